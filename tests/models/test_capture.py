"""Captured columns equal the full unfolding at the sampled positions."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedprotip.models.capture import _Sampler, capture, find_layers
from fedprotip.models.patches import some_columns
from tests.models.test_patches import CONVOLUTIONS

SEED = (0, "capture", 0)


def everything(module, *batches):
    return capture(module, batches, 10**9, SEED)


@pytest.mark.parametrize("options", CONVOLUTIONS, ids=str)
def test_weight_times_columns_is_the_convolution(options):
    """The defining property, checked against torch's own convolution."""
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 8, (3, 2), bias=False, **options).double()
    images = torch.randn(3, 4, 9, 11).double()
    columns = everything(nn.Sequential(conv), images)
    expected = conv(images)
    layers = find_layers(nn.Sequential(conv))["0.weight"]
    outputs = [layer.weight({"0.weight": conv.weight}) @ columns[layer.name] for layer in layers]
    assert torch.allclose(torch.cat(outputs), expected.transpose(0, 1).flatten(1))


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_padding_stays_zero_beside_values_that_are_not_finite(value):
    images = torch.zeros(1, 1, 4, 4)
    images[0, 0, 0, 0] = value
    columns = everything(nn.Sequential(nn.Conv2d(1, 1, 3, padding=1)), images)["0.weight"]
    assert (~columns.isfinite()).sum() == 4  # four 3×3 windows see that pixel


@pytest.mark.parametrize("options", [{}, {"stride": 2, "padding": 1}, {"dilation": 2}], ids=str)
def test_sampled_columns_equal_the_full_unfold(options):
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 4, 3, **options)
    batches = [torch.randn(5, 3, 8, 8), torch.randn(2, 3, 8, 8)]
    full = torch.cat([F.unfold(b, 3, **options).transpose(1, 2).flatten(0, 1) for b in batches])
    sampler = _Sampler(40, torch.Generator().manual_seed(1))
    for batch in batches:
        sampler.see(conv, (batch,))
    assert sampler.data.shape == (40, 1, 27)
    assert torch.equal(sampler.data[:, 0], full[sampler.numbers])
    assert len(set(sampler.numbers.tolist())) == 40
    assert sampler.seen == len(full)


def test_linear_with_and_without_tokens():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 3))
    flat, tokens = torch.randn(4, 6), torch.randn(4, 5, 6)
    assert torch.equal(everything(module, flat)["0.weight"], flat.T)
    assert torch.equal(everything(module, tokens)["0.weight"], tokens.flatten(0, 1).T)


class Shared(nn.Module):
    """One module called twice, and one weight in two modules."""

    def __init__(self):
        super().__init__()
        self.twice, self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.other.weight = self.one.weight
        self.unused = nn.Linear(4, 4)

    def forward(self, x):
        return self.other(self.one(self.twice(self.twice(x))))


def test_shared_modules_and_tied_weights_see_all_their_inputs():
    module = Shared()
    columns = everything(module, torch.randn(7, 4))
    assert {name: tuple(c.shape) for name, c in columns.items()} == {
        "twice.weight": (4, 14),
        "one.weight": (4, 14),
    }


def test_a_layer_that_never_ran_has_no_subspace():
    """torch's attention reads its output projection without calling it: no hook fires, so no columns."""
    module = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    assert "self_attn.out_proj.weight" in find_layers(module)
    names = set(everything(module.train(), torch.randn(3, 5, 8)))
    assert names == {"linear1.weight", "linear2.weight"}


def test_frozen_weights_are_left_out():
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[0].weight.requires_grad_(False)
    assert list(everything(module, torch.randn(3, 4))) == ["1.weight"]
    assert len(capture(module, [torch.randn(3, 4)], 5, SEED, find_layers(module, only_trainable=False))) == 2


def test_memory_is_the_sample_not_the_unfolding(monkeypatch):
    """Patches gathered in all: m_s·(1 + ln(total / m_s)) on average, far below the total."""
    gathered = []

    def counting(module, inputs, chosen):
        gathered.append(len(chosen))
        return some_columns(module, inputs, chosen)

    monkeypatch.setattr("fedprotip.models.capture.some_columns", counting)
    conv = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1))
    batches = [torch.randn(8, 2, 16, 16) for _ in range(10)]
    columns = capture(conv, batches, 64, SEED)["0.weight"]
    assert columns.shape == (18, 64)
    assert max(gathered) <= 64
    assert sum(gathered) < 64 * 8 < 8 * 16 * 16 * 10


def test_sampling_is_uniform():
    """Each of 30 columns is kept in about a third of 600 draws of 10 (five standard deviations allowed)."""
    counts = torch.zeros(30)
    linear = nn.Linear(1, 1)
    for seed in range(600):
        sampler = _Sampler(10, torch.Generator().manual_seed(seed))
        for part in torch.arange(30.0)[:, None].split(7):
            sampler.see(linear, (part,))
        counts[sampler.numbers] += 1
    assert counts.sum() == 6000
    assert (counts - 200).abs().max() < 5 * (600 * 1 / 3 * 2 / 3) ** 0.5


def test_same_seed_same_columns_and_hooks_are_gone():
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 3))
    batch = torch.randn(6, 1, 8, 8)
    first, second = (capture(module, [batch], 5, SEED) for _ in range(2))
    other = capture(module, [batch], 5, (1, "capture", 0))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["0.weight"], other["0.weight"])
    assert not module[0]._forward_pre_hooks


def images_used(module, columns, per_image, images=40, batch=4):
    """How many images run until the samples are fair."""
    seen = []

    def forward(part):
        seen.append(len(part))
        return module(part)

    parts = [torch.randn(batch, 1, 6, 6) for _ in range(images // batch)]
    capture(module, parts, columns, SEED, forward=forward, per_image=per_image)
    return sum(seen)


@pytest.mark.parametrize(
    ("columns", "per_image", "expected"),
    [
        (32, 0, 40),  # no limit: all of them
        (32, 8, 4),  # 8 of the 36 columns of each image
        (32, 4, 8),
        (32, 1, 32),
        (32, 100, 4),  # one batch has 144 columns
        (300, 100, 12),  # 100 per image would do with 3 images, but they only have 36 each
        (10**6, 8, 40),
    ],
)
def test_no_more_images_run_than_a_fair_sample_needs(columns, per_image, expected):
    assert images_used(nn.Sequential(nn.Conv2d(1, 2, 3, padding=1)), columns, per_image) == expected


def test_the_layer_with_the_smallest_map_decides():
    module = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Flatten(), nn.Linear(72, 3))
    assert images_used(module, 16, 8) == 16  # a Linear has one column per image
