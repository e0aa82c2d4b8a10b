"""Plots about finding the task: samples that come together, how sure the answers are, drift of class statistics."""

import math
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from fedprotip.report import style
from fedprotip.report.rundata import RunData
from fedprotip.report.text import RULES, number
from fedprotip.store.records import Number

BIN = 10  # width of a bin of confidence in %
PALE = "#BFE3D7"  # of mode single


@style.styled
def accuracy_over_size(run: RunData) -> Figure:
    """Accuracy when so many samples of one task come together, a line per way; the chosen one is broad."""
    sweeps = run.summary.sweeps
    figure, (axes,) = style.new_figure(3.6)
    for way, values in sweeps.size.items():
        axes.plot(sweeps.sizes, style.as_floats(values), label=_way_label(run, way), **_look(run, way))
    axes.set_xscale("log", base=2)
    axes.set_xticks(sweeps.sizes, [str(size) for size in sweeps.sizes])
    axes.set_xlabel("samples of one task that come together")
    _accuracy_axis(axes, [value for values in sweeps.size.values() for value in values])
    style.legend_above(axes, 2)
    return figure


@style.styled
def accuracy_over_purity(run: RunData) -> Figure:
    """Accuracy when a group of 64 is of one task only in part: rules of the chosen way, and the paper's."""
    sweeps, chosen = run.summary.sweeps, run.chosen
    lines = [(chosen, rule) for rule in RULES if rule in sweeps.purity.get(chosen, {})]
    if chosen != "cosine" and "pooled" in sweeps.purity.get("cosine", {}):
        lines.append(("cosine", "pooled"))
    figure, (axes,) = style.new_figure(3.6)
    for way, rule in lines:
        values = style.as_floats(sweeps.purity[way][rule])
        colour = style.WAY_LOOKS.get(way, style.OTHER_WAY)[0]
        axes.plot(range(len(values)), values, label=f"{way}: {RULES[rule]}", color=colour, **_RULE_LOOKS[rule])
    axes.set_xticks(range(len(sweeps.purities)), [f"{number(100 * share, 0)} %" for share in sweeps.purities])
    axes.margins(x=0.08)
    axes.set_xlabel("share of the 64 samples that are of one task")
    _accuracy_axis(axes, [value for way, rule in lines for value in sweeps.purity[way][rule]])
    style.legend_above(axes, 2)
    return figure


@style.styled
def reliability(run: RunData) -> Figure:
    """Share of right answers over their confidence, and below it how many answers there are."""
    bins = run.summary.confidence.bins
    left = np.array([min(int(line.confidence * 100 / BIN), 100 // BIN - 1) * BIN for line in bins])
    counts = np.array([line.count for line in bins])
    figure, (above, below) = style.new_figure(4.2, rows=2, heights=(3.4, 1))
    above.plot([0, 100], [0, 100], color="#333333", linestyle=":", linewidth=1.2, label="as sure as right")
    above.bar(left + BIN / 2, [100 * line.accuracy for line in bins], 0.92 * BIN, color=PALE)
    above.plot(
        [100 * line.confidence for line in bins],
        [100 * line.accuracy for line in bins],
        "o-",
        color=style.MODE_COLOURS["single"],
        label="answers of mode single",
    )
    above.set_ylim(0, 103)
    above.set_ylabel("right (%)")
    above.grid(axis="y")
    style.legend_above(above, 2)
    below.bar(left + BIN / 2, 100 * counts / counts.sum(), 0.92 * BIN, color=PALE)
    for place, count in zip(left, counts, strict=True):
        height = 100 * count / counts.sum()
        below.text(place + BIN / 2, height + 2, _count(int(count)), ha="center", va="bottom", fontsize=8.5)
    below.set_ylim(0, 1.45 * 100 * counts.max() / counts.sum())
    below.set_ylabel("answers")
    below.yaxis.set_major_formatter(PercentFormatter(decimals=0))
    below.set_xlim(0, 100)
    below.set_xticks(range(0, 101, 20))
    below.set_xlabel("confidence (%)")
    figure.align_ylabels()
    return figure


@style.styled
def drift(run: RunData) -> Figure:
    """How far class means of test data lie from the kept statistics: on each task (columns), after each (rows)."""
    rows = run.summary.drift
    size = max(map(len, rows))
    first = min(map(len, rows))
    values = np.full((size - first + 1, size), np.nan)
    for row in rows:
        values[len(row) - first, : len(row)] = style.as_floats(row)
    figure, axes = style.square(size)
    top = float(np.nanmax(values, initial=0.0)) or 1.0
    style.heatmap(figure, axes, values, (0.0, top), lambda value: number(value, 1 if top >= 10 else 2))
    style.cell_ticks(axes.xaxis, size)
    style.cell_ticks(axes.yaxis, len(values), first)
    axes.set_title("class means off their statistics (σ)")
    axes.set_xlabel("on task")
    axes.set_ylabel("after task")
    return figure


_RULE_LOOKS: dict[str, dict[str, Any]] = {  # alone and mixture often lie on each other, so one is broad and pale
    "pooled": {"linestyle": "-", "marker": "o"},
    "alone": {"linestyle": "-", "linewidth": 6, "alpha": 0.3, "solid_capstyle": "round"},
    "mixture": {"linestyle": ":", "marker": "^"},
}


def _way_label(run: RunData, way: str) -> str:
    note = {run.chosen: " (chosen)", "cosine": " (paper)"} | ({"cosine": " (chosen)"} if run.chosen == "cosine" else {})
    return way + note.get(way, "")


def _look(run: RunData, way: str) -> dict[str, Any]:
    """The chosen way is a broad line under the others, so that equal ones stay visible."""
    colour, marker = style.WAY_LOOKS.get(way, style.OTHER_WAY)
    if way == run.chosen:
        return {"color": colour, "marker": marker, "linewidth": 4.5, "markersize": 7, "zorder": 2}
    return {"color": colour, "marker": marker, "linewidth": 1.3, "markersize": 4, "zorder": 3}


def _accuracy_axis(axes: Axes, values: list[Number]) -> None:
    lowest = np.nanmin(style.as_floats(values), initial=100.0)
    low = max(0, 10 * math.floor((lowest - 3) / 10))
    axes.set_ylim(low, 100 + 0.03 * (100 - low))  # room for markers, none for a tick above 100
    axes.set_ylabel("accuracy (%)")
    axes.grid(axis="y")


def _count(count: int) -> str:
    return f"{count:,}" if count < 10_000 else f"{count / 1000:,.0f}k"
