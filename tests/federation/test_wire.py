"""What travels is enough: clients that know nothing but their parcels hold the server's model, bit by bit."""

import json

import pytest
import torch
from fedprotip.federation.wire import Wire
from torch import nn

import fedprotip
from fedprotip.federation.client import full_state, load_state, moving_state, prepare, release
from fedprotip.federation.engines.local import LocalEngine
from fedprotip.messages import Message
from fedprotip.methods import create_method
from fedprotip.methods.base import START
from fedprotip.models import build_network
from fedprotip.models.capture import find_layers
from fedprotip.models.heads import _builders
from fedprotip.stream import build_stream
from fedprotip.subspace.bank import SubspaceBank
from tests.methods.parts.test_projection import leak, two_tasks
from tests.small import results, small, tensors
from tests.test_resume import stop_after


class Machine:
    """A client far away: its own model, its own knowledge, and messages that arrive as bytes."""

    def __init__(self, settings):
        self.settings, self.method, self.stream = settings, create_method(settings), build_stream(settings)
        self.network = build_network(settings, self.stream.dataset.image_shape, self.method.routes)
        self.knowledge, self.task = {}, -1

    def receive(self, messages, task):
        for message in map(Message.from_bytes, map(Message.to_bytes, messages)):
            if message.kind == "knowledge":
                self.knowledge.update(message.tensors)
            elif message.kind == "basis":
                self.method.receive(self.knowledge, message, task)
            else:
                missed = {n.removeprefix(START): t for n, t in message.tensors.items() if n.startswith(START)}
                news = {n: t for n, t in message.tensors.items() if not n.startswith(START)}
                prepare(self.network, self.stream, self.settings.run.seed, task)
                load_state(self.network, missed)
                self.begin(task)
                load_state(self.network, self.wire(task).unpack(news))
        self.begin(task)

    def begin(self, task):
        """At the first message of a task it holds W^(t,0)."""
        if self.task == task:
            return
        self.knowledge = {name: tensor for name, tensor in self.knowledge.items() if not name.startswith(START)}
        prepare(self.network, self.stream, self.settings.run.seed, task)
        release(self.network, self.method.trainable(self.network, self.knowledge, task))
        self.wire(task).begin(moving_state(self.network, self.settings, task))
        self.task = task

    def wire(self, task):
        return Wire(self.settings, self.method, self.network, self.knowledge, task)


class Apart(LocalEngine):
    """Clients train as ever, but each one's parcels also go to a machine of its own, which is compared."""

    def present(self, clients):
        """Every third client has nothing of a task: it is asked for its reference only."""
        return [client for client in clients if (client + self.workspace.task) % 3]

    def _ask(self, clients, parcel, work):
        workspace = self.workspace
        machines = workspace.__dict__.setdefault("machines", {})

        def delivered(client):
            machine = machines.setdefault(client, Machine(workspace.settings))
            machine.receive(parcel(client), workspace.task)
            same(full_state(machine.network), full_state(self._network))
            same(*({n: t for n, t in k.items() if "subspaces" in n} for k in (machine.knowledge, workspace.knowledge)))

        return super()._ask(clients, delivered, work)


def same(mine, theirs):
    assert mine.keys() == theirs.keys()
    assert [name for name in theirs if not torch.equal(mine[name], theirs[name])] == []


CHANGING = {"count": 4, "fraction": 0.5, "roster": {"1": "0-2", "2": "1-3,7", "3": "0,4-7"}}
CASES = {
    "local": {},
    "global": {"method": {"projection": "global"}},
    "gradient": {"method": {"project_on": "gradient"}},
    "none": {"method": {"projection": "none"}},
    "fedavg": {"method": {"name": "fedavg"}},
    "cnn": {"model": {"name": "small_cnn", "width": 8, "norm": "track"}},
    "full": {"method": {"threshold": 1.0}, "model": {"name": "small_cnn", "width": 8}},
}


@pytest.mark.parametrize("wire", ["float32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_clients_come_and_go_and_parcels_are_enough(tmp_path, monkeypatch, case, wire):
    """Half of the clients train in a round, some leave, some join in the middle of everything."""
    monkeypatch.setattr("fedprotip.api.LocalEngine", Apart)
    sections = {"clients": CHANGING, "stream": {"tasks": 4}, "train": {"rounds": 3, "wire": wire}, **CASES[case]}
    assert fedprotip.run(small(**sections), out=tmp_path / "r")["tasks"] == 4


class Grouped(nn.Module):
    """A grouped convolution: each group has a basis, and so coordinates, of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 6, 3, stride=2), nn.Conv2d(6, 9, 2, groups=3)

    def forward(self, images):
        return torch.relu(self.second(torch.relu(self.first(images)))).flatten(1)


def test_every_group_of_a_convolution_travels_in_its_own_coordinates(tmp_path, monkeypatch):
    monkeypatch.setitem(_builders, "mlp", lambda *_: Grouped())
    monkeypatch.setattr("fedprotip.api.LocalEngine", Apart)
    fedprotip.run(small(method={"threshold": 0.8}, clients={"count": 4}), out=tmp_path / "r")
    ranks = {name: r.tolist() for name, r in tensors(tmp_path / "r", "subspaces").items() if name.startswith("ranks/")}
    free = 6 * (9 - ranks["ranks/first.weight"][0]) + sum(
        3 * (8 - ranks[f"ranks/second.weight[{g}]"][0]) for g in range(3)
    )
    width = tensors(tmp_path / "r", "model")["heads.1.weight"].numel() + 2
    lines = [json.loads(line) for line in (tmp_path / "r" / "ledger.jsonl").read_text().splitlines()]
    down = {ln["bytes"] for ln in lines if (ln["task"], ln["round"], ln["direction"]) == (1, 1, "down")}
    assert down == {4 * (free + width)}


@pytest.mark.parametrize(("wire", "error"), [("float32", 1e-6), ("bf16", 4e-3)])
def test_a_packed_model_comes_back(monkeypatch, wire, error):
    """To float precision of the change, also with one coordinate system per group, and without what is inside Φ."""
    monkeypatch.setitem(_builders, "mlp", lambda *_: Grouped())
    machine, bank = Machine(small(train={"wire": wire})), SubspaceBank()
    for layer in (layer for group in find_layers(machine.network.backbone).values() for layer in group):
        bank.extend(layer.name, torch.linalg.qr(torch.randn(layer.d, 3)).Q, 0)
    machine.knowledge = bank.to_tensors()
    machine.begin(1)
    before = {name: tensor.clone() for name, tensor in full_state(machine.network).items()}
    layers = [
        (layer, projector) for layer, projector in machine.method.projectors(machine.network, machine.knowledge, 1)
    ]
    inside, state = {}, moving_state(machine.network, machine.settings, 1)
    with torch.no_grad():
        for name, tensor in state.items():
            tensor.add_(torch.randn(tensor.shape))
            inside[name] = torch.zeros_like(tensor)
        for layer, projector in layers:
            change = state[f"backbone.{layer.parameter}"] - before[f"backbone.{layer.parameter}"]
            part = layer.weight({layer.parameter: change})
            layer.weight({layer.parameter: inside[f"backbone.{layer.parameter}"]}).copy_(part - projector(part))
    sent = machine.wire(1).pack(state)
    Message("model", sent).check("model", machine.wire(1).specs(state))
    back = machine.wire(1).unpack(sent)
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
