"""When running statistics move: `frozen`, `freeze_after_first`, `track`, and never inside the frozen part."""

import pytest
import torch
from torch import nn

from fedprotip.models import build_network
from fedprotip.models.freeze import declare_stages
from fedprotip.models.norms import moving_norms, training_mode
from fedprotip.models.state import moving_state
from fedprotip.settings import ModelSettings, load

POLICIES = [("frozen", [False] * 3), ("freeze_after_first", [True, False, False]), ("track", [True] * 3)]
NORMS = ["1", "3.0", "3.1"]


def backbone():
    return nn.Sequential(
        nn.Conv2d(1, 2, 3),
        nn.BatchNorm2d(2),
        nn.Dropout(),
        nn.Sequential(nn.BatchNorm2d(2, affine=False), nn.InstanceNorm2d(2, track_running_stats=True), nn.Dropout()),
        nn.GroupNorm(1, 2),
        nn.BatchNorm2d(2, track_running_stats=False),
    )


def changed_norms(module, settings, task):
    """Names of the norms whose statistics moved in one forward pass of training."""
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    training_mode(module, settings, task)
    module(torch.randn(4, 1, 6, 6) + 3)
    after = dict(module.named_buffers())
    return sorted({name.rpartition(".")[0] for name in before if not torch.equal(after[name], before[name])})


@pytest.mark.parametrize(("policy", "moves"), POLICIES)
def test_statistics_move_when_the_policy_says_so(policy, moves):
    settings = ModelSettings(norm=policy)
    for task, expected in enumerate(moves):
        module = backbone()
        assert moving_norms(module, settings, task) == (NORMS if expected else [])
        assert changed_norms(module, settings, task) == (NORMS if expected else [])
        assert all(module[part].training for part in (0, 2, 4, 5))  # dropout trains whatever the statistics do
        assert module[3][2].training


@pytest.mark.parametrize("policy", ["freeze_after_first", "track"])
@pytest.mark.parametrize("freeze_from", ["first", "start"])
def test_a_norm_inside_the_frozen_part_never_moves(registries, policy, freeze_from):
    declare_stages("mlp", {"a": ("0.", "1.", "2."), "b": ("3.",), "c": ("4.",)})
    for freeze, rest in (("a", ["3.0", "3.1"]), ("b", []), ("c", [])):
        settings = ModelSettings(norm=policy, freeze=freeze, freeze_from=freeze_from)
        for task in range(3):
            free = NORMS if task == 0 and freeze_from == "first" else rest
            expected = [] if policy == "freeze_after_first" and task else free
            module = backbone()
            assert moving_norms(module, settings, task) == changed_norms(module, settings, task) == expected


def test_the_frozen_part_gives_the_same_in_training_as_in_evaluation(registries):
    declare_stages("mlp", {"a": ("0.", "1.", "2."), "b": ("3.",)})
    module, images = backbone(), torch.randn(4, 1, 6, 6)
    expected = module.eval()[:4](images)
    training_mode(module, ModelSettings(norm="track", freeze="b", freeze_from="start"), 0)
    assert torch.equal(module[:4](images), expected)  # its dropout rests too
    assert module.training
    assert module[4].training


def test_a_network_that_was_frozen_moves_again_when_asked():
    module = backbone()
    training_mode(module, ModelSettings(norm="frozen"), 0)
    training_mode(module, ModelSettings(norm="track"), 5)
    assert all(part.training for part in module.modules())


@pytest.mark.parametrize(("policy", "moves"), POLICIES)
@pytest.mark.parametrize("freeze", ["none", "layer1"])
def test_only_moving_statistics_travel(policy, moves, freeze):
    model = {"name": "small_cnn", "width": 8, "depth": 2, "norm": policy, "freeze": freeze}
    settings = load({"model": model})
    network = build_network(settings, (1, 8, 8), routes=True)
    for task, move in enumerate(moves):
        norms = ["1", "5"] if freeze == "none" or task == 0 else ["5"]
        names = {
            name for name in moving_state(network, settings.model, task) if name not in dict(network.named_parameters())
        }
        buffers = ("running_mean", "running_var", "num_batches_tracked")
        assert names == ({f"backbone.{norm}.{buffer}" for norm in norms for buffer in buffers} if move else set())
