"""The command `fedprotip bench`: how fast and how small, measured here and now.

fedprotip bench                                            # all benchmarks, one after another
fedprotip bench project --quick                            # one of them, smaller, in less than a minute
fedprotip bench task --data ~/data --set model.weights=resnet18.safetensors
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import progress as bars
from rich.console import Console
from rich.table import Column, Table

from fedprotip.bench import BENCHMARKS
from fedprotip.bench.base import Benchmark, Report, Row, RunSize, Size
from fedprotip.bench.measure import this_machine
from fedprotip.bench.plot import write_plot
from fedprotip.bench.runner import run_benchmark
from fedprotip.cli.display import plain
from fedprotip.errors import RunError, UsageError, nearest
from fedprotip.store.files import write_atomic

out, err = Console(), Console(stderr=True)
LISTED = "\n\n".join(f"[bold]{name}[/bold]: {benchmark.title}." for name, benchmark in BENCHMARKS.items())
HELP = f"""Measure what the method costs: ours beside a plain textbook implementation, on the same inputs.

Both results are compared first; if they disagree, the command says so and fails. Then both are timed in turns, the
median counts, and every figure stands beside the bar it has to reach. Nothing but this machine is needed: images and
weights are made up, unless [bold]--data[/bold] names a folder with CIFAR-100. Other work on the machine spoils the
figures.

{LISTED}

Examples: [bold]fedprotip bench extract --out runs/bench[/bold], [bold]fedprotip bench --quick[/bold],
[bold]fedprotip bench task --data DATA --set model.weights=DATA/resnet18.safetensors[/bold]
"""


def bench(
    name: Annotated[
        str, typer.Argument(metavar="[NAME]", help="One benchmark; without, all.", show_default=False)
    ] = "",
    quick: Annotated[bool, typer.Option("--quick", help="Smaller inputs, under a minute each.")] = False,
    folder: Annotated[
        Path | None, typer.Option("--out", help="Where NAME.json and NAME.png go.", show_default=False)
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder with CIFAR-100, for round, task and resume.", show_default=False)
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of the runs; may be given again."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, for programs.")] = False,
) -> None:
    chosen = _chosen(name)
    changes = [*(overrides or [])] + (["data.name=cifar100", f"data.root={json.dumps(str(data))}"] if data else [])
    takes = [one.name for one in BENCHMARKS.values() if isinstance(one.full, RunSize)]
    if changes and name and name not in takes:
        raise UsageError(f"--data and --set do not concern {name!r}; they are for {', '.join(takes)}.")
    sizes = {one.name: _size(one, quick, tuple(changes)) for one in chosen}
    reports = []
    with _Bars() as shown:
        machine = this_machine()
        for one in chosen:
            reports.append(run_benchmark(one, machine, sizes[one.name], quick, shown.of(one.name)))
            _write(reports[-1], folder)
            if not as_json:
                _print(reports[-1])
    if as_json:
        found = [report.to_json() for report in reports]
        print(json.dumps(found[0] if name else found, indent=1, ensure_ascii=False))
    _refuse_disagreement(reports)


def _chosen(name: str) -> list[Benchmark[Any]]:
    if name and name not in BENCHMARKS:
        raise UsageError(f"{name!r} is not a benchmark; {nearest(name, BENCHMARKS)}.")
    return [BENCHMARKS[name]] if name else list(BENCHMARKS.values())


def _size(benchmark: Benchmark[Any], quick: bool, overrides: tuple[str, ...]) -> Size:
    size = benchmark.quick if quick else benchmark.full
    return replace(size, overrides=size.overrides + overrides) if isinstance(size, RunSize) else size


def _refuse_disagreement(reports: list[Report]) -> None:
    for report in reports:
        for row in report.disagreements:
            check = row.agreement
            raise RunError(
                f"{report.name}, {row.case}: ours and the textbook disagree ({check['what']} {check['error']:.2g}, "
                f"at most {check['tolerance']:.2g} is rounding); its figures mean nothing until that is mended."
            )


def _write(report: Report, folder: Path | None) -> None:
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(report.to_json(), indent=1, ensure_ascii=False) + "\n"
        write_atomic(folder / f"{report.name}.json", text)
        write_plot(report, folder)


def _print(report: Report) -> None:
    machine = report.machine
    out.print(f"[bold]{report.name}[/bold]: {plain(report.title)}", soft_wrap=True)
    out.print(
        f"[dim]{plain(machine.cpu)}, {machine.cores} cores, {machine.threads} threads of torch {machine.torch}, "
        f"matrix product {machine.gflops:.0f} GFLOP/s; median of {report.size.repeats}"
        + ("; quick: smaller than the bars are meant for" if report.quick else ""),
        soft_wrap=True,
    )
    measured = Table(Column("case", overflow="fold"), *_right("ours", "textbook", "ours MiB", "textbook MiB"), "agree")
    for row in {row.case: row for row in report.rows}.values():
        measured.add_row(*_measured(row))
    figures = Table(
        Column("case", overflow="fold"), Column("figure", overflow="fold"), *_right("value", "bar", "goal"), ""
    )
    for row in report.rows:
        verdict = f"[dim]{_verdict(row)}" if report.quick else _verdict(row)
        figures.add_row(plain(row.case), plain(row.figure), f"{row.value:.3g}", *_limits(row), verdict)
    out.print(measured, figures)


def _right(*headings: str) -> list[Column]:
    return [Column(heading, justify="right") for heading in headings]


def _measured(row: Row) -> list[str]:
    """Time and memory of both sides, and whether they agree."""
    seconds = [_seconds(value) for value in (row.ours_seconds, row.textbook_seconds)]
    memory = ["" if value is None else f"{value:.0f}" for value in (row.ours_peak_mb, row.textbook_peak_mb)]
    agree = f"{'yes' if row.agreement['holds'] else '[red]NO'} ({row.agreement['error']:.1g})"
    return [plain(row.case), *seconds, *memory, agree]


def _limits(row: Row) -> list[str]:
    sign = "≥" if row.better == "higher" else "≤"
    return ["" if limit is None else f"{sign} {limit:g}" for limit in (row.bar, row.goal)]


def _verdict(row: Row) -> str:
    if row.goal_met:
        return "[green]goal"
    if row.met is None:
        return "" if row.goal is None else "[yellow]not the goal"
    return "[green]met" if row.met else "[red]not met"


def _seconds(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.3g} s" if value >= 1 else f"{1000 * value:.3g} ms"


class _Bars:
    """A bar for every benchmark under way; silent when stderr is not a terminal."""

    def __init__(self) -> None:
        self._bars = bars.Progress(
            bars.TextColumn("[bold]{task.description}"),
            bars.BarColumn(),
            bars.TextColumn("{task.percentage:>3.0f}%"),
            bars.TimeElapsedColumn(),
            bars.TextColumn("{task.fields[note]}"),
            console=err,
            transient=True,
            disable=not err.is_terminal,
        )

    def __enter__(self) -> "_Bars":
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bars.stop()

    def of(self, name: str) -> Any:
        bar = self._bars.add_task(name, total=1.0, note="")

        def tick(what: str, share: float) -> None:
            self._bars.update(bar, completed=share, note=plain(what))

        return tick
