"""Augmentation: pure, seeded, and each sample on its own."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedprotip.stream import transforms
from fedprotip.stream.transforms import Augmentation, augment, brighten, draw, flip, random_crop, resize_area

seeds = st.integers(0, 10_000)
shapes = st.tuples(st.integers(0, 5), st.sampled_from([1, 3]), st.integers(1, 9), st.integers(1, 9))


def images(shape, seed):
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed)).to(torch.uint8)


def drawn(n, seed):
    return draw(n, torch.Generator().manual_seed(seed))


@given(shapes, seeds)
def test_flipped_twice_is_the_same(shape, seed):
    batch, chosen = images(shape, seed), drawn(shape[0], seed).flip < 0.5
    once = flip(batch, chosen)
    assert torch.equal(flip(once, chosen), batch)
    assert torch.equal(once[~chosen], batch[~chosen])
    assert torch.equal(once[chosen], batch[chosen].flip(3))


@given(shapes, seeds, st.integers(0, 4))
def test_a_crop_is_a_window_of_the_padded_image(shape, seed, pad):
    batch, position = images(shape, seed), drawn(shape[0], seed).position
    cut = random_crop(batch, pad, position)
    assert cut.dtype == torch.uint8
    for image, result, (row, column) in zip(batch.numpy(), cut.numpy(), position.tolist(), strict=True):
        padded = np.pad(image, ((0, 0), (pad, pad), (pad, pad)))
        top, left = int(row * (2 * pad + 1)), int(column * (2 * pad + 1))
        assert (result == padded[:, top : top + shape[2], left : left + shape[3]]).all()


@given(shapes, seeds)
def test_a_crop_without_padding_and_light_of_one_change_nothing(shape, seed):
    batch = images(shape, seed)
    assert torch.equal(random_crop(batch, 0, drawn(shape[0], seed).position), batch)
    nothing = Augmentation(pad=0, flip=False, brightness=0.0)
    assert torch.equal(augment(batch, drawn(shape[0], seed), nothing), batch.float() / 255)
    assert torch.equal(brighten(batch / 255, torch.ones(shape[0])), batch / 255)


@given(st.integers(1, 6), seeds)
def test_a_sample_depends_on_its_own_draws_alone(n, seed):
    batch, draws, how = images((n, 3, 8, 8), seed), drawn(n, seed), Augmentation()
    together = augment(batch, draws, how)
    assert together.min() >= 0
    assert together.max() <= 1
    for i in range(n):
        one = transforms.Draws(*(getattr(draws, name)[[i]] for name in ("position", "flip", "brightness", "boxes")))
        assert torch.equal(augment(batch[[i]], one, how)[0], together[i])


def test_the_same_generator_gives_the_same_and_another_gives_another():
    batch = images((16, 3, 32, 32), 0)
    results = [augment(batch, drawn(16, seed), Augmentation()) for seed in (1, 1, 2)]
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_all_places_both_sides_and_all_light_are_reached():
    draws = drawn(4000, 0)
    corners = (draws.position * 9).long()
    assert {tuple(pair) for pair in corners.tolist()} == {(y, x) for y in range(9) for x in range(9)}
    grey = torch.full((4000, 1, 1, 1), 100, dtype=torch.uint8)
    factors = augment(grey, draws, Augmentation(pad=0)).flatten() * 2.55
    assert factors.min() == pytest.approx(1 - 63 / 255, abs=0.01)
    assert factors.max() == pytest.approx(1 + 63 / 255, abs=0.01)


@given(st.integers(1, 400), st.integers(1, 400), seeds)
def test_a_resized_crop_lies_inside_and_has_the_wanted_size(width, height, seed):
    draws = drawn(1, seed)
    position, boxes = draws.position[0].tolist(), draws.boxes[0].tolist()
    left, top, right, bottom = transforms.resized_box(width, height, position, boxes)
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height
    if min(width, height) >= 100 and max(width, height) <= 1.3 * min(width, height):
        assert 0.07 <= (right - left) * (bottom - top) / (width * height) <= 1.0
        assert 0.7 <= (right - left) / (bottom - top) <= 1.4


def test_an_image_that_no_try_fits_is_cut_in_the_middle():
    assert transforms.resized_box(1000, 10, [0.9, 0.9], [[0.99, 0.5]] * 10) == (493, 0, 506, 10)


@given(st.integers(1, 30), st.integers(1, 30), seeds)
def test_area_resizing_is_exact(old, new, seed):
    pictures = np.random.default_rng(seed).integers(0, 256, (3, old, old), dtype=np.uint8)
    resized = resize_area(pictures, new)
    fine = pictures.repeat(new, 1).repeat(new, 2).reshape(3, new, old, new, old)  # the least common grid
    assert np.abs(resized - fine.mean((2, 4))).max() <= 0.5 + 1e-9
    flat = np.full((1, old, old), 77, np.uint8)
    assert (resize_area(flat, new) == 77).all()
