"""CIFAR-100: 50,000 training and 10,000 test images of 32×32 pixels in 100 classes, in either official layout.

`cifar-100-binary/`: train.bin and test.bin, records of coarse label, fine label and 3,072 bytes of RGB planes.
`cifar-100-python/`: train, test and meta, pickles that are read by a reader which can build nothing but data.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedprotip.errors import UsageError
from fedprotip.settings import DataSettings
from fedprotip.stream.datasets import IMAGENET_MEAN, IMAGENET_STD, Dataset, locate, read_text, register
from fedprotip.stream.pickles import read_pickle

CLASSES, PIXELS = 100, 3 * 32 * 32
RECORD = 2 + PIXELS
BINARY = tuple(f"cifar-100-binary/{name}" for name in ("train.bin", "test.bin", "fine_label_names.txt"))
PYTHON = tuple(f"cifar-100-python/{name}" for name in ("train", "test", "meta"))


@register("cifar100", BINARY, PYTHON)
def cifar100(settings: DataSettings) -> Dataset:
    root, layout = locate(settings)
    train, test, names = (root / path for path in layout)
    if layout == BINARY:
        read, classes = _read_binary, read_text(names).split()
    else:
        read, classes = _read_python, _names(read_pickle(names).get("fine_label_names"))
    if len(set(classes)) != CLASSES:
        raise UsageError(f"{names} names {len(set(classes))} classes, not {CLASSES}.")
    return Dataset("cifar100", classes, *read(train), *read(test), IMAGENET_MEAN, IMAGENET_STD)


def _read_binary(path: Path) -> tuple[Tensor, Tensor]:
    """Images (n, 3, 32, 32) uint8 and fine labels (n,)."""
    raw = np.fromfile(path, dtype=np.uint8)
    if len(raw) == 0 or len(raw) % RECORD:
        raise UsageError(f"{path} is not a CIFAR-100 file: its size is not a multiple of {RECORD} bytes.")
    records = raw.reshape(-1, RECORD)
    return _checked(path, records[:, 2:], records[:, 1])


def _read_python(path: Path) -> tuple[Tensor, Tensor]:
    found = read_pickle(path)
    pixels, labels = found.get("data"), found.get("fine_labels")
    if not isinstance(labels, list) or not all(type(label) is int and 0 <= label < 2**31 for label in labels):
        raise UsageError(f"{path} is not a CIFAR-100 file: its fine_labels are no list of whole numbers.")
    if not isinstance(pixels, np.ndarray) or pixels.shape != (len(labels), PIXELS) or not labels:
        raise UsageError(f"{path} is not a CIFAR-100 file: it needs data (n, {PIXELS}) and n fine_labels.")
    return _checked(path, pixels, np.array(labels))


def _checked(path: Path, pixels: np.ndarray, labels: np.ndarray) -> tuple[Tensor, Tensor]:
    if labels.dtype.kind not in "iu" or labels.min() < 0 or labels.max() >= CLASSES:
        raise UsageError(f"{path}: a label is not a whole number from 0 to {CLASSES - 1}.")
    return torch.from_numpy(pixels.reshape(-1, 3, 32, 32).copy()), torch.from_numpy(labels.astype(np.int64))


def _names(found: Any) -> list[str]:
    """Class names as text; whatever else is there is no name."""
    listed = found if isinstance(found, list) else []
    texts = (name.decode(errors="replace") if isinstance(name, bytes) else name for name in listed)
    return [text for text in texts if isinstance(text, str)]
