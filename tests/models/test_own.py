"""Any nn.Module from Python: registered under a name, run, resumed, and refused in one sentence where it cannot run."""

import pytest
import torch
from torch import nn

import fedprotip
from fedprotip import UsageError
from fedprotip.models import build_network, register
from tests.small import results, small, tensors


class Stopped(Exception):
    pass


def own_module():
    torch.manual_seed(7)
    convolution = nn.Conv2d(1, 6, 3, padding=1, groups=1)
    return nn.Sequential(convolution, nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Dropout(0.1), nn.Linear(384, 12))


def settings(**model):
    return small("train.rounds=2", stream={"tasks": 2}, model={"name": "mine", **model})


def stop_after(rounds):
    def observe(event):
        if event["event"] == "round":
            observe.left -= 1
            if observe.left == 0:
                raise Stopped

    observe.left = rounds
    return observe


@pytest.mark.parametrize("ready", [False, True], ids=["builder", "ready module"])
def test_ones_own_module_runs_and_is_resumed(tmp_path, registries, no_report, ready):
    """Also when the same ready module serves for every run: each starts from a copy."""
    module = own_module()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    register("mine", {"stem": ("0.", "1.")})(lambda s, shape: module if ready else own_module())
    fedprotip.run(settings(freeze="stem"), out=tmp_path / "whole")
    with pytest.raises(Stopped):
        fedprotip.run(settings(freeze="stem"), out=tmp_path / "parts", observers=[stop_after(3)])
    register("mine", {"stem": ("0.", "1.")})(lambda s, shape: own_module())  # as another process would
    fedprotip.resume(tmp_path / "parts")
    assert results(tmp_path / "whole")["model.safetensors"] == results(tmp_path / "parts")["model.safetensors"]
    assert "layers/5.weight" in tensors(tmp_path / "whole", "subspaces")
    assert "layers/0.weight" not in tensors(tmp_path / "whole", "subspaces")
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


def test_an_unregistered_name_is_one_sentence(tmp_path, registries):
    with pytest.raises(UsageError, match=r"^model.name = 'mine' is unknown; known: .*mlp, resnet18.*\.$"):
        fedprotip.run({"model": {"name": "mine"}}, out=tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_a_run_whose_module_is_not_registered_any_more_cannot_be_resumed(tmp_path, registries, monkeypatch):
    from fedprotip import settings as settings_module

    register("mine")(lambda s, shape: own_module())
    with pytest.raises(Stopped):
        fedprotip.run(settings(), out=tmp_path / "r", observers=[stop_after(1)])
    monkeypatch.delitem(settings_module.KNOWN["model.name"], "mine")
    with pytest.raises(UsageError, match=r"needs model\.name = 'mine', .* the run had tests\.models\.test_own"):
        fedprotip.resume(tmp_path / "r")


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (nn.Flatten(), "no parameters"),
        (nn.Conv2d(1, 2, 3), r"gives \(1, 2, 6, 6\) for one image; a backbone must give one vector, \(1, d\)"),
        (nn.Sequential(nn.Flatten(), nn.Linear(63, 2)), "on images of 1×8×8 fails: mat1 and mat2"),
        (nn.Sequential(nn.Flatten(0), nn.Linear(64, 2)), r"gives \(2,\) for one image"),
    ],
)
def test_a_module_that_makes_no_features_is_refused(tmp_path, registries, module, words):
    register("mine")(lambda s, shape: module)
    with pytest.raises(UsageError, match=words) as error:
        fedprotip.run(settings(), out=tmp_path / "r")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "r").exists()


def test_a_module_without_stages_has_nothing_to_freeze(registries):
    register("mine")(lambda s, shape: own_module())
    with pytest.raises(UsageError, match=r"'stem' is not a stage of 'mine'; known: none\.$"):
        build_network(settings(freeze="stem"), (1, 8, 8), True)
