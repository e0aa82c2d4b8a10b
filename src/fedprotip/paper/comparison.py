"""Our figures beside the published ones: Markdown, CSV and a plot of one table of the paper."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from fedprotip.paper import costs
from fedprotip.paper.anchors import DIGITS
from fedprotip.paper.costs import Cost
from fedprotip.report import style
from fedprotip.report.tables import Stat
from fedprotip.report.text import number
from fedprotip.store.results import MODES

HEADINGS = ("row", "metric", "mode", "part", "ours", "std", "seeds", "paper", "paper std", "verdict", "why", "protocol")

GLANCE = (
    "Accuracy % (forgetting) [published]; samples that all clients keep of the past; a client's MiB per task, by kind, "
    "from 0.005 on; seconds of learning, without evaluation, of the processor, or by the clock (wall) where cells know "
    "no other. Ratios are to FedAvg with the same seed under the same conditions."
)


@dataclass(frozen=True)
class Line:
    """One figure of one row: what we measured, what the paper says, and how they compare."""

    row: str
    metric: str
    mode: str
    part: str  # the single task, kind of message or phase that the figure is about
    ours: Stat
    seeds: int
    paper: Stat
    verdict: str  # beats, equal, below, not comparable, not published, not run
    why: str = ""
    protocol: str = ""  # of the published number

    @property
    def judged(self) -> str:
        return f"{self.verdict} ({self.why})" if self.why else self.verdict


@dataclass(frozen=True)
class Outcome:
    """A table of the paper as far as it was run."""

    name: str
    title: str
    scale: str
    lines: list[Line]
    runs: dict[str, list[str]]  # row → the commands that made it
    curves: dict[str, list[Stat]]  # row and mode → average accuracy after each task
    waiting: dict[str, str]  # row → why it was not run
    notes: list[str]  # what a reader must know about the rows
    costs: dict[str, Cost]  # row → what it costs
    outdated: dict[str, str]  # file of a cell → what its row says otherwise today


def markdown(outcome: Outcome) -> str:
    """The table with its remarks below; long reasons are numbered."""
    reasons = list(dict.fromkeys(line.why for line in outcome.lines if line.why))
    text = [f"# {outcome.name}: {outcome.title} ({outcome.scale} scale)", ""]
    if outcome.runs:
        headings, rows = at_a_glance(outcome)
        text += [GLANCE, "", _bar(headings), _bar(["---"] * len(headings)), *map(_bar, rows), ""]
    text += ["Mean ± sample standard deviation over seeds; accuracy and forgetting in %.", ""]
    text += ["| row | figure | ours | seeds | paper | verdict |", "|---|---|---|---|---|---|"]
    for line in outcome.lines:
        figure = " ".join(filter(None, (line.metric, line.mode, line.part)))
        verdict = f"{line.verdict} [{reasons.index(line.why) + 1}]" if line.why else line.verdict
        ours, paper = (_text(stat, line.metric) for stat in (line.ours, line.paper))
        text.append(f"| {line.row} | {figure} | {ours} | {line.seeds or '–'} | {paper} | {verdict} |")
    text += ["", *(f"{number}. {reason}." for number, reason in enumerate(reasons, 1))]
    text += _section("Text and code", [f"{note}." for note in outcome.notes])
    protocols = dict.fromkeys((line.row, line.protocol) for line in outcome.lines if line.protocol)
    text += _section("Protocol of the published numbers", [f"{row}: {protocol}" for row, protocol in protocols])
    text += _section("Commands", [f"{row}: `{command}`" for row, all_ in outcome.runs.items() for command in all_])
    text += _section("Outdated", [f"{file}: {changed}" for file, changed in outcome.outdated.items()])
    text += _section("Not run", [f"{row}: {why}" for row, why in outcome.waiting.items()])
    return "\n".join(text) + "\n"


def at_a_glance(outcome: Outcome) -> tuple[list[str], list[list[str]]]:
    """Headings and a line for every row that was run: accuracy in all modes, and what it costs."""
    by_figure = {(line.row, line.metric, line.mode): line for line in outcome.lines if not line.part}
    modes = [mode for mode in MODES if any((row, "acc", mode) in by_figure for row in outcome.runs)]
    rows = []
    for row in outcome.runs:
        pairs = [[by_figure.get((row, metric, mode)) for metric in ("acc", "ft")] for mode in modes]
        rows.append([row, *(_both(*pair) for pair in pairs), *costs.columns(outcome.costs.get(row))])
    return ["row", *modes, *costs.HEADINGS], rows


def as_csv(outcome: Outcome) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(HEADINGS)
    for line in outcome.lines:
        ours, paper = (line.ours.mean, line.ours.std), (line.paper.mean, line.paper.std)
        what = (line.row, line.metric, line.mode, line.part)
        writer.writerow([*what, *ours, line.seeds, *paper, line.verdict, line.why, line.protocol])
    return buffer.getvalue()


@style.styled
def accuracy_bars(outcome: Outcome) -> Figure:
    """A bar for every row and mode that was run; a black diamond where the paper has a number."""
    shown = [line for line in outcome.lines if line.metric == "acc" and line.ours.mean is not None]
    places, rows = _places(shown)
    figure, (axes,) = style.new_figure(1.0 + 0.2 * max(places, default=1))
    drawn: set[str] = set()
    for place, line in zip(places, shown, strict=True):
        label = None if line.mode in drawn else line.mode
        colour = style.MODE_COLOURS[line.mode]
        axes.barh(place, line.ours.mean or 0.0, 0.86, xerr=line.ours.std or 0.0, capsize=2, color=colour, label=label)
        drawn.add(line.mode)
    printed = [(place, line.paper.mean) for place, line in zip(places, shown, strict=True) if line.paper.mean]
    if printed:
        heights, values = zip(*printed, strict=True)
        axes.plot(values, heights, "D", color="black", markersize=4, label="paper")
    axes.set_yticks(list(rows.values()), [row.replace("+", "\n+") for row in rows])
    axes.tick_params(axis="y", length=0, labelsize=7)
    axes.invert_yaxis()
    axes.set_xlim(0, 103)
    axes.set_xlabel(f"accuracy (%), {outcome.scale} scale")
    axes.grid(axis="x")
    figure.legend(loc="outside upper center", ncols=5, handlelength=1.6, columnspacing=1.2)
    return figure


@style.styled
def accuracy_curves(outcome: Outcome) -> Figure:
    """Average accuracy over the tasks learned so far, a line for every row and mode (the paper's Fig. 3)."""
    figure, (axes,) = style.new_figure(3.0 + 0.2 * len(outcome.curves))
    for index, (name, stats) in enumerate(outcome.curves.items()):
        places = range(1, len(stats) + 1)
        axes.plot(places, style.as_floats([stat.mean for stat in stats]), label=name, **style.series(index))
    axes.set_ylim(0, 103)
    axes.set_ylabel(f"average accuracy (%), {outcome.scale} scale")
    style.task_axis(axes, max(map(len, outcome.curves.values()), default=1), "tasks learned")
    axes.grid(axis="y")
    style.legend_above(axes, 1)
    return figure


def time_and_memory(outcome: Outcome) -> Figure:
    """What rows cost beside FedAvg (the paper's Fig. 6)."""
    return costs.time_and_memory(outcome.costs)


def _places(lines: Sequence[Line]) -> tuple[list[float], dict[str, float]]:
    """Where each bar stands, and the middle of each row's bars."""
    places: list[float] = []
    of_row: dict[str, list[float]] = {}
    for line in lines:
        gap = 0.0 if not places else 1.0 if line.row in of_row else 1.7
        places.append((places[-1] if places else 0.0) + gap)
        of_row.setdefault(line.row, []).append(places[-1])
    return places, {row: float(np.mean(found)) for row, found in of_row.items()}


def _text(stat: Stat, metric: str) -> str:
    if stat.mean is None:
        return "–"
    digits = DIGITS.get(metric, 3)
    return f"{stat.mean:.{digits}f}" + ("" if stat.std is None else f" ± {stat.std:.{digits}f}")


def _both(accuracy: Line | None, forgetting: Line | None) -> str:
    """97.1 (0.3) [96.0 (1.2)]: ours, and what the paper says."""
    nothing = Stat(None, None)
    ours = [line.ours if line else nothing for line in (accuracy, forgetting)]
    paper = [line.paper if line else nothing for line in (accuracy, forgetting)]
    text = "–" if ours[0].mean is None else f"{number(ours[0].mean)} ({number(ours[1].mean)})"
    return text if paper[0].mean is None else f"{text} [{number(paper[0].mean)} ({number(paper[1].mean)})]"


def _bar(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _section(title: str, entries: list[str]) -> list[str]:
    return ["", f"## {title}", "", *(f"- {entry}" for entry in entries)] if entries else []
