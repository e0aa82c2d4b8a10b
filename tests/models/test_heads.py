"""Growing heads: seeded by their task, independent of history."""

import pytest
import torch
from torch import nn

from fedprotip.models import Network, build_network, heads, new_network
from fedprotip.models.heads import register
from fedprotip.models.state import full_state
from fedprotip.settings import ModelSettings, load

SHAPE = (1, 4, 4)


def network(routes=True, **sections):
    raw = {"model": {"width": 6}} | sections
    return build_network(load(raw), SHAPE, routes)


def weights(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_weights_belong_to_the_seed_and_leave_the_global_generator_alone():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    one, other = network(), network()
    assert torch.equal(torch.rand(1), expected)
    assert same(weights(one), weights(other))
    assert not same(weights(network(run={"seed": 1})), weights(one))


def test_a_head_depends_on_its_task_and_not_on_what_came_before():
    straight, late = network(), network()
    for task in range(3):
        straight.add_head([2 * task, 2 * task + 1], seed=0, task=task)
    torch.rand(50)
    late.add_head([4, 5], seed=0, task=2)
    assert same(weights(straight.heads[2]), weights(late.heads[0]))
    assert not same(weights(straight.heads[0]), weights(straight.heads[1]))


def test_old_heads_do_not_change_when_a_new_one_comes():
    net = network()
    net.add_head([0, 1], 0, 0)
    before = weights(net)
    net.add_head([2, 3, 4], 0, 1)
    assert same({name: weights(net)[name] for name in before}, before)
    assert [head.out_features for head in net.heads] == [2, 3]
    assert net.labels == [(0, 1), (2, 3, 4)]


def test_outputs_are_those_of_the_heads_one_after_another():
    net = network()
    net.add_head([5, 3], 0, 0)
    net.add_head([3, 8, 1], 0, 1)
    images = torch.randn(7, *SHAPE)
    features = net.backbone(images)
    assert net(images).shape == (7, 5)
    torch.testing.assert_close(net(images)[:, :2], net.logits(features, 0))
    torch.testing.assert_close(net(images)[:, 2:], net.logits(features, 1))
    assert net.targets(torch.tensor([3, 5, 3]), 0).tolist() == [1, 0, 1]
    assert net.targets(torch.tensor([3, 1, 8]), 1).tolist() == [0, 2, 1]


def test_a_shared_head_is_made_once():
    net = Network(nn.Linear(3, 4), 4, shared_head=True)
    for task in range(3):
        net.add_head([0, 1], 0, task)
        assert net.head_of(task) == 0
    assert len(net.heads) == len(net.labels) == 1
    assert net(torch.zeros(2, 3)).shape == (2, 2)


@pytest.mark.parametrize(
    ("head", "scenario", "routes", "shared"),
    [
        ("auto", "class", True, False),
        ("auto", "class", False, False),
        ("auto", "domain", True, False),
        ("auto", "domain", False, True),
        ("shared", "domain", True, True),
        ("per_task", "domain", False, False),
    ],
)
def test_which_runs_share_a_head(head, scenario, routes, shared):
    assert network(routes, model={"head": head}, stream={"scenario": scenario}).shared_head == shared


def test_the_feature_width_is_measured():
    assert network(model={"width": 11}).features == 11
    assert network(model={"name": "small_cnn", "width": 12}).features == 12


def test_a_backbone_of_ones_own(registries):
    register("mine")(lambda settings, shape: nn.Sequential(nn.Flatten(), nn.Linear(16, 3), nn.Dropout()))
    net = network(model={"name": "mine"})
    assert net.features == 3
    assert not net.backbone.training


@pytest.mark.parametrize("name", ["mlp", "small_cnn", "resnet18", "vit"])
def test_weights_that_are_there_are_not_drawn_first(name, monkeypatch):
    model, shape = ModelSettings(name=name, width=12, depth=4), (3, 8, 8)
    drawn = new_network(model, shape, 0, False)

    monkeypatch.setattr(heads, "ambient_stream", None)
    before = torch.get_rng_state()
    filled = new_network(model, shape, 0, False, weights(drawn.backbone))
    assert torch.equal(torch.get_rng_state(), before)
    assert same(weights(filled), weights(drawn))
    assert full_state(filled).keys() == weights(filled).keys()  # none that is not in a file of weights
    doubled = {name: tensor.double() for name, tensor in weights(drawn.backbone).items()}
    assert same(weights(new_network(model, shape, 0, False, doubled)), weights(drawn))  # in numbers of its own kind
    assert (filled.features, filled.stacked, filled.first) == (drawn.features, drawn.stacked, drawn.first)


def test_what_a_backbone_of_ones_own_draws_beside_its_weights_stays_the_same(registries):
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, 3)
            self.mask = torch.rand(3)

        def forward(self, x):
            return self.linear(x.flatten(1)) * self.mask

    register("masked")(lambda settings, shape: Masked())
    model = ModelSettings(name="masked")
    drawn = new_network(model, SHAPE, 0, False)
    filled = new_network(model, SHAPE, 0, False, weights(drawn.backbone))
    assert torch.equal(filled.backbone.mask, drawn.backbone.mask)
