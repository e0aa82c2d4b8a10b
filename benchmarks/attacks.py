"""attacks: what one hostile client of five can do to a run, attack by attack, beside the honest run of the same seed.

python -m benchmarks attacks --json attacks.json           # hours of one core; what is done is kept beside the file
python -m benchmarks attacks --quick --only 'update_*'     # one seed, and only some of the attacks
"""

import hashlib
import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import nullcontext
from fnmatch import fnmatchcase
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

import fedprotip
from benchmarks import hostile, runs
from benchmarks.harness import Bench, Case, Figure
from fedprotip import FedprotipError, RunError, UsageError, api
from fedprotip.settings import load

SETTINGS: dict[str, Any] = {
    "stream": {"tasks": 5, "task_size": 2},
    "clients": {"count": 5, "held_back": 0.1},
    "model": {"width": 128, "depth": 2},
    "train": {"rounds": 3, "epochs": 2, "batch": 16, "lr": 0.05},
    "method": {"name": "fedprotip", "threshold": 0.9, "rank_rule": "energy"},
    "run": {"threads": 1, "checkpoint": 1000},
}
"""The embedded digits: five clients, five tasks of two digits, FedProTIP with its default router."""
CLIENT = 1
"""The hostile one."""
MODES = ("aware", "single")
BARS = {"mean": 10.0, "clipped": 10.0, "trimmed": 5.0, "median": 5.0}
"""Points of accuracy that an attack may cost, by `train.aggregate`."""
LINE = 2000
"""Letters of a line of the logs, at most, whatever a client says."""


class Cell(NamedTuple):
    """One run: which attack, against which aggregate, with which seed."""

    attack: str
    aggregate: str
    seed: int


def attacks(
    bench: Bench,
    seeds: tuple[int, ...] = (0, 1, 2),
    aggregates: tuple[str, ...] = tuple(BARS),
    only: str = "*",  # attacks by name patterns, with commas between
    overrides: tuple[str, ...] = (),
    kept: Path | None = None,  # finished cells, one per line
    workers: int = os.cpu_count() or 1,
) -> None:
    """One hostile client of five: points of accuracy that each attack costs, and what the server noticed."""
    names = [name for name in hostile.ATTACKS if any(fnmatchcase(name, like.strip()) for like in only.split(","))]
    names = [name for name in names if name != hostile.HONEST.name]
    if not names:
        raise UsageError(f"No attack is named like {only!r}; there are: {', '.join(hostile.ATTACKS)}.")
    load(SETTINGS, overrides)
    known = [aggregate for aggregate in aggregates if _possible(aggregate)]
    cells = [Cell(name, how, seed) for seed in seeds for how in known for name in ("", hostile.HONEST.name, *names)]
    found = done(cells, overrides, kept or bench.folder / "cells.jsonl", workers, bench.say)
    for how in known:
        plain, door = ([found[Cell(name, how, seed)] for seed in seeds] for name in ("", hostile.HONEST.name))
        for ended in filter(None, (run["ended"] for run in plain)):
            raise RunError(f"The honest run: {ended}")
        worst = max(abs(a[mode] - b[mode]) for a, b in zip(plain, door, strict=True) for mode in MODES)
        seconds = {"honest": sum(run["seconds"] for run in plain), "by the door": sum(run["seconds"] for run in door)}
        case = Case(how, ("points that the door itself costs", worst, 0.0), seconds, {}, {})
        bench.cases.append(case)
        for mode in MODES:
            bench.figure(case, f"% {mode}, honest", sum(run[mode] for run in plain) / len(plain))
        for name in names:
            judge(bench, case, name, [found[Cell(name, how, seed)] for seed in seeds], plain)


def judge(bench: Bench, case: Case, name: str, attacked: list[dict[str, Any]], honest: list[dict[str, Any]]) -> None:
    """The figures of one attack, the worst over all seeds."""
    ended = [run["ended"] for run in attacked if run["ended"]]
    if ended:
        bench.figures.append(Figure(case.name, f"runs of {name} that ended: {ended[0]}", len(ended), "≤", 0))
        return
    pairs = list(zip(attacked, honest, strict=True))
    cost = {mode: max(plain[mode] - run[mode] for run, plain in pairs) for mode in MODES}
    mode = max(MODES, key=lambda each: cost[each])
    told = Counter(text for run in attacked for text in run["told"])
    noticed = told.most_common(1)[0][0] if told else "not noticed"
    needs_robust = hostile.ATTACKS[name].needs_robust and BARS[case.name] > 5
    limits = () if needs_robust else (BARS[case.name],)
    lost = ", ".join(f"{each} −{cost[each]:.1f}" for each in MODES)
    bench.figure(case, f"points of {mode} that {name} costs ({lost}; {noticed})", cost[mode], "≤", *limits)
    blamed = max(run["blamed"] for run in attacked)
    if blamed:
        bench.figure(case, f"times that honest clients were left out by {name}", blamed, "≤", 0)
    longest = max(run["longest"] for run in attacked)
    if longest > LINE:
        bench.figure(case, f"letters of the longest line in the logs by {name}", longest, "≤", LINE)


# Cells


def done(
    cells: Iterable[Cell], overrides: tuple[str, ...], kept: Path, workers: int, say: Any
) -> dict[Cell, dict[str, Any]]:
    """What every cell found; those that this code has done before are read from the file."""
    code, found = _code(overrides), dict[Cell, dict[str, Any]]()
    for line in kept.read_text(encoding="utf-8").splitlines() if kept.exists() else ():
        before = json.loads(line)
        if before["code"] == code:
            found[Cell(*before["cell"])] = before["found"]
    missing = [cell for cell in cells if cell not in found]
    say(f"attacks: {len(missing)} runs, {len(found)} are there")
    with kept.open("a", encoding="utf-8") as file:
        for cell, result in _worked(missing, overrides, workers):
            found[cell] = result
            file.write(json.dumps({"code": code, "cell": cell, "found": result}, ensure_ascii=False) + "\n")
            file.flush()
            say(f"{cell.attack or 'no client attacks'}, {cell.aggregate}, seed {cell.seed}: {result['seconds']:.1f} s")
    return found


def _worked(cells: list[Cell], overrides: tuple[str, ...], workers: int) -> Iterator[tuple[Cell, dict[str, Any]]]:
    if workers == 1:
        for cell in cells:
            yield cell, run(cell, overrides)
        return
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        waiting = {pool.submit(run, cell, overrides): cell for cell in cells}
        for future in as_completed(waiting):
            yield waiting[future], future.result()


def run(cell: Cell, overrides: tuple[str, ...] = ()) -> dict[str, Any]:
    """One run with its hostile client: accuracy, how it ended, who was left out and why."""
    torch.set_num_threads(1)
    start, found = perf_counter(), dict[str, Any](ended="")
    changes = [*overrides, *_aggregate(cell.aggregate), f"run.seed={cell.seed}"]
    door = hostile.among(cell.attack, CLIENT) if cell.attack else nullcontext()
    no_report = patch.object(api, "write_report", lambda path: None)
    with tempfile.TemporaryDirectory(prefix="fedprotip-attack-") as folder, door, no_report:
        path = Path(folder, "run")
        try:
            summary = fedprotip.run(SETTINGS, changes, path)
            found |= {mode: summary["accuracy"][mode] for mode in MODES}
            found["routers"] = {way: figures["single"] for way, figures in summary["routers"].items()}
        except FedprotipError as error:
            found["ended"] = f"it stopped: {error}"
        except Exception as error:
            found["ended"] = f"it crashed: {type(error).__name__}: {error}"
        found["ended"] = found["ended"][:300]
        found |= logged(path)
    return found | {"seconds": perf_counter() - start}


def logged(path: Path) -> dict[str, Any]:
    """What the logs say about the hostile client (reason → how often), how often others were left out, line lengths."""
    lines = [line for log in ("events.jsonl", "ledger.jsonl") for line in (path / log).read_text("utf-8").splitlines()]
    events = [event for event in runs.records(path, "events.jsonl") if event.get("client") is not None]
    about = [event for event in events if event["client"] == CLIENT]
    texts = [f"{event['event']}: {event.get('reason') or event.get('text') or ''}" for event in about]
    blamed = sum(event["event"] == "failure" for event in events if event["client"] != CLIENT)
    told = dict(Counter(text for text in texts if not text.startswith("withheld")).most_common(5))
    return {"told": told, "blamed": blamed, "longest": max(map(len, lines), default=0)}


def _aggregate(name: str) -> list[str]:
    """The default is not named, so that code without the setting can be attacked too."""
    return [] if name == "mean" else [f"train.aggregate={name}"]


def _possible(aggregate: str) -> bool:
    """Whether the settings know it."""
    try:
        load(SETTINGS, _aggregate(aggregate))
    except UsageError:
        return False
    return True


def _code(overrides: tuple[str, ...]) -> str:
    """Recognises what finished cells depend on."""
    package, here = Path(fedprotip.__file__).parent, Path(__file__).parent
    files = [*sorted(package.rglob("*.py")), here / "attacks.py", *sorted(here.glob("hostile/*.py"))]
    texts = [file.read_bytes() for file in files] + [json.dumps(overrides).encode()]
    return hashlib.sha256(b"\0".join(texts)).hexdigest()[:16]
