"""What training adds: class statistics of the trained network less the same of the network as it began.

Either the run has both itself (`method.birth`), or another one that trains nothing (`lda`) stands beside it.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from fedprotip.report.tables import Group, Stat
from fedprotip.store.results import Summary

Result = tuple[Mapping[str, Mapping[str, Any]], Summary]
"""The settings of a run, and what came of it."""
FROZEN, WAY, BIRTH = "lda", "statistics", "birth"
SAME = ("data", "stream", "clients", "model", "statistics")
"""Sections that decide what is summed, but for the training itself."""
MODES = ("single", "batch64")
TITLE = "Trained minus frozen (points)"
NOTE = "Class statistics alone: of the trained network less those of the network as it began, seed by seed."


def trained_minus_frozen(runs: Iterable[Result], others: Iterable[Result]) -> dict[str, Stat]:
    """Mode → points by which class statistics of runs are better than at birth, or than those of their frozen twins.

    A twin, among others, differs in nothing but what trains. Empty without any, and for runs that train nothing.
    """
    frozen = [other for other in others if _is_frozen(other)]
    found: dict[str, list[float]] = {mode: [] for mode in MODES}
    for run in (run for run in runs if not _is_frozen(run)):
        twin = next((other for other in frozen if _twins(run, other)), None)
        for mode in MODES:
            ours, theirs = _by(run, WAY, mode), _by(run, BIRTH, mode)
            if theirs is None and twin:
                theirs = _by(twin, WAY, mode)
            if ours is not None and theirs is not None:
                found[mode].append(ours - theirs)
    return {mode: Stat.of(points) for mode, points in found.items() if points}


def gains(groups: list[Group]) -> dict[str, dict[str, Stat]]:
    """Label → mode → what training adds to the class statistics of a group."""
    measured = {group.label: [(run.settings, run.summary) for run in group.runs] for group in groups}
    everything = [one for runs in measured.values() for one in runs]
    found = {label: trained_minus_frozen(runs, everything) for label, runs in measured.items()}
    return {label: points for label, points in found.items() if points}


def _is_frozen(run: Result) -> bool:
    return run[1].method == FROZEN and not run[0].get("method", {}).get("adapt", False)


def _twins(run: Result, other: Result) -> bool:
    return run[1].seed == other[1].seed and all(run[0].get(section) == other[0].get(section) for section in SAME)


def _by(run: Result, way: str, mode: str) -> float | None:
    found = run[1].routers.get(way)
    return None if found is None else getattr(found, mode)
