"""Gradients by products: those that torch gives, only where they pay, and nothing else about a layer changes."""

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedprotip
from fedprotip.models import products
from fedprotip.models.patches import all_columns
from fedprotip.models.products import by_products
from tests.models.test_patches import UNGROUPED
from tests.small import quick


class Halved:
    """A method that takes the gradient of a weight from half of its columns' length."""

    def serve(self, module, inputs):
        return True

    def __call__(self, module, inputs):
        return 0.5 * all_columns(module, inputs)


def used(output):
    return output.grad_fn is not None and output.grad_fn.name() == "_ProductsBackward"


def gradients(module, images, given=True):
    """Of the inputs and all trainable parameters, for a loss that is not linear."""
    images = images.clone().requires_grad_(given)
    wanted = [*([images] if given else []), *(p for p in module.parameters() if p.requires_grad)]
    return torch.autograd.grad(module(images).square().sum(), wanted)


def close(ones, others):
    return all(torch.allclose(one, other) for one, other in zip(ones, others, strict=True))


def conv(out=128, **options):
    torch.manual_seed(0)
    return nn.Conv2d(4, out, (3, 2), **options).double()


IMAGES = torch.randn(2, 4, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("options", UNGROUPED, ids=str)
def test_every_convolution_gets_the_gradients_that_torch_gives(options, bias):
    layer = conv(bias=bias, **options)
    expected = gradients(layer, IMAGES)
    with by_products(layer):
        assert used(layer(IMAGES))
        assert close(gradients(layer, IMAGES), expected)
        assert close(gradients(layer, IMAGES, given=False), expected[1:])
    assert not used(layer(IMAGES))


@pytest.mark.parametrize("frozen", ["weight", "bias"])
@pytest.mark.parametrize("options", [{"padding": 1}, {"padding": 1, "stride": 2}], ids=str)
def test_what_is_frozen_gets_no_gradient_and_the_rest_the_same(options, frozen):
    layer = conv(**options)
    getattr(layer, frozen).requires_grad_(False)
    expected = gradients(layer, IMAGES)
    with by_products(layer):
        assert close(gradients(layer, IMAGES), expected)
        layer(IMAGES).sum().backward()
        assert getattr(layer, frozen).grad is None
        layer.requires_grad_(False)
        assert not layer(IMAGES).requires_grad


@pytest.mark.parametrize("options", [{"padding": 1}, {"padding": 1, "stride": 2}], ids=str)
def test_gradients_can_be_differentiated_again(options):
    """As a penalty on gradients needs it: of inputs and of weights."""
    layer = conv(**options)

    def penalty():
        images = IMAGES.clone().requires_grad_()
        first = torch.autograd.grad(layer(images).pow(3).sum(), (images, layer.weight), create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), (images, *layer.parameters()))

    expected = penalty()
    with by_products(layer):
        assert used(layer(IMAGES))
        assert close(penalty(), expected)


def hooked():
    layer = conv()
    layer.register_forward_hook(lambda module, inputs, output: 3 * output)
    return layer


class Standardised(nn.Conv2d):
    def forward(self, x):
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding)


def overridden():
    layer = conv()
    vars(layer)["forward"] = lambda x: nn.Conv2d.forward(layer, 2 * x)
    return layer


OWN = {
    "more positions than outputs": lambda: conv(out=17),
    "groups": lambda: conv(groups=2),
    "a foreign hook": hooked,
    "another class": lambda: Standardised(4, 128, 3).double(),
    "another forward": overridden,
    "linear": lambda: nn.Linear(4, 128).double(),
}


@pytest.mark.parametrize("layer", OWN)
def test_other_layers_keep_the_gradients_of_torch(layer):
    layer = OWN[layer]()
    before = dict(vars(layer))
    expected = gradients(layer, IMAGES)
    with by_products(layer):
        assert not used(layer(IMAGES))
        assert all(torch.equal(one, other) for one, other in zip(gradients(layer, IMAGES), expected, strict=True))
    assert vars(layer).keys() == before.keys()
    assert vars(layer).get("forward") is before.get("forward")


def test_sizes_alone_decide():
    """Nine positions an image: 18 are no more than 18 outputs, 27 are."""
    with by_products(layer := conv(out=18)):
        assert used(layer(IMAGES))
        assert not used(layer(IMAGES[[0, 1, 0]]))
        with torch.no_grad():
            assert not used(layer(IMAGES))
        with torch.autocast("cpu", torch.bfloat16):
            assert not used(layer.float()(IMAGES.float()))


def test_one_image_without_a_batch():
    layer = conv(padding=1)
    expected = gradients(layer, IMAGES[0])
    with by_products(layer):
        assert close(gradients(layer, IMAGES[0]), expected)


def test_a_change_in_place_right_behind_the_layer():
    layer = nn.Sequential(conv(), nn.ReLU(inplace=True))
    expected = gradients(layer, IMAGES)
    with by_products(layer):
        assert close(gradients(layer, IMAGES), expected)


def test_inputs_that_changed_since_are_noticed():
    layer, images = conv(), IMAGES.clone()
    with by_products(layer):
        output = layer(images)
        images.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


@pytest.mark.parametrize("options", [{"padding": 1}, {"padding": 1, "stride": 2}], ids=str)
def test_channels_last_stay_last(options):
    layer, images = conv(**options), IMAGES.contiguous(memory_format=torch.channels_last)
    expected, strides = gradients(layer, images), layer(images).stride()
    with by_products(layer):
        assert layer(images).stride() == strides
        assert close(gradients(layer, images), expected)


@pytest.mark.parametrize("options", [{"padding": 1}, {"padding": 1, "stride": 2}], ids=str)
def test_nothing_more_is_kept_for_the_way_back(options):
    def kept():
        images, found = IMAGES.clone().requires_grad_(), set()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: found.add(t.data_ptr()) or t, lambda t: t):
            layer(images)
        return found == {images.data_ptr(), layer.weight.data_ptr()}

    layer = conv(**options)
    assert kept()
    with by_products(layer):
        assert kept()


def test_a_shared_layer_adds_up():
    shared = nn.Conv2d(8, 8, 3, padding=1).double()
    twice, images = nn.Sequential(shared, nn.Tanh(), shared), torch.randn(2, 8, 2, 2).double()
    expected = gradients(twice, images)
    with by_products(twice):
        assert close(gradients(twice, images), expected)


def test_a_failing_call_leaves_nothing_behind():
    layer = conv()
    with by_products(layer):
        with pytest.raises(RuntimeError):
            layer(IMAGES[:, :3])
        assert layer.weight.requires_grad
    with pytest.raises(RuntimeError), by_products(layer):
        layer(IMAGES[:, :3])
    assert "forward" not in vars(layer)


def test_a_copy_made_meanwhile_has_its_own_weight():
    layer = conv()
    with by_products(layer):
        other = deepcopy(layer)
        other(IMAGES).sum().backward()
        assert other.weight.grad is not None
        assert layer.weight.grad is None


@pytest.mark.parametrize("layer", [lambda: conv(padding=1), lambda: conv(stride=2), OWN["linear"]])
def test_other_columns_change_the_gradient_of_the_weight_alone(layer):
    layer = layer()
    inputs, weight, bias = gradients(layer, IMAGES)
    with by_products(layer, {layer.weight: Halved()}):
        assert used(layer(IMAGES))
        assert close(gradients(layer, IMAGES), (inputs, 0.5 * weight, bias))


def test_other_columns_need_every_layer_with_the_weight_to_be_plain():
    layers = nn.ModuleList([conv(), Standardised(4, 128, (3, 2)).double()])
    layers[1].weight = layers[0].weight
    expected = gradients(layers[0], IMAGES)
    with by_products(layers, {layers[0].weight: Halved()}):
        assert close(gradients(layers[0], IMAGES), expected)


@pytest.mark.parametrize(("layer", "function"), [(conv, F.conv2d), (OWN["linear"], F.linear)])
def test_other_columns_under_autocast(layer, function):
    """In half precision; a weight that is used elsewhere too keeps both its gradients."""
    layer, images = layer().float(), IMAGES.float()

    def gradient():
        with torch.autocast("cpu", torch.bfloat16):
            called = layer(images)
            elsewhere = function(images, layer.weight)
        assert called.dtype == torch.bfloat16
        return torch.autograd.grad(called.float().sum(), layer.weight, retain_graph=True)[0], elsewhere.requires_grad

    expected, _ = gradient()
    with by_products(layer, {layer.weight: Halved()}):
        found, elsewhere = gradient()
    assert elsewhere
    assert torch.allclose(found, 0.5 * expected, rtol=0.05, atol=0.05)


def test_fedavg_trains_by_products(tmp_path, monkeypatch):
    """Where its maps are small; with large batches they are not."""
    quick(monkeypatch)
    calls = []
    monkeypatch.setattr(products, "all_columns", lambda *given: calls.append(1) or all_columns(*given))
    sections = {
        "stream": {"tasks": 1},
        "clients": {"count": 1},
        "model": {"name": "small_cnn", "width": 16, "depth": 3},
        "method": {"name": "fedavg"},
        "train": {"rounds": 1, "steps": 2},
    }
    fedprotip.run(fedprotip.load_settings(sections, ["train.batch=4"]), out=tmp_path / "few")
    assert calls
    calls.clear()
    fedprotip.run(fedprotip.load_settings(sections, ["train.batch=64"]), out=tmp_path / "many")
    assert not calls


def test_gradients_of_single_samples():
    """Methods that bound what one sample contributes map over samples."""
    network = nn.Sequential(nn.Conv2d(2, 32, 3, stride=2, padding=1, padding_mode="reflect"), nn.Conv2d(32, 32, 2))
    images, weights = torch.randn(3, 2, 6, 6), dict(network.named_parameters())

    def loss(weights, image):
        return torch.func.functional_call(network, weights, (image[None],)).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), (None, 0))
    expected = each(weights, images)
    with by_products(network):
        found = each(weights, images)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-4)
