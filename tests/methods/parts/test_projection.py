"""∆W·Φ = 0 over a whole task, shown on finished run folders: a run of one task, and its extension by another."""

import pytest
import torch

import fedprotip
from fedprotip.methods.base import Method
from fedprotip.methods.fedprotip import FedProTIP
from tests.sites import Ends
from tests.small import results, small, tensors

OPTIMISERS = {
    "sgd": {},
    "momentum and decay": {"momentum": 0.9, "weight_decay": 0.05},
    "adam": {"optimizer": "Adam", "lr": 0.005, "weight_decay": 0.01},
    "adamw": {"optimizer": "AdamW", "lr": 0.005, "weight_decay": 0.1},
}
MODELS = {"mlp": {"name": "mlp", "width": 24}, "cnn": {"name": "small_cnn", "width": 16, "depth": 3}}


def two_tasks(folder, **sections):
    """Per layer (∆W of the second task as a matrix, Φ^(1)), and both models."""
    fedprotip.run(small(stream={"tasks": 1}, **sections), out=folder)
    before = tensors(folder, "model")
    fedprotip.extend(folder, tasks=1)
    after, known = tensors(folder, "model"), tensors(folder, "subspaces")
    layers = {}
    for name in known:
        if name.startswith("layers/"):
            layer = name.removeprefix("layers/")
            change = (after[f"backbone.{layer}"] - before[f"backbone.{layer}"]).flatten(1)
            layers[layer] = change, known[name][:, : known[f"ranks/{layer}"][0]]
    return layers, before, after


def leak(change, phi):
    return (change.double() @ phi.double()).norm() / change.double().norm()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_no_update_touches_the_past(tmp_path, optimiser, model):
    layers, before, after = two_tasks(tmp_path / "r", train=OPTIMISERS[optimiser], model=MODELS[model])
    assert len(layers) >= 2
    for name, (change, phi) in layers.items():
        assert phi.shape[1] > 0, name
        if phi.shape[1] < len(phi):
            assert change.norm() > 0, name
            assert leak(change, phi) <= 1e-5, name
        else:  # a 3×3 kernel on one channel has 9 inputs: soon all of them are protected
            assert change.abs().max() == 0, name
    for name, tensor in before.items():  # biases, norms, their statistics and the old head do not move
        if name.removeprefix("backbone.") not in layers:
            assert torch.equal(tensor, after[name]), name
    assert "heads.1.weight" in after


def test_global_projection_constrains_the_aggregate(tmp_path):
    layers, _, _ = two_tasks(tmp_path / "r", method={"projection": "global"}, train=OPTIMISERS["momentum and decay"])
    assert all(leak(change, phi) <= 1e-5 for change, phi in layers.values())


def test_projecting_the_gradient_lets_weight_decay_through(tmp_path):
    layers, _, _ = two_tasks(tmp_path / "a", method={"project_on": "gradient"}, train={"weight_decay": 0.05})
    assert all(leak(change, phi) > 1e-3 for change, phi in layers.values())
    layers, _, _ = two_tasks(tmp_path / "b", method={"project_on": "gradient"}, train={"weight_decay": 0})
    assert all(leak(change, phi) <= 1e-5 for change, phi in layers.values())


def test_without_projection_everything_moves(tmp_path):
    layers, before, after = two_tasks(tmp_path / "r", method={"projection": "none"})
    assert layers == {}
    assert not torch.equal(before["backbone.1.weight"], after["backbone.1.weight"])
    assert not torch.equal(before["backbone.1.bias"], after["backbone.1.bias"])


def test_a_full_subspace_leaves_nothing_to_learn(tmp_path):
    """With ε = 1 every input of the first kernel is protected: it must not move at all, nor break."""
    layers, _, _ = two_tasks(tmp_path / "r", method={"threshold": 1.0}, model=MODELS["cnn"])
    change, phi = layers["0.weight"]
    assert phi.shape == (9, 9)
    assert change.abs().max() == 0


@pytest.mark.slow
@pytest.mark.slow
def test_rounding_does_not_add_up_over_many_rounds(tmp_path):
    """A hundred rounds with small steps: the change is tiny against the weights, the leak still below 1e-5 of it."""
    train = {"rounds": 100, "lr": 0.01, "epochs": 2}
    layers, _, _ = two_tasks(tmp_path / "r", train=train, method={"threshold": 0.95})
    assert all(leak(change, phi) <= 1e-5 for change, phi in layers.values())


def test_a_layer_at_full_rank_is_left_alone_and_nothing_else_changes(tmp_path, monkeypatch):
    """Without gradient, without traffic; every tensor of the run is as if it had been trained and pulled back."""

    def trained_in_vain(method, site):
        names = Method.trainable(method, site)
        layers = {f"backbone.{layer.parameter}" for layer, _ in site.view.projectors}
        return {name for name in names if site.task == 0 or name.startswith("heads.") or name in layers}

    settings = small(method={"threshold": 0.99}, model=MODELS["cnn"], train=OPTIMISERS["momentum and decay"])
    ours = fedprotip.run(settings, out=tmp_path / "ours")
    monkeypatch.setattr(FedProTIP, "trainable", trained_in_vain)
    plain = fedprotip.run(settings, out=tmp_path / "plain")
    ranks = {name: basis.shape for name, basis in tensors(tmp_path / "ours", "subspaces").items()}
    assert ranks["layers/0.weight"] == (9, 9)
    for file in ("model", "subspaces", "references"):
        one, other = tensors(tmp_path / "ours", file), tensors(tmp_path / "plain", file)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert ours["accuracy"] == plain["accuracy"]
    events = [results(tmp_path / run)["events"] for run in ("ours", "plain")]
    assert [event.get("loss") for event in events[0]] == [event.get("loss") for event in events[1]]


@pytest.mark.parametrize("options", [{"projection": "global"}, {"project_on": "gradient"}])
def test_a_layer_at_full_rank_still_trains_where_steps_are_not_projected(tmp_path, options):
    """Its local changes matter to the other layers, although the average or the gradient is projected."""
    knowledge = {"subspaces/layers/1.weight": torch.eye(64), "subspaces/ranks/1.weight": torch.tensor([64])}
    site, strict = (Ends(settings, tmp_path).site(knowledge, task=1) for settings in (small(method=options), small()))
    assert "backbone.1.weight" in site.network.moving
    assert "backbone.1.weight" not in strict.network.moving
