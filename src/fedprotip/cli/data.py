"""The command `fedprotip data`: what datasets there are, what a source holds, and fetching an official one.

fedprotip data list
fedprotip data check photos/ --set stream.tasks=3          # a folder, CSV, Parquet or NPZ of one's own, or a name
fedprotip data get cifar100 --root ~/data                  # only this verb ever downloads anything
"""

import shlex
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import progress as bars
from rich.table import Table

from fedprotip import api
from fedprotip import settings as settings_file
from fedprotip.cli.display import Console, plain, print_json
from fedprotip.cli.options import Imports, Json, Overrides
from fedprotip.errors import UsageError, shortened
from fedprotip.stream.archives import get as get_archive
from fedprotip.stream.datasets import layouts, missing
from fedprotip.stream.download import OnBytes
from fedprotip.stream.inspection import inspect_data

app = typer.Typer(no_args_is_help=True, help="Datasets: list them, check your own, fetch official ones.")
out, err = Console(), Console(stderr=True)
SHOWN = 20

Root = Annotated[
    Path | None,
    typer.Option("--root", help="Folder of the datasets.", envvar="FEDPROTIP_DATA", show_default=False),
]


@app.command("list")
def list_(root: Root = None, imports: Imports = None, as_json: Json = False) -> None:
    """All datasets, what they need, and whether that is under the data root."""
    for problem in settings_file.load_offered("data.name"):
        err.print(f"[yellow]{plain(problem)}", soft_wrap=True)
    rows = [_row(name, choices, root) for name, choices in sorted(layouts().items())]
    if as_json:
        print_json(rows)
        return
    table = Table("data.name", "needs", "state")
    for row in rows:
        table.add_row(row["name"], plain(row["needs"]), row["state"])
    out.print(table)
    _say(f"Data root: {root or 'none; set data.root or FEDPROTIP_DATA'}")


@app.command()
def check(
    source: Annotated[str, typer.Argument(metavar="SOURCE|NAME", help="Folder, file or dataset.", show_default=False)],
    overrides: Overrides = None,
    settings: Annotated[
        Path | None, typer.Option("--settings", help="Settings file of the run.", show_default=False)
    ] = None,
    imports: Imports = None,
    as_json: Json = False,
) -> None:
    """Counts per class, task and client, files that cannot be read, and what a run would do.

    Example: [bold]fedprotip data check photos/ --set stream.tasks=3[/bold]
    """
    known = settings_file.is_known("data.name", source)
    chosen = {"data.name": source} if known else {"data.name": "own", "data.source": source}
    changes = [*(f"{key}={settings_file.as_text(value)}" for key, value in chosen.items()), *(overrides or [])]
    facts = inspect_data(settings_file.load(settings, changes), partial(api.check, images=False), _watch)
    words = ["fedprotip", "run", *([str(settings)] if settings else [])]
    options = [*(("--import", module) for module in imports or []), *(("--set", change) for change in changes)]
    facts["command"] = shlex.join([*words, *(word for option in options for word in option)])
    if as_json:
        print_json(facts)
    else:
        _print_facts(facts)
    if facts["problem"]:
        raise typer.Exit(1)


@app.command()
def get(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Dataset.", show_default=False)],
    root: Root = None,
) -> None:
    """Download the official archive of a dataset, check and unpack it; a broken download is continued."""
    if root is None:
        raise UsageError("Where to? Give --root DIR, or set the environment variable FEDPROTIP_DATA.")
    with _Bars() as shown:
        sentence = get_archive(name, root, shown.of)
    _say(sentence)


def _row(name: str, choices: tuple[tuple[str, ...], ...], root: Path | None) -> dict[str, Any]:
    needs = " or ".join(" and ".join(sorted({path.split("/")[0] for path in layout})) for layout in choices)
    if name == "own":
        state, needs = "data.source", "a folder, .csv, .parquet or .npz"
    elif not choices:
        state, needs = "ready", "nothing"
    else:
        found = root is not None and any(not missing(root, layout) for layout in choices)
        state = "ready" if found else "missing"
    return {"name": name, "needs": needs, "state": state}


def _print_facts(facts: dict[str, Any]) -> None:
    shape = "×".join(map(str, facts["image_shape"]))
    _say(f"{facts['train']:,} training and {facts['test']:,} test images of {shape}, {facts['kept']}.")
    classes = Table("class", "training", "test")
    for row in facts["classes"][:SHOWN]:
        classes.add_row(plain(row["name"]), str(row["train"]), str(row["test"]))
    out.print(classes)
    _say_rest(facts["classes"], "classes")
    if facts["tasks"]:
        _print_tasks(facts["tasks"])
        _print_clients(facts["tasks"])
    for row in facts["unreadable"][:SHOWN]:
        _say(f"unreadable: {row['path']}: {row['reason']}")
    for text in facts["notes"]:
        _say(f"Note: {text}")
    for text in facts["warnings"]:
        _say(f"Warning: {text}")
    if facts["plan"]:
        _say(f"A run would do: {facts['plan']}")
    if facts["problem"]:
        _say(f"In the way: {facts['problem']}")
    else:
        _say(f"Nothing is in the way. To run it: {facts['command']}")


def _print_tasks(tasks: list[dict[str, Any]]) -> None:
    unused = any(task["unused"] for task in tasks)
    table = Table("task", "name", "classes", "training", "held back", "test", *["unused"] * unused)
    for task in tasks[:SHOWN]:
        words = [_short(text) for text in (task["name"], ", ".join(task["classes"]))]
        counts = [task[key] for key in ("train", "held_back", "test", *["unused"] * unused)]
        table.add_row(str(task["index"] + 1), *words, *map(str, counts))
    out.print(table)
    _say_rest(tasks, "tasks")


def _print_clients(tasks: list[dict[str, Any]]) -> None:
    """Of every client what it trains on and, where it does, holds back, task by task."""
    names = list(dict.fromkeys(name for task in tasks for name in task["clients"]))
    table = Table("client", *(f"task {task['index'] + 1}" for task in tasks[:SHOWN]))
    for name in names[:SHOWN]:
        cells = []
        for task in tasks[:SHOWN]:
            held = task["clients_held_back"].get(name, 0)
            cells.append(f"{task['clients'].get(name, 0)}" + (f" + {held}" if held else ""))
        table.add_row(_short(name), *cells)
    out.print(table)
    _say_rest(names, "clients")


def _say_rest(rows: Sequence[Any], what: str) -> None:
    if len(rows) > SHOWN:
        _say(f"… and {len(rows) - SHOWN} further {what} (--json lists all).")


def _short(text: str) -> str:
    return plain(shortened(text, 40))


def _say(text: str) -> None:
    out.print(plain(text), soft_wrap=True)


def _watch(faults: Iterator[str], files: int) -> Iterator[str]:
    """A bar over the files that are read; silent when stderr is not a terminal."""
    return iter(bars.track(faults, "Reading images", files, console=err, transient=True, disable=not err.is_terminal))


class _Bars:
    """A bar per file; silent when stderr is not a terminal."""

    def __init__(self) -> None:
        self._bars = bars.Progress(
            bars.TextColumn("[bold]{task.description}"),
            bars.BarColumn(),
            bars.DownloadColumn(),
            bars.TransferSpeedColumn(),
            bars.TimeRemainingColumn(),
            console=err,
            disable=not err.is_terminal,
        )

    def __enter__(self) -> "_Bars":
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bars.stop()

    def of(self, name: str) -> OnBytes:
        bar = self._bars.add_task(plain(name), total=None)
        return lambda done, total: self._bars.update(bar, completed=done, total=total or None)
