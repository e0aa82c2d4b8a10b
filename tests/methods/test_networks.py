"""Networks of a method's own: they learn, travel and are saved with the model."""

import pytest
import torch
from torch import nn

import fedprotip
from fedprotip.methods import Method, base
from fedprotip.settings import KNOWN
from tests.sites import Ends
from tests.small import quick, results, small, tensors


class Mapped(Method):
    """FedAvg whose features pass a mapping of their own on the way to the loss."""

    name = "mapped"

    def networks(self, site):
        return {"mapping": nn.Linear(site.network.features, 3)}

    def loss(self, local, inputs, labels):
        mapped = local.network.extras["mapping"](local.network.embed(inputs))
        return super().loss(local, inputs, labels) + (mapped - 1).square().mean()


@pytest.fixture(autouse=True)
def _known_here_only(monkeypatch):
    monkeypatch.setattr(base, "_methods", dict(base._methods))
    monkeypatch.setitem(KNOWN, "method.name", dict(KNOWN["method.name"]))
    base.register(Mapped)
    quick(monkeypatch)


def settings(*overrides):
    return small(*overrides, method={"name": "mapped"}, stream={"tasks": 2, "task_size": 2})


def test_they_learn_and_travel_and_a_folder_with_them_answers(tmp_path):
    found = {}
    for engine in ("local", "apart"):
        fedprotip.run(settings(f"run.engine={engine}"), out=tmp_path / engine)
        found[engine] = results(tmp_path / engine)
    assert found["local"] == found["apart"]
    born = Ends(settings(), tmp_path).site().network.extras["mapping"].weight
    assert not torch.equal(tensors(tmp_path / "local", "model")["extras.mapping.weight"], born)
    assert fedprotip.load(tmp_path / "local").predict(torch.zeros(1, 1, 8, 8))[0].label


def test_both_ends_are_born_with_the_same(tmp_path):
    one, other = (Ends(settings(), tmp_path / end).site().network.extras["mapping"].weight for end in "ab")
    assert torch.equal(one, other)


def test_a_network_that_is_there_stays_as_it_is(tmp_path):
    """A longer plan makes a new site around the same network."""
    ends = Ends(settings(), tmp_path)
    with torch.no_grad():
        ends.site().network.extras["mapping"].weight.fill_(7.0)
    assert (ends.site().network.extras["mapping"].weight == 7).all()


def test_buffers_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(Mapped, "networks", lambda self, site: {"norm": nn.BatchNorm1d(3)})
    with pytest.raises(ValueError, match="'norm' of the method has buffers"):
        Ends(settings(), tmp_path).site()
