"""The embedded digits, and datasets of one's own."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from fedprotip import settings as settings_module
from fedprotip.errors import UsageError
from fedprotip.settings import DataSettings, load
from fedprotip.stream import build_stream, datasets
from tests.stream.samples import made_dataset


def test_digits_are_all_there_once():
    digits, raw = datasets.load_dataset(DataSettings()), load_digits()
    images = torch.cat([digits.train_images, digits.test_images]).numpy()
    assert images.dtype == np.uint8
    assert digits.image_shape == (1, 8, 8)
    assert (images.min(), images.max()) == (0, 255)
    ours = sorted((image.tobytes(), label) for image, label in zip(images, labels_of(digits), strict=True))
    scaled = np.round(raw.images * 255 / 16).astype(np.uint8)[:, None]
    assert ours == sorted((image.tobytes(), int(label)) for image, label in zip(scaled, raw.target, strict=True))


def labels_of(dataset):
    return torch.cat([dataset.train_labels, dataset.test_labels]).tolist()


def test_a_quarter_of_every_digit_is_for_testing():
    digits = datasets.load_dataset(DataSettings())
    for label in range(10):
        train, test = ((part == label).sum().item() for part in (digits.train_labels, digits.test_labels))
        assert abs(test - (train + test) / 4) < 1


def test_mean_and_std_are_those_of_the_training_images():
    digits = datasets.load_dataset(DataSettings())
    scaled = digits.train_images.double() / 255
    assert digits.mean[0] == pytest.approx(scaled.mean().item(), abs=2e-3)
    assert digits.std[0] == pytest.approx(scaled.std().item(), abs=2e-3)


def test_a_registered_dataset_is_a_valid_name(monkeypatch):
    monkeypatch.setitem(settings_module.KNOWN, "data.name", dict(settings_module.KNOWN["data.name"]))
    monkeypatch.setattr(datasets, "_loaders", dict(datasets._loaders))
    with pytest.raises(UsageError, match=r"data\.name = 'mine' is unknown"):
        load({"data": {"name": "mine"}})
    loader = datasets.register("mine")(lambda settings: made_dataset())
    assert loader(None).name == "made"
    assert build_stream(load({"data": {"name": "mine"}, "stream": {"tasks": 2}})).dataset.name == "made"
