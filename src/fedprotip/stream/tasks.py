"""Which classes or domains form which task."""

from collections.abc import Collection, Sequence

from fedprotip.errors import UsageError, nearest, shortened
from fedprotip.seeds import numpy_stream
from fedprotip.settings import StreamSettings
from fedprotip.stream.kept import NOTHING, Settled


def ordered(names: list[str], settings: StreamSettings, seed: int, what: str) -> list[int]:
    """Positions of the names in the order of `stream.order`; a list may leave names out."""
    if settings.order == "natural":
        return list(range(len(names)))
    if settings.order == "seeded":
        return numpy_stream(seed, "order").permutation(len(names)).tolist()
    if not settings.order:
        raise UsageError(f"stream.order = [] names no {what}; the nearest valid choice is 'natural'.")
    for name in settings.order:
        if name not in names:
            raise UsageError(f"stream.order names {shortened(name)!r}, which is not a {what}; {nearest(name, names)}.")
    if len(set(settings.order)) < len(settings.order):
        raise UsageError(f"stream.order = {shortened(repr(settings.order))} names a {what} twice.")
    return [names.index(name) for name in settings.order]


def task_sizes(classes: int, settings: StreamSettings) -> list[int]:
    """Classes of each task; with overlap o, T tasks cover Σ sizes − (T − 1)·o classes."""
    tasks, overlap, wanted = settings.tasks, settings.overlap, settings.task_size
    if tasks > classes:
        raise UsageError(
            f"stream.tasks = {tasks}: the dataset has {classes} classes, so {classes} is the nearest valid value."
        )
    if isinstance(wanted, list):
        if len(wanted) != tasks:
            raise UsageError(
                f"stream.task_size = {shortened(repr(wanted))} has {len(wanted)} entries, "
                f"but stream.tasks = {tasks}; give {tasks}."
            )
        sizes = wanted
    elif wanted:
        sizes = [wanted] * tasks
    else:
        size, larger = divmod(classes + (tasks - 1) * overlap, tasks)
        sizes = [size + 1] * larger + [size] * (tasks - larger)
    if overlap >= min(sizes):
        largest = min(sizes) - 1 if wanted else classes - tasks  # shared out evenly, sizes grow with the overlap
        raise UsageError(
            f"stream.overlap = {overlap} must be smaller than the smallest task, which has {min(sizes)} classes; "
            f"the nearest valid value is {largest}."
        )
    needed = sum(sizes) - (tasks - 1) * overlap
    if needed > classes:
        raise UsageError(
            f"stream.tasks = {tasks} with stream.task_size = {shortened(repr(wanted))} needs {needed} classes; "
            f"the dataset has {classes}."
        )
    return sizes


def class_tasks(
    names: list[str], settings: StreamSettings, seed: int, kept: Settled = NOTHING, gone: Collection[int] = ()
) -> list[list[int]]:
    """Classes of every task, each sorted by its place in the order; neighbours share `overlap` classes.

    Tasks that a run has settled stay as they are; further ones are made of classes that are in none of them.

    Args:
        gone: classes without samples, which no further task can have.
    """
    planned = [list(task.classes) for task in kept.tasks[: settings.tasks]]
    order = ordered(names, settings, seed, "class")
    if planned:
        order = further(order, settings, {label for task in planned for label in task} | set(gone), kept.classes, names)
        settings = _of_further(settings, planned, len(order))
        order = planned[-1][len(planned[-1]) - settings.overlap :] + order
    tasks, start = planned, 0
    for size in task_sizes(len(order), settings) if settings.tasks else ():
        tasks.append(order[start : start + size])
        start += size - settings.overlap
    return tasks


def further(
    order: list[int], settings: StreamSettings, taken: Collection[int], known: Sequence[str], names: Sequence[str]
) -> list[int]:
    """What is left of an order for further tasks; a list could not name what is new, which follows."""
    new = range(len(known), len(names)) if isinstance(settings.order, list) else ()
    return [place for place in dict.fromkeys([*order, *new]) if place not in taken]


def _of_further(settings: StreamSettings, planned: list[list[int]], left: int) -> StreamSettings:
    """The settings for the tasks after the planned ones, which have so many classes left."""
    count, sizes = settings.tasks - len(planned), settings.task_size
    sizes = sizes[len(planned) :] if isinstance(sizes, list) else sizes
    needed = sum(sizes) if isinstance(sizes, list) else count * sizes
    needed = needed - count * settings.overlap if sizes else count
    if left < needed:
        raise UsageError(too_few(count, needed, left, "class(es)"))
    return settings.model_copy(update={"tasks": count, "task_size": sizes})


def too_few(tasks: int, needed: int, left: int, what: str) -> str:
    """A run cannot be extended: a sentence."""
    wanted = "A further task needs" if tasks == 1 else f"{tasks} further tasks need"
    return (
        f"{wanted} {needed} {what} that no task has yet, and the data has {left or 'none left'}; "
        "add them to the data, or ask for fewer."
    )
