"""Handwritten digits from three sources as three domains of the same ten labels: MNIST, USPS, scikit-learn's.

`mnist.npz` (28×28) and `usps.npz` (16×16) under the data root hold x_train, y_train, x_test, y_test; the third
domain (8×8) ships with scikit-learn. All are brought to 16×16, each pixel the exact mean of the area it covers.
"""

from pathlib import Path

import numpy as np
import torch

from fedprotip.errors import UsageError
from fedprotip.settings import DataSettings
from fedprotip.stream.datasets import Dataset, locate, register
from fedprotip.stream.datasets.digits import digits
from fedprotip.stream.tables import read_arrays
from fedprotip.stream.transforms import Augmentation, resize_area

DOMAINS = ("mnist", "usps", "digits")
SIZE = 16


@register("digit_domains", ("mnist.npz", "usps.npz"))
def digit_domains(settings: DataSettings) -> Dataset:
    root, _ = locate(settings)
    embedded = digits(settings)
    sources = [_read(root / "mnist.npz"), _read(root / "usps.npz")]
    sources.append(
        {
            "x_train": np.asarray(embedded.train_images)[:, 0],
            "y_train": embedded.train_labels.numpy(),
            "x_test": np.asarray(embedded.test_images)[:, 0],
            "y_test": embedded.test_labels.numpy(),
        }
    )
    parts = []
    for part in ("train", "test"):
        images = np.concatenate([resize_area(source[f"x_{part}"], SIZE) for source in sources])[:, None]
        labels = np.concatenate([source[f"y_{part}"] for source in sources]).astype(np.int64)
        domains = np.repeat(np.arange(len(DOMAINS)), [len(source[f"y_{part}"]) for source in sources])
        parts.append((torch.from_numpy(images), torch.from_numpy(labels), torch.from_numpy(domains)))
    (train, train_labels, train_domains), (test, test_labels, test_domains) = parts
    return Dataset(
        "digit_domains",
        [str(label) for label in range(10)],
        train,
        train_labels,
        test,
        test_labels,
        (0.147,),
        (0.294,),
        DOMAINS,
        train_domains,
        test_domains,
        augmentation=Augmentation(pad=2, flip=False, brightness=0.0),
    )


def _read(path: Path) -> dict[str, np.ndarray]:
    """x_train, y_train, x_test, y_test of an npz file, checked."""
    found = read_arrays(path)
    if not {"x_train", "y_train", "x_test", "y_test"} <= set(found):
        raise UsageError(f"{path} needs x_train, y_train, x_test and y_test; it has {', '.join(sorted(found))}.")
    for part in ("train", "test"):
        images, labels = found[f"x_{part}"], found[f"y_{part}"]
        if images.ndim != 3 or images.dtype != np.uint8 or labels.shape != images.shape[:1] or not images.size:
            raise UsageError(f"{path}: x_{part} must be uint8 (n, h, w), and y_{part} its n labels.")
        if labels.dtype.kind not in "iu" or labels.min() < 0 or labels.max() > 9:
            raise UsageError(f"{path}: a label of y_{part} is out of range, 0 to 9 are valid.")
    return found
