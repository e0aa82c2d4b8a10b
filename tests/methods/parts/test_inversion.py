"""A gradient of the encoder gives away the label at once, and the image after a while."""

import pytest
import torch
import torch.nn.functional as F

from fedprotip.methods.parts.inversion import (
    distances,
    gradients_of,
    new_encoder,
    reconstruct,
    recovered,
    size_of,
)

SHAPE, CLASSES = (1, 8, 8), 10


def samples(count, seed=0, shape=SHAPE, classes=CLASSES):
    chance = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(count, *shape, generator=chance), torch.randint(classes, (count,), generator=chance)


def test_the_encoder_is_the_same_at_both_ends_and_leaves_the_global_stream_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    one = new_encoder(SHAPE, CLASSES, 0)
    assert torch.equal(torch.rand(3), expected)
    other, third = new_encoder(SHAPE, CLASSES, 0), new_encoder(SHAPE, CLASSES, 1)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert not torch.equal(one[0].weight, third[0].weight)
    assert all(parameter.abs().max() <= 0.5 for parameter in one.parameters())


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32), (3, 9, 14)])
def test_gradients_are_those_of_each_image_alone(shape):
    encoder = new_encoder(shape, CLASSES, 0)
    images, labels = samples(4, shape=shape)
    found = gradients_of(encoder, images, labels)
    assert found.shape == (4, size_of(encoder))
    encoder.requires_grad_(True)
    for image, label, row in zip(images, labels, found, strict=True):
        loss = F.cross_entropy(encoder(image[None]), label[None])
        plain = torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(encoder.parameters()))])
        assert torch.allclose(row, plain, atol=1e-5)


@pytest.mark.parametrize("classes", [2, 10, 100])
def test_every_label_is_recovered(classes):
    encoder = new_encoder(SHAPE, classes, 3)
    images, labels = samples(200, seed=classes, classes=classes)
    assert torch.equal(recovered(encoder, gradients_of(encoder, images, labels)), labels)


@pytest.mark.parametrize("solver", ["lbfgs", "adam"])
def test_images_come_back(solver):
    encoder = new_encoder(SHAPE, CLASSES, 0)
    images, labels = samples(6)
    gradients, (start, _) = gradients_of(encoder, images, labels), samples(6, seed=1)
    steps: list[int] = []
    found, told = reconstruct(encoder, gradients, start, solver, 200, 0.1, 3, steps.append)
    assert steps == list(range(1, 201))
    assert torch.equal(told, labels.repeat(3))
    before, after = distances(encoder, start, labels, gradients), distances(encoder, found[-6:], labels, gradients)
    assert (after < 0.05 * before).all()
    assert (found[-6:] - images).square().mean() < 0.2 * (start - images).square().mean()


def test_lbfgs_never_makes_an_image_worse():
    encoder = new_encoder(SHAPE, CLASSES, 0)
    images, labels = samples(5)
    gradients, (start, _) = gradients_of(encoder, images, labels), samples(5, seed=2)
    found, _ = reconstruct(encoder, gradients, start, "lbfgs", 40, 0.1, 40)
    course = torch.stack([distances(encoder, part, labels, gradients) for part in (start, *found.split(5))])
    assert (course.diff(dim=0) <= 1e-6 * course[0]).all()


def test_an_image_that_is_lost_is_left_out():
    encoder = new_encoder(SHAPE, CLASSES, 0)
    images, labels = samples(3)
    start, _ = samples(3, seed=1)
    start[1] = torch.nan
    found, told = reconstruct(encoder, gradients_of(encoder, images, labels), start, "adam", 3, 0.1, 2)
    assert found.isfinite().all()
    assert torch.equal(told, labels[[0, 2]].repeat(2))
