"""The verb `serve`: a finished run behind HTTP, with a page.

fedprotip serve runs/mine
"""

from pathlib import Path
from typing import Annotated

import typer

from fedprotip.cli.display import Console, plain
from fedprotip.cli.options import Imports
from fedprotip.errors import UsageError

err = Console(stderr=True)
MOST = 1e6
"""Of whatever an option counts: a terabyte, or eleven days."""


def serve(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="A finished run folder, or a folder of runs: the newest.", show_default=False
        ),
    ],
    host: Annotated[str, typer.Option(help="Address to listen to; 0.0.0.0 is all of them.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8000,
    allow_host: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A further name of this server; may be given again.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Images that are answered at once, at most.")] = 32,
    wait_ms: Annotated[float, typer.Option(min=0, help="How long it waits for more of them, at most.")] = 50.0,
    body_mb: Annotated[float, typer.Option(min=0.001, help="Largest request, in megabytes.")] = 16.0,
    megapixels: Annotated[float, typer.Option(min=0.001, help="Largest image, compared before it is decoded.")] = 25.0,
    request_megapixels: Annotated[float, typer.Option(min=0.001, help="All images of a request.")] = 100.0,
    images: Annotated[int, typer.Option(min=1, help="Most images of a request.")] = 64,
    concurrency: Annotated[int, typer.Option(min=1, help="Most requests at a time.")] = 32,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that a request may take.")] = 30.0,
    threads: Annotated[int, typer.Option(min=0, help="Of torch; 0: one for every core but one.")] = 0,
    watch: Annotated[float, typer.Option(min=0, help="Seconds between looks for a newer run; 0: never.")] = 5.0,
    imports: Imports = None,
) -> None:
    """Answer over HTTP, with a page to drop images on; needs the extra `serve`.

    POST /predict takes images as a form or as JSON; /health, /metrics, /docs tell about the server. With the
    environment variable FEDPROTIP_API_KEY every request must bring that key. When the run in DIR is extended, or a
    newer one lies there, it takes over without a pause (also: SIGHUP, POST /reload). SIGTERM ends it after what was
    asked.

    Example: [bold]fedprotip serve runs/mine --port 8080[/bold]
    """
    try:
        from fedprotip.serve.limits import MB, Limits
        from fedprotip.serve.server import serve as run
    except ImportError as error:
        raise UsageError(
            f"The package {error.name} is missing; it comes with: pip install 'fedprotip[serve]'."
        ) from None
    numbers = {"wait-ms": wait_ms, "body-mb": body_mb, "megapixels": megapixels, "timeout": timeout, "watch": watch}
    for name, value in (numbers | {"request-megapixels": request_megapixels}).items():
        if not value <= MOST:  # NaN is not, either
            raise UsageError(f"--{name} {value:g} must be a number of {MOST:,.0f} at most.")
    limits = Limits(
        body=round(body_mb * MB),
        pixels=round(megapixels * 10**6),
        total=round(request_megapixels * 10**6),
        images=images,
        concurrency=concurrency,
        seconds=timeout,
        batch=batch,
        wait=wait_ms / 1000,
        threads=threads,
    )
    run(folder, host, port, limits, watch, allow_host or [], lambda text: err.print(plain(text), soft_wrap=True))
