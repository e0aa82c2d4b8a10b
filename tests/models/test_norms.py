"""When running statistics move: `frozen`, `freeze_after_first`, `track`."""

import pytest
import torch
from torch import nn

from fedprotip.models.norms import norms_with_statistics, statistics_move, training_mode
from fedprotip.settings import ModelSettings


def backbone():
    return nn.Sequential(
        nn.Conv2d(1, 2, 3),
        nn.BatchNorm2d(2),
        nn.Dropout(),
        nn.Sequential(nn.BatchNorm2d(2, affine=False), nn.InstanceNorm2d(2, track_running_stats=True)),
        nn.GroupNorm(1, 2),
        nn.BatchNorm2d(2, track_running_stats=False),
    )


@pytest.mark.parametrize(
    ("policy", "moves"),
    [("frozen", [False] * 3), ("freeze_after_first", [True, False, False]), ("track", [True] * 3)],
)
def test_statistics_move_when_the_policy_says_so(policy, moves):
    settings = ModelSettings(norm=policy)
    for task, expected in enumerate(moves):
        module = backbone()
        before = {name: buffer.clone() for name, buffer in module.named_buffers() if "running" in name}
        training_mode(module, settings, task)
        module(torch.randn(4, 1, 6, 6) + 3)
        after = dict(module.named_buffers())
        changed = {name for name in before if not torch.equal(after[name], before[name])}
        assert changed == (before.keys() if expected else set())
        assert statistics_move(settings, task) == expected
        assert module[2].training  # dropout trains whatever the statistics do
        assert module[0].training


def test_a_network_that_was_frozen_moves_again_when_asked():
    module = backbone()
    training_mode(module, ModelSettings(norm="frozen"), 0)
    training_mode(module, ModelSettings(norm="track"), 5)
    assert all(norm.training for norm in norms_with_statistics(module))


def test_only_norms_with_statistics_are_listed():
    module = backbone()
    assert list(norms_with_statistics(module)) == [module[1], module[3][0], module[3][1]]
