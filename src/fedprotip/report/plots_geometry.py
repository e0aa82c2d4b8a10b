"""Plots of the geometry of projection: section 5 of the paper, measured."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedprotip.report import style
from fedprotip.report.text import number
from fedprotip.store.records import Number
from fedprotip.store.results import Geometry

Limits = list[tuple[str, list[Number]]]
"""Name of a bound → its values."""


@style.styled
def rho(geometry: Geometry) -> Figure:
    """ρ̂ of each task: the share of the gradient that projection leaves (one line of Fig. 2a)."""
    figure, (axes,) = style.new_figure(2.9)
    lines = (
        ("mean over rounds", geometry.rho_mean, style.INK, "o"),
        ("minimum", geometry.rho, style.SAND, "v"),
    )
    for label, values, colour, marker in lines:
        places = range(1, len(values) + 1)
        axes.plot(places, style.as_floats(values), label=label, color=colour, marker=marker)
    axes.set_ylim(0, 1.03)
    axes.set_ylabel(r"$\hat{\rho}_t$")
    style.task_axis(axes, len(geometry.rho))
    axes.grid(axis="y")
    style.legend_above(axes, 2)
    return figure


@style.styled
def beta(geometry: Geometry) -> Figure:
    """β̂ between every new task (rows) and every old one (columns) (Fig. 2b)."""
    size = len(geometry.beta)
    values = np.full((size, size), np.nan)
    for t, row in enumerate(geometry.beta):
        values[t, : len(row)] = style.as_floats(row)
    values = values[1:, :-1]  # the first task has no old task, the last is no old task
    top = float(np.nanmax(values, initial=0.0)) or 1.0
    figure, axes = style.square(size - 1)
    style.heatmap(figure, axes, values, (min(0.0, float(np.nanmin(values, initial=0.0))), top), _short)
    style.cell_ticks(axes.xaxis, size - 1)
    style.cell_ticks(axes.yaxis, size - 1, first=2)
    axes.set_title(r"interference $\hat{\beta}_{\tau \to t}$")
    axes.set_xlabel(r"old task $\tau$")
    axes.set_ylabel("while learning task $t$")
    return figure


@style.styled
def bounds(geometry: Geometry) -> Figure:
    """What was measured in each task beside the bounds of theorems, corollary and Lemma 3, on a logarithmic axis."""
    measured, known = geometry.measured, geometry.bounds
    panels: list[tuple[str, list[Number], Limits]] = [
        (
            "squared gradient",
            measured.gradient_sq_mean,
            [("Eq. 13", known.taskwise), ("Eq. 15", known.taskwise_canonical)],
        ),
        (
            "loss increase",
            measured.loss_increase,
            [("Eq. 14", known.forgetting), ("Eq. 31", known.forgetting_canonical)],
        ),
        ("local drift", measured.drift, [("Lemma 3", known.drift)]),
    ]
    panels = [panel for panel in panels if any(value is not None for value in panel[1])]
    figure, all_axes = style.new_figure(0.5 + 2.2 * len(panels), rows=len(panels))
    for axes, (name, values, limits) in zip(all_axes, panels, strict=True):
        _measured_and_bounds(axes, range(1, len(values) + 1), [("measured", "o", values)], limits)
        axes.set_ylabel(name)
    style.task_axis(all_axes[-1], len(geometry.rho))
    figure.align_ylabels()
    return figure


@style.styled
def rounds(geometry: Geometry) -> Figure:
    """The loss increase of every old task in one round of a new one (Eq. 24) beside its bound (Eq. 25)."""
    pairs, tasks = geometry.pairs(), len(geometry.beta)
    places = [t + 1 + (tau - (t - 1) / 2) * 0.8 / max(tasks - 1, 1) for t, tau in pairs]
    size = 5.0 if tasks <= 6 else 3.0
    figure, (axes,) = style.new_figure(3.2)
    measured = [
        ("largest", "o", list(pairs.values())),
        ("mean", ".", list(geometry.pairs(geometry.measured.round_increase_mean).values())),
    ]
    bound = list(geometry.pairs(geometry.bounds.round_increase).values())
    _measured_and_bounds(axes, places, measured, [("Eq. 25", bound)], size)
    axes.set_ylabel("loss increase in a round")
    style.task_axis(axes, tasks, r"while learning task $t$, old tasks $\tau < t$ from left to right")
    axes.set_xlim(1.4, tasks + 0.6)
    return figure


def _measured_and_bounds(
    axes: Axes,
    places: Sequence[float],
    measured: Sequence[tuple[str, str, Sequence[Number]]],
    limits: Limits,
    size: float = 5.0,
) -> None:
    """Points (name, marker, values) and the bounds above them, each where it belongs."""
    everything = [value for _, _, values in measured for value in values] + [v for _, values in limits for v in values]
    numbers = style.as_floats(everything)
    numbers = numbers[np.isfinite(numbers)]
    sizes = np.abs(numbers[numbers != 0])
    if len(numbers) and (numbers > 0).all():
        axes.set_yscale("log")
    elif len(sizes):  # linear around zero: a loss that did not rise has no logarithm and must be seen
        least = max(float(sizes.min()), float(sizes.max()) * 1e-8)
        axes.set_yscale("symlog", linthresh=10.0 ** np.ceil(np.log10(least)), linscale=2)
    for (name, marker, values), colour in zip(measured, (style.INK, "#888888"), strict=False):
        axes.plot(places, style.as_floats(values), marker, label=name, color=colour, markersize=size)
    for (name, values), colour, marker in zip(limits, (style.SAND, style.STRAW), ("_", "x"), strict=False):
        if values:
            drawn = axes.plot(places, style.as_floats(values), marker, label=f"bound {name}", color=colour)
            drawn[0].set(markersize=1.6 * size, markeredgewidth=2)
    axes.grid(axis="y")
    style.legend_above(axes, 3)


def _short(value: float) -> str:
    return number(value, 2).removeprefix("0") if 0 < abs(value) < 1 else number(value, 1)
