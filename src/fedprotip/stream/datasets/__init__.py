"""Labelled datasets, one file each. A new file that calls `register` is a new `data.name`."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from torch import Tensor

from fedprotip.errors import UsageError
from fedprotip.settings import DataSettings, declare


@dataclass(frozen=True)
class Dataset:
    """Images as uint8 (n, channels, height, width) with labels 0…C−1, training and test part."""

    name: str
    classes: list[str]
    train_images: Tensor
    train_labels: Tensor  # (n,) int64
    test_images: Tensor
    test_labels: Tensor
    mean: tuple[float, ...]  # per channel, of images scaled to [0, 1]
    std: tuple[float, ...]
    domains: tuple[str, ...] = ()  # names, when the dataset comes in domains
    train_domains: Tensor | None = None  # (n,) int64 index into `domains`
    test_domains: Tensor | None = None

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(channels, height, width)"""
        channels, height, width = self.train_images.shape[1:]
        return channels, height, width


Loader = Callable[[DataSettings], Dataset]
_loaders: dict[str, Loader] = {}


def register(name: str) -> Callable[[Loader], Loader]:
    """Make a loader available as `data.name = NAME`."""

    def add(loader: Loader) -> Loader:
        _loaders[name] = loader
        declare("data.name", name, loader)
        return loader

    return add


def data_root(settings: DataSettings) -> Path:
    """The folder of the datasets: `data.root`, or the environment variable FEDPROTIP_DATA."""
    root = settings.root or os.environ.get("FEDPROTIP_DATA", "")
    if not root:
        raise UsageError(f"data.name = {settings.name!r} needs its files: set data.root or FEDPROTIP_DATA.")
    if not Path(root).is_dir():
        raise UsageError(f"data.root = {root!r} is not a folder.")
    return Path(root)


def load_dataset(settings: DataSettings) -> Dataset:
    return _loaders[settings.name](settings)


for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
