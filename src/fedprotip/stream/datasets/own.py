"""The user's own images: `data.source`; see `fedprotip data check SOURCE`."""

import os

import numpy as np
import torch
from torch import Tensor

from fedprotip.errors import UsageError, shortened
from fedprotip.settings import DataSettings
from fedprotip.stream.datasets import IMAGENET_MEAN, IMAGENET_STD, Dataset, register, take
from fedprotip.stream.images import FileImages, Images, usual_shape
from fedprotip.stream.splits import every_fifth
from fedprotip.stream.tables import Table, read_source
from fedprotip.stream.transforms import LARGE_PHOTOS, Augmentation, Size

SPARSE = 10
"""Numbers of clients are no numbers of clients where fewer than one in so many has samples."""
NAMED = 3
"""Shapes of images that are named; the others are counted."""


@register("own")
def own(settings: DataSettings) -> Dataset:
    table = read_source(settings.source, settings.folders)
    images, shapes = _images(table, settings)
    classes, labels = _numbered(table.labels)
    tasks, task_of = _numbered(table.columns.get("task", []))
    is_test = _is_test(table)
    train, test = np.flatnonzero(~is_test), np.flatnonzero(is_test)
    repeated = _repeated(table, is_test, settings.source)
    sites, clients = client_ids(table.columns["client"]) if "client" in table.columns else ([], None)
    channels, side = images.shape[1], min(images.shape[2:])
    return Dataset(
        "own",
        classes,
        take(images, train),
        labels[train],
        take(images, test),
        labels[test],
        IMAGENET_MEAN if channels == 3 else (0.5,),
        IMAGENET_STD if channels == 3 else (0.5,),
        tuple(tasks),
        task_of[train] if tasks else None,
        task_of[test] if tasks else None,
        clients[train] if clients is not None else None,
        LARGE_PHOTOS if isinstance(images, FileImages) else Augmentation(pad=side // 8),
        test_clients=clients[test] if clients is not None else None,
        notes=(*table.notes, *repeated, *_other_shapes(shapes, images, settings)),
        clients=tuple(sites),
    )


def client_ids(names: list[str]) -> tuple[list[str], Tensor]:
    """The name of every id, and the ids (n,) of samples.

    Numbers stay as they are, so that some may have no samples. Others are names, in their natural order: 01 beside 1,
    and post codes, to which nobody would count.
    """
    different = set(names)
    if all(name.isdecimal() and len(name) < 10 and name == str(int(name)) for name in different):
        largest = max(map(int, different))
        if largest < SPARSE * len(different):
            return [str(client) for client in range(largest + 1)], torch.tensor([int(name) for name in names])
    return _numbered(names)


def _images(table: Table, settings: DataSettings) -> tuple[Images, list[Size]]:
    """The images, and the shapes that files were seen to have."""
    if isinstance(table.images, np.ndarray):
        return torch.from_numpy(table.images), []
    usual, shapes = usual_shape(table.images)
    if usual is None:
        raise UsageError(f"{settings.source}: none of the {len(table.images)} files is an image that can be read.")
    size = settings.sides or usual
    return FileImages(table.images, size, size, settings.fit, settings.workers), shapes


def _other_shapes(shapes: list[Size], images: Images, settings: DataSettings) -> list[str]:
    """That images are not all of one shape, and what becomes of them."""
    if len(shapes) < 2:
        return []
    named = ", ".join(f"{height}×{width}" for height, width in shapes[:NAMED])
    more = f" and {len(shapes) - NAMED} more" if len(shapes) > NAMED else ""
    height, width = images.shape[2:]
    how = {"crop": "the middle is cut out", "pad": "they are padded with black", "stretch": "they are stretched"}
    return [
        f"Images differ in shape ({named}{more}); all become {height}×{width}, and where that does not fit "
        f"{how[settings.fit]} (data.size, data.fit)."
    ]


def _numbered(names: list[str]) -> tuple[list[str], Tensor]:
    """The different names, numbers in numerical order and before text, and the place (n,) of each name there."""
    numbers = {name: int(name) for name in set(names) if name.isdecimal() and len(name) < 1000}
    different = sorted(set(names), key=lambda name: (name not in numbers, numbers.get(name, 0), name))
    places = {name: place for place, name in enumerate(different)}
    return different, torch.tensor([places[name] for name in names], dtype=torch.int64)


def _repeated(table: Table, is_test: np.ndarray, source: str) -> list[str]:
    """A file listed twice must not be learned and tested, nor have two labels in a task; else it counts twice."""
    if isinstance(table.images, np.ndarray):
        return []
    places = _places(table.images)
    learned = {place: path for place, path, test in zip(places, table.images, is_test, strict=True) if not test}
    for place, path, test in zip(places, table.images, is_test, strict=True):
        if test and place in learned:
            twice = _named(learned[place], path)
            raise UsageError(f"{source} lists {twice}, and so for training and for testing; keep one of the two.")
    tasks, first = table.columns.get("task", [""] * len(table.labels)), dict[tuple[str, str], tuple[str, str]]()
    for place, path, task, label in zip(places, table.images, tasks, table.labels, strict=True):
        before, other = first.setdefault((place, task), (label, path))
        if before != label:
            raise UsageError(
                f"{source} lists {_named(other, path)}, as {shortened(before)!r} and as {shortened(label)!r}, and an "
                "image has one label; keep one of the two."
            )
    again = len(table.images) - len(first)
    return [f"{source}: samples that are listed twice count twice: {again}."] if again else []


def _places(paths: list[str]) -> list[str]:
    """Where files are, however they are spelled or linked."""
    folders = {folder: os.path.realpath(folder) for folder in {os.path.dirname(path) for path in paths}}
    direct = (os.path.join(folders[os.path.dirname(path)], os.path.basename(path)) for path in paths)
    return [os.path.realpath(place) if os.path.islink(place) else place for place in direct]


def _named(path: str, again: str) -> str:
    return f"{path} twice" if path == again else f"{path} and the same file as {again}"


def _is_test(table: Table) -> np.ndarray:
    """(n,) from the split, or every fifth sample of a class (and task, if tasks are given)."""
    if "split" in table.columns:
        return np.array(table.columns["split"]) == "test"
    groups = [f"Class {label!r}" for label in table.labels]
    if "task" in table.columns:
        groups = [f"{group} of task {task!r}" for group, task in zip(groups, table.columns["task"], strict=True)]
    return every_fifth(groups)
