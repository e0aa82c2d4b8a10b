"""What stands on the page that compares several runs."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from fedprotip.report import plots_comparison as plots
from fedprotip.report.alike import differences, other_questions
from fedprotip.report.bounds import UPPER, of_the_way, way_sentence
from fedprotip.report.gains import MODES as GAIN_MODES
from fedprotip.report.gains import NOTE, TITLE, gains
from fedprotip.report.parts import Grid, Picture, Section
from fedprotip.report.rundata import RunData
from fedprotip.report.significance import Verdict, may_be_chance, verdict_grid, verdicts
from fedprotip.report.tables import QUIET, Group, Stat, kinds_of_samples, other_differences
from fedprotip.report.text import (
    NOTICEABLE,
    PHASES,
    STAND_IN,
    STAND_IN_NOTE,
    bytes_text,
    chance,
    joined,
    meaning,
    mib_text,
    number,
    plus_minus,
    points,
    seconds_text,
    trains_nothing,
)
from fedprotip.store.results import MODES, standing_for

HATCHED = "Hatched: this method does not look for the task and answers agnostically."


def comparison_sections(groups: list[Group]) -> list[Section]:
    """Result tables and bars, curves, cost, and geometry over the threshold when it was measured."""
    modes = _modes(groups)
    runs = [run for group in groups for run in group.runs]
    bars = [
        Picture(
            f"bars_{kind}",
            plots.bars(groups, kind),
            f"Bar chart of the {kind} of each method in each mode.",
            HATCHED if any(standing_for(mode, group.accuracy) != mode for group in groups for mode in modes) else "",
        )
        for kind in ("accuracy", "forgetting")
    ]
    sections = [Section("Results", "Mean ± sample standard deviation over seeds.", bars, _results(groups))]
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
    if table := differences(groups):
        intro = "What may explain a difference besides the method. Options that only one method has are not listed."
        sections.append(Section("Settings that differ", intro, grids=[table]))
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


def comparison_grids(groups: list[Group]) -> list[Grid]:
    """Tables without pictures and costs: results, and settings that differ."""
    table = differences(groups)
    return [*_results(groups), *([replace(table, title="Settings that differ")] if table else [])]


def _results(groups: list[Group]) -> list[Grid]:
    grids = result_grids(groups)
    if not other_questions(groups):
        found = verdict_grid(verdicts(groups))
        grids += [*([found] if found else []), *_way(groups)]
    return grids + _gains(groups)


def result_grids(groups: list[Group]) -> list[Grid]:
    """Accuracy and forgetting; the best of a mode is marked where the runs were asked the same."""
    grids = [
        _grid(groups, "Accuracy (%)", lambda group: group.accuracy, max),
        _grid(groups, "Forgetting (points)", lambda group: group.forgetting, min),
    ]
    return [replace(grid, best=set()) for grid in grids] if other_questions(groups) else grids


def comparison_reading(groups: list[Group]) -> str:
    """Who is ahead, in one sentence: sample by sample without the task, then with it. Nobody under other conditions."""
    if other_questions(groups):
        return "The runs were not asked the same, so none of them is called ahead."
    if set(other_differences([run for group in groups for run in group.runs])) - QUIET:
        return "The methods were not run under the same conditions, so none of them is called ahead."
    methods = [group for group in groups if group.method != UPPER] or groups  # it may keep all data: no competitor
    alone = _ranked(methods, _alone)
    told = _ranked(methods, lambda group: group.accuracy.get("aware"))
    sentences, tested = [], verdicts(methods)
    if alone:
        sentences.append(f"When no task is given and each sample stands alone, {_ahead(alone, tested, 'single')}.")
    if told:
        sentences.append(f"When the task is given, {_ahead(told, tested, 'aware')}.")
    return " ".join(filter(None, [*sentences, way_sentence(groups), *_training_is_worth(methods)]))


def _alone(group: Group) -> Stat | None:
    """Accuracy when each sample stands alone and no task is given."""
    return group.accuracy.get(standing_for("single", group.accuracy))


def _training_is_worth(groups: list[Group]) -> list[str]:
    """What training adds in the best method that trains, in one sentence; none where nothing tells.

    By its class statistics, trained minus frozen, where they are known: a method may answer by the untrained network.
    Else it is compared with the best method that trains nothing.
    """
    closed = _ranked([group for group in groups if all(map(trains_nothing, group.runs))], _alone)
    trained = _ranked([group for group in groups if not any(map(trains_nothing, group.runs))], _alone)
    if not trained:
        return []
    best = trained[0]
    gained = gains(groups).get(best.label, {}).get("single")
    if gained is not None and gained.mean is not None:
        gain, noise = gained.mean, max(gained.std or 0.0, best.noise)
        what = [f"class statistics of {best.label}, trained minus frozen, {_signed(gained)}"]
    elif closed:
        gain, noise, what = best.mean - closed[0].mean, max(best.noise, closed[0].noise), []
    else:
        return []
    if abs(gain) <= noise or abs(gain) < NOTICEABLE:
        verdict = "Training makes no difference here that could be told"
    else:
        verdict = f"Training is worth {number(gain)} points here" if gain > 0 else "Training is not worth it here"
    if closed:
        what.append(f"{closed[0].label}, which trains nothing, has {closed[0].shown}, {best.label} {best.shown}")
    return [f"{verdict}: {'; '.join(what)}."]


def mode_meanings(groups: list[Group]) -> dict[str, str]:
    """What each mode of the comparison measures."""
    size = groups[0].runs[0].setting("evaluate.group", 64)
    return {mode: meaning(mode, size) for mode in _modes(groups)}


def remarks(groups: list[Group]) -> list[str]:
    """What a reader must know before trusting the comparison."""
    found = []
    if questions := other_questions(groups):
        found.append(
            f"These runs cannot be compared as they stand: they differ in {joined(questions)}. "
            "Nothing is marked as best, and nothing is tested."
        )
    if others := other_differences([run for group in groups for run in group.runs]):
        found.append(f"The methods were also run with different {joined(others)}.")
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
    modes, best, marked = _modes(groups), set(), False
    rows = [[group.label] for group in groups]
    for column, mode in enumerate(modes, start=1):
        shown = [standing_for(mode, stats(group)) for group in groups]
        found = [stats(group).get(other) for group, other in zip(groups, shown, strict=True)]
        for row, stat, other in zip(rows, found, shown, strict=True):
            stands_in = stat is not None and other != mode
            row.append(_stat(stat) + (STAND_IN if stands_in else ""))
            marked |= stands_in
        means = [None if stat is None else stat.mean for stat in found]
        known = [mean for mean in means if mean is not None]
        if len(known) > 1:
            best |= {(row, column) for row, mean in enumerate(means) if mean == better(known)}
    rows = [[*row, str(len(group.runs))] for row, group in zip(rows, groups, strict=True)]
    return Grid(["method", *modes, "seeds"], rows, title, best=best, note=STAND_IN_NOTE if marked else "")


def _way(groups: list[Group]) -> list[Grid]:
    """How far every method comes from the lower to the upper bound; nothing where they are not both there."""
    way = of_the_way(groups)
    modes = [mode for mode in _modes(groups) if any(mode in found for found in way.values())]
    if not modes:
        return []
    rows = [[g.label, *(points(way.get(g.label, {}).get(mode)) for mode in modes)] for g in groups]
    return [Grid(["method", *modes], rows, "Of the way from FedAvg to joint training")]


def _gains(groups: list[Group]) -> list[Grid]:
    """What training adds to class statistics; nothing where no run stands beside its frozen twin."""
    found = gains(groups)
    rows = [[label, *(_signed(points.get(mode)) for mode in GAIN_MODES)] for label, points in found.items()]
    return [Grid(["method", *GAIN_MODES], rows, TITLE, note=NOTE)] if rows else []


def _signed(stat: Stat | None) -> str:
    return _stat(stat) if stat is None or (stat.mean or 0) < 0 else f"+{_stat(stat)}"


def _stat(stat: Stat | None) -> str:
    return "–" if stat is None else plus_minus(stat.mean, stat.std)


def _costs(groups: list[Group]) -> Section:
    def shown(stat: Stat, write: Callable[[float], str]) -> str:
        if stat.mean is None:
            return "–"
        return write(stat.mean) + (f" ± {write(stat.std)}" if stat.std else "")

    kinds, nothing = kinds_of_samples(groups), Stat(None, None)
    rows = [
        [
            group.label,
            shown(group.bytes["up"], bytes_text),
            shown(group.bytes["down"], bytes_text),
            shown(group.seconds, seconds_text),
            *(shown(group.samples.get(kind, nothing), "{:,.0f}".format) for kind in kinds),
        ]
        for group in groups
    ]
    columns = ["method", "up", "down", "time", *(f"{kind} samples kept" for kind in kinds)]
    pictures, grids = [], [Grid(columns, rows)]
    phases = {phase: words for phase, words in PHASES.items() if any(phase in group.memory for group in groups)}
    if phases:
        peaks = [
            [group.label, *(shown(group.memory.get(phase, nothing), mib_text) for phase in phases)] for group in groups
        ]
        grids.append(Grid(["method", *phases.values()], peaks, "Peak memory by phase"))
        pictures.append(Picture("memory", plots.memory(groups), "Bar chart of the peak memory of each phase."))
    intro = "Bytes that all clients together sent (up) and received (down), and wall-clock time."
    intro += " Memory is that of the process, which may hold what earlier runs in it have left." if phases else ""
    return Section("Cost", intro, pictures, grids, folded=True)


@dataclass(frozen=True)
class _Rank:
    """A group by its accuracy (%)."""

    label: str
    mean: float
    shown: str
    noise: float
    """By how much it may be off: over seeds, or by chance with so many test samples."""

    def near(self, other: "_Rank") -> bool:
        return abs(self.mean - other.mean) <= max(self.noise, other.noise)


def _ranked(groups: list[Group], pick: Callable[[Group], Stat | None]) -> list[_Rank]:
    found = []
    for group in groups:
        stat = pick(group)
        if stat is not None and stat.mean is not None:
            noise = max(stat.std or 0.0, chance(stat.mean, group.runs[0]))
            found.append(_Rank(group.label, stat.mean, f"{_stat(stat)} %", noise))
    return sorted(found, key=lambda rank: -rank.mean)


def _ahead(ranked: list[_Rank], tested: list[Verdict], mode: str) -> str:
    first, *others = ranked
    if not others:
        return f"{first.label} answers {first.shown} correctly"
    second = others[0]
    if first.near(second):
        return f"{first.label} ({first.shown}) and {second.label} ({second.shown}) are too close to call"
    ahead = f"{first.label} is ahead with {first.shown}, followed by {second.label} with {second.shown}"
    return ahead + may_be_chance(tested, mode, first.label, second.label)
