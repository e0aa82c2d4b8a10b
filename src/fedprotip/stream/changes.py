"""What changed in the data of a run since it was last at work, and whether it may go on with it.

It may where no result gets a second meaning: a task that is not learned yet may have other samples, one that is not
begun other classes too, and training samples of learned tasks are not needed any more. Refused is what would make
the model answer with wrong names, or mix two test sets in one table of accuracies.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedprotip.errors import UsageError
from fedprotip.store.files import Tensors
from fedprotip.store.folder import RunFolder
from fedprotip.stream.fingerprint import PARTS, Fingerprint, Note, Samples, Table, take
from fedprotip.stream.stream import Stream

NAMED = 3
"""Classes of a part, and files of a class, that are named; the others are counted."""
WORDS = {"train": "training samples", "test": "test samples"}
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


def check_data(
    folder: RunFolder, stream: Stream, at: Standing, accept: bool, note: Note = lambda text: None
) -> tuple[dict[str, Any], Tensors]:
    """Refuse data that changed since the run was last at work; with `accept` only what cannot be accepted.

    Returns what `RunFolder.write_data` is to write: what the data is now, and what was accepted so far.
    """
    record, tensors = folder.read_data()
    table = Table.recall(tensors)
    now = take(stream, table, note)
    found, never = changes(record, table, now, at) if record else ([], "")
    told = f"The data of {folder.path} is not what it was: {'; '.join(found)}"
    if never:
        raise UsageError(f"{told}; the run cannot go on with it, because {never}: put it back, or start another run.")
    if found and not accept:
        raise UsageError(f"{told}; put it back, or go on with it by --accept-data.")
    if at.begun and not record:
        note(f"{folder.path} does not say which data it began with; from now on it is the data that is there.")
    news = [{"task": at.learned, "round": at.rounds, "changes": found}] if found else []
    return now.summary() | {"accepted": [*record.get("accepted", []), *news]}, now.table.tensors()


def changes(record: dict[str, Any], table: Table | None, now: Fingerprint, at: Standing) -> tuple[list[str], str]:
    """What is not as recorded, in words, and why the run cannot go on with it (empty: it can).

    Args:
        record: `Fingerprint.summary` of the data as it was; table: its samples, if they are still known.
    """
    summary = now.summary()
    pairs = list(enumerate(zip(record["tasks"], summary["tasks"], strict=False)))  # tasks added since have no pair
    differ = {kind: [task for task, (was, new) in pairs if was[kind] != new[kind]] for kind in ("classes", *PARTS)}
    learned = {kind: [task + 1 for task in tasks if task < at.learned] for kind, tasks in differ.items()}
    renamed = [task + 1 for task in differ["classes"] if task < at.begun]
    found, never = [], []
    if record["shape"] != summary["shape"]:
        found.append("images were {} and are {}".format(*("×".join(map(str, s["shape"])) for s in (record, summary))))
        never += ["its model is for the former"] if at.begun else []
    if differ["classes"]:
        found.append(_class_changes(table.classes if table else now.table.classes, now.table.classes))
    if renamed:
        never.append(f"task {renamed[0]} began with other classes, and answers would have wrong names")
    if learned["test"]:
        never.append(f"task {learned['test'][0]} was tested with others, and one table would mix two test sets")
    if learned["train"] and at.rereads:
        never.append(f"run.geometry measures task {learned['train'][0]} on its training samples again")
    for part in PARTS if not renamed else ():  # after other classes came, tasks have other samples: that says nothing
        if table and differ[part]:
            described = _sample_changes(part, table, now, len(pairs))
            needed = part == "test" or at.rereads or differ[part][-1] >= at.learned
            found += described or ([f"{WORDS[part]} are in another order or in other tasks"] if needed else [])
        elif differ[part]:
            found.append(f"{WORDS[part]} of task {', '.join(str(task + 1) for task in differ[part])}")
    return found, never[0] if never else ""


def _class_changes(before: list[str], after: list[str]) -> str:
    new, gone = ([name for name in a if name not in set(b)] for a, b in ((after, before), (before, after)))
    said = [f"new classes: {_listed(new)}"] * bool(new) + [f"classes that are gone: {_listed(gone)}"] * bool(gone)
    return " and ".join(said) or "classes are in another order or in other tasks"


def _sample_changes(part: str, table: Table, now: Fingerprint, tasks: int) -> list[str]:
    """A line for each of the first classes in which samples were added, removed or changed."""
    before = _keyed(table.parts[part], table.classes)
    after = _keyed(now.used(part, tasks), now.table.classes)
    gone, come = _beyond(before, after), _beyond(after, before)
    lines = []
    for name in sorted({*gone, *come}):
        lost, won = Counter(gone.get(name, [])), Counter(come.get(name, []))
        changed = lost & won  # by name; pixels have none, and as many as went and came count as changed
        counts = [
            f"{files.total()} {word}" + (f" ({_listed(list(files.elements()))})" if any(files) else "")
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


def _listed(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")
