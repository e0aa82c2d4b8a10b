"""What travels of a model is enough: coordinates and rounded changes give it back."""

import json

import pytest
import torch
from torch import nn

import fedprotip
from fedprotip.messages import Message
from fedprotip.models.capture import find_layers
from fedprotip.models.heads import _builders
from fedprotip.models.state import full_state
from fedprotip.subspace.bank import SubspaceBank
from tests.methods.parts.test_projection import leak, two_tasks
from tests.sites import Ends
from tests.small import results, small, tensors
from tests.test_resume import stop_after


class Grouped(nn.Module):
    """A grouped convolution: each group has a basis, and so coordinates, of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 6, 3, stride=2), nn.Conv2d(6, 9, 2, groups=3)

    def forward(self, images):
        return torch.relu(self.second(torch.relu(self.first(images)))).flatten(1)


MIDDLE = [1, 1, "down", "model"]


def test_every_group_of_a_convolution_travels_in_its_own_coordinates(tmp_path, monkeypatch):
    monkeypatch.setitem(_builders, "mlp", lambda *_: Grouped())
    fedprotip.run(small("run.engine=apart", method={"threshold": 0.8}, clients={"count": 4}), out=tmp_path / "r")
    ranks = {name: r.tolist() for name, r in tensors(tmp_path / "r", "subspaces").items() if name.startswith("ranks/")}
    free = 6 * (9 - ranks["ranks/first.weight"][0]) + sum(
        3 * (8 - ranks[f"ranks/second.weight[{g}]"][0]) for g in range(3)
    )
    width = tensors(tmp_path / "r", "model")["heads.1.weight"].numel() + 2
    lines = [json.loads(line) for line in (tmp_path / "r" / "ledger.jsonl").read_text().splitlines()]
    down = {ln["bytes"] for ln in lines if [ln[k] for k in ("task", "round", "direction", "kind")] == MIDDLE}
    assert down == {4 * (free + width)}


@pytest.mark.parametrize(("wire", "error"), [("float32", 1e-6), ("bf16", 4e-3)])
def test_a_packed_model_comes_back(tmp_path, monkeypatch, wire, error):
    """To float precision of the change, also with one coordinate system per group, and without what is inside Φ."""
    monkeypatch.setitem(_builders, "mlp", lambda *_: Grouped())
    ends, bank = Ends(small(train={"wire": wire}), tmp_path), SubspaceBank()
    for layer in (layer for group in find_layers(ends.network.backbone).values() for layer in group):
        bank.extend(layer.name, torch.linalg.qr(torch.randn(layer.d, 3)).Q, 0)
    site = ends.site(bank.to_tensors(), task=1)
    before = {name: tensor.clone() for name, tensor in full_state(site.network).items()}
    inside, state = {}, site.moving()
    with torch.no_grad():
        for name, tensor in state.items():
            tensor.add_(torch.randn(tensor.shape))
            inside[name] = torch.zeros_like(tensor)
        for layer, projector in site.view.projectors:
            change = state[f"backbone.{layer.parameter}"] - before[f"backbone.{layer.parameter}"]
            part = layer.weight({layer.parameter: change})
            layer.weight({layer.parameter: inside[f"backbone.{layer.parameter}"]}).copy_(part - projector(part))
    sent = site.wire.pack(state)
    Message("model", sent).check("model", site.specs)
    back = site.wire.unpack(sent)
    assert back.keys() == {"backbone.first.weight", "backbone.second.weight", "heads.1.weight", "heads.1.bias"}
    for name, tensor in back.items():
        change = tensor - before[name]
        assert (change + inside[name] - (state[name] - before[name])).norm() <= error * change.norm()
    assert sent["backbone.second.weight"].numel() == 9 * (8 - 3)


def test_a_rounded_run_sends_half_and_still_keeps_out_of_the_past(tmp_path):
    for wire in ("float32", "bf16"):
        layers, _, _ = two_tasks(tmp_path / wire, train={"wire": wire, "weight_decay": 0.05})
        assert all(leak(change, phi) <= 1e-5 for change, phi in layers.values())
        known = tensors(tmp_path / wire, "subspaces")
        for name in known:
            if name.startswith("layers/"):
                gram = known[name].double().T @ known[name].double()
                assert (gram - torch.eye(len(gram))).abs().max() <= 1e-6
    exact, rounded = (
        [json.loads(line) for line in (tmp_path / wire / "ledger.jsonl").read_text().splitlines()]
        for wire in ("float32", "bf16")
    )
    for kind in ("model", "basis"):
        up = [
            [ln["bytes"] for ln in lines if (ln["direction"], ln["kind"]) == ("up", kind)] for lines in (exact, rounded)
        ]
        assert 0.5 <= sum(up[1]) / sum(up[0]) < 0.52


def test_a_rounded_run_is_resumed_exactly(tmp_path, monkeypatch):
    settings = small(train={"wire": "bf16"})
    fedprotip.run(settings, out=tmp_path / "whole")
    with monkeypatch.context() as patch:
        stop_after(patch, 3 * 3 + 3 * 2 + 2)  # in the last round of the second task
        with pytest.raises(KeyboardInterrupt):
            fedprotip.run(settings, out=tmp_path / "r")
    fedprotip.resume(tmp_path / "r")
    assert results(tmp_path / "r") == results(tmp_path / "whole")
