"""The small backbones: any image size, any width and depth."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedprotip.models.small import mlp, small_cnn
from fedprotip.settings import ModelSettings

shapes = st.tuples(st.integers(1, 3), st.integers(1, 12), st.integers(1, 12))


@given(shapes, st.integers(1, 20), st.integers(1, 6))
def test_features_are_one_vector_per_image(shape, width, depth):
    settings = ModelSettings(width=width, depth=depth)
    images = torch.randn(3, *shape)
    for build in (mlp, small_cnn):
        features = build(settings, shape).eval()(images)
        assert features.shape == (3, width)
        assert (features >= 0).all()
        assert torch.isfinite(features).all()


@pytest.mark.parametrize("depth", [1, 3])
def test_the_mlp_is_what_its_settings_say(depth):
    layers = [m for m in mlp(ModelSettings(width=5, depth=depth), (1, 4, 4)).modules() if isinstance(m, nn.Linear)]
    assert [(layer.in_features, layer.out_features) for layer in layers] == [(16, 5)] + [(5, 5)] * (depth - 1)


def test_the_cnn_doubles_its_channels_and_has_statistics():
    modules = list(small_cnn(ModelSettings(width=16, depth=3), (3, 8, 8)).modules())
    assert [(m.in_channels, m.out_channels) for m in modules if isinstance(m, nn.Conv2d)] == [(3, 4), (4, 8), (8, 16)]
    assert sum(isinstance(m, nn.BatchNorm2d) for m in modules) == 3


def test_images_of_a_batch_do_not_influence_each_other_in_evaluation():
    for build in (mlp, small_cnn):
        backbone = build(ModelSettings(width=8, depth=2), (1, 8, 8)).eval()
        images = torch.randn(6, 1, 8, 8)
        assert torch.allclose(backbone(images)[2:3], backbone(images[2:3]), atol=1e-6)
