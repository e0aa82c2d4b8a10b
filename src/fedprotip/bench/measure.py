"""Measuring on a noisy machine: sides take turns, and the median counts."""

import gc
import os
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from fedprotip.bench.base import Machine, Side


def seconds_of(call: Side, least: float, expected: float) -> float:
    """Seconds of one call; calls expected to be shorter than `least` are repeated and averaged."""
    calls = max(int(least / max(expected, 1e-7)), 1)
    start = perf_counter()
    for _ in range(calls):
        call()
    return (perf_counter() - start) / calls


def alternate(
    sides: Mapping[str, Side], repeats: int, least: float, tick: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """Median seconds of every side: ours, textbook, ours, textbook, … so that slow minutes hit all of them."""
    expected = dict.fromkeys(sides, least)
    taken: dict[str, list[float]] = {side: [] for side in sides}
    gc.disable()  # a collection in the middle would hit one side only
    try:
        for _ in range(repeats):
            for side, call in sides.items():
                taken[side].append(seconds_of(call, least, expected[side]))
                expected[side] = min(taken[side])
                tick()
    finally:
        gc.enable()
    return {side: median(values) for side, values in taken.items()}


def this_machine(side: int = 2048) -> Machine:
    """The machine with its measured matrix product, `side` × `side` in float32."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(side, side, generator=generator) for _ in range(2))
    target = torch.empty(side, side)

    def multiply() -> None:
        torch.mm(a, b, out=target)

    multiply()
    best = min(seconds_of(multiply, 0.0, 1.0) for _ in range(7))  # the rate it can do: bounds must not be too kind
    return Machine(
        _cpu(), os.cpu_count() or 1, torch.get_num_threads(), round(2 * side**3 / best / 1e9, 1), torch.__version__
    )


def _cpu() -> str:
    """The name of the processor, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
