"""Whether runs can be compared at all, and in what else they differ."""

from typing import Any

from fedprotip.errors import shortened
from fedprotip.report.parts import Grid
from fedprotip.report.rundata import RunData
from fedprotip.report.tables import BOOKKEEPING, QUIET, Group
from fedprotip.report.text import joined, setting_text

QUESTION = ("data.", "stream.")
"""Settings that say what is asked; all others say how it is answered."""
PLACES = frozenset({"data.root", "data.source", "data.workers"})
"""Where the data is: which data it was, its fingerprint says."""
MOST = 60
"""Letters of a value that are shown."""


def other_questions(groups: list[Group]) -> list[str]:
    """In what the runs were not about the same thing: other data, other tasks. Empty: they can be compared.

    Where fingerprints say that the samples of every task were the same, settings may say it in different words.
    """
    runs = [run for group in groups for run in group.runs]
    if set.intersection(*(set(group.seeds) for group in groups)) and all(
        run.manifest.data and len(_tasks(other)) and _tasks(run) == _tasks(other)
        for run in runs
        for other in runs
        if run.summary.seed == other.summary.seed
    ):
        return []
    found = []
    for key in _keys(runs):
        if key.startswith(QUESTION) and key not in PLACES and len(values := _values(runs, key)) > 1:
            found.append(f"{key} ({', '.join(values)})")
    for name in ("scenario", "tasks"):
        values = list(dict.fromkeys(str(getattr(run.summary, name)) for run in runs))
        if len(values) > 1 and not any(key.startswith(f"stream.{name} ") for key in found):
            found.append(f"stream.{name} ({', '.join(values)})")
    if not found and (seeds := _other_samples(runs)):
        found.append(f"test samples (seed {joined([str(seed) for seed in seeds])})")
    return found


def differences(groups: list[Group]) -> Grid | None:
    """Settings that differ, a column for each group; an option that only one of them has is no difference."""
    runs = [group.runs[0] for group in groups]
    rows = []
    for key in _keys(runs):
        section, _, field = key.partition(".")
        having = [run for run in runs if section != "method" or field in run.settings.get(section, {})]
        if key not in BOOKKEEPING | QUIET | {"method.name"} and len(_values(having, key)) > 1:
            rows.append([key, *(_shown(run.setting(key, "–")) for run in runs)])
    return Grid(["setting", *(group.label for group in groups)], rows, folded=len(rows) > 8) if rows else None


def _keys(runs: list[RunData]) -> list[str]:
    return sorted({f"{section}.{key}" for run in runs for section, part in run.settings.items() for key in part})


def _values(runs: list[RunData], key: str) -> list[str]:
    """What stands there, each once; a run that is older than the setting says nothing about it."""
    missing = object()
    found = [run.setting(key, missing) for run in runs]
    return list(dict.fromkeys(_shown(value) for value in found if value is not missing))


def _tasks(run: RunData) -> list[tuple[str, str]]:
    """Hashes of the samples of every task."""
    return [(task.train, task.test) for task in run.manifest.data.tasks] if run.manifest.data else []


def _other_samples(runs: list[RunData]) -> list[int]:
    """Seeds of which runs were tested on other samples, or in another order of tasks."""
    known: dict[int, set[tuple[str, ...]]] = {}
    for run in runs:
        if run.manifest.data:
            known.setdefault(run.summary.seed, set()).add(tuple(task.test for task in run.manifest.data.tasks))
    return sorted(seed for seed, tests in known.items() if len(tests) > 1)


def _shown(value: Any) -> str:
    return shortened(setting_text(value), MOST)
