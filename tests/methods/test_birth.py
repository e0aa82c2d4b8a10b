"""The network at birth beside the trained one: its statistics are those of `lda`, and evidence chooses between them."""

from importlib import import_module

import pytest
import torch
from sklearn.datasets import load_digits

import fedprotip
from fedprotip.models import build_network
from fedprotip.models.prefix import still_prefix
from fedprotip.settings import load as load_settings
from fedprotip.stream.stream import Stream
from tests.small import quick, small, tensors

SHAPE = (1, 8, 8)


def settings(method=(), **sections):
    """Held-back samples, so that there is evidence."""
    sections = {"clients": {"held_back": 0.1}, "model": {"width": 32}, **sections}
    return small(method={"router": "auto", **dict(method)}, **sections)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    quick(monkeypatch)


def test_the_network_at_birth_answers_as_the_closed_form_does(tmp_path):
    trained = fedprotip.run(settings(), out=tmp_path / "trained")
    frozen = fedprotip.run(settings({"name": "lda"}), out=tmp_path / "frozen")
    for mode in ("single", "batch64"):
        assert trained["routers"]["birth"][mode] == pytest.approx(frozen["accuracy"][mode])
    born, sums = tensors(tmp_path / "trained", "birth"), tensors(tmp_path / "frozen", "statistics")
    assert born.keys() == sums.keys()
    assert all(torch.equal(born[name], sums[name]) for name in born)
    assert trained["routers"]["statistics"] != trained["routers"]["birth"]


def test_training_moves_nothing_of_the_network_at_birth(tmp_path):
    made = settings()
    fedprotip.run(made, out=tmp_path / "r")
    kept, start = tensors(tmp_path / "r", "model"), build_network(made, SHAPE, True).state_dict()
    born = {name for name in kept if name.startswith("newborn.")}
    assert born
    for name in born:
        same = name.replace("newborn.", "backbone.")
        assert torch.equal(kept[name], start[same])
        assert not torch.equal(kept[name], kept[same])


def test_training_that_spoils_the_features_is_not_believed(tmp_path):
    """Steps far too long: what they leave of the network answers worse, held-back samples say so."""
    spoiled = fedprotip.run(settings(train={"lr": 1.5, "rounds": 4}), out=tmp_path / "spoiled")
    ways = spoiled["routers"]
    assert spoiled["router"] == "birth"
    assert ways["birth"]["single"] > ways["statistics"]["single"] + 5
    assert spoiled["accuracy"]["single"] == pytest.approx(ways["birth"]["single"])
    (answer,) = fedprotip.load(tmp_path / "spoiled").predict(torch.zeros(1, *SHAPE))
    assert 0 <= answer.probability <= 1


def test_the_network_that_answers_says_what_is_unusual(tmp_path):
    """As the closed form does, however far training has moved the other network."""
    made, answers = {"train": {"lr": 1.5, "rounds": 4}}, []
    images = torch.from_numpy(load_digits().images[:60, None] / 16).float()
    for method in ("fedprotip", "lda"):
        fedprotip.run(settings({"name": method}, **made), out=tmp_path / method)
        answers.append([answer.unusual for answer in fedprotip.load(tmp_path / method).predict(images)])
    assert len(set(answers[0])) > 5
    assert answers[0] == pytest.approx(answers[1], abs=1e-3)


def test_where_nobody_could_hold_a_sample_back_the_network_at_birth_answers(tmp_path, monkeypatch):
    monkeypatch.setattr(Stream, "held_back", lambda self, task, client: self.tasks[task].train[:0])
    made = settings({}, clients={"held_back": 0.01}, train={"lr": 1.5, "rounds": 4}, statistics={"minimum": 1})
    summary = fedprotip.run(made, out=tmp_path / "r")
    assert summary["router"] == "birth"
    assert summary["accuracy"]["single"] == pytest.approx(summary["routers"]["birth"]["single"])


@pytest.mark.parametrize(
    "changes",
    [{"method": {"router": "fused"}}, {"clients": {"held_back": 0.0}}, {"method": {"birth": False}}],
)
def test_where_nobody_would_choose_it_nothing_is_kept(tmp_path, changes):
    made = settings(changes.get("method", ()), **{k: v for k, v in changes.items() if k != "method"})
    summary = fedprotip.run(made, out=tmp_path / "r")
    assert "birth" not in summary["routers"]
    assert not (tmp_path / "r" / "birth.safetensors").exists()
    assert not any(name.startswith("newborn.") for name in tensors(tmp_path / "r", "model"))


def test_it_can_be_asked_for_by_name(tmp_path):
    summary = fedprotip.run(settings({"router": "birth"}, clients={"held_back": 0.0}), out=tmp_path / "r")
    assert summary["accuracy"]["single"] == pytest.approx(summary["routers"]["birth"]["single"])


def test_a_loaded_run_asks_the_network_at_birth_only_where_it_answers(tmp_path, monkeypatch):
    for router, asked in (("statistics", False), ("birth", True)):
        made = settings({"router": "auto"})
        monkeypatch.setattr(import_module("fedprotip.inference.assemble"), "best_way", lambda *args, way=router: way)
        fedprotip.run(made, out=tmp_path / router)
        inference = fedprotip.load(tmp_path / router).inference
        assert inference.chosen == router
        assert inference.sees_birth is asked
        assert ("birth" in inference.ways) is asked
        assert {"cosine", "statistics"} <= inference.ways.keys()


def test_what_is_frozen_is_there_once_and_rows_end_where_learning_began():
    made = load_settings({"model": {"name": "resnet18", "freeze": "layer2"}})
    network = build_network(made, (3, 32, 32), True).eval()
    before = still_prefix(network.requires_grad_(False), made, 1)  # nothing learns: rows could be features
    network.remember_birth(("conv1", "bn1", "layer1", "layer2"))
    own, born = (dict(part.named_parameters()) for part in (network.backbone, network.newborn))
    assert own["layer2.0.conv1.weight"] is born["layer2.0.conv1.weight"]
    assert own["layer3.0.conv1.weight"] is not born["layer3.0.conv1.weight"]
    names = [name for name, _ in network.named_parameters()]
    assert "newborn.layer3.0.conv1.weight" in names
    assert "newborn.layer2.0.conv1.weight" not in names
    assert 0 < still_prefix(network, made, 1) < before
    images = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        found = network.look(images, newborn=True)
        assert torch.equal(found.newborn, found.stacked)
        network.backbone.layer4[1].conv2.weight.zero_()
        again = network.look(images, newborn=True)
    assert torch.equal(again.newborn, found.newborn)
    assert not torch.equal(again.stacked, found.stacked)
