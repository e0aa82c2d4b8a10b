"""What changed in the data of a run since it was last at work, and whether it may go on with it.

It goes on with what is still to be learned: there, samples that were added, removed or changed need a yes. Training
samples of learned tasks are not needed any more, and their test samples only to measure: where those changed, the run
says that its figures cannot be compared.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedprotip.errors import UsageError, listed
from fedprotip.store.files import Tensors
from fedprotip.store.folder import RunFolder
from fedprotip.stream.fingerprint import PARTS, Fingerprint, Inventory, Note, Samples, names_in, take
from fedprotip.stream.stream import Stream

NAMED = 3
"""Classes of a part, and files of a class, that are named; the others are counted."""
WORDS = {"train": "training samples", "test": "test samples"}
REORDERED = {part: f"{words} are in another order or in other tasks" for part, words in WORDS.items()}
Key = tuple[str, int, int]
"""What a sample is: its class, the hash of its content, its client."""


@dataclass(frozen=True)
class Standing:
    """How far a run has come."""

    learned: int = 0  # tasks
    rounds: int = 0  # of the task after them
    rereads: bool = False  # whether it measures learned tasks on their training samples again (`run.geometry`)

    @property
    def begun(self) -> int:
        return self.learned + (self.rounds > 0)


@dataclass(frozen=True)
class Changes:
    """What is not as recorded, in words."""

    ahead: list[str] = field(default_factory=list)  # in what the run still reads to learn
    past: list[str] = field(default_factory=list)  # in the test samples of learned tasks
    never: str = ""  # why the run cannot go on with it; empty: it can


def check_data(
    folder: RunFolder,
    stream: Stream,
    at: Standing,
    accept: bool,
    note: Note = lambda text: None,
    warn: Callable[[str], None] = lambda text: None,
) -> tuple[dict[str, Any], Tensors]:
    """Refuse data that changed since the run was last at work; with `accept` only what cannot be accepted.

    Returns what `RunFolder.write_data` is to write: what the data is now, and what was accepted so far.
    """
    record, tensors = folder.read_data()
    table = Inventory.recall(tensors)
    if at.begun and record and not record["classes"] and names_in(tensors) not in ([], list(stream.dataset.classes)):
        raise UsageError(
            f"{folder.path} is of a version that did not keep the names of classes, and the data has other classes "
            "now; put it back as it was, and resume or extend the run once: from then on classes go by their names."
        )
    now = take(stream, table, note)
    found = changes(record, table, now, at) if record else Changes()
    told = f"The data of {folder.path} is not what it was: {'; '.join(found.ahead)}"
    if found.never:
        raise UsageError(
            f"{told}; the run cannot go on with it, because {found.never}: put it back, or start another run."
        )
    if found.ahead and not accept:
        raise UsageError(f"{told}; put it back, or go on with it by --accept-data.")
    if found.past:
        warn(f"The test data of {folder.path} is not what it was: {'; '.join(found.past)}.")
    if at.begun and not record:
        note(f"{folder.path} does not say which data it began with; from now on it is the data that is there.")
    said = [*found.ahead, *found.past]
    news = [{"task": at.learned, "round": at.rounds, "changes": said}] if said else []
    return _remembered(record, now, at) | {"accepted": [*record.get("accepted", []), *news]}, now.table.tensors()


def changes(record: dict[str, Any], table: Inventory | None, now: Fingerprint, at: Standing) -> Changes:
    """What changed in the tasks that the record has; tasks that were added since are new.

    Args:
        record: `Fingerprint.summary` of the data as it was; table: its samples, if they are still known.
    """
    summary, tasks = now.summary(), len(record["tasks"])
    pairs = list(enumerate(zip(record["tasks"], summary["tasks"], strict=False)))
    differ = {part: [task for task, (was, new) in pairs if was[part] != new[part]] for part in PARTS}
    learned, ahead = range(at.learned), range(at.learned, tasks)
    found, never = [], []
    if record["shape"] != summary["shape"]:
        found.append("images were {} and are {}".format(*("×".join(map(str, s["shape"])) for s in (record, summary))))
        never += ["its model is for the former"] if at.begun else []
    if at.rereads and (reread := [task for task in differ["train"] if task in learned]):
        found += _described("train", table, now, reread, tasks)
        never.append(f"run.geometry measures task {reread[0] + 1} on its training samples again")
    for part in PARTS:
        if coming := [task for task in differ[part] if task in ahead]:
            found += _described(part, table, now, coming, tasks)
    found += _trained_on(table, now, range(at.learned, at.begun))
    measured = [task for task in differ["test"] if task in learned and all(one["test"] for one in pairs[task][1])]
    past = _described("test", table, now, measured, tasks) if measured else []
    if past and past != [REORDERED["test"]]:  # in whichever order, the same samples are right
        named = listed([str(task + 1) for task in measured], NAMED)
        past.append(f"accuracies on task {named} from before and from now on cannot be compared")
        past += _trained_on(table, now, learned)
        return Changes(found, past, never[0] if never else "")
    return Changes(found, never=never[0] if never else "")


def _trained_on(table: Inventory | None, now: Fingerprint, begun: range) -> list[str]:
    """How many test samples of these tasks were for training before: every fifth is another one among other files."""
    if table is None or not begun:
        return []
    before = {part: _contents(samples, table.classes) for part, samples in table.parts.items()}
    tested = np.unique(np.concatenate([now.rows["test"][task] for task in begun]))
    after = _contents(now.table.parts["test"][tested], now.table.classes)
    known = after & before["train"] - before["test"]
    return (
        [f"test samples that the model was trained on, which makes accuracies too good: {len(known)}"] if known else []
    )


def _contents(samples: Samples, classes: list[str]) -> set[tuple[str, int]]:
    return {(classes[label], content) for label, content in zip(samples.labels, samples.hashes.tolist(), strict=True)}


def _remembered(record: dict[str, Any], now: Fingerprint, at: Standing) -> dict[str, Any]:
    """The data as it is now; of learned tasks whose test samples are gone, the hash that they had."""
    summary = now.summary()
    for was, new in list(zip(record.get("tasks", []), summary["tasks"], strict=False))[: at.learned]:
        new["test"] = new["test"] or was["test"]
    return summary


def _described(part: str, table: Inventory | None, now: Fingerprint, differ: list[int], tasks: int) -> list[str]:
    """What changed in a part of these tasks: by class, or where that is not known by task."""
    if table is None:
        return [f"{WORDS[part]} of task {', '.join(str(task + 1) for task in differ)}"]
    return _sample_changes(part, table, now, differ, tasks) or [REORDERED[part]]


def _sample_changes(part: str, table: Inventory, now: Fingerprint, differ: list[int], tasks: int) -> list[str]:
    """A line for each of the first classes in which samples were added, removed or changed."""
    former = table.parts[part]
    before = _keyed(former[np.flatnonzero(np.isin(former.tasks, differ))], table.classes)
    after = _keyed(now.of_tasks(part, differ, tasks), now.table.classes)
    gone, come = _beyond(before, after), _beyond(after, before)
    lines = []
    for name in sorted({*gone, *come}):
        lost, won = Counter(gone.get(name, [])), Counter(come.get(name, []))
        changed = lost & won  # by name; pixels have none, and as many as went and came count as changed
        counts = [
            f"{files.total()} {word}" + (f" ({listed(list(files.elements()), NAMED)})" if any(files) else "")
            for word, files in (("added", won - changed), ("removed", lost - changed), ("changed", changed))
            if files
        ]
        lines.append(f"{WORDS[part]} of {name!r}: {', '.join(counts)}")
    more = len(lines) - NAMED
    return lines if more <= 0 else [*lines[:NAMED], f"{WORDS[part]} of {more} more classes"]


def _keyed(samples: Samples, classes: list[str]) -> list[tuple[Key, str]]:
    """Every sample, and the name of its file; empty without one."""
    names = [name for name, *_ in samples.files] or [""] * len(samples.labels)
    columns = samples.labels.tolist(), samples.hashes.tolist(), samples.clients.tolist()
    return [((classes[k], *rest), name) for k, *rest, name in zip(*columns, names, strict=True)]


def _beyond(some: list[tuple[Key, str]], others: list[tuple[Key, str]]) -> dict[str, list[str]]:
    """Samples that only the first have, or have more often: class → names of their files."""
    left = Counter(key for key, _ in some)
    left.subtract(key for key, _ in others)
    found: dict[str, list[str]] = {}
    for key, name in some:
        if left[key] > 0:
            left[key] -= 1
            found.setdefault(key[0], []).append(name)
    return found
