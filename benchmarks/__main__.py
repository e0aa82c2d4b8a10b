"""How fast and how small, measured here and now.

python -m benchmarks                                       # all benchmarks, one after another
python -m benchmarks project merge --quick                 # some of them, smaller, in less than a minute each
python -m benchmarks task --data ~/data --set model.weights=resnet18.safetensors --json task.json
python -m benchmarks task round --against ../before        # beside the code of another checkout
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import evaluate, extract, growth, merging, project, resume, second_task
from benchmarks.harness import Bench, this_machine
from fedprotip import FedprotipError

BENCHMARKS: dict[str, Callable[..., None]] = {
    function.__name__: function
    for function in (
        *(extract.extract, project.project, merging.merge, merging.average, second_task.round, second_task.task),
        *(evaluate.evaluate, growth.clients, growth.tasks, resume.resume),
    )
}
QUICK: dict[str, dict[str, Any]] = {
    "extract": {"repeats": 1, "images": 128, "columns": 128},
    "project": {"shares": (0.1,)},
    "merge": {"clients": (5, 20), "d": 1152},
    "average": {"clients": (5, 20)},
    "round": {"repeats": 1, "train": 8, "test": 5, "rounds": 2},
    "task": {"repeats": 1, "train": 8, "test": 5, "rounds": 1},
    "evaluate": {"tasks": 3, "images": 10},
    "clients": {"repeats": 1, "clients": (10, 100), "width": 256, "samples": 400},
    "tasks": {"repeats": 1, "tasks": 24, "rounds": 2, "epochs": 2},
    "resume": {"train": 8},
}
FULL: dict[str, dict[str, Any]] = {
    "round": {"train": 200, "test": 5, "rounds": 2},
    "task": {"train": 500, "test": 100, "rounds": 3},
    "clients": {"repeats": 1},
    "tasks": {"repeats": 1},
}
RUNS, COMPARED = ("round", "task", "resume"), ("round", "task")
COLOURS = {"goal": "green", "met": "green", "not met": "red", "not the goal": "yellow", "": "none"}


def main(arguments: list[str] | None = None) -> None:
    listed = "\n".join(f"  {name:9} {str(function.__doc__).splitlines()[0]}" for name, function in BENCHMARKS.items())
    parser = argparse.ArgumentParser(
        "python -m benchmarks", epilog=listed, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", choices=[*BENCHMARKS, []], help="benchmarks; without, all")
    add("--quick", action="store_true", help="smaller inputs, under a minute each; too small for the bars")
    add("--repeats", type=int, metavar="N", help="how often sides take turns")
    add("--json", type=Path, metavar="FILE", help="write the results there too")
    add("--data", type=Path, metavar="DIR", help="folder with CIFAR-100, for round, task and resume")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="change a setting of these three")
    add("--against", type=Path, metavar="CHECKOUT", help="round and task beside the code of another checkout")
    given = parser.parse_args(arguments)
    names: list[str] = given.names or list(COMPARED if given.against else BENCHMARKS)
    if given.data:
        given.set += ["data.name=cifar100", f"data.root={json.dumps(str(given.data))}"]
    if given.against and not set(names) <= set(COMPARED):
        parser.error(f"--against is for {' and '.join(COMPARED)}")
    if given.set and not set(names) & set(RUNS):
        parser.error(f"--data and --set are for {', '.join(RUNS)}")
    try:
        run(names, given)
    except FedprotipError as error:
        sys.exit(f"benchmarks: {error}")


def run(names: list[str], given: argparse.Namespace) -> None:
    """One benchmark after another; a table each, and all results in one file."""
    out, found = Console(), list[Bench]()
    with Console(stderr=True).status("the machine") as status:
        machine = this_machine()
        out.print(", ".join(f"{key} {value}" for key, value in machine.items()), soft_wrap=True, highlight=False)
        for name in names:
            size = dict((QUICK if given.quick else FULL).get(name, {}))
            repeats = given.repeats or size.pop("repeats", 3 if given.quick else 5)
            size |= {"overrides": tuple(given.set)} if name in RUNS else {}
            with tempfile.TemporaryDirectory(prefix="fedprotip-bench-") as folder:
                bench = Bench(name, Path(folder), repeats, machine, status.update)
                if given.against:
                    second_task.compare(bench, given.against, **size)
                else:
                    BENCHMARKS[name](bench, **size)
            out.print(*tables(bench))
            found.append(bench)
            if given.json:
                results = {"machine": machine, "quick": given.quick, "results": [bench.to_json() for bench in found]}
                given.json.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for bench in found:
        bench.refuse_disagreement()


def tables(bench: Bench) -> list[Table]:
    """What was measured, and what follows from it."""
    title = f"{bench.name}: {str(BENCHMARKS[bench.name].__doc__).splitlines()[0]} Median of {bench.repeats}."
    measured = Table("case", "side", "seconds", "MiB", "agree", title=title, title_justify="left")
    for case in bench.cases:
        for side, seconds in case.seconds.items():
            peak = f"{case.peaks[side]:.0f}" if side in case.peaks else ""
            agree = f"{'yes' if case.agrees else '[red]NO[/]'} ({case.agreement[1]:.1g})"
            measured.add_row(case.name, side, f"{seconds:.3g}", peak, agree)
    figures = Table("case", "figure", "value", "bar", "goal", "")
    for figure in bench.figures:
        limits = ["" if limit is None else f"{figure.better} {limit:g}" for limit in (figure.bar, figure.goal)]
        verdict = f"[{COLOURS[figure.verdict]}]{figure.verdict}[/]"
        figures.add_row(figure.case, figure.name, f"{figure.value:.3g}", *limits, verdict)
    return [measured, figures]


if __name__ == "__main__":
    main()
