"""Which classes or domains form which task."""

from fedprotip.errors import UsageError, nearest, shortened
from fedprotip.seeds import numpy_stream
from fedprotip.settings import StreamSettings


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


def class_tasks(names: list[str], settings: StreamSettings, seed: int) -> list[list[int]]:
    """Classes of every task, each sorted by its place in the order; neighbours share `overlap` classes."""
    order = ordered(names, settings, seed, "class")
    tasks, start = [], 0
    for size in task_sizes(len(order), settings):
        tasks.append(order[start : start + size])
        start += size - settings.overlap
    return tasks
