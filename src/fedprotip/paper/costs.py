"""What the rows of a table cost, and how far they come, beside FedAvg under the same conditions (the paper's Fig. 6).

Conditions are all settings but the method's own and those that say where things are and how fast it goes. Without
FedAvg under the same conditions and with the same seed there is nothing to divide by, and no figure.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from matplotlib.figure import Figure

from fedprotip.paper.finished import FinishedCell
from fedprotip.report import style
from fedprotip.report.bounds import LOWER, UPPER
from fedprotip.report.tables import QUIET, Stat
from fedprotip.report.text import NOTICEABLE, number
from fedprotip.store.records import Number
from fedprotip.store.results import standing_for

LEARNING = ("train", "task_end")
"""Phases that count: evaluation is not part of a method."""
MIB = 2**20
LEAST = 0.005
"""MiB below which a kind of message is not worth a word."""


@dataclass(frozen=True)
class Cost:
    """One row: means over its seeds."""

    method: str
    samples: Mapping[str, Stat]  # "raw", "synthetic" → kept of the past, all clients together
    sent: Mapping[str, float]  # kind → MiB that a client sends in a task
    received: Mapping[str, float]
    seconds: Stat  # of learning: of the processor, or
    wall: bool  # by the clock, where some cell knows no other
    times: Stat  # the same, as a multiple of FedAvg's
    memory: Stat  # peak while learning, as a multiple of FedAvg's
    way: Number  # from FedAvg to joint training, %, one sample at a time


def costs(rows: Mapping[str, Sequence[FinishedCell]]) -> dict[str, Cost]:
    """The cost of every row that was run; rows: label → its finished cells."""
    cells = [cell for found in rows.values() for cell in found]
    lower = {(_conditions(cell), cell.seed): cell for cell in cells if cell.summary.method == LOWER}
    return {label: _cost(found, lower, cells) for label, found in rows.items() if found}


def _cost(
    found: Sequence[FinishedCell], lower: Mapping[tuple[str, int], FinishedCell], cells: list[FinishedCell]
) -> Cost:
    pairs = [(cell, lower.get((_conditions(cell), cell.seed))) for cell in found]
    kinds = sorted({kind for cell in found for kind in cell.summary.samples})
    return Cost(
        method=found[0].summary.method,
        samples={kind: Stat.of(cell.summary.samples.get(kind, 0) for cell in found) for kind in kinds},
        sent=_traffic(found, "up"),
        received=_traffic(found, "down"),
        seconds=Stat.of(_seconds(cell, all(map(_timed, found))) for cell in found),
        wall=not all(map(_timed, found)),
        times=Stat.of(_slower(cell, base) if base else None for cell, base in pairs),
        memory=Stat.of(_ratio(_peak(cell), _peak(base) if base else None) for cell, base in pairs),
        way=_way(found, cells),
    )


def _conditions(cell: FinishedCell) -> str:
    kept = {
        f"{section}.{key}": value
        for section, values in cell.settings.items()
        for key, value in values.items()
        if section != "method" and f"{section}.{key}" not in QUIET | {"run.seed"}
    }
    return json.dumps(kept, sort_keys=True)


def _timed(cell: FinishedCell) -> bool:
    """Whether the processor time of all of a run is known: clients in other processes have their own."""
    return bool(cell.summary.cpu_seconds) and cell.settings["run"]["engine"] == "local"


def _seconds(cell: FinishedCell, cpu: bool) -> float:
    spent = cell.summary.cpu_seconds if cpu else cell.summary.seconds
    return sum(spent.get(phase, 0.0) for phase in LEARNING)


def _slower(cell: FinishedCell, base: FinishedCell) -> float | None:
    cpu = _timed(cell) and _timed(base)
    return _ratio(_seconds(cell, cpu), _seconds(base, cpu))


def _peak(cell: FinishedCell) -> float | None:
    """Of the process while it learned; cells from before it was measured by phase have none."""
    peaks = cell.summary.memory.peaks("rss")
    return max((peaks[phase] for phase in LEARNING if phase in peaks), default=None)


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def _traffic(found: Sequence[FinishedCell], direction: Literal["up", "down"]) -> dict[str, float]:
    """Kind → MiB per client and task, the largest first."""
    totals: dict[str, float] = {}
    for cell in found:
        parts = cell.summary.tasks * cell.summary.clients * len(found) * MIB
        for kind, size in cell.summary.bytes.get(direction, {}).items():
            totals[kind] = totals.get(kind, 0.0) + size / parts
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


def _way(found: Sequence[FinishedCell], cells: Iterable[FinishedCell]) -> Number:
    """(accuracy − FedAvg)/(joint − FedAvg), one sample at a time; none where the two are as good as equal."""
    alike = {_conditions(cell) for cell in found}
    peers = [cell for cell in cells if _conditions(cell) in alike]
    low, high, own = (
        Stat.of(map(_single, those)).mean
        for those in (*([cell for cell in peers if cell.summary.method == end] for end in (LOWER, UPPER)), found)
    )
    if low is None or high is None or own is None or high - low < NOTICEABLE:
        return None
    return 100 * (own - low) / (high - low)


def _single(cell: FinishedCell) -> Number:
    return cell.summary.accuracy.get(standing_for("single", cell.summary.accuracy))


# Words and a picture


def columns(cost: Cost | None) -> list[str]:
    """The cells of one row below `HEADINGS`."""
    if cost is None:
        return ["–"] * len(HEADINGS)
    kept = ", ".join(f"{stat.mean or 0:,.0f} {kind}" for kind, stat in cost.samples.items())
    times, memory = (number(stat.mean, 2) for stat in (cost.times, cost.memory))
    way = "–" if cost.way is None else f"{number(cost.way, 0)} %"
    seconds = number(cost.seconds.mean, 0) + (" (wall)" if cost.wall else "")
    return [way, kept or "none", _mib(cost.sent), _mib(cost.received), seconds, times, memory]


HEADINGS = ["way to joint", "samples kept", "sent, MiB", "received, MiB", "seconds", "× FedAvg", "memory × FedAvg"]


def _mib(traffic: Mapping[str, float]) -> str:
    return ", ".join(f"{kind} {size:.3g}" for kind, size in traffic.items() if size >= LEAST) or "0"


@style.styled
def time_and_memory(found: Mapping[str, Cost]) -> Figure:
    """Learning time and peak memory of every row as multiples of FedAvg's, two panels side by side."""
    shown = {label: cost for label, cost in found.items() if cost.times.mean is not None}
    figure = Figure(figsize=(1.5 * style.WIDTH, 1.1 + 0.24 * len(shown)), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (title, stats) in zip(panels, _panels(shown), strict=True):
        widths = style.as_floats([stat.mean for stat in stats])
        spread = style.as_floats([stat.std for stat in stats])
        colours = [style.METHOD_COLOURS.get(cost.method, style.PHASE_COLOURS["task_end"]) for cost in shown.values()]
        axes.barh(range(len(shown)), widths, 0.7, xerr=spread, capsize=2, color=colours)
        for place, width in enumerate(widths):
            if width == width:
                axes.text(width + np.nan_to_num(spread[place]), place, f" {width:.2f}", va="center", fontsize=7.5)
        axes.axvline(1.0, color=style.INK, linewidth=0.8, linestyle=":")
        axes.set_xlabel(title)
        axes.margins(x=0.14)
        axes.grid(axis="x")
        axes.tick_params(axis="y", length=0)
        axes.tick_params(labelsize=8)
    panels[0].set_yticks(range(len(shown)), list(shown))
    panels[0].invert_yaxis()
    return figure


def _panels(shown: Mapping[str, Cost]) -> Iterator[tuple[str, list[Stat]]]:
    yield "learning time, multiple of FedAvg's", [cost.times for cost in shown.values()]
    yield "peak memory, multiple of FedAvg's", [cost.memory for cost in shown.values()]
