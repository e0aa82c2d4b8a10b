"""The command `fedprotip`: verbs only, no logic.

fedprotip demo                                             # FedAvg, LDA and FedProTIP in a minute
fedprotip run my.toml --set train.rounds=5 --out runs/mine
fedprotip resume runs/mine                                 # after an interruption
fedprotip extend runs/mine --tasks 1                       # when the next task comes
fedprotip compare my.toml --methods fedavg,fedprotip --seeds 0,1,2
fedprotip watch runs/mine                                  # how far it is, in the browser
fedprotip predict runs/mine photos/                        # what it says about images
fedprotip export runs/mine mine.onnx                       # the same without this package
fedprotip serve runs/mine                                  # a page and an API on this machine
"""

import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from enum import StrEnum
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from fedprotip import api, cells
from fedprotip import settings as settings_file
from fedprotip.cli import asking, display, serving, watching
from fedprotip.cli import data as data_cli
from fedprotip.cli import flower as flower_cli
from fedprotip.cli.display import Console
from fedprotip.cli.options import Imports, Json, Overrides, Track, with_tracking
from fedprotip.cli.progress import ProgressDisplay
from fedprotip.errors import FedprotipError, UsageError, shortened
from fedprotip.methods import described
from fedprotip.paper import reproduce as reproduction
from fedprotip.paper.comparison import at_a_glance
from fedprotip.report import comparison_remarks, comparison_rows, comparison_text, write_comparison, write_report
from fedprotip.store.folder import RunFolder, is_run
from fedprotip.store.results import Summary

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Federated continual learning without replay: many clients, tasks one after another, one model at the end.",
)
app.add_typer(data_cli.app, name="data")
app.add_typer(flower_cli.app, name="flower")
app.command()(asking.predict)
app.command()(asking.export)
app.command()(serving.serve)
app.command()(watching.watch)
out, err = Console(), Console(stderr=True)


class Format(StrEnum):
    markdown = "markdown"
    csv = "csv"
    latex = "latex"


FILES = {Format.markdown: "md", Format.csv: "csv", Format.latex: "tex"}
Preset = Annotated[
    str, typer.Option(metavar="NAME", help="Start from settings that come with the package: paper.", show_default=False)
]
Moved = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Where the data is now: data.source=… or data.root=…"),
]
AcceptData = Annotated[
    bool,
    typer.Option("--accept-data", help="Go on although samples were added, removed or changed, where that is honest."),
]
Run = Annotated[Path, typer.Argument(metavar="DIR", help="A run folder.", show_default=False)]
Source = Annotated[
    Path | None,
    typer.Argument(metavar="[SETTINGS.toml]", help="Settings; without, the defaults.", show_default=False),
]


@app.command()
def run(
    settings: Source = None,
    overrides: Overrides = None,
    imports: Imports = None,
    folder: Annotated[Path | None, typer.Option("--out", help="Run folder, empty or missing.")] = None,
    preset: Preset = "",
    track: Track = None,
    engine: Annotated[
        str, typer.Option(metavar="NAME", help="Where clients run: run.engine in short.", show_default=False)
    ] = "",
    as_json: Json = False,
) -> None:
    """Run all tasks of one method and write a run folder with a report.

    Example: [bold]fedprotip run configs/demo.toml --set method.name=fedavg --out runs/fedavg[/bold]
    """
    with ProgressDisplay(err) as progress:
        given = [*with_tracking(overrides, track), *([f"run.engine={engine}"] if engine else [])]
        summary = api.run(settings, given, folder, [progress], preset)
    _show_run(Path(progress.folder), summary, as_json)


@app.command()
def resume(
    folder: Run, moved: Moved = None, accept_data: AcceptData = False, imports: Imports = None, as_json: Json = False
) -> None:
    """Continue an interrupted run. It ends with exactly the result it would have had.

    Example: [bold]fedprotip resume runs/mine --set data.source=elsewhere/photos[/bold]
    """
    with ProgressDisplay(err) as progress:
        summary = api.resume(folder, [progress], accept_data, moved or [])
    _show_run(folder, summary, as_json)


@app.command()
def extend(
    folder: Run,
    tasks: Annotated[int, typer.Option(help="How many further tasks.")] = 1,
    clients: Annotated[
        str | None, typer.Option(help="Clients that take part from now on, such as 0-2,7; default: the same.")
    ] = None,
    moved: Moved = None,
    accept_data: AcceptData = False,
    imports: Imports = None,
    as_json: Json = False,
) -> None:
    """Continue a finished run with the next task, also with clients that left or joined meanwhile.

    Example: [bold]fedprotip extend runs/mine --tasks 1 --clients 0-3,5[/bold]
    """
    with ProgressDisplay(err) as progress:
        summary = api.extend(folder, tasks, clients, [progress], accept_data, moved or [])
    _show_run(folder, summary, as_json)


@app.command()
def demo(
    folder: Annotated[Path, typer.Option("--out", help="Where the run folders go.")] = Path("runs/demo"),
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas.")] = "0",
    as_json: Json = False,
) -> None:
    """FedAvg forgets, FedProTIP remembers, and LDA trains nothing: five tasks of handwritten digits, half a minute."""
    settings = Path(str(files("fedprotip") / "configs" / "demo.toml"))
    _compare_cells(settings, [], ["fedavg", "lda", "fedprotip"], seeds, [], folder, as_json)


@app.command()
def compare(
    sources: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[SETTINGS.toml | DIR…]", help="Settings to run, or run folders.", show_default=False),
    ] = None,
    overrides: Overrides = None,
    imports: Imports = None,
    methods: Annotated[str, typer.Option(help="Methods, separated by commas.")] = "",
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas.")] = "0,1,2",
    vary: Annotated[
        list[str] | None, typer.Option(metavar="KEY=A,B", help="One run per value; may be given again.")
    ] = None,
    folder: Annotated[Path, typer.Option("--out", help="Where runs and the comparison go.")] = Path("runs/compare"),
    preset: Preset = "",
    track: Track = None,
    shape: Annotated[
        Format | None, typer.Option("--format", help="Print the tables in this form.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Methods × seeds (× values of a setting), or finished run folders, in one table with mean ± std.

    The best is marked, and tested over seeds where there are three or more; what cannot be compared is said.

    Examples: [bold]fedprotip compare configs/demo.toml --methods fedavg,fedprotip --seeds 0,1,2[/bold],
    [bold]fedprotip compare runs/a runs/b --format latex > table.tex[/bold],
    [bold]fedprotip compare my.toml --vary method.threshold=0.7,0.8,0.9 --set run.geometry=1[/bold]
    """
    given = sources or []
    runs = [path for path in given if is_run(path)]
    if runs and len(runs) == len(given):
        _show_comparison(runs, folder, as_json, shape)
    elif len(given) <= 1 and not any(path.is_dir() for path in given):
        chosen = [name.strip() for name in methods.split(",") if name.strip()]
        source = given[0] if given else None
        _compare_cells(
            source, with_tracking(overrides, track), chosen, seeds, vary or [], folder, as_json, preset, shape
        )
    else:
        wrong = next(path for path in given if not is_run(path))
        raise UsageError(f"{wrong} is not a run folder; give one settings file, or run folders only.")


@app.command()
def reproduce(
    name: Annotated[str, typer.Argument(metavar="[TABLE]", help="Such as table1 or fig5.", show_default=False)] = "",
    scale: Annotated[str, typer.Option(help="paper: as published, for a GPU; cpu: smaller, for two cores.")] = "paper",
    seeds: Annotated[int, typer.Option(help="Runs of every row, with seeds 0, 1, …")] = 3,
    only: Annotated[list[str] | None, typer.Option(metavar="ROW", help="Rows, also as 'cifar100-a0.5-*'.")] = None,
    overrides: Overrides = None,
    imports: Imports = None,
    listed: Annotated[bool, typer.Option("--list", help="List tables, figures and their rows.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Run nothing: the table from finished cells.")] = False,
    redo: Annotated[
        bool, typer.Option("--redo", help="Run outdated cells again; they and their run folders are replaced.")
    ] = False,
    results: Annotated[Path, typer.Option(help="Finished cells, small JSON files.")] = Path("results"),
    folder: Annotated[Path, typer.Option("--out", help="Run folders of the cells.")] = Path("runs/reproduce"),
    as_json: Json = False,
) -> None:
    """Run the rows of a table of the paper that are missing, and show them beside the published figures.

    Example: [bold]fedprotip reproduce table1 --scale cpu --seeds 1 --only 'cifar100-a0.5-*'
    --set data.root=DATA --set model.weights=DATA/resnet18.safetensors[/bold]
    """
    if listed or not name:
        entries = [entry for entry in reproduction.overview(scale, results) if name in ("", entry["name"])]
        if not entries:
            reproduction.protocol(name)  # says which names there are
        display.print_json(entries) if as_json else display.print_protocols(out, entries)
        return
    if not show:
        plan = reproduction.make_plan(name, scale, seeds, only or [], overrides or [], results, folder, redo)
        with ProgressDisplay(err, runs=len(plan.cells)) as progress:
            reproduction.carry_out(plan, lambda cell: [progress.of(cell.name)])
        for row, why in plan.skipped.items():
            err.print(f"[dim]{display.plain(row)} is left out: {display.plain(why)}", soft_wrap=True)
        for cell, changed in plan.outdated.items() if not redo else ():
            remark = f"{cell} is outdated ({changed}) and counts as not run; --redo runs it again"
            err.print(f"[yellow]{display.plain(remark)}", soft_wrap=True)
    outcome = reproduction.rebuild(name, scale, results)
    paths = reproduction.write_table(outcome, results)
    if as_json:
        display.print_json([asdict(line) for line in outcome.lines])
    else:
        glance = at_a_glance(outcome)
        display.print_reproduction(out, glance, [asdict(line) for line in outcome.lines], paths)


@app.command()
def report(folder: Run) -> None:
    """Write report.html, plots and tables of a run again."""
    RunFolder.open(folder).summary()
    out.print(display.plain(str(write_report(folder))), soft_wrap=True)


@app.command()
def settings(
    method: Annotated[str, typer.Option(help="Show the settings of this method.")] = "fedprotip",
    preset: Preset = "",
    imports: Imports = None,
    as_json: Json = False,
) -> None:
    """All settings with their documentation and defaults, as a TOML file to start from.

    Example: [bold]fedprotip settings > my.toml[/bold]
    """
    if as_json:
        for problem in settings_file.load_offered("method.name"):
            err.print(f"[yellow]{display.plain(problem)}", soft_wrap=True)
        display.print_json(settings_file.documentation())
    else:
        print(
            settings_file.to_toml(settings_file.load({"method": {"name": method}}, preset=preset), documented=True),
            end="",
        )


@app.command()
def methods(imports: Imports = None, as_json: Json = False) -> None:
    """All methods: their idea, and what they store, send and need.

    Example: [bold]fedprotip methods[/bold], then [bold]fedprotip settings --method fot[/bold]
    """
    for problem in settings_file.load_offered("method.name"):
        err.print(f"[yellow]{display.plain(problem)}", soft_wrap=True)
    if as_json:
        display.print_json(described())
    else:
        display.print_methods(out, described())


@app.command()
def info(folder: Run, imports: Imports = None, as_json: Json = False) -> None:
    """What a run folder holds: state, result, versions, and whether its files are intact."""
    facts = api.inspect(folder)
    if as_json:
        display.print_json(facts)
    else:
        display.print_info(out, facts)


def _compare_cells(
    source: Path | None,
    overrides: list[str],
    methods: list[str],
    seeds: str,
    vary: list[str],
    folder: Path,
    as_json: bool,
    preset: str = "",
    shape: Format | None = None,
) -> None:
    try:
        numbers = [int(seed) for seed in seeds.split(",")]
    except ValueError:
        raise UsageError(f"--seeds {seeds!r} is not a list of numbers such as 0,1,2.") from None
    notes = list[str]()
    planned = cells.plan_cells(source, overrides, methods, numbers, vary, notes.append, preset)
    for text in dict.fromkeys(notes):
        err.print(f"[dim]{display.plain(text)}", soft_wrap=True)
    with ProgressDisplay(err, runs=len(planned)) as progress:
        folders = cells.run_cells(planned, folder, lambda cell: [progress.of(cell.name)])
    _show_comparison(folders, folder, as_json, shape)


def _show_run(folder: Path, summary: dict[str, Any], as_json: bool) -> None:
    if as_json:
        display.print_json(summary)
    else:
        display.print_summary(out, folder, Summary.model_validate(summary))


def _show_comparison(folders: list[Path], target: Path, as_json: bool, shape: Format | None = None) -> None:
    page = write_comparison(folders, target)
    if shape:
        display.print_text(comparison_text(folders, FILES[shape]))
        return
    rows, remarks = comparison_rows(folders), comparison_remarks(folders)
    if as_json:
        display.print_json({"rows": rows, "remarks": remarks, "report": str(page)})
    else:
        display.print_comparison(out, rows, page, remarks)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"fedprotip {version('fedprotip')}")
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it.")] = False,
) -> None:
    pass


@contextmanager
def ended_like_ctrl_c() -> Iterator[None]:
    """SIGTERM (a scheduler's, a shutdown's) and SIGHUP (a closed terminal's) stop a run as Ctrl-C does: with a word.

    One that is ignored already, as under nohup, stays so; the second of them does not disturb the end that the first
    has begun.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        for one in former:
            signal.signal(one, signal.SIG_IGN)
        raise KeyboardInterrupt

    ending = (signal.SIGTERM, signal.SIGHUP)
    former = {one: signal.getsignal(one) for one in ending if signal.getsignal(one) is signal.SIG_DFL}
    for one in former:
        signal.signal(one, stop)
    try:
        yield
    finally:
        for one, handler in former.items():
            signal.signal(one, handler)


def main() -> None:
    """Entry point: errors a user can mend are one sentence on stderr and an exit code."""
    warnings.filterwarnings("ignore", module=r"PIL\.")  # of large or odd images, which are read all the same
    with ended_like_ctrl_c():
        try:
            app()
        except FedprotipError as error:
            err.print(f"[bold red]fedprotip:[/bold red] {display.plain(str(error))}", soft_wrap=True)
            sys.exit(error.exit_code)
        except OSError as error:  # of a file that was named: a name too long, a folder that is another user's
            if error.filename is None:
                raise
            told = f"{shortened(str(error.filename))} cannot be used: {error.strerror}."
            err.print(f"[bold red]fedprotip:[/bold red] {display.plain(told)}", soft_wrap=True)
            sys.exit(FedprotipError.exit_code)
