"""Whether clients have enough samples, and how many clients would: one rule behind refusals, warnings and defaults.

So nothing that is advised here is warned of afterwards. And whether people can tell names apart that a run tells apart.
"""

import unicodedata
from collections.abc import Iterator, Sequence

import numpy as np

from fedprotip.errors import UsageError, listed, shortened
from fedprotip.stream.datasets import Dataset
from fedprotip.stream.stream import Stream

NAMED = 3
"""Pairs of names that a warning has; the others are counted."""
THIN = 0.5
"""Share of a task's samples that may lie with clients which have too few of their class."""


def check_clients(stream: Stream) -> None:
    """Refuse a stream in which a task has too few samples for its clients (before a run, not in the middle)."""
    for task in stream.coming:
        clients, place = stream.clients(task.index), task.place
        if stream.owners is None and len(task.train) < len(clients):
            raise UsageError(
                f"{place} has {len(task.train)} training samples for {len(clients)} clients; {_advised(stream)}."
            )
        if not any(len(stream.client_samples(task.index, client)) for client in clients):
            raise UsageError(f"{place}: none of its {len(clients)} clients holds a sample of it.")


def thin_tasks(stream: Stream) -> list[int]:
    """Tasks of which most samples lie with clients that have fewer of their class than `statistics.minimum`."""
    return [task.index for task in stream.coming if _thin_share(stream, task.index) > THIN]


def thin_warning(stream: Stream) -> str:
    """What is wrong with how samples are shared out, and what would be better; empty: nothing."""
    tasks = thin_tasks(stream)
    if not tasks:
        return ""
    minimum, named = stream.settings.statistics.minimum, listed([str(task + 1) for task in tasks], 3)
    return (
        f"In task {named} most samples lie with clients that have fewer than {minimum} of a class, and class "
        f"statistics leave them out (statistics.minimum); {_advised(stream)}."
    )


def alike_warnings(dataset: Dataset) -> Iterator[str]:
    """Of classes, tasks and clients whose names differ in nothing that people read."""
    kinds = {"Classes": dataset.classes, "Tasks": dataset.domains, "Clients": dataset.clients}
    for kind, names in kinds.items():
        if pairs := _alike(names):
            yield (
                f"{kind} whose names read alike are different ones: {shortened(listed(pairs, NAMED))}; "
                "give them one name where they are the same."
            )


def _alike(names: Sequence[str]) -> list[str]:
    """Names that differ in case, spaces, leading zeros or in how Unicode writes a letter, in a way that shows it."""
    first, found = dict[str, str](), list[str]()
    for name in names:
        read = " ".join(unicodedata.normalize("NFKC", name).casefold().replace("_", " ").split())
        read = read.lstrip("0") or "0" if read.isdecimal() else read
        if (other := first.setdefault(read, name)) != name:
            found.append(f"{_spelled(other)} and {_spelled(name)}")
    return found


def _spelled(name: str) -> str:
    """As it is, or where that hides what it is made of, letter by letter."""
    same = unicodedata.normalize("NFKC", name) == name and name.isprintable()
    return repr(name) if same else ascii(name)


def enough_clients(stream: Stream, most: int) -> int:
    """The largest number of clients, up to `most`, that have enough to learn from; if none has, that have anything."""
    fewest = min(len(task.train) for task in stream.coming)
    possible, count = (max(1, min(most, fewest // each)) for each in (1, stream.settings.statistics.minimum))
    while thin_tasks(stream.with_clients(count)):
        if count == 1:
            return possible
        count = min(count - 1, count * 9 // 10)
    return count


def _advised(stream: Stream) -> str:
    """What would be better, as the end of a sentence."""
    if stream.owners is not None:
        return "more images per client and class would help"
    most = max(len(stream.clients(task.index)) for task in stream.coming)
    count = enough_clients(stream, most)
    if not thin_tasks(stream.with_clients(count)):
        return f"clients.count = {count} shares them better"
    limit = f", and clients.count = {count} is the most that can take part" if count < most else ""
    return f"more images per class would help{limit}"


def _thin_share(stream: Stream, task: int) -> float:
    """Share of the training samples of a task whose client has fewer than `statistics.minimum` of their class."""
    labels, minimum = stream.dataset.train_labels.numpy(), stream.settings.statistics.minimum
    thin = every = 0
    for client in stream.clients(task):
        counts = np.bincount(labels[stream.client_samples(task, client)])
        thin, every = thin + int(counts[counts < minimum].sum()), every + int(counts.sum())
    return thin / every if every else 0.0
