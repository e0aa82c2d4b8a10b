"""One round on one layer, mostly in float64: projecting inputs does the same as projecting weights."""

from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedprotip.methods.parts.projection import ProjectUpdate, linear_decay
from fedprotip.methods.parts.training import build_optimizer
from fedprotip.models.capture import find_layers
from fedprotip.models.products import by_products
from fedprotip.settings import TrainSettings
from fedprotip.subspace.project import Anchored, Projector
from tests.methods.parts.test_projection import leak


class Tokens(nn.Module):
    """The same Linear on every token, twice: a shared module."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(12, 12, bias=False)

    def forward(self, x):
        return torch.tanh(self.layer(torch.tanh(self.layer(x.flatten(1)[:, :24].unflatten(1, (2, 12)))))).flatten(1)


def convolution(**options):
    """A change in place right behind the layer, as published models have it."""
    return nn.Sequential(nn.Conv2d(3, 24, 3, **options), nn.ReLU(inplace=True), nn.Flatten())


LAYERS = {
    "linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(75, 20), nn.Tanh()),
    "tokens": Tokens,
    "conv": lambda: convolution(),
    "stride": lambda: convolution(stride=2, padding=1),
    "dilation": lambda: convolution(stride=(2, 1), dilation=(1, 2), padding=(1, 0)),
    "reflect": lambda: convolution(stride=2, padding=1, padding_mode="reflect"),
    "same": lambda: convolution(padding="same", dilation=2),
    "small map": lambda: nn.Sequential(nn.AdaptiveAvgPool2d(2), convolution(padding=1)),
}
LINEAR = {
    "plain": {},
    "decay": {"weight_decay": 0.1},
    "momentum": {"momentum": 0.9, "weight_decay": 0.05, "optimizer_options": {"dampening": 0.2}},
    "nesterov": {"momentum": 0.8, "weight_decay": 0.05, "optimizer_options": {"nesterov": True}},
}


@contextmanager
def projected(backbone, layers, decay):
    """A round as a client trains it."""
    with ProjectUpdate(backbone, layers, decay) as constraint, by_products(backbone, constraint.columns):
        yield constraint


def one_round(make, train, share, project_inputs, batch=2, steps=6, dtype=torch.float64):
    """Weights before and after a round, Φ, and how often a weight was pulled back."""
    torch.manual_seed(0)
    backbone = make().to(dtype)
    ((layer,),) = find_layers(backbone).values()
    phi = torch.linalg.qr(torch.randn(layer.d, int(share * layer.d), dtype=torch.float64))[0].to(dtype)
    weight = backbone.get_parameter(layer.parameter)
    before = weight.detach().clone()
    settings = TrainSettings(**{"lr": 0.05} | train)
    optimizer = build_optimizer(settings, list(backbone.parameters()))
    decay = linear_decay(settings) if project_inputs else None
    pulls = 0
    with projected(backbone, [(layer, Projector.outside(phi))], decay) as constraint:
        for _ in range(steps):
            features = backbone(torch.randn(batch, 3, 5, 5, dtype=dtype))
            optimizer.zero_grad()
            F.cross_entropy(features, torch.arange(batch)).backward()
            constraint.before_step()
            optimizer.step()
            kept = weight.detach().clone()
            constraint.after_step()
            pulls += not torch.equal(kept, weight)
    assert not any("forward" in vars(m) for m in backbone.modules())
    assert weight.requires_grad
    return before.flatten(1), weight.detach().flatten(1), phi, pulls


@pytest.mark.parametrize("share", [0.3, 0.8])
@pytest.mark.parametrize("train", LINEAR)
@pytest.mark.parametrize("layer", LAYERS)
def test_projected_inputs_give_the_update_that_projected_weights_give(layer, train, share):
    before, by_weight, phi, pulls = one_round(LAYERS[layer], LINEAR[train], share, False)
    assert pulls == 6
    _, by_inputs, _, pulls = one_round(LAYERS[layer], LINEAR[train], share, True)
    assert pulls == (6 if layer == "same" else 0)  # 2·25 positions against 24 outputs
    assert (by_weight - before).norm() > 1e-3
    assert torch.allclose(by_inputs, by_weight, atol=1e-11)
    assert leak(by_inputs - before, phi) <= 1e-12


@pytest.mark.parametrize("layer", ["linear", "stride", "small map"])
def test_an_empty_basis_holds_nothing_back(layer):
    _, plain, phi, _ = one_round(LAYERS[layer], LINEAR["decay"], 0.0, False)
    assert phi.shape[1] == 0
    assert torch.allclose(one_round(LAYERS[layer], LINEAR["decay"], 0.0, True)[1], plain, atol=1e-11)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layer", [name for name in LAYERS if name != "tokens"])
def test_inputs_and_biases_get_the_gradient_that_torch_gives_them(layer, bias):
    """The layers before a tapped one learn from it."""
    torch.manual_seed(0)
    backbone = LAYERS[layer]().double()
    module = next(m for m in backbone.modules() if isinstance(m, nn.Linear | nn.Conv2d))
    module.bias.requires_grad_(bias)
    images = torch.randn(1, 3, 5, 5, dtype=torch.float64)

    def gradients():
        given = images.clone().requires_grad_()
        wanted = (given, module.bias) if bias else (given,)
        return torch.autograd.grad(backbone(given).square().sum(), wanted)

    ((one,),) = find_layers(backbone).values()
    expected = gradients()
    with projected(backbone, [(one, Projector.outside(torch.eye(one.d, 2, dtype=torch.float64)))], 0.0):
        found = gradients()
    assert all(torch.allclose(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


class Scaled(nn.Linear):
    """A layer with a forward of its own, and an argument of its own."""

    def forward(self, x, scale=1.0):
        return scale * super().forward(x)


class Standardised(nn.Conv2d):
    def forward(self, x):
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding)


class Doubled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = Scaled(75, 20)

    def forward(self, x):
        return torch.tanh(self.layer(x.flatten(1), 2.0))


def hooked():
    backbone = convolution()
    backbone[0].register_forward_hook(lambda module, inputs, output: 3 * output)
    return backbone


OTHER = {
    "own forward": Doubled,
    "other weight": lambda: nn.Sequential(Standardised(3, 24, 3), nn.Flatten()),
    "foreign hook": hooked,
}


@pytest.mark.parametrize("layer", OTHER)
def test_layers_that_are_more_than_a_product_are_projected_by_their_weight(layer):
    torch.manual_seed(0)
    backbone = OTHER[layer]().double()
    ((one,),) = find_layers(backbone).values()
    projector = Projector.outside(torch.eye(one.d, 2, dtype=torch.float64))
    images = torch.randn(1, 3, 5, 5, dtype=torch.float64)

    def gradients():
        given = images.clone().requires_grad_()
        return torch.autograd.grad(backbone(given).square().sum(), (given, backbone.get_parameter(one.parameter)))

    expected = gradients()
    with projected(backbone, [(one, projector)], 0.0) as constraint:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(gradients(), expected, strict=True))
        weight = backbone.get_parameter(one.parameter)
        before = weight.detach().clone()
        with torch.no_grad():
            weight.add_(1.0)
        constraint.after_step()
        assert leak((weight.detach() - before).flatten(1), projector.basis) <= 1e-12


@pytest.mark.parametrize("other", [{"padding": 2, "dilation": 2}, {"padding": 1, "stride": 2}], ids=str)
@pytest.mark.parametrize("rank", [8, 20])
def test_convolutions_that_share_a_weight_keep_their_own_geometry(other, rank):
    torch.manual_seed(0)
    backbone = nn.ModuleList([nn.Conv2d(3, 40, 3, padding=1), nn.Conv2d(3, 40, 3, **other)]).double()
    backbone[1].weight = backbone[0].weight
    ((one,),) = find_layers(backbone).values()
    phi = torch.linalg.qr(torch.randn(27, rank, dtype=torch.float64))[0]
    images = torch.randn(2, 3, 2, 2, dtype=torch.float64)

    def gradient():
        loss = sum(conv(images).square().sum() for conv in backbone)
        return torch.autograd.grad(loss, backbone[0].weight)[0].flatten(1)

    expected = gradient()
    with projected(backbone, [(one, Projector.outside(phi))], 0.0):
        assert torch.allclose(gradient(), expected - expected @ phi @ phi.T)


def test_the_larger_side_is_not_projected():
    """18 positions are fewer than 24 outputs, 27 are more."""
    assert one_round(LAYERS["conv"], {}, 0.3, True, batch=2)[3] == 0
    assert one_round(LAYERS["conv"], {}, 0.3, True, batch=3)[3] == 6


@pytest.mark.slow
def test_a_round_by_inputs_leaves_no_rounding_behind():
    """Many small steps: without the last pull, rounding would have added up to six times as much."""
    train = {"lr": 1e-3, "momentum": 0.9}
    before, after, phi, pulls = one_round(LAYERS["linear"], train, 0.5, True, steps=4000, dtype=torch.float32)
    assert pulls == 0
    assert leak(after - before, phi) <= 8e-7


def test_grouped_convolutions_are_projected_by_their_weight():
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Conv2d(4, 8, 3, groups=2), nn.Flatten())
    (layers,) = find_layers(backbone).values()
    phi = torch.linalg.qr(torch.randn(18, 5))[0]
    before = backbone[0].weight.detach().clone()
    with projected(backbone, [(layer, Projector.outside(phi)) for layer in layers], 0.0) as constraint:
        backbone(torch.randn(1, 4, 3, 3)).square().sum().backward()
        with torch.no_grad():
            backbone[0].weight -= backbone[0].weight.grad
        constraint.after_step()
    assert leak((backbone[0].weight.detach() - before).flatten(1), phi) <= 1e-6


def test_a_failed_step_leaves_the_model_as_it_was_made():
    backbone = nn.Sequential(nn.Linear(4, 8))
    ((layer,),) = find_layers(backbone).values()
    with pytest.raises(RuntimeError), projected(backbone, [(layer, Projector.outside(torch.eye(4, 1)))], 0.0):
        backbone(torch.randn(2, 5))  # a wrong width
    assert backbone[0].weight.requires_grad
    assert "forward" not in vars(backbone[0])


def test_only_sgd_is_linear_in_the_gradient():
    assert linear_decay(TrainSettings(weight_decay=0.1)) == 0.1
    assert linear_decay(TrainSettings(weight_decay=0.1, optimizer_options={"weight_decay": 0.2})) == 0.2
    assert linear_decay(TrainSettings(optimizer_options={"maximize": True})) is None
    assert linear_decay(TrainSettings(optimizer="AdamW")) is None


@pytest.mark.parametrize("share", [0.3, 0.8])
def test_the_fixed_part_is_what_no_update_changes(share):
    phi = torch.linalg.qr(torch.randn(10, int(10 * share), dtype=torch.float64))[0]
    weight = torch.randn(3, 10, dtype=torch.float64)
    anchored: Anchored = Projector.outside(phi).anchor(weight)
    assert torch.allclose(anchored.fixed_part, weight @ phi @ phi.T)
