"""How fast and how small, measured here and now.

python -m benchmarks                                       # all benchmarks, one after another
python -m benchmarks project merge --quick                 # some of them, smaller, in less than a minute each
python -m benchmarks task --data ~/data --set model.weights=resnet18.safetensors --json task.json
python -m benchmarks task round --against ../before        # beside the code of another checkout
python -m benchmarks attacks --json attacks.json           # what a hostile client can do: hours, and only when named
python -m benchmarks engines                               # what Flower costs beside the work; only when named
python -m benchmarks masks --data ~/data                   # one sketch with and without method.secure; only when named
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import attacks, engines, evaluate, extract, growth, load, masks, merging, project, resume, second_task
from benchmarks import secure as secure_sums
from benchmarks import serve as serving
from benchmarks.harness import Bench, this_machine
from benchmarks.second_task import Size
from fedprotip import FedprotipError
from fedprotip.errors import nearest

_ALL = (extract.extract, project.project, merging.merge, merging.average, second_task.round, second_task.task)
BENCHMARKS: dict[str, Callable[..., None]] = {
    function.__name__: function
    for function in (
        *(*_ALL, evaluate.evaluate, growth.clients, growth.tasks),
        *(resume.resume, secure_sums.secure, load.load, serving.serve),
    )
}
CAMPAIGNS: dict[str, Callable[..., None]] = {
    "attacks": attacks.attacks,
    "engines": engines.engines,
    "masks": masks.masks,
}
"""What is measured only when it is named."""
QUICK: dict[str, dict[str, Any]] = {
    "extract": {"images": 128, "columns": 128},
    "project": {"shares": (0.1,)},
    "merge": {"clients": (5, 20), "d": 1152},
    "average": {"clients": (5, 20)},
    "round": {"size": Size(8, 5, 2)},
    "task": {"size": Size(8, 5, 1)},
    "evaluate": {"tasks": 3, "images": 10},
    "clients": {"clients": (10, 100), "width": 256, "samples": 400},
    "tasks": {"tasks": 24, "rounds": 2, "epochs": 2},
    "resume": {"size": Size(8, 5)},
    "secure": {"megabytes": (1,), "clients": (5, 20)},
    "load": {"classes": 4, "images": 2},
    "serve": {"requests": 200, "classes": 20, "images": 2},
    "attacks": {"seeds": (0,), "aggregates": ("mean", "median")},
    "engines": {"width": 100, "rounds": 3},
    "masks": {"images": (10, 5)},
}
FULL = {"round": {"size": Size(200, 5, 2)}, "task": {"size": Size()}, "resume": {"size": Size(test=5)}}
RUNS, COMPARED = tuple(FULL), ("round", "task")
ONCE = ("clients", "tasks", "secure", "serve")
"""Whose figures compare memory, or tasks of one run, or take long."""


def main(arguments: list[str] | None = None) -> None:
    listed = "\n".join(f"  {name:9} {_title(function)}" for name, function in (BENCHMARKS | CAMPAIGNS).items())
    parser = argparse.ArgumentParser(
        "python -m benchmarks", epilog=listed, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="benchmarks; without, all but attacks, engines and masks")
    add("--quick", action="store_true", help="smaller inputs, under a minute each; too small for the bars")
    add("--repeats", type=int, metavar="N", help="how often sides take turns")
    add("--json", type=Path, metavar="FILE", help="write the results there too")
    add("--data", type=Path, metavar="DIR", help="folder with CIFAR-100, for round, task, resume, masks and serve")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="change a setting of these, or of attacks")
    add("--defaults", action="store_true", help="default settings instead of the paper's, for task")
    add("--against", type=Path, metavar="CHECKOUT", help="round and task beside the code of another checkout")
    add("--only", default="*", metavar="PATTERNS", help="attacks whose names are like one of these (a,b)")
    given = parser.parse_args(arguments)
    names: list[str] = given.names or list(COMPARED if given.against else BENCHMARKS)
    for name in set(names) - set(BENCHMARKS | CAMPAIGNS):
        parser.error(f"{name!r} is not a benchmark; {nearest(name, BENCHMARKS | CAMPAIGNS)}.")
    if given.data:
        given.set += ["data.name=cifar100", f"data.root={json.dumps(str(given.data))}"]
    if given.against and not set(names) <= set(COMPARED):
        parser.error(f"--against is for {' and '.join(COMPARED)}")
    if given.set and not set(names) & {*RUNS, *CAMPAIGNS, "serve"}:
        parser.error(f"--data and --set are for {', '.join(RUNS)}, serve")
    try:
        run(names, given)
    except FedprotipError as error:
        sys.exit(f"benchmarks: {error}")


def run(names: list[str], given: argparse.Namespace) -> None:
    """One benchmark after another; what each found is printed at once, and all of it goes into one file."""
    machine, found = this_machine(), list[Bench]()
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    for name in names:
        sizes = dict((QUICK if given.quick else FULL).get(name, {}))
        if name in RUNS:
            row = second_task.DEFAULTS if given.defaults else second_task.PAPER
            overrides = sizes["size"].overrides + tuple(given.set)
            sizes["size"] = sizes["size"]._replace(overrides=overrides, protocol=row)
        if name in ("serve", "masks"):
            sizes["overrides"] = tuple(given.set)
        if name == "attacks":
            kept = given.json and given.json.with_suffix(".cells.jsonl")
            sizes |= {"overrides": tuple(given.set), "only": given.only, "kept": kept}
        repeats = given.repeats or (1 if given.quick or name in (*ONCE, *CAMPAIGNS) else 5)
        with tempfile.TemporaryDirectory(prefix="fedprotip-bench-") as folder:
            bench = Bench(name, Path(folder), repeats, machine, lambda text: print(text, file=sys.stderr))
            if given.against:
                second_task.compare(bench, given.against, **sizes)
            else:
                (BENCHMARKS | CAMPAIGNS)[name](bench, **sizes)
        show(bench)
        found.append(bench)
        if given.json:
            results = {"machine": machine, "quick": given.quick, "results": [bench.to_json() for bench in found]}
            given.json.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for bench in found:
        bench.refuse_disagreement()


def show(bench: Bench) -> None:
    """What was measured, and what follows from it."""
    print(f"\n{bench.name}: {_title((BENCHMARKS | CAMPAIGNS)[bench.name])} Median of {bench.repeats}.")
    for case in bench.cases:
        print(f"  {case.name}: {case.agreement[0]} {case.agreement[1]:.1g}, {'agree' if case.agrees else 'DISAGREE'}")
        for side, seconds in case.seconds.items():
            peak = f"{case.peaks[side]:8.0f} MiB" if side in case.peaks else ""
            cpu = f"{case.cpu[side]:10.3g} CPU s" if side in case.cpu else ""
            print(f"    {side:20}{seconds:10.3g} s{cpu}{peak}")
    for figure in bench.figures:
        limits = [f"{figure.better} {limit:g}" for limit in (figure.bar, figure.goal) if limit is not None]
        asked = f"  ({', '.join(limits)}: {figure.verdict})" if limits else ""
        print(f"  {figure.value:10.3g}  {figure.case}: {figure.name}{asked}")


def _title(function: Callable[..., None]) -> str:
    return str(function.__doc__).splitlines()[0]


if __name__ == "__main__":
    main()
