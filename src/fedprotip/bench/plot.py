"""A picture of a benchmark: seconds, and where measured peak memory, of ours and the textbook in every case."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from fedprotip.bench.base import Report, Row
from fedprotip.report import style
from fedprotip.store.files import write_atomic

SIDES = (("ours", style.PALETTE[0], "o"), ("textbook", style.PALETTE[1], "s"))


def write_plot(report: Report, folder: Path) -> Path:
    path = folder / f"{report.name}.png"
    write_atomic(path, style.png(draw(report)))
    return path


@style.styled
def draw(report: Report) -> Figure:
    """A line per case from ours to the textbook's; logarithmic, so equal lengths are equal ratios."""
    cases = list({row.case: row for row in report.rows}.values())
    weighed = [row for row in cases if row.ours_peak_mb is not None and row.textbook_peak_mb is not None]
    panels = [("seconds", "seconds", cases)] + ([("peak_mb", "peak memory (MiB)", weighed)] if weighed else [])
    heights = [len(rows) for _, _, rows in panels]
    figure = Figure(figsize=(1.3 * style.WIDTH, 1.2 * len(panels) + 0.32 * sum(heights)), layout="constrained")
    every = figure.subplots(len(panels), 1, squeeze=False, height_ratios=[0.6 + height for height in heights])[:, 0]
    for axes, (measure, label, rows) in zip(every, panels, strict=True):
        _lines(axes, rows, measure, label)
    figure.suptitle(
        report.title + (" (quick)" if report.quick else ""), x=0.01, ha="left", fontsize=10.5, weight="bold"
    )
    style.legend_above(every[0], len(SIDES))
    return figure


def _lines(axes: Axes, rows: list[Row], measure: str, label: str) -> None:
    """The first case on top; how many times less ours needs stands at the right."""
    places = np.arange(len(rows))
    ours, textbook = (style.as_floats([getattr(row, f"{side}_{measure}") for row in rows]) for side, *_ in SIDES)
    axes.hlines(places, ours, textbook, color="#bbbbbb", linewidth=2, zorder=1)
    for (side, colour, marker), values in zip(SIDES, (ours, textbook), strict=True):
        axes.scatter(values, places, 36, color=colour, marker=marker, label=side, zorder=2)
    for place, ratio in zip(places, textbook / ours, strict=True):
        axes.annotate(f"{ratio:.3g}×", (1.01, place), xycoords=("axes fraction", "data"), va="center", fontsize=9)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_yticks(places, [row.case for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel(label)
    axes.grid(axis="x")
