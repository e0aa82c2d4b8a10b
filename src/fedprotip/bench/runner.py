"""Running a benchmark: every case on all sides, checked, timed, its memory measured, and its figures judged."""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from fedprotip.bench.base import Benchmark, Case, Machine, Measured, Report, Size
from fedprotip.bench.measure import alternate
from fedprotip.bench.probe import Probe, in_own_process

Tick = Callable[[str, float], None]
"""Told what is under way, and which share of the work is done."""
Ask = Callable[[str], Probe]
"""Runs a side of the present case where it can be measured alone."""


def run_benchmark(
    benchmark: Benchmark[Any],
    machine: Machine,
    size: Size | None = None,
    quick: bool = False,
    tick: Tick = lambda what, share: None,
    probe: Callable[[Benchmark[Any], Size, Case, str, Path], Probe] = in_own_process,
) -> Report:
    """Run all cases of a benchmark.

    Args:
        size: another size than the benchmark's own full or quick one.
        probe: how a side is run where it needs a process of its own.
    """
    size = size or (benchmark.quick if quick else benchmark.full)
    cases, measured = benchmark.cases(size), list[Measured]()
    with tempfile.TemporaryDirectory(prefix="fedprotip-bench-") as name:
        folder = Path(name)
        for index, case in enumerate(cases):
            say = partial(_tell, tick, case.name, index, len(cases))
            say("preparing", 0.0)
            case.prepare(folder)
            run = _apart if case.apart else _here
            measured.append(run(case, size.repeats, folder, partial(_ask, probe, benchmark, size, case, folder), say))
    return Report(benchmark.name, benchmark.title, quick, machine, size, benchmark.rows(measured, machine, size))


def _here(case: Case, repeats: int, folder: Path, ask: Ask, say: Tick) -> Measured:
    """In this process; only memory is measured in others."""
    sides = case.sides(folder)
    first = {side: call() for side, call in sides.items()}
    agreement = case.agree(first)
    total, done = repeats * len(sides) + 1, 0

    def tick() -> None:
        nonlocal done
        done += 1
        say(f"{done} of {total - 1}", done / total)

    seconds = alternate(sides, repeats, case.least, tick)
    del sides
    peaks = {}
    for side in case.memory:
        say(f"memory of {side}", done / total)
        peaks[side] = [ask(side)]
    return Measured(case.name, seconds, _peaks(peaks), first, agreement)


def _apart(case: Case, repeats: int, folder: Path, ask: Ask, say: Tick) -> Measured:
    """Every call in a process of its own, sides taking turns."""
    found: dict[str, list[Probe]] = {side: [] for side in case.sides(folder)}
    for turn in range(repeats):
        for place, side in enumerate(found):
            done, total = turn * len(found) + place, repeats * len(found)
            say(f"{done + 1} of {total}, {side}", done / total)
            found[side].append(ask(side))
    middle = {side: sorted(probes, key=_seconds)[len(probes) // 2] for side, probes in found.items()}
    seconds = {side: _seconds(probe) for side, probe in middle.items()}
    results = {side: probe.result for side, probe in middle.items()}
    return Measured(case.name, seconds, _peaks(found), results, case.agree(results))


def _tell(tick: Tick, case: str, index: int, cases: int, what: str, share: float) -> None:
    tick(f"{case}: {what}", (index + share) / cases)


def _ask(
    probe: Callable[[Benchmark[Any], Size, Case, str, Path], Probe],
    benchmark: Benchmark[Any],
    size: Size,
    case: Case,
    folder: Path,
    side: str,
) -> Probe:
    return probe(benchmark, size, case, side, folder)


def _seconds(probe: Probe) -> float:
    """Those that a side reports itself, or else all of its time."""
    return probe.result["seconds"] if isinstance(probe.result, dict) and "seconds" in probe.result else probe.seconds


def _peaks(found: dict[str, list[Probe]]) -> dict[str, float]:
    """Median peak of every side that has one."""
    peaks = {side: [probe.peak_mb for probe in probes if probe.peak_mb is not None] for side, probes in found.items()}
    return {side: median(values) for side, values in peaks.items() if values}
