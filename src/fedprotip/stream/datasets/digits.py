"""1,797 real handwritten digits of 8×8 pixels that ship inside scikit-learn (UCI, test part of NIST)."""

import numpy as np
import torch

from fedprotip.settings import DataSettings
from fedprotip.stream.datasets import Dataset, register
from fedprotip.stream.transforms import Augmentation

TEST_EVERY = 4
"""Every fourth sample of each class is a test sample: 25 %, the same for every run."""


@register("digits")
def digits(settings: DataSettings) -> Dataset:
    from sklearn.datasets import load_digits  # a second that other data need not wait

    raw = load_digits()
    images = torch.from_numpy((raw.images * (255 / 16)).round().astype(np.uint8))[:, None]
    labels = torch.from_numpy(raw.target.astype(np.int64))
    is_test = torch.zeros(len(labels), dtype=torch.bool)
    for label in range(10):
        is_test[torch.nonzero(labels == label).flatten()[TEST_EVERY - 1 :: TEST_EVERY]] = True
    return Dataset(
        name="digits",
        classes=[str(label) for label in range(10)],
        train_images=images[~is_test],
        train_labels=labels[~is_test],
        test_images=images[is_test],
        test_labels=labels[is_test],
        mean=(0.305,),
        std=(0.376,),
        augmentation=Augmentation(pad=1, flip=False, brightness=0.0),
    )
