"""How many threads a run takes, and that those that wait sleep."""

import os

import pytest

import fedprotip
from fedprotip.api import sensible_threads
from fedprotip.models import new_network


@pytest.mark.parametrize(
    ("model", "side", "expected"),
    [
        ({"name": "mlp", "width": 256, "depth": 3}, 8, 1),
        ({"name": "mlp", "width": 128}, 32, 1),
        ({"name": "mlp", "width": 2000}, 32, 0),
        ({"name": "small_cnn", "width": 32, "depth": 3}, 32, 1),
        ({"name": "small_cnn", "width": 128}, 32, 0),
        ({"name": "vit", "width": 32, "depth": 1}, 8, 1),
        ({"name": "vit", "width": 192, "depth": 1}, 32, 0),
        ({"name": "resnet18"}, 32, 0),
    ],
)
def test_small_networks_take_one_thread(model, side, expected):
    settings = fedprotip.load_settings({"model": model})
    assert sensible_threads(new_network(settings.model, (3, side, side), 0, False), settings) == expected


def test_products_are_counted_with_their_positions():
    """A convolution of 3 → 16 channels at 64 positions, then of 16 → 32 at 16; and a larger batch is more work."""
    settings = fedprotip.load_settings({"model": {"name": "small_cnn", "width": 32, "depth": 2}})
    network = new_network(settings.model, (3, 8, 8), 0, False)
    assert network.longest == max(64 * 16 * 27, 16 * 32 * 144)
    assert not any(module._forward_hooks for module in network.modules())
    many = fedprotip.load_settings(settings, ["train.batch=4096"])
    assert (sensible_threads(network, settings), sensible_threads(network, many)) == (1, 0)


def test_waiting_threads_sleep():
    assert os.environ["OMP_WAIT_POLICY"] == "passive"
