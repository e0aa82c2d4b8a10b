"""Clients that know nothing but their parcels hold the server's model and knowledge, bit by bit."""

import numpy as np
import pytest
import torch
from torch import nn

import fedprotip
from fedprotip.federation.client import Client
from fedprotip.federation.parcels import Ask
from fedprotip.federation.server import Server
from fedprotip.messages import Message
from fedprotip.methods.exchange import Exchange
from fedprotip.methods.fedlwf import FedLwF
from fedprotip.models.heads import _builders
from fedprotip.models.state import full_state
from fedprotip.stream.holdings import Holding
from tests.small import quick, results, small

CHANGING = {"count": 4, "fraction": 0.5, "roster": {"1": "0-2", "2": "1-3,7", "3": "0,4-7"}}
CASES = {
    "local": {},
    "global": {"method": {"projection": "global"}},
    "gradient": {"method": {"project_on": "gradient"}},
    "none": {"method": {"projection": "none"}},
    "fedavg": {"method": {"name": "fedavg"}},
    "cnn": {"model": {"name": "small_cnn", "width": 8, "norm": "track"}},
    "full": {"method": {"threshold": 1.0}, "model": {"name": "small_cnn", "width": 8}},
    "calibrated": {"clients": CHANGING | {"held_back": 0.2}},
}


def same(mine, theirs):
    assert mine.keys() == theirs.keys()
    assert [name for name in theirs if not torch.equal(mine[name], theirs[name])] == []


@pytest.fixture
def compared(monkeypatch):
    """After every answer that needs the model, a client holds what the server holds; how many such answers."""
    servers, seen = [], []
    request, handle, samples = Server.request, Client.handle, Holding.samples

    def noted(self, *arguments):
        servers[:] = [self]
        return request(self, *arguments)

    def checked(self, parcel):
        message, (server,) = handle(self, parcel), servers
        assert message.kind == Ask.of(parcel[0]).exchange
        if server.method.exchange(message.kind).needs_model:
            same(full_state(self._site.network), full_state(server.network))
            same(self._site.known, server.site.known.shared())
            seen.append(message.kind)
        return message

    def third_has_none(self, task):
        """Every third client has nothing of a task: it is asked for its reference only."""
        return samples(self, task) if (self.client + task) % 3 else np.array([], dtype=np.int64)

    monkeypatch.setattr(Server, "request", noted)
    monkeypatch.setattr(Client, "handle", checked)
    monkeypatch.setattr(Holding, "samples", third_has_none)
    quick(monkeypatch)
    return seen


@pytest.mark.parametrize("wire", ["float32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_clients_come_and_go_and_parcels_are_enough(tmp_path, compared, case, wire):
    """Half of the clients train in a round, some leave, some join in the middle of everything."""
    sections = {"clients": CHANGING, "stream": {"tasks": 4}, "train": {"rounds": 3, "wire": wire}, **CASES[case]}
    summary = fedprotip.run(small("run.engine=apart", **sections), out=tmp_path / "r")
    assert summary["tasks"] == 4
    assert summary["failures"]["count"] == 0
    assert compared.count("model") >= 4 * 3


@pytest.mark.parametrize("case", ["local", "fedavg"])
def test_the_same_bytes_as_on_one_shared_model(tmp_path, case):
    for engine in ("local", "apart"):
        sections = {"clients": CHANGING, "stream": {"tasks": 4}, **CASES[case]}
        fedprotip.run(small(f"run.engine={engine}", **sections), out=tmp_path / engine)
    assert results(tmp_path / "apart") == results(tmp_path / "local")


def test_a_client_is_told_no_path_and_no_setting_of_the_servers_machine(tmp_path, monkeypatch):
    """The plan says what is to be learned; where data and results lie is each machine's own."""
    plans, handle = [], Client.handle

    def noted(self, parcel):
        plans.extend(message.meta["settings"] for message in parcel if message.kind == "plan")
        return handle(self, parcel)

    monkeypatch.setattr(Client, "handle", noted)
    settings = small("run.engine=apart", "run.cache_mb=7", stream={"tasks": 1})
    fedprotip.run(settings, out=tmp_path / "secret")
    assert len(plans) == 3
    assert not any("secret" in plan or "apart" in plan or "cache_mb = 7" in plan for plan in plans)


class Says(Exchange):
    """What a client holds as the model of the last task, once and once more."""

    def __init__(self, name):
        self.name = name

    def answer(self, local):
        return Message(self.name, {"sum": sum(p.double().sum() for p in local.before.parameters())[None]})

    def digest(self, combined, site):
        for _, message in combined:
            HEARD.append((self.name, message.tensors["sum"].item()))
        return Message(self.name)


HEARD = []


def test_what_is_remembered_after_the_last_round_is_the_same_as_in_one_process(tmp_path, monkeypatch):
    quick(monkeypatch)
    monkeypatch.setattr(FedLwF, "at_end", lambda self: [Says("first"), Says("second")])
    heard = []
    for engine in ("local", "apart"):
        HEARD.clear()
        fedprotip.run(small(f"run.engine={engine}", method={"name": "fedlwf"}), out=tmp_path / engine)
        heard.append(list(HEARD))
    assert heard[0] == heard[1]


def spectral(*_):
    """A backbone with a buffer of its own that training changes: the norm's direction."""
    return nn.Sequential(nn.Flatten(), nn.utils.parametrizations.spectral_norm(nn.Linear(64, 16)), nn.ReLU())


def test_buffers_that_training_changes_are_put_back_everywhere(tmp_path, monkeypatch):
    """Else clients of one process would hand them on to each other."""
    quick(monkeypatch)
    monkeypatch.setitem(_builders, "mlp", spectral)
    for engine in ("local", "apart"):
        settings = small(f"run.engine={engine}", method={"name": "fedavg"}, stream={"tasks": 2}, train={"rounds": 2})
        fedprotip.run(settings, out=tmp_path / engine)
    assert results(tmp_path / "local") == results(tmp_path / "apart")
