"""Arrays of numbers as images: read as they can only be meant, or refused with a sentence."""

import numpy as np
import pytest

from fedprotip.errors import UsageError
from fedprotip.stream.pixels import as_images

RAMP = np.arange(0, 252, 7, dtype=np.uint8).reshape(1, 6, 6).repeat(2, 0)
SAME = {
    "uint8": RAMP,
    "int64": RAMP.astype(np.int64),
    "floats to 1": RAMP / 255,
    "half floats to 1": (RAMP / 255).astype(np.float16),
    "floats to 255": RAMP.astype(np.float32),
    "uint16": RAMP.astype(np.uint16) * 257,
    "a channel first": RAMP[:, None],
    "a channel last": RAMP[..., None],
    "grey with alpha": np.stack([RAMP, np.full_like(RAMP, 255)], 1),
}


@pytest.mark.parametrize("kind", SAME)
def test_the_same_image_in_many_forms(kind):
    found = as_images(SAME[kind], "x")
    assert found.dtype == np.uint8
    assert np.array_equal(found, RAMP[:, None])


def test_black_and_white_and_the_ends_of_16_bits():
    assert as_images(np.array([[[True, False]]]), "x").tolist() == [[[[255, 0]]]]
    assert as_images(np.array([[[0, 128, 32768, 65535]]], np.uint16), "x").tolist() == [[[[0, 0, 128, 255]]]]


def test_what_is_transparent_shows_white():
    clear = np.zeros((1, 6, 6, 4), np.uint8)
    clear[0, 0, 0] = (10, 20, 30, 255)
    clear[0, 0, 1] = (0, 0, 0, 127)
    found = as_images(clear, "x")
    assert found.shape == (1, 3, 6, 6)
    assert found[0, :, 0, 0].tolist() == [10, 20, 30]
    assert found[0, :, 0, 1].tolist() == [128, 128, 128]
    assert found[0, :, 5, 5].tolist() == [255, 255, 255]


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        (RAMP / 90, "values from 0 to 2.72222"),
        (RAMP / 255 - 0.5, "values from -0.5 to"),
        (RAMP / 15.0, "values from 0 to 16"),  # such as scikit-learn's own digits
        (RAMP * 2.0, "values from 0 to 490"),
        (RAMP.astype(np.int32) * 257, "uint16 (white is 65535)"),
        (np.where(RAMP == 7, np.nan, RAMP / 255), "NaN or infinite"),
        (np.where(RAMP == 7, np.inf, RAMP / 255), "NaN or infinite"),
        (RAMP.astype(complex), "whole numbers or floats"),
        (np.zeros((2, 3, 9, 3), np.uint8), "channels first or last"),
        (np.zeros((2, 3, 1, 1), np.uint8), "channels first or last"),
        (np.zeros((2, 5, 9, 5), np.uint8), "1 to 4 channels"),
        (np.zeros((2, 9), np.uint8), "must be (n, h, w)"),
        (np.array(0.5), "must be (n, h, w)"),
    ],
    ids=range(13),
)
def test_what_cannot_be_told_is_refused(numbers, words):
    with pytest.raises(UsageError) as caught:
        as_images(numbers, "x")
    assert words in str(caught.value)
    assert str(caught.value).endswith(".")


def test_one_pixel_is_an_image():
    assert as_images(np.full((2, 1, 1, 1), 9, np.uint8), "x").tolist() == [[[[9]]], [[[9]]]]
    assert as_images(np.full((2, 1, 1), 9, np.uint8), "x").shape == (2, 1, 1, 1)
