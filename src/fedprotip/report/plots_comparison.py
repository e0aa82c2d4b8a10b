"""Plots of several runs side by side: mean and sample standard deviation over seeds."""

from itertools import zip_longest

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from fedprotip.report import style
from fedprotip.report.rundata import RunData
from fedprotip.report.tables import Group, Stat, labels
from fedprotip.report.text import PHASES, STAND_IN, byte_unit
from fedprotip.store.records import mean_of
from fedprotip.store.results import MODES, Geometry, standing_for


@style.styled
def bars(groups: list[Group], kind: str) -> Figure:
    """`kind` "accuracy" or "forgetting": one bar per mode for each group, with error bars; hatched where another mode
    stands in."""
    stats = [group.accuracy if kind == "accuracy" else group.forgetting for group in groups]
    modes = [mode for mode in MODES if any(mode in values for values in stats)]
    present = [[mode for mode in modes if standing_for(mode, values) in values] for values in stats]
    figure, (axes,) = style.new_figure(1.0 + 0.2 * sum(map(len, present)) + 0.14 * len(groups))
    place, middles = 0.0, []
    for values, own in zip(stats, present, strict=True):
        middles.append(place + (len(own) - 1) / 2)
        for mode in own:
            stat = values[standing_for(mode, values)]
            axes.barh(
                place,
                stat.mean or 0.0,
                0.86,
                xerr=stat.std or None,
                capsize=2,
                color=style.MODE_COLOURS[mode],
                hatch=None if mode in values else "////",
                edgecolor="white",
                linewidth=0,
                ecolor="#222222",
                error_kw={"elinewidth": 1.2},
            )
            place += 1
        place += 0.7
    axes.set_yticks(middles, [group.label.replace(" ", "\n", 1) for group in groups])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    if kind == "accuracy":
        axes.set_xlim(0, 103)
    axes.set_xlabel("accuracy (%)" if kind == "accuracy" else "forgetting (points, less is better)")
    axes.grid(axis="x")
    style.legend_above(axes, len(modes), [Patch(color=style.MODE_COLOURS[mode], label=mode) for mode in modes])
    return figure


@style.styled
def curves(groups: list[Group], mode: str) -> Figure:
    """Average accuracy over the tasks seen so far; the band is one standard deviation."""
    looks = style.looks([group.method for group in groups])
    drawn = [(look, group, group.curve(mode)) for look, group in zip(looks, groups, strict=True) if group.curve(mode)]
    columns = 2 if max(len(group.label) for _, group, _ in drawn) < 24 else 1
    figure, (axes,) = style.new_figure(2.8 + 0.2 * -(-len(drawn) // columns))
    for look, group, curve in drawn:
        mark = "" if mode in group.accuracy else STAND_IN
        mean = style.as_floats([stat.mean for stat in curve])
        spread = style.as_floats([stat.std or 0.0 for stat in curve])
        places = range(1, len(curve) + 1)
        axes.plot(places, mean, label=group.label + mark, **look)
        axes.fill_between(places, mean - spread, mean + spread, color=look["color"], alpha=0.18, linewidth=0)
    axes.set_ylim(0, 103)
    axes.set_ylabel(f"average accuracy (%), {mode}")
    style.task_axis(axes, max(len(curve) for _, _, curve in drawn), "tasks learned")
    axes.grid(axis="y")
    style.legend_above(axes, columns)
    return figure


@style.styled
def memory(groups: list[Group]) -> Figure:
    """Peak memory of each phase, a bar per phase for each group (the paper's Fig. 7)."""
    shown = [group for group in groups if group.memory]
    phases = [phase for phase in PHASES if any(phase in group.memory for group in shown)]
    divisor, unit = byte_unit(2**20 * max(stat.mean or 0.0 for group in shown for stat in group.memory.values()))
    figure, (axes,) = style.new_figure(1.0 + (0.2 * len(phases) + 0.14) * len(shown))
    for index, phase in enumerate(phases):
        stats = [group.memory.get(phase, Stat(None, None)) for group in shown]
        places = np.arange(len(shown)) + (index - (len(phases) - 1) / 2) * 0.8 / len(phases)
        width = 2**20 * style.as_floats([stat.mean for stat in stats]) / divisor
        spread = 2**20 * style.as_floats([stat.std or 0.0 for stat in stats]) / divisor
        axes.barh(places, width, 0.72 / len(phases), xerr=spread, capsize=2, color=style.PHASE_COLOURS[phase])
        axes.containers[-1].set_label(PHASES[phase])
    axes.set_yticks(range(len(shown)), [group.label.replace(" ", "\n", 1) for group in shown])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlabel(f"peak memory ({unit})")
    axes.grid(axis="x")
    style.legend_above(axes, len(phases))
    return figure


Thresholds = dict[str, dict[float, list[Geometry]]]


def thresholds(runs: list[RunData]) -> Thresholds:
    """Label without threshold → ε → what its runs measured; only labels measured at two or more ε."""
    measured: Thresholds = {}
    for run, label in zip(runs, labels(runs, leave_out=frozenset({"method.threshold"})), strict=True):
        if run.geometry and run.geometry.threshold is not None:
            measured.setdefault(label, {}).setdefault(run.geometry.threshold, []).append(run.geometry)
    return {label: dict(sorted(found.items())) for label, found in measured.items() if len(found) > 1}


def rho_by_task(measured: list[Geometry]) -> list[Stat]:
    """ρ̂_t of each task, mean over rounds, over seeds."""
    return [Stat.of(values) for values in zip_longest(*(geometry.rho_mean for geometry in measured))]


def rho_and_beta(measured: list[Geometry]) -> tuple[Stat, Stat]:
    """Mean ρ̂ and mean β̂ of a run, over seeds."""
    return (
        Stat.of(mean_of(geometry.rho_mean) for geometry in measured),
        Stat.of(geometry.beta_bar for geometry in measured),
    )


@style.styled
def geometry_rho_by_threshold(by_label: Thresholds) -> Figure:
    """ρ̂ over tasks, a line for every threshold ε (the paper's Fig. 2a); a panel for every label."""
    lines = max(map(len, by_label.values()))
    figure, panels = style.new_figure(0.7 + 2.4 * len(by_label) + 0.1 * lines, rows=len(by_label))
    for axes, (label, by_threshold) in zip(panels, by_label.items(), strict=True):
        for index, (threshold, measured) in enumerate(by_threshold.items()):
            stats, look = rho_by_task(measured), style.series(index)
            mean = style.as_floats([stat.mean for stat in stats])
            spread = style.as_floats([stat.std or 0.0 for stat in stats])
            places = range(1, len(stats) + 1)
            axes.plot(places, mean, label=rf"$\epsilon$ = {threshold:g}", **look)
            axes.fill_between(places, mean - spread, mean + spread, color=look["color"], alpha=0.18, linewidth=0)
        axes.set_ylim(0, min(1.03, axes.get_ylim()[1]))
        axes.set_ylabel(r"$\hat{\rho}_t$" + (f", {label}" if len(by_label) > 1 else ""))
        axes.grid(axis="y")
        style.legend_above(axes, 3)
    style.task_axis(panels[-1], max(len(g.rho) for found in by_label.values() for runs in found.values() for g in runs))
    figure.align_ylabels()
    return figure


@style.styled
def geometry_over_threshold(by_label: Thresholds) -> Figure:
    """Mean ρ̂ and mean β̂ against the threshold ε (the paper's Fig. 2c)."""
    figure, panels = style.new_figure(4.6, rows=2)
    for index, (label, by_threshold) in enumerate(by_label.items()):
        points = {threshold: rho_and_beta(measured) for threshold, measured in by_threshold.items()}
        for panel, axes in enumerate(panels):
            mean = style.as_floats([stats[panel].mean for stats in points.values()])
            spread = style.as_floats([stats[panel].std or 0.0 for stats in points.values()])
            axes.errorbar(list(points), mean, spread, label=label, capsize=2, **style.series(index))
    for axes, name in zip(panels, (r"mean $\hat{\rho}$", r"mean $\hat{\beta}$"), strict=True):
        axes.set_ylabel(name)
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
        axes.grid(axis="y")
    panels[0].set_ylim(top=1.03)
    panels[1].set_xticks(np.unique([threshold for found in by_label.values() for threshold in found]))
    panels[1].set_xlabel(r"threshold $\epsilon$")
    style.legend_above(panels[0], 1)
    figure.align_ylabels()
    return figure
