"""The harness: the same work done by several sides, compared first, then measured in turns, and judged by figures."""

import gc
import os
import platform
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch

from benchmarks.apart import SOURCE, memory_mb, run_apart
from benchmarks.inside import hand_back_memory
from fedprotip import RunError

CLEAR = Path("/proc/self/clear_refs")
Side = Callable[[], Any]
"""One way to do the work of a case; what it returns is compared with the other ways."""
Agreement = tuple[str, float, float]
"""What was compared, how far apart the sides are, and how far they may be."""
Agree = Callable[[dict[str, Any]], Agreement]  # from the results of all sides


class Case(NamedTuple):
    """What was measured, by side: median seconds, median peak in MiB, what a call returned, and median CPU seconds.

    CPU seconds are the time that processors worked for a side: other work on the machine changes them less.
    """

    name: str
    agreement: Agreement
    seconds: dict[str, float]
    peaks: dict[str, float]
    results: dict[str, Any]
    cpu: Mapping[str, float] = MappingProxyType({})  # of sides in processes of their own, as far as they tell

    @property
    def agrees(self) -> bool:
        return self.agreement[1] <= self.agreement[2]

    def ratio(self, above: str = "textbook", below: str = "ours") -> float:
        return self.seconds[above] / self.seconds[below]


class Figure(NamedTuple):
    """A number to judge by: at least (≥) or at most (≤) the bar, and the goal beyond it."""

    case: str
    name: str
    value: float
    better: Literal["≥", "≤"] = "≥"
    bar: float | None = None
    goal: float | None = None

    @property
    def verdict(self) -> str:
        """What was reached; empty where nothing is asked."""
        sign = 1 if self.better == "≥" else -1
        if self.goal is not None and sign * self.value >= sign * self.goal:
            return "goal"
        if self.bar is None:
            return "" if self.goal is None else "not the goal"
        return "met" if sign * self.value >= sign * self.bar else "not met"


@dataclass
class Bench:
    """One benchmark under way: what it measures and finds. A benchmark is a function of this and its sizes."""

    name: str
    folder: Path  # for its files
    repeats: int
    machine: Mapping[str, Any]
    say: Callable[[str], object] = lambda text: None
    cases: list[Case] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)

    def measure(
        self, name: str, sides: Mapping[str, Side], agree: Agree, memory: bool = False, least: float = 0.2
    ) -> Case:
        """Sides in this process. Short calls are repeated for `least` seconds; 0: one call, as sides change state."""
        self.say(f"{self.name}, {name}")
        results = {side: call() for side, call in sides.items()}
        agreement, seconds = agree(results), alternate(sides, self.repeats, least)
        peaks = {side: [on_top_mb(call)] for side, call in sides.items()} if memory else {}
        return self._enter(name, agreement, seconds, peaks, results)

    def measure_apart(
        self, name: str, sides: dict[str, tuple[Any, ...]], agree: Agree, sources: Mapping[str, Path] = {}
    ) -> Case:
        """Sides that are a function and its arguments, every call in a process of its own; results have "seconds".

        `sources`: of sides that another package does, where that is.
        """
        found: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
        peaks: dict[str, list[float | None]] = {side: [] for side in sides}
        for turn, side in enumerate([*sides] * self.repeats):  # ours, textbook, ours, …: slow minutes hit all of them
            self.say(f"{self.name}, {name}: {side}, {turn + 1} of {self.repeats * len(sides)}")
            result, peak = run_apart(*sides[side], source=sources.get(side, SOURCE))
            found[side].append(result)
            peaks[side].append(peak)
        middle = {side: sorted(calls, key=lambda r: r["seconds"])[len(calls) // 2] for side, calls in found.items()}
        seconds = {side: median(result["seconds"] for result in calls) for side, calls in found.items()}
        told = {side: calls for side, calls in found.items() if all("cpu" in result for result in calls)}
        cpu = {side: median(result["cpu"] for result in calls) for side, calls in told.items()}
        return self._enter(name, agree(middle), seconds, peaks, middle, cpu)

    def _enter(
        self, name: str, agreement: Agreement, seconds: Any, peaks: Any, results: Any, cpu: Any = MappingProxyType({})
    ) -> Case:
        known = {side: median(values) for side, values in peaks.items() if None not in values}
        self.cases.append(Case(name, agreement, seconds, known, results, cpu))
        return self.cases[-1]

    def figure(
        self, case: Case, name: str, value: float, better: Literal["≥", "≤"] = "≥", *limits: float | None
    ) -> None:
        """Enter a figure; `limits`: bar and goal."""
        self.figures.append(Figure(case.name, name, value, better, *limits))

    def speedup(self, case: Case) -> None:
        self.figure(case, "times faster than the textbook", case.ratio())

    def to_json(self) -> dict[str, Any]:
        cases = [case._asdict() | {"agrees": case.agrees, "cpu": dict(case.cpu)} for case in self.cases]
        for case in cases:
            del case["results"]
        figures = [figure._asdict() | {"verdict": figure.verdict} for figure in self.figures]
        return {"name": self.name, "repeats": self.repeats, "cases": cases, "figures": figures}

    def refuse_disagreement(self) -> None:
        for case in [case for case in self.cases if not case.agrees]:
            what, error, tolerance = case.agreement
            raise RunError(
                f"{self.name}, {case.name}: the sides disagree ({what} {error:.2g}, at most {tolerance:.2g} is "
                "rounding); its figures mean nothing until that is mended."
            )


def alternate(sides: Mapping[str, Side], repeats: int, least: float) -> dict[str, float]:
    """Median seconds of a call of every side, in turns."""
    taken: dict[str, list[float]] = {side: [] for side in sides}
    gc.disable()  # a collection in the middle would hit one side only
    try:
        for side in [*sides] * repeats:
            calls = max(int(least / max(min(taken[side], default=least), 1e-7)), 1)
            start = perf_counter()
            for _ in range(calls):
                sides[side]()
            taken[side].append((perf_counter() - start) / calls)
    finally:
        gc.enable()
    return {side: median(values) for side, values in taken.items()}


def on_top_mb(call: Side) -> float | None:
    """MiB that a call needs on top of what is there; None where the system does not tell.

    The kernel keeps the largest resident size of a process (VmHWM) and lets the process set it back to the present one.
    The call has run before, so kernels and libraries are loaded; freed memory is handed back first.
    """
    gc.collect()
    hand_back_memory()
    with suppress(OSError):
        CLEAR.write_text("5")
        before = memory_mb("VmRSS")
        call()
        peak = memory_mb("VmHWM")
        return max(peak - before, 0.1) if peak and before else None
    return None


def this_machine(side: int = 2048) -> dict[str, Any]:
    """Where it is measured, as ratios depend on it; with the rate of a float32 matrix product, `side` × `side`."""
    a, b = torch.randn(2, side, side, generator=torch.Generator().manual_seed(0))
    target, taken = torch.empty(side, side), []
    for _ in range(8):
        start = perf_counter()
        torch.mm(a, b, out=target)
        taken.append(perf_counter() - start)
    rate = round(2 * side**3 / min(taken) / 1e9, 1)  # what it can do at best: bounds must not be too kind
    info = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    cpu = next((line.partition(": ")[2] for line in info if line.startswith("model name")), platform.machine())
    threads = torch.get_num_threads()
    return {"cpu": cpu, "cores": os.cpu_count(), "threads": threads, "gflops": rate, "torch": torch.__version__}
