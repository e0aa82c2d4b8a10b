"""What stands on the page that compares several runs."""

from collections.abc import Callable

from fedprotip.report import plots_comparison as plots
from fedprotip.report.parts import Grid, Picture, Section
from fedprotip.report.rundata import RunData
from fedprotip.report.tables import QUIET, Group, Stat, other_differences
from fedprotip.report.text import PHASES, bytes_text, joined, meaning, mib_text, plus_minus, seconds_text
from fedprotip.store.results import MODES


def comparison_sections(groups: list[Group]) -> list[Section]:
    """Result tables and bars, curves, cost, and geometry over the threshold when it was measured."""
    modes = _modes(groups)
    runs = [run for group in groups for run in group.runs]
    bars = [
        Picture(f"bars_{kind}", plots.bars(groups, kind), f"Bar chart of the {kind} of each method in each mode.")
        for kind in ("accuracy", "forgetting")
    ]
    grids = [
        _grid(groups, "Accuracy (%)", lambda group: group.accuracy, max),
        _grid(groups, "Forgetting (points)", lambda group: group.forgetting, min),
    ]
    sections = [Section("Results", "Mean ± sample standard deviation over seeds.", bars, grids)]
    curves = [
        Picture(
            f"curves_{mode}",
            plots.curves(groups, mode),
            f"Line chart of the average accuracy over the tasks seen so far, mode {mode}, a line per method.",
        )
        for mode in modes
        if any(group.curve(mode) for group in groups)
    ]
    if curves:
        intro = "Average over all tasks seen so far; the band is one standard deviation over seeds."
        sections.append(Section("Accuracy over tasks", intro, curves))
    sections.append(_costs(groups))
    measured = plots.thresholds(runs)
    if measured:
        pictures = [
            Picture(
                "geometry_rho_by_threshold",
                plots.geometry_rho_by_threshold(measured),
                "Line chart of ρ̂ over tasks, a line for every threshold ε.",
            ),
            Picture(
                "geometry_over_threshold",
                plots.geometry_over_threshold(measured),
                "Two line charts: mean ρ̂ and mean β̂ against the threshold ε.",
            ),
        ]
        intro = "A higher threshold protects more: less interference β̂, and less room to learn ρ̂."
        sections.append(Section("Geometry and threshold", intro, pictures))
    return sections


def comparison_reading(groups: list[Group]) -> str:
    """Who is ahead, in one sentence: sample by sample without the task, then with it. Nobody under other conditions."""
    if set(other_differences([run for group in groups for run in group.runs])) - QUIET:
        return "The methods were not run under the same conditions, so none of them is called ahead."
    alone = _ranked(groups, lambda group: group.accuracy.get("single", group.accuracy.get("agnostic")))
    told = _ranked(groups, lambda group: group.accuracy.get("aware"))
    sentences = []
    if alone:
        sentences.append(f"When no task is given and each sample stands alone, {_ahead(alone)}.")
    if told:
        sentences.append(f"When the task is given, {_ahead(told)}.")
    return " ".join(sentences)


def mode_meanings(groups: list[Group]) -> dict[str, str]:
    """What each mode of the comparison measures."""
    size = groups[0].runs[0].setting("evaluate.group", 64)
    return {mode: meaning(mode, size) for mode in _modes(groups)}


def remarks(groups: list[Group]) -> list[str]:
    """What a reader must know before trusting the comparison."""
    found = []
    differences = other_differences([run for group in groups for run in group.runs])
    if differences:
        found.append(f"The methods were also run with different {joined(differences)}.")
    for group in groups:
        repeated = sorted({seed for seed in group.seeds if group.seeds.count(seed) > 1})
        if repeated:
            seeds = joined([str(seed) for seed in repeated])
            found.append(f"{group.label}: seed {seeds} occurs more than once, so the ± is too small.")
    if len({len(group.runs) for group in groups}) > 1:
        found.append("The methods have different numbers of seeds.")
    return found


def common_facts(runs: list[RunData]) -> list[str]:
    """Facts that hold for all runs."""
    facts = [
        {str(run.setting("data.name", "")) for run in runs},
        {f"{run.summary.scenario}-incremental" for run in runs},
        {f"{run.summary.tasks} tasks" for run in runs},
        {f"{run.summary.clients} clients" for run in runs},
    ]
    return [next(iter(values)) for values in facts if len(values) == 1 and "" not in values]


def _modes(groups: list[Group]) -> list[str]:
    return [mode for mode in MODES if any(mode in group.accuracy for group in groups)]


def _grid(
    groups: list[Group],
    title: str,
    stats: Callable[[Group], dict[str, Stat]],
    better: Callable[[list[float]], float],
) -> Grid:
    modes, best = _modes(groups), set()
    rows = [[group.label, *(_stat(stats(group).get(mode)) for mode in modes)] for group in groups]
    for column, mode in enumerate(modes, start=1):
        means = [stats(group)[mode].mean if mode in stats(group) else None for group in groups]
        known = [mean for mean in means if mean is not None]
        if len(known) > 1:
            best |= {(row, column) for row, mean in enumerate(means) if mean == better(known)}
    rows = [[*row, str(len(group.runs))] for row, group in zip(rows, groups, strict=True)]
    return Grid(["method", *modes, "seeds"], rows, title, best=best)


def _stat(stat: Stat | None) -> str:
    return "–" if stat is None else plus_minus(stat.mean, stat.std)


def _costs(groups: list[Group]) -> Section:
    def shown(stat: Stat, write: Callable[[float], str]) -> str:
        if stat.mean is None:
            return "–"
        return write(stat.mean) + (f" ± {write(stat.std)}" if stat.std else "")

    rows = [
        [
            group.label,
            shown(group.bytes["up"], bytes_text),
            shown(group.bytes["down"], bytes_text),
            shown(group.seconds, seconds_text),
        ]
        for group in groups
    ]
    pictures, grids = [], [Grid(["method", "up", "down", "time"], rows)]
    phases = {phase: words for phase, words in PHASES.items() if any(phase in group.memory for group in groups)}
    if phases:
        nothing = Stat(None, None)
        peaks = [
            [group.label, *(shown(group.memory.get(phase, nothing), mib_text) for phase in phases)] for group in groups
        ]
        grids.append(Grid(["method", *phases.values()], peaks, "Peak memory by phase"))
        pictures.append(Picture("memory", plots.memory(groups), "Bar chart of the peak memory of each phase."))
    intro = "Bytes that all clients together sent (up) and received (down), and wall-clock time."
    intro += " Memory is that of the process, which may hold what earlier runs in it have left." if phases else ""
    return Section("Cost", intro, pictures, grids)


def _ranked(groups: list[Group], pick: Callable[[Group], Stat | None]) -> list[tuple[str, Stat]]:
    picked = [(group.label, pick(group)) for group in groups]
    known = [(label, stat) for label, stat in picked if stat is not None and stat.mean is not None]
    return sorted(known, key=lambda item: -(item[1].mean or 0.0))


def _ahead(ranked: list[tuple[str, Stat]]) -> str:
    label, first = ranked[0]
    if len(ranked) == 1:
        return f"{label} answers {_stat(first)} % correctly"
    other, second = ranked[1]
    near = (first.mean or 0.0) - (second.mean or 0.0) <= max(first.std or 0.0, second.std or 0.0)
    if near:
        return f"{label} ({_stat(first)} %) and {other} ({_stat(second)} %) are too close to call"
    return f"{label} is ahead with {_stat(first)} %, followed by {other} with {_stat(second)} %"
