"""`fedprotip flower`: the same run across machines (docs/deploy.md)."""

import os
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from fedprotip.cli import display
from fedprotip.cli.display import Console
from fedprotip.cli.options import Imports, Json
from fedprotip.flower import keys, processes, submission
from fedprotip.flower.deployment import Place
from fedprotip.store.folder import RunFolder

app = typer.Typer(no_args_is_help=True, help="Across machines: a SuperLink, sites with their own data, and runs.")
out, err = Console(), Console(stderr=True)

File = Annotated[Path, typer.Argument(metavar="DEPLOYMENT.toml", help="What is where.", show_default=False)]


def _anywhere(imports: list[str] | None) -> list[str]:
    """Modules for processes that work in another folder."""
    return [os.path.abspath(what) if what.endswith(".py") else what for what in imports or []]


def _say(text: str) -> None:
    out.print(display.plain(text), soft_wrap=True)


@app.command()
def up(file: File, imports: Imports = None) -> None:
    """Start the SuperLink and the sites that the file names, in the background."""
    for name in processes.up(Place(file), _anywhere(imports)) or ["nothing: all of it"]:
        _say(f"{name} runs" if name.startswith("nothing") else f"{name} is started")


@app.command()
def join(
    file: File, client: Annotated[int, typer.Option(help="Which site of the file.")], imports: Imports = None
) -> None:
    """Be one site, in the foreground, until Ctrl-C."""
    place = Place(file)

    def tell(text: str) -> None:
        _say(f"{datetime.now():%Y-%m-%d %H:%M:%S}  {text}")

    processes.join(place, place.site(client), tell)


@app.command()
def submit(
    file: File,
    tasks: Annotated[int, typer.Option(min=0, help="Further tasks for a finished run.")] = 0,
    clients: Annotated[str, typer.Option(help="Clients that take part in them, such as 0-2,7.")] = "",
    detach: Annotated[bool, typer.Option("--detach", help="Do not wait for its end.")] = False,
    most: Annotated[float, typer.Option("--most", min=0, help="Seconds to wait at most.")] = 30 * 86400.0,
    imports: Imports = None,
    as_json: Json = False,
) -> None:
    """Run over the deployment: begin, or continue from the last checkpoint, or add tasks."""
    place = Place(file)
    run = submission.submit(place, tasks, clients, _anywhere(imports))
    if detach:
        _say(run)
        return
    folder = submission.wait(place, run, most, lambda text: err.print(f"[dim]{display.plain(text)}", soft_wrap=True))
    summary = RunFolder.open(folder).summary()
    display.print_json(summary.plain()) if as_json else display.print_summary(out, folder, summary)


@app.command()
def status(file: File, as_json: Json = False) -> None:
    """What runs on this machine, and how far the run is."""
    facts = submission.status(Place(file))
    if as_json:
        display.print_json(facts)
    else:
        for name, fact in facts.items():
            _say(f"{name}: {', '.join(fact) if isinstance(fact, list) else fact}")


@app.command()
def down(file: File) -> None:
    """End what `up` has started on this machine."""
    for name in processes.down(Place(file)) or ["nothing"]:
        _say(f"{name} is ended" if name != "nothing" else "nothing of it runs")


@app.command()
def key(file: Annotated[Path, typer.Argument(metavar="FILE", help="Where the private key goes.")]) -> None:
    """Make a key for a site; its public half, FILE.pub, goes to whoever runs the SuperLink."""
    _say(str(keys.site_key(file)))


@app.command()
def admit(
    file: File,
    public: Annotated[Path, typer.Argument(metavar="KEY.pub", help="The site's public key.")],
    client: Annotated[
        int | None, typer.Option(min=0, help="Which client it is, and nobody else; without: whichever is not taken.")
    ] = None,
) -> None:
    """Let a site in whose public key this is."""
    _say("it is admitted" if processes.admit(Place(file), public, client) else "it was admitted before")
