"""ImageNet-R: 30,000 renditions of 200 ImageNet classes, in the official folder `imagenet-r/` (one per WordNet id).

It has no official split: every fifth image of a class is for testing, about 24,000 / 6,000. (The counts of the
paper's Table 18, 67,080 / 19,464, cannot be had from 30,000 images.)
"""

import re

import numpy as np
import torch

from fedprotip.errors import UsageError
from fedprotip.settings import DataSettings
from fedprotip.stream.datasets import IMAGENET_MEAN, IMAGENET_STD, Dataset, locate, register
from fedprotip.stream.images import is_image, photos
from fedprotip.stream.splits import every_fifth
from fedprotip.stream.transforms import LARGE_PHOTOS

CLASSES = 200


@register("imagenet_r", ("imagenet-r",))
def imagenet_r(settings: DataSettings) -> Dataset:
    root, layout = locate(settings)
    folder = root / layout[0]
    folders = sorted(path for path in folder.iterdir() if path.is_dir() and re.fullmatch(r"n\d{8}", path.name))
    if len(folders) != CLASSES:
        raise UsageError(
            f"{folder} has {len(folders)} folders of WordNet ids such as n01443537; {CLASSES} belong there."
        )
    paths, labels = [], []
    for label, one in enumerate(folders):
        found = sorted(str(path) for path in one.iterdir() if is_image(path))
        if not found:
            raise UsageError(f"Class {one.name} of ImageNet-R is empty: {one} holds no images.")
        paths += found
        labels += [label] * len(found)
    is_test = every_fifth([f"Class {folders[label].name}" for label in labels])
    images, every = photos(paths, settings.sides, settings.workers, settings.fit), torch.tensor(labels)
    train, test = np.flatnonzero(~is_test), np.flatnonzero(is_test)
    return Dataset(
        "imagenet_r",
        [one.name for one in folders],
        images.take(train),
        every[train],
        images.take(test),
        every[test],
        IMAGENET_MEAN,
        IMAGENET_STD,
        augmentation=LARGE_PHOTOS,
    )
