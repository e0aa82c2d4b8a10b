"""What settings leave unsaid about the user's own data is read from the data, once, before the run is written down.

A run folder then holds settings that say everything, and whoever resumes or extends it reads nothing into them.
"""

from collections.abc import Callable
from typing import Any

from fedprotip.settings import Settings
from fedprotip.stream.advice import enough_clients, thin_tasks
from fedprotip.stream.datasets import Dataset, index_dataset
from fedprotip.stream.images import FileImages
from fedprotip.stream.stream import build_stream

LEAST = 2
"""Classes of a task, where classes are shared out: with one there is nothing to tell apart."""

Note = Callable[[str], None]


def spelled_out(settings: Settings, note: Note = lambda text: None, dataset: Dataset | None = None) -> Settings:
    """The same settings, with what own data says about itself where they say nothing; `note` is told what that is.

    Args:
        dataset: what `index_dataset` gives, if it is there already.
    """
    if settings.data.name != "own":
        return settings
    dataset = dataset or index_dataset(settings.data)
    for text in dataset.notes:
        note(text)
    settings = _with_size(settings, dataset)
    for step in (_with_columns, _with_scenario, _with_tasks, _with_clients):
        settings = step(settings, dataset, note)
    return settings


def columns_of(dataset: Dataset) -> list[str]:
    """What the data itself says about its samples."""
    return ["task"] * bool(dataset.domains) + ["client"] * (dataset.train_clients is not None)


def _with_size(settings: Settings, dataset: Dataset) -> Settings:
    """Files that are added later must not change the shape of images."""
    if settings.data.sides or not isinstance(dataset.train_images, FileImages):
        return settings
    return _changed(settings, "data", size=list(dataset.train_images.size))


def _with_columns(settings: Settings, dataset: Dataset, note: Note) -> Settings:
    columns = columns_of(dataset)
    said = " and ".join(columns)
    if not columns or settings.stream.source == "columns":
        return settings
    if _is_stated(settings, "stream", "source"):
        note(f"The data says the {said} of every sample, which is left aside: stream.source = 'settings'.")
        return settings
    note(f"The data says the {said} of every sample: stream.source = 'columns'; with 'settings' that is left aside.")
    return _changed(settings, "stream", source="columns")


def _with_scenario(settings: Settings, dataset: Dataset, note: Note) -> Settings:
    """Tasks that all have the same classes differ in their images."""
    if not _has_tasks(settings, dataset) or _is_stated(settings, "stream", "scenario") or len(dataset.domains) < 2:
        return settings
    assert dataset.train_domains is not None
    pairs = set(zip(dataset.train_domains.tolist(), dataset.train_labels.tolist(), strict=True))
    if len(pairs) < len(dataset.domains) * len(dataset.classes):
        return settings
    note("All tasks of the data have the same classes: stream.scenario = 'domain'.")
    return _changed(settings, "stream", scenario="domain")


def _with_tasks(settings: Settings, dataset: Dataset, note: Note) -> Settings:
    stream = settings.stream
    if _is_stated(settings, "stream", "tasks"):
        return settings
    if _has_tasks(settings, dataset):
        count = len(stream.order) if isinstance(stream.order, list) else len(dataset.domains)
        why = f"the data names {len(dataset.domains)}"
    elif stream.scenario == "class":
        classes = len(stream.order) if isinstance(stream.order, list) else len(dataset.classes)
        count = _class_tasks(settings, classes)
        why = "there is 1 class" if classes == 1 else f"there are {classes} classes"
    else:
        return settings
    if count == stream.tasks or count < 1:
        return settings
    note(f"stream.tasks = {count}: {why}.")
    return _changed(settings, "stream", tasks=count)


def _class_tasks(settings: Settings, classes: int) -> int:
    """As many tasks as the default, if there are classes enough for them."""
    stream = settings.stream
    if isinstance(stream.task_size, list):
        return len(stream.task_size)
    size = stream.task_size or max(LEAST, stream.overlap + 1)
    if stream.overlap >= size:
        return stream.tasks  # refused later
    return min(stream.tasks, max(1, (classes - stream.overlap) // (size - stream.overlap)))


def _with_clients(settings: Settings, dataset: Dataset, note: Note) -> Settings:
    clients = settings.clients
    owners = dataset.train_clients if settings.stream.source == "columns" else None
    named = 0 if owners is None else int(owners.max()) + 1
    if clients.roster or _is_stated(settings, "clients", "count"):
        if named and not clients.roster and clients.count > named:
            note(f"clients.count = {clients.count}, but the data names {named}: the others will have no samples.")
        return settings
    if named:
        count, why = named, "the data names them"
    else:
        stream = build_stream(settings, dataset)
        count = enough_clients(stream, clients.count)
        why = f"with {clients.count} most of them would have fewer than {settings.statistics.minimum} images of a class"
        if thin_tasks(stream.with_clients(count)):  # with any number
            why = f"a task has only {min(len(task.train) for task in stream.coming)} training samples"
    if count == clients.count:
        return settings
    note(f"clients.count = {count}: {why}.")
    return _changed(settings, "clients", count=count)


def _has_tasks(settings: Settings, dataset: Dataset) -> bool:
    return settings.stream.source == "columns" and bool(dataset.domains)


def _is_stated(settings: Settings, section: str, key: str) -> bool:
    return key in getattr(settings, section).model_fields_set


def _changed(settings: Settings, section: str, **values: Any) -> Settings:
    return settings.model_copy(update={section: getattr(settings, section).model_copy(update=values)})
