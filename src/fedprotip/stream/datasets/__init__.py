"""Labelled datasets, one file each. A new file that calls `register` is a new `data.name`."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedprotip.errors import UsageError, listed, looked_for, shortened
from fedprotip.settings import DataSettings, declare
from fedprotip.stream.images import FileImages, Images
from fedprotip.stream.kept import NOTHING, Settled, grown
from fedprotip.stream.splits import at_most
from fedprotip.stream.transforms import SMALL_PHOTOS, Augmentation, Size

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""As pretrained backbones expect photographs."""


@dataclass(frozen=True)
class Dataset:
    """Images as uint8 (n, channels, height, width) with labels 0…C−1, training and test part."""

    name: str
    classes: list[str]
    train_images: Images
    train_labels: Tensor  # (n,) int64
    test_images: Images
    test_labels: Tensor
    mean: tuple[float, ...]  # per channel, of images scaled to [0, 1]
    std: tuple[float, ...]
    domains: tuple[str, ...] = ()  # names, when the dataset comes in domains or says its tasks
    train_domains: Tensor | None = None  # (n,) int64 index into `domains`
    test_domains: Tensor | None = None
    train_clients: Tensor | None = None  # (n,) int64 client ids, when the data says who holds what
    augmentation: Augmentation = SMALL_PHOTOS
    train_files: Sequence[str] = ()  # of images that were decoded into memory; those in files know their own
    test_files: Sequence[str] = ()
    resize: Size | None = None  # of `FileImages` that were decoded into memory
    size: Size | None = None  # that batches are brought to; None: that of the images
    test_clients: Tensor | None = None
    notes: tuple[str, ...] = ()  # what of the source is not used, or used in a way the user may not expect
    clients: tuple[str, ...] = ()  # the name of every id, a number or what the data calls it

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(channels, height, width)"""
        channels, height, width = self.train_images.shape[1:]
        return (channels, *(self.size or (height, width)))


Loader = Callable[[DataSettings], Dataset]
Layout = tuple[str, ...]
"""Files and folders under the data root that make a dataset complete."""
_loaders: dict[str, Loader] = {}
_layouts: dict[str, tuple[Layout, ...]] = {}


def register(name: str, *layouts: Layout) -> Callable[[Loader], Loader]:
    """Make a loader available as `data.name = NAME`; `layouts`: what it needs under the data root, one of these."""

    def add(loader: Loader) -> Loader:
        _loaders[name] = loader
        _layouts[name] = layouts
        declare("data.name", name, loader)
        return loader

    return add


def loader_of(name: str) -> Loader:
    """What reads the dataset that is registered under this name."""
    return _loaders[name]


def layouts() -> dict[str, tuple[Layout, ...]]:
    """Every dataset with the layouts it can be in; none: it needs nothing under the data root."""
    return dict(_layouts)


def missing(root: Path, layout: Layout) -> list[str]:
    """What a layout lacks under a data root."""
    return [path for path in layout if not ((root / path).is_file() or (root / path).is_dir())]


def data_root(settings: DataSettings) -> Path:
    """The folder of the datasets: `data.root`, or the environment variable FEDPROTIP_DATA."""
    root = settings.root or os.environ.get("FEDPROTIP_DATA", "")
    if not root:
        raise UsageError(
            f"data.name = {settings.name!r} needs its files: set data.root or the environment variable FEDPROTIP_DATA "
            f"to the folder that holds them, or fetch them with: fedprotip data get {settings.name} --root DIR."
        )
    if not Path(root).is_dir():
        where = "data.root" if settings.root else "FEDPROTIP_DATA"
        raise UsageError(f"{where} = {root!r} is not a folder{looked_for(root)}.")
    return Path(root)


def locate(settings: DataSettings) -> tuple[Path, Layout]:
    """The data root and the first layout that is complete there; the root may also be the dataset's own folder."""
    root, choices = data_root(settings), _layouts[settings.name]
    for layout in choices:
        inside = root.resolve().name == layout[0].split("/")[0]
        for base in (root, root.resolve().parent) if inside else (root,):
            if not missing(base, layout):
                return base, layout
    lacking = min((missing(root, layout) for layout in choices), key=len)
    raise UsageError(
        f"{settings.name!r}: {root} has no {listed(lacking, 1)}; "
        f"give the folder that holds it as data.root, or see: fedprotip data get {settings.name}."
    )


def index_dataset(settings: DataSettings, kept: Settled = NOTHING) -> Dataset:
    """The dataset within `data.train_limit` and `data.test_limit`; image files are listed, not decoded.

    Args:
        kept: of a run that goes on; its classes keep their labels, whatever else the data has now.
    """
    _refuse_unread_source(settings)
    try:
        found = _loaders[settings.name](settings)
    except OSError as error:
        where = shortened(str(error.filename or settings.source or settings.root))
        raise UsageError(f"{where} cannot be read: {error.strerror or error}.") from None
    return _limited(numbered_as(found, kept), settings)


def _refuse_unread_source(settings: DataSettings) -> None:
    """Of the datasets of this package only `own` reads `data.source`; those of others may."""
    ours = _loaders[settings.name].__module__.startswith(__name__)
    if settings.source and ours and settings.name != "own":
        raise UsageError(
            f"data.source = {shortened(settings.source)!r} would not be read: data.name = {settings.name!r} is another "
            "dataset; leave data.name out (or set it to 'own') to learn from it, or leave data.source out."
        )


def numbered_as(dataset: Dataset, kept: Settled) -> Dataset:
    """The dataset with the numbers that a run has given its classes, domains and clients; new names come after them."""
    changes: dict[str, Any] = {}
    for key, column in (("classes", "labels"), ("domains", "domains"), ("clients", "clients")):
        before, known = getattr(dataset, key), getattr(kept, key)
        parts = {part: getattr(dataset, part, None) for part in (f"train_{column}", f"test_{column}")}
        columns = {part: numbers for part, numbers in parts.items() if numbers is not None}
        there = {number for numbers in columns.values() for number in numbers.unique().tolist()}
        names = grown(known, [name for number, name in enumerate(before) if number in there] if known else before)
        if names != list(before):
            place = {name: number for number, name in enumerate(names)}
            places = torch.tensor([place.get(name, -1) for name in before], dtype=torch.int64)
            changes[key] = type(before)(names)
            changes |= {part: places[numbers] for part, numbers in columns.items()}
    return replace(dataset, **changes)


def load_dataset(settings: DataSettings, kept: Settled = NOTHING) -> Dataset:
    """The dataset as a run uses it: small images in memory, at the size of `data.size`; `kept`: as above."""
    dataset = replace(index_dataset(settings, kept), size=settings.sides)
    train, test = dataset.train_images, dataset.test_images
    if not isinstance(train, FileImages) or not train.small:
        return dataset
    # a resized crop is cut while decoding; for what is decoded once, a shifted crop stands in
    return replace(
        dataset,
        train_images=_decoded(train),
        test_images=_decoded(test),
        train_files=train.paths,
        resize=train.resize,
        test_files=test.paths if isinstance(test, FileImages) else (),
        augmentation=Augmentation(min(train.size) // 8),
    )


def _decoded(images: Images) -> Tensor:
    every = torch.empty(images.shape, dtype=torch.uint8)
    for part in torch.arange(len(images)).split(1024):
        every[part] = images[part]
    return every


def read_text(path: Path) -> str:
    """A text file in UTF-8, with or without a byte order mark."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not text in UTF-8.") from None


def _limited(dataset: Dataset, settings: DataSettings) -> Dataset:
    changes: dict[str, Any] = {}
    for part, limit in (("train", settings.train_limit), ("test", settings.test_limit)):
        names = [f"{part}_{name}" for name in ("images", "labels", "domains", "clients")]
        columns = {name: column for name in names if (column := getattr(dataset, name, None)) is not None}
        if limit:
            groups = columns.get(f"{part}_domains", columns[f"{part}_labels"]).numpy()
            kept = at_most(limit, groups, settings.seed, f"limit {part}")
            changes |= {name: take(column, kept) for name, column in columns.items()}
    return replace(dataset, **changes)


def take(column: Images, chosen: np.ndarray) -> Images:
    """The chosen samples of images, in memory or in files, or of a column (n,)."""
    return column.take(chosen) if isinstance(column, FileImages) else column[torch.from_numpy(chosen)]


for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
