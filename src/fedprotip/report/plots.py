"""Plots of one run; every function returns a matplotlib Figure."""

import numpy as np
from matplotlib.figure import Figure

from fedprotip.report import style
from fedprotip.report.rundata import RunData
from fedprotip.report.text import PHASES, byte_unit, second_unit
from fedprotip.store.results import Memory

MOST_LINES = 8  # layers that still can be told apart as lines


@style.styled
def accuracy_over_tasks(run: RunData) -> Figure:
    """Average accuracy over the tasks seen so far (the paper's Fig. 3)."""
    figure, (axes,) = style.new_figure()
    modes = [mode for mode in run.summary.modes if mode in run.summary.matrix]
    for place, mode in enumerate(modes):
        curve = style.as_floats(run.summary.over_tasks(mode))
        axes.plot(
            range(1, len(curve) + 1),
            curve,
            label=mode,
            color=style.MODE_COLOURS[mode],
            marker=style.MODE_MARKERS[mode],
            zorder=3 - 0.1 * place,  # the first mode is never hidden
        )
    axes.set_ylim(0, 103)
    axes.set_ylabel("average accuracy (%)")
    style.task_axis(axes, run.summary.tasks, "tasks learned")
    axes.grid(axis="y")
    style.legend_above(axes, len(modes))
    return figure


@style.styled
def accuracy_matrix(run: RunData, mode: str) -> Figure:
    """Accuracy on each task (columns) after each task (rows)."""
    rows = run.summary.matrix[mode]
    values = np.full((len(rows), len(rows)), np.nan)
    for i, row in enumerate(rows):
        values[i, : i + 1] = style.as_floats(row[: i + 1])
    figure, axes = style.square(len(rows))
    style.heatmap(figure, axes, values, (0, 100), lambda value: f"{value:.0f}")
    style.cell_ticks(axes.xaxis, len(values))
    style.cell_ticks(axes.yaxis, len(values))
    axes.set_title(f"{mode}: accuracy (%)")
    axes.set_xlabel("on task")
    axes.set_ylabel("after task")
    return figure


@style.styled
def routing_confusion(run: RunData, mode: str) -> Figure:
    """Where the samples of each task (rows) were sent (columns), in % of the row."""
    counts = np.array(run.summary.confusion[mode], dtype=float)
    totals = counts.sum(axis=1, keepdims=True)
    values = np.divide(100 * counts, totals, out=np.full_like(counts, np.nan), where=totals > 0)
    figure, axes = style.square(len(counts))
    style.heatmap(figure, axes, values, (0, 100), lambda value: f"{value:.0f}" if value >= 0.5 else "")
    style.cell_ticks(axes.xaxis, len(values))
    style.cell_ticks(axes.yaxis, len(values))
    axes.set_title(f"{mode}: decisions (% of row)")
    axes.set_xlabel("predicted task")
    axes.set_ylabel("true task")
    return figure


@style.styled
def routing_by_task(run: RunData) -> Figure:
    """Share of samples sent to a right task (the paper's Fig. 4a), read in two ways; the dotted line is guessing.

    Bars: each task at the end. Lines: all tasks so far, right after each task.
    """
    by_task, over = run.summary.routing.by_task, run.summary.routing_over_tasks
    figure, (axes,) = style.new_figure(3.2)
    width, tasks = 0.8 / len(by_task), max(map(len, by_task.values()))
    for index, (mode, shares) in enumerate(by_task.items()):
        values = 100 * style.as_floats(shares)
        places = np.arange(1, len(values) + 1) + (index - (len(by_task) - 1) / 2) * width
        colour, marker = style.MODE_COLOURS[mode], style.MODE_MARKERS[mode]
        axes.bar(places, values, 0.92 * width, label=f"{mode}, at the end", color=colour, alpha=0.55 if over else 1.0)
        if mode in over:
            so_far = 100 * style.as_floats(over[mode].so_far)
            axes.plot(range(1, len(so_far) + 1), so_far, color=colour, marker=marker, label=f"{mode}, tasks so far")
    axes.axhline(100 / tasks, color="#333333", linestyle=":", linewidth=1.2, label="guessing")
    axes.set_ylim(0, 103)
    axes.set_ylabel("task found (%)")
    style.task_axis(axes, tasks)
    axes.grid(axis="y")
    style.legend_above(axes, 2)
    return figure


@style.styled
def ranks(run: RunData) -> Figure:
    """Protected share R/d of each layer's input space; lines for few layers, a heatmap for many."""
    events = [event for event in run.tasks if event.ranks]
    layers = list(dict.fromkeys(layer for event in events for layer in event.ranks))
    rank = np.array([style.as_floats([event.ranks.get(layer) for event in events]) for layer in layers])
    dims = np.array([next(e.dims[layer] for e in events if layer in e.ranks) for layer in layers], dtype=float)
    share = 100 * rank / dims[:, None]
    names = [f"{layer} ({rank[i, -1]:.0f} of {dims[i]:.0f})" for i, layer in enumerate(layers)]
    if len(layers) > MOST_LINES:
        return _rank_heatmap(share, rank, names)
    figure, (axes,) = style.new_figure(3.0 + 0.11 * len(layers))
    for i, (name, colour) in enumerate(zip(names, style.shades("Purples", len(names)), strict=True)):
        places, marker = [event.task + 1 for event in events], style.MARKERS[i % len(style.MARKERS)]
        axes.plot(places, share[i], label=name, color=colour, marker=marker)
    axes.set_ylim(0, 103)
    axes.set_ylabel("protected share R/d (%)")
    style.task_axis(axes, run.summary.tasks, "tasks learned")
    axes.grid(axis="y")
    style.legend_above(axes, 2 if max(map(len, names)) < 24 else 1)
    return figure


@style.styled
def traffic(run: RunData) -> Figure:
    """Bytes of each task over all clients, stacked by kind: above to the server, below to the clients."""
    tasks = sorted({task for task, _, _ in run.traffic})  # only those: a stranger's log may name any number
    kinds = sorted({kind for _, _, kind in run.traffic}, key=lambda kind: (kind != "model", kind))
    colours = dict(zip(kinds, style.shades("YlOrBr", len(kinds)), strict=True))
    sums = {
        direction: [sum(run.traffic.get((t, direction, kind), 0) for kind in kinds) for t in tasks]
        for direction in ("up", "down")
    }
    divisor, unit = byte_unit(max(map(max, sums.values())))
    figure, panels = style.new_figure(4.6, rows=2)
    for axes, direction, words in zip(panels, sums, ("clients → server", "server → clients"), strict=True):
        below = np.zeros(len(tasks))
        for kind in kinds:
            height = np.array([run.traffic.get((t, direction, kind), 0) / divisor for t in tasks])
            axes.bar(
                [float(t + 1) for t in tasks],
                height,
                0.7,
                below,
                label=kind,
                color=colours[kind],
                edgecolor="white",
                linewidth=0.6,
            )
            below += height
        axes.set_ylabel(f"{words} ({unit})")
        axes.grid(axis="y")
    style.task_axis(panels[-1], tasks[-1] + 1)
    style.legend_above(panels[0], min(len(kinds), 4))
    figure.align_ylabels()
    return figure


@style.styled
def seconds(run: RunData) -> Figure:
    """Wall-clock time of each task, stacked by phase."""
    events = [event for event in run.tasks if event.seconds]
    divisor, unit = second_unit(max(sum(event.seconds.values()) for event in events))
    figure, (axes,) = style.new_figure(2.8)
    places, below = [event.task + 1 for event in events], np.zeros(len(events))
    for phase, words in PHASES.items():
        height = np.array([event.seconds.get(phase, 0.0) for event in events]) / divisor
        axes.bar(places, height, 0.7, below, label=words, color=style.PHASE_COLOURS[phase])
        below += height
    axes.set_ylabel(f"time ({unit})")
    style.task_axis(axes, max(places))
    axes.grid(axis="y")
    style.legend_above(axes, len(PHASES))
    return figure


@style.styled
def memory(run: RunData) -> Figure:
    """Peak memory of each phase of each task (the paper's Fig. 7); a second panel where there was a GPU."""
    found = run.memory or Memory()
    panels = [(name, mbs) for name, mbs in (("memory", found.rss), ("GPU memory", found.gpu)) if mbs]
    figure, all_axes = style.new_figure(0.9 + 1.9 * len(panels), rows=len(panels))
    tasks = max(len(mbs) for _, by_phase in panels for mbs in by_phase.values())
    phases = [phase for phase in PHASES if any(phase in by_phase for _, by_phase in panels)]
    for axes, (name, by_phase) in zip(all_axes, panels, strict=True):
        divisor, unit = byte_unit(2**20 * max(mb or 0.0 for mbs in by_phase.values() for mb in mbs))
        for index, phase in enumerate(phases):
            height = 2**20 * style.as_floats(by_phase.get(phase, [])) / divisor
            places = np.arange(1, len(height) + 1) + (index - (len(phases) - 1) / 2) * 0.8 / len(phases)
            label, colour = PHASES[phase], style.PHASE_COLOURS[phase]
            axes.bar(places, height, 0.72 / len(phases), label=label, color=colour)
        axes.set_ylabel(f"peak {name} ({unit})")
        axes.grid(axis="y")
    style.task_axis(all_axes[-1], tasks)
    style.legend_above(all_axes[0], len(phases))
    return figure


def _rank_heatmap(share: np.ndarray, rank: np.ndarray, names: list[str]) -> Figure:
    layers, tasks = share.shape
    figure, (axes,) = style.new_figure(
        0.26 * layers + 0.9, max(style.WIDTH, 0.42 * min(tasks, style.MOST_NUMBERS) + 2.4)
    )
    style.heatmap(figure, axes, share, (0, 100), lambda value: f"{value:.0f}", rank)
    style.cell_ticks(axes.xaxis, tasks)
    axes.set_yticks(range(layers), names, fontsize=8.5)
    axes.set_title("rank R (colour: share of d)")
    axes.set_xlabel("tasks learned")
    return figure
