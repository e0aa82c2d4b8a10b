"""The contrastive loss against a plain loop; and the second look at images."""

import math

import pytest
import torch
import torch.nn.functional as F

from fedprotip.methods.parts.contrast import contrast
from fedprotip.methods.parts.views import Views, brightness, coloured, cropped, second_look, turned


def by_loops(views, labels, temperature):
    losses = []
    for i, own in enumerate(views):
        positive = [p for p in range(len(views)) if p != i and labels[p] == labels[i]]
        if positive:
            below = sum(math.exp(float(own @ views[a]) / temperature) for a in range(len(views)) if a != i)
            logs = [math.log(math.exp(float(own @ views[p]) / temperature) / below) for p in positive]
            losses.append(-sum(logs) / len(positive))
    return sum(losses) / max(len(losses), 1)


def unit(n, d=6, seed=0):
    return F.normalize(torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))


@pytest.mark.parametrize("labels", [[0, 0, 1, 1, 2, 2], [3, 3, 3, 3, 3, 3], [0, 1, 1, 2, 2, 2]], ids=str)
def test_it_is_what_the_loops_say(labels):
    views, labels = unit(6), torch.tensor(labels)
    assert contrast(views, labels, 0.1).item() == pytest.approx(by_loops(views, labels, 0.1))


def test_a_view_without_others_of_its_class_pushes_nothing_and_divides_nothing():
    views = unit(3).requires_grad_()
    loss = contrast(views, torch.tensor([0, 1, 2]), 0.1)
    loss.backward()
    assert loss.item() == 0
    assert not views.grad.any()


def test_it_falls_as_classes_come_together():
    apart = F.normalize(torch.tensor([[1.0, 0], [0, 1], [1, 0.1], [0.1, 1]]))
    assert contrast(apart, torch.tensor([0, 1, 0, 1]), 0.1) < contrast(apart, torch.tensor([0, 0, 1, 1]), 0.1)


def chance(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_a_second_look_is_an_image_of_the_same_shape(channels):
    images = torch.rand(16, channels, 9, 7, generator=chance())
    seen = second_look(images, Views(), chance(1))
    assert seen.shape == images.shape
    assert 0 <= seen.min() < seen.max() <= 1
    assert not torch.equal(seen, images)
    assert torch.equal(seen, second_look(images, Views(), chance(1)))


def test_a_crop_of_the_whole_image_is_the_image():
    images = torch.rand(8, 3, 6, 6, generator=chance())
    whole = cropped(images, 1.0, torch.full((8, 4), 0.5), torch.zeros(8, dtype=torch.bool))
    assert torch.allclose(whole, images, atol=1e-5)


def test_grey_images_have_no_colour():
    seen = second_look(torch.rand(8, 3, 6, 6, generator=chance()), Views(grey=1.0), chance(1))
    assert torch.allclose(seen, seen[:, :1].expand_as(seen))


def test_a_crop_shows_a_part_and_a_flip_mirrors_it():
    ramp = torch.linspace(0, 1, 8).expand(1, 1, 8, 8)
    numbers = torch.tensor([[0.0, 0.5, 0.0, 0.5]])  # a quarter of the area, square, at the left edge
    left = cropped(ramp, 0.25, numbers, torch.tensor([False]))
    assert left.max() < 0.55
    assert left[0, 0, 0, 0] < left[0, 0, 0, -1]
    mirrored = cropped(ramp, 0.25, numbers, torch.tensor([True]))
    assert torch.allclose(mirrored, left.flip(3), atol=1e-5)


def test_turning_colours_keeps_greys_and_comes_round():
    images = torch.rand(2, 3, 4, 4, generator=chance())
    grey = brightness(images).expand_as(images)
    third = torch.full((2, 1, 1, 1), 1 / 3)
    assert torch.allclose(turned(grey, third), grey, atol=1e-6)
    assert torch.allclose(turned(images, third), images.roll(1, 1), atol=1e-6)  # red becomes green
    assert torch.allclose(turned(turned(turned(images, third), third), third), images, atol=1e-5)


@pytest.mark.parametrize("channels", [1, 3])
def test_colours_change_by_the_chance_of_jitter_and_after_the_crop(channels):
    images, how = torch.rand(40, channels, 6, 6, generator=chance()), {"grey": 0.0, "crop": 0.5}
    numbers = torch.rand(40, 11, generator=chance(1))
    plain = cropped(images, 0.5, numbers[:, :4], numbers[:, 4] < 0.5)
    torch.testing.assert_close(second_look(images, Views(jitter=0.0, **how), chance(1)), plain)
    all_changed = second_look(images, Views(jitter=1.0, **how), chance(1))
    torch.testing.assert_close(all_changed, coloured(plain, 0.4 * (2 * numbers[:, 5:9] - 1)))
    some = second_look(images, Views(jitter=0.3, **how), chance(1))
    share = (some == plain).flatten(1).all(1).float().mean()
    assert 0.4 < share < 0.95


def test_every_colour_changes_by_its_own_number_and_no_image_by_another():
    images = 0.3 + 0.4 * torch.rand(4, 3, 5, 5, generator=chance())
    grey, mean = brightness(images), brightness(images).mean((2, 3), keepdim=True)
    wanted = {
        0: images * 1.2,
        1: mean + (images - mean) * 1.2,
        2: grey + (images - grey) * 1.2,
        3: turned(images, torch.full((4, 1, 1, 1), 0.05)),
    }
    for place, expected in wanted.items():
        changes = torch.zeros(4, 4)
        changes[:, place] = 0.2
        torch.testing.assert_close(coloured(images, changes), expected.clamp(0, 1), atol=1e-5, rtol=1e-4)
    changes = 0.4 * (2 * torch.rand(4, 4, generator=chance(1)) - 1)
    alone = torch.cat([coloured(images[[row]], changes[[row]]) for row in range(4)])
    torch.testing.assert_close(coloured(images, changes), alone)


def test_a_crop_is_from_three_to_four_up_to_four_to_three():
    slope = torch.linspace(0, 1, 24)
    shares = []
    for ratio in (0.0, 0.5, 1.0):
        numbers = torch.tensor([[0.0, ratio, 0.5, 0.5]])
        across, down = (
            cropped(image[None, None], 0.25, numbers, torch.tensor([False]))
            for image in (slope.expand(24, 24), slope[:, None].expand(24, 24))
        )
        shares.append(((across.max() - across.min()) / (down.max() - down.min())).item())
    assert shares == pytest.approx([3 / 4, 1, 4 / 3], rel=0.01)
