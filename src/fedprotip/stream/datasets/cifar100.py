"""CIFAR-100: 50,000 training and 10,000 test images of 32×32 pixels in 100 classes, in the official layout.

`cifar-100-binary/` with train.bin and test.bin: records of coarse label, fine label and 3,072 bytes of RGB planes.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedprotip.errors import UsageError
from fedprotip.settings import DataSettings
from fedprotip.stream.datasets import Dataset, data_root, register

RECORD = 2 + 3 * 32 * 32
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, as the pretrained backbones expect


@register("cifar100")
def cifar100(settings: DataSettings) -> Dataset:
    root = data_root(settings)
    folder = next((path for path in (root / "cifar-100-binary", root) if (path / "train.bin").is_file()), None)
    if folder is None:
        raise UsageError(f"data.root = {str(root)!r} has no cifar-100-binary/train.bin; give the folder that holds it.")
    names = (folder / "fine_label_names.txt").read_text().split()
    train_images, train_labels = _read(folder / "train.bin")
    test_images, test_labels = _read(folder / "test.bin")
    return Dataset("cifar100", names, train_images, train_labels, test_images, test_labels, MEAN, STD)


def _read(path: Path) -> tuple[Tensor, Tensor]:
    """Images (n, 3, 32, 32) uint8 and fine labels (n,)."""
    raw = np.fromfile(path, dtype=np.uint8)
    if len(raw) == 0 or len(raw) % RECORD:
        raise UsageError(f"{path} is not a CIFAR-100 file: its size is not a multiple of {RECORD} bytes.")
    records = raw.reshape(-1, RECORD)
    images = torch.from_numpy(records[:, 2:].reshape(-1, 3, 32, 32).copy())
    return images, torch.from_numpy(records[:, 1].astype(np.int64))
