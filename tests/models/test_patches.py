"""Columns of a layer: what a convolution reads, and the way back."""

import pytest
import torch
from torch import nn

from fedprotip.models.patches import (
    all_columns,
    all_outputs,
    by_taps,
    coordinates,
    count_columns,
    inputs_of,
    some_columns,
)

CONVOLUTIONS = [
    {},
    {"stride": 2},
    {"padding": 1},
    {"padding": (2, 0), "stride": (1, 3)},
    {"dilation": 2, "padding": 2},
    {"groups": 2},
    {"groups": 4, "padding": 1, "stride": 2},
    {"padding": 1, "padding_mode": "reflect"},
    {"padding": 2, "padding_mode": "replicate"},
    {"padding": 1, "padding_mode": "circular", "stride": 2},
    {"padding": "same"},
    {"padding": "same", "dilation": 3},
    {"padding": "valid"},
]
UNGROUPED = [options for options in CONVOLUTIONS if "groups" not in options]


@pytest.mark.parametrize("options", UNGROUPED, ids=str)
def test_all_columns_are_those_that_the_convolution_reads(options):
    torch.manual_seed(0)
    conv, images = nn.Conv2d(4, 8, (3, 2), bias=False, **options).double(), torch.randn(3, 4, 9, 11).double()
    columns, outputs = all_columns(conv, images), all_outputs(conv, conv(images))
    assert columns.shape == (24, count_columns(conv, images))
    assert torch.allclose(conv.weight.flatten(1) @ columns, outputs)
    one_by_one = some_columns(conv, images, torch.arange(columns.shape[1]))[:, 0].T  # image by image
    assert torch.equal(columns.view(24, -1, 3).transpose(1, 2).flatten(1), one_by_one)


def test_all_columns_of_a_linear_layer_are_its_inputs():
    linear, inputs = nn.Linear(5, 2, bias=False), torch.randn(3, 4, 5)
    assert torch.allclose(linear.weight @ all_columns(linear, inputs), all_outputs(linear, linear(inputs)))
    assert torch.equal(inputs_of(linear, all_columns(linear, inputs), inputs), inputs)


@pytest.mark.parametrize("options", UNGROUPED, ids=str)
def test_columns_return_to_the_inputs_they_came_from(options):
    """⟨A, B⟩ = ⟨inputs, transposed B⟩ for any B: the transpose of a linear map, checked by its definition."""
    torch.manual_seed(0)
    conv, images = nn.Conv2d(4, 8, (3, 2), **options).double(), torch.randn(3, 4, 9, 11).double()
    columns = all_columns(conv, images)
    other = torch.randn_like(columns)
    assert torch.allclose((columns * other).sum(), (images * inputs_of(conv, other, images)).sum())


@pytest.mark.parametrize("options", UNGROUPED, ids=str)
@pytest.mark.parametrize("size", [(9, 11), (5, 4)])
@pytest.mark.parametrize("rank", [0, 5])
def test_coordinates_tap_by_tap_are_those_of_all_columns(options, size, rank):
    torch.manual_seed(0)
    conv, images = nn.Conv2d(4, 8, (3, 2), **options).double(), torch.randn(3, 4, *size).double()
    basis = torch.randn(24, rank).double()
    assert torch.allclose(coordinates(conv, images, by_taps(conv, basis)), basis.T @ all_columns(conv, images))
