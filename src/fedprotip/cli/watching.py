"""The verb `watch`: how far a run is, in the browser.

fedprotip watch runs/mine
"""

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from fedprotip.cli.display import Console, plain, print_json
from fedprotip.cli.options import Json
from fedprotip.watch import Watched, WatchServer
from fedprotip.watch.server import PORT

err = Console(stderr=True)


def watch(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A run folder; it need not be there yet.", show_default=False)
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Of the page; 0: any that is free.")] = PORT,
    browse: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
    as_json: Json = False,
) -> None:
    """How far a run is, in a page that this machine alone can see: accuracy, loss, bytes, time left.

    It reads the run folder and changes nothing. It may be started before the run, while it works, or months later.

    Example: [bold]fedprotip watch runs/mine[/bold], and in another terminal [bold]fedprotip run --out runs/mine[/bold]
    """
    watched = Watched(folder)
    if as_json:
        print_json(watched.look().model_dump())
        return
    with WatchServer(watched, port) as server:
        try:
            err.print(plain(watched.look().sentence), soft_wrap=True, highlight=False)
            err.print(f"Watch it at {server.address} (Ctrl-C ends the page, not the run).", soft_wrap=True)
            if browse:
                webbrowser.open(server.address)
            server.serve_forever()
        except KeyboardInterrupt:
            err.print("The page has ended.")
