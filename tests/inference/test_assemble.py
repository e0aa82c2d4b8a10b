"""Answers by declaration: what is built in, and a method with a router of its own."""

from dataclasses import dataclass

import pytest
import torch

import fedprotip
from fedprotip.inference import Context, Router, assemble, router
from fedprotip.inference.parts import ROUTERS
from fedprotip.methods import Method, base, create_method, register
from fedprotip.models import build_network
from fedprotip.settings import KNOWN, MethodSettings
from fedprotip.stream.plan import Answering, WayPlan
from tests.small import quick, small


@dataclass(frozen=True)
class Length(Router):
    """The nearest of some lengths of a feature, one for every task."""

    lengths: torch.Tensor

    def evidence(self, seen):
        return -(seen.features.norm(dim=1, keepdim=True) - self.lengths).square()


class Mine(Method):
    """FedAvg that tells tasks apart by the length of features."""

    name = "mine"
    routes = True

    class Options(MethodSettings):
        name: str = "mine"

    def answering(self):
        way = WayPlan(router="length", expert="heads", options={"step": 0.5})
        return Answering(ways={"length": way}, chosen="length")


@pytest.fixture
def mine(monkeypatch):
    quick(monkeypatch)
    monkeypatch.setitem(KNOWN, "method.name", dict(KNOWN["method.name"]))
    monkeypatch.setattr(base, "_methods", dict(base._methods))
    monkeypatch.setitem(ROUTERS, "length", None)
    register(Mine)

    @router("length")
    def build(given: Context) -> Router:
        return Length(given.options["step"] * torch.arange(1, len(given.classes) + 1))


@pytest.mark.usefixtures("mine")
def test_a_method_with_a_router_of_its_own_runs_and_answers(tmp_path):
    summary = fedprotip.run(small(method={"name": "mine"}), out=tmp_path / "r")
    assert summary["routers"].keys() == {"length"}
    predictor = fedprotip.load(tmp_path / "r")
    assert predictor.inference.ways["length"].router.lengths.tolist() == [0.5, 1.0, 1.5]
    answers = predictor.predict(torch.zeros(3, 1, 8, 8))
    assert len({answer.task for answer in answers}) == 1


@pytest.mark.usefixtures("mine")
def test_where_its_router_is_not_registered_the_folder_says_what_to_import(tmp_path):
    fedprotip.run(small("train.rounds=1", method={"name": "mine"}), out=tmp_path / "r")
    del ROUTERS["length"]
    with pytest.raises(fedprotip.UsageError) as error:
        fedprotip.load(tmp_path / "r")
    assert str(error.value) == (
        "The router 'length' is not registered in this process; "
        'first import the file that has @router("length") from fedprotip.inference.'
    )


def test_an_unknown_expert_is_a_sentence_too():
    network = build_network(small(), (1, 8, 8), routes=True)
    with pytest.raises(fedprotip.UsageError, match="The expert 'oracle' is not registered in this process"):
        assemble(Answering(experts={"oracle": {}}), network, {}, [(0, 1)])


@pytest.mark.parametrize("scenario", ["class", "domain"])
@pytest.mark.parametrize("method", sorted(KNOWN["method.name"]))
def test_what_methods_declare_can_be_written_and_read(method, scenario):
    stream = {"scenario": scenario} | ({"domains": "rotate", "task_size": 0} if scenario == "domain" else {})
    try:
        declared = create_method(small(method={"name": method}, clients={"count": 1}, stream=stream)).answering()
    except fedprotip.UsageError:
        pytest.skip(f"{method} does not run in this scenario")
    read = Answering.model_validate_json(declared.model_dump_json())
    assert read == declared
    assert list(read.experts) == list(declared.experts)  # the first one is the model's own
    assert all(way.expert in declared.experts for way in declared.ways.values())
    assert declared.chosen in declared.ways or not declared.ways
