"""What a source holds and what a run would make of it, without running: the facts behind `fedprotip data check`."""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, islice
from typing import Any

from fedprotip.errors import FedprotipError
from fedprotip.settings import Settings
from fedprotip.stream.datasets import SMALL, Dataset, index_dataset
from fedprotip.stream.images import FileImages, open_rgb
from fedprotip.stream.stream import Stream, build_stream, check_clients

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


def inspect_data(settings: Settings, watch: Watch = lambda faults, files: faults) -> dict[str, Any]:
    """Counts per class, task and client, unreadable files, and the run in a sentence, as plain JSON values.

    A source that cannot be read at all is an error; `problem` says what is in the way of a run.
    """
    dataset = replace(index_dataset(settings.data), size=settings.data.size)
    paths = [path for images in _files(dataset) for path in images.paths]
    faults = watch(chain.from_iterable(images.faults() for images in _files(dataset)), len(paths))
    broken = ({"path": path, "reason": fault} for path, fault in zip(paths, faults, strict=True) if fault)
    unreadable = list(islice(broken, LISTED))
    facts: dict[str, Any] = {
        "data": settings.data.name,
        "source": settings.data.source or settings.data.root,
        "image_shape": list(dataset.image_shape),
        "kept": _kept(dataset),
        "train": len(dataset.train_labels),
        "test": len(dataset.test_labels),
        "classes": _classes(dataset),
        "tasks": [],
        "unreadable": unreadable,
        "problem": f"Unreadable files: {len(unreadable)}; mend or remove them." if unreadable else "",
        "plan": "",
    }
    try:
        stream = build_stream(settings, dataset)
        facts["tasks"] = [_task(stream, index) for index in range(len(stream.tasks))]
        facts["plan"] = _plan(stream, settings)
        check_clients(stream)
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
    if isinstance(images, FileImages) and images.size > SMALL:
        return "decoded from files when needed"
    return "in memory"


def _classes(dataset: Dataset) -> list[dict[str, Any]]:
    train, test = (Counter(labels.tolist()) for labels in (dataset.train_labels, dataset.test_labels))
    return [{"name": name, "train": train[i], "test": test[i]} for i, name in enumerate(dataset.classes)]


def _task(stream: Stream, index: int) -> dict[str, Any]:
    task = stream.tasks[index]
    return {
        "index": index,
        "name": task.name,
        "classes": [stream.dataset.classes[label] for label in task.classes],
        "train": len(task.train),
        "test": len(task.test),
        "clients": {str(client): len(stream.client_samples(index, client)) for client in stream.clients(index)},
    }


def _plan(stream: Stream, settings: Settings) -> str:
    columns = settings.stream.source == "columns"
    if stream.owners is not None:
        shared = "each sample with the client its column names"
    elif settings.clients.partition == "iid":
        shared = "samples shared out evenly"
    else:
        shared = f"samples shared out by Dirichlet with α = {settings.clients.alpha:g}"
    origin = (
        "from the data" if columns and stream.dataset.domains else f"by stream.scenario = {settings.stream.scenario!r}"
    )
    return (
        f"{len(stream.tasks)} tasks {origin}, {len(stream.clients(0))} clients, {shared}; "
        f"{settings.train.rounds} rounds per task of {settings.method.name} with {settings.model.name}."
    )
