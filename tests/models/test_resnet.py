"""ResNet-18: torchvision's names, every stem, both poolings."""

import pytest
import torch

from fedprotip.models.resnet import resnet18
from fedprotip.settings import ModelSettings

NORM = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


def torchvision_names():
    """The state_dict of torchvision's resnet18 without fc."""
    names = ["conv1.weight", *(f"bn1.{part}" for part in NORM)]
    for layer in range(1, 5):
        for block in range(2):
            for number in (1, 2):
                names.append(f"layer{layer}.{block}.conv{number}.weight")
                names += [f"layer{layer}.{block}.bn{number}.{part}" for part in NORM]
        if layer > 1:
            names.append(f"layer{layer}.0.downsample.0.weight")
            names += [f"layer{layer}.0.downsample.1.{part}" for part in NORM]
    return names


def build(stem="cifar", pool=1, channels=3):
    return resnet18(ModelSettings(name="resnet18", stem=stem, pool=pool), (channels, 32, 32)).eval()


@pytest.mark.parametrize("stem", ["imagenet", "cifar", "stride1"])
def test_names_and_sizes_are_those_of_torchvision(stem):
    state = build(stem).state_dict()
    assert sorted(state) == sorted(torchvision_names())
    assert len(state) == 120
    weights = sum(t.numel() for n, t in state.items() if n.endswith((".weight", ".bias")))
    assert weights == 11_689_512 - 513_000 - (0 if stem != "cifar" else 64 * 3 * (49 - 9))  # fc, smaller kernel


@pytest.mark.parametrize("pool", [1, 2])
@pytest.mark.parametrize("stem", ["imagenet", "cifar", "stride1"])
def test_features_of_small_and_large_images(stem, pool):
    backbone = build(stem, pool)
    for size in (32, 224):
        with torch.no_grad():
            features = backbone(torch.randn(1 if size == 224 else 3, 3, size, size))
        assert features.shape == (1 if size == 224 else 3, 512 * pool**2)
        assert features.isfinite().all()


def test_the_stems_see_a_small_image_at_their_own_resolution():
    sides = {}
    for stem in ("imagenet", "cifar", "stride1"):
        backbone = build(stem)
        backbone.layer1.register_forward_hook(lambda m, i, out, stem=stem: sides.update({stem: out.shape[-1]}))
        backbone(torch.zeros(1, 3, 32, 32))
    assert sides == {"imagenet": 8, "cifar": 32, "stride1": 16}


def test_grey_and_tiny_images():
    assert build(channels=1)(torch.zeros(2, 1, 8, 8)).shape == (2, 512)
