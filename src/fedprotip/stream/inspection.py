"""What a source holds and what a run would make of it, without running: the facts behind `fedprotip data check`."""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, islice
from typing import Any

from fedprotip.errors import FedprotipError, shortened
from fedprotip.settings import Settings
from fedprotip.stream.advice import alike_warnings, thin_warning
from fedprotip.stream.datasets import Dataset, index_dataset
from fedprotip.stream.images import FileImages, open_rgb
from fedprotip.stream.pixels import DIM
from fedprotip.stream.readings import spelled_out
from fedprotip.stream.stream import Stream, build_stream

LISTED = 1000
"""Unreadable files that are named; a source with more has another problem."""
CHECKED = 256 << 20
"""Bytes of image files that are all decoded before a run, which takes some seconds."""

Watch = Callable[[Iterator[str], int], Iterator[str]]
"""Passes on what it is given, one for each of so many files, and shows how far it is."""


def check_images(dataset: Dataset) -> None:
    """Refuse a damaged image before the run. In a source too large for that it stops the run when it is read."""
    files = _files(dataset)
    if sum(_size(path) for images in files for path in images.paths) > CHECKED:
        return
    for images in files:
        for path, fault in zip(images.paths, images.faults(), strict=True):
            if fault:
                open_rgb(path)  # says so


def inspect_data(
    settings: Settings, check: Callable[[Settings, Stream], object], watch: Watch = lambda faults, files: faults
) -> dict[str, Any]:
    """Counts per class, task and client, unreadable files, and the run in a sentence, as plain JSON values.

    A source that cannot be read at all is an error; `problem` says what is in the way of a run.

    Args:
        check: refuses what a run would refuse, but for unreadable files.
    """
    dataset, notes = index_dataset(settings.data), list[str]()
    paths = [path for images in _files(dataset) for path in images.paths]
    faults = watch(chain.from_iterable(images.faults() for images in _files(dataset)), len(paths))
    broken = ({"path": path, "reason": fault} for path, fault in zip(paths, faults, strict=True) if fault)
    unreadable = list(islice(broken, LISTED))
    facts: dict[str, Any] = {
        "data": settings.data.name,
        "source": settings.data.source or settings.data.root,
        "image_shape": list(replace(dataset, size=settings.data.sides).image_shape),
        "kept": _kept(dataset),
        "train": len(dataset.train_labels),
        "test": len(dataset.test_labels),
        "classes": _classes(dataset),
        "tasks": [],
        "unreadable": unreadable,
        "notes": notes,
        "warnings": [*_alone(dataset), *_dark(dataset), *alike_warnings(dataset)],
        "problem": f"Unreadable files: {len(unreadable)}; mend or remove them." if unreadable else "",
        "plan": "",
    }
    try:
        settings = spelled_out(settings, notes.append, dataset)
        stream = build_stream(settings, replace(dataset, size=settings.data.sides))
        facts["tasks"] = [_task(stream, index) for index in range(len(stream.tasks))]
        facts["plan"] = _plan(stream, settings)
        check(settings, stream)
        facts["warnings"] += filter(None, [thin_warning(stream)])
    except FedprotipError as error:
        facts["problem"] = facts["problem"] or str(error)
    return facts


def _size(path: str) -> int:
    """Bytes of a file; of one that has gone meanwhile none: decoding says so."""
    try:
        return os.path.getsize(path)
    except OSError:
        return 0


def _files(dataset: Dataset) -> list[FileImages]:
    """The images that are still in files."""
    return [images for images in (dataset.train_images, dataset.test_images) if isinstance(images, FileImages)]


def _kept(dataset: Dataset) -> str:
    images = dataset.train_images
    if isinstance(images, FileImages) and not images.small:
        return "decoded from files when needed"
    return "in memory"


def _classes(dataset: Dataset) -> list[dict[str, Any]]:
    train, test = (Counter(labels.tolist()) for labels in (dataset.train_labels, dataset.test_labels))
    return [{"name": name, "train": train[i], "test": test[i]} for i, name in enumerate(dataset.classes)]


def _alone(dataset: Dataset) -> list[str]:
    """With one class every answer is right."""
    if len(dataset.classes) > 1:
        return []
    return [f"There is one class only, {shortened(dataset.classes[0])!r}, so every answer is right; is more missing?"]


def _dark(dataset: Dataset) -> list[str]:
    """Whole numbers from 0 to 1, or to 16, are read as if white were 255."""
    images = dataset.train_images
    if isinstance(images, FileImages) or int(images.max()) > DIM:
        return []
    return [f"No pixel is brighter than {int(images.max())} of 255; if that is white, scale it to 255."]


def _task(stream: Stream, index: int) -> dict[str, Any]:
    """What a task has: samples to train on, held back, of clients that take no part, and to test with."""
    task, clients = stream.tasks[index], stream.clients(index)
    train = {_name(stream, client): len(stream.client_samples(index, client)) for client in clients}
    held_back = {_name(stream, client): len(stream.held_back(index, client)) for client in clients}
    return {
        "index": index,
        "name": task.name,
        "classes": [stream.dataset.classes[label] for label in task.classes],
        "train": sum(train.values()),
        "held_back": sum(held_back.values()),
        "unused": len(task.train) - sum(train.values()) - sum(held_back.values()),
        "test": len(task.test),
        "clients": train,
        "clients_held_back": held_back,
    }


def _name(stream: Stream, client: int) -> str:
    """A client as the data calls it, where its samples come from there; else its number."""
    return stream.client_names.get(client, str(client))


def _plan(stream: Stream, settings: Settings) -> str:
    from_data = settings.stream.source == "columns" and stream.dataset.domains
    if stream.owners is not None:
        shared = "each sample with the client its column names"
    elif settings.clients.partition == "iid":
        shared = "samples shared out evenly"
    else:
        shared = f"samples shared out by Dirichlet with α = {settings.clients.alpha:g}"
    origin = "from the data" if from_data else f"by stream.scenario = {settings.stream.scenario!r}"
    return (
        f"{_counted(len(stream.tasks), 'task')} {origin}, "
        f"{_counted(len(stream.clients(0)), 'client')}, {shared}; "
        f"{settings.train.rounds} rounds per task of {settings.method.name} with {settings.model.name}."
    )


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
