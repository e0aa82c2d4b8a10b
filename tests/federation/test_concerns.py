"""Warnings of a run, as its owner meets them: in the terminal, in events.jsonl and in the report."""

import json
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import nn

import fedprotip
from fedprotip.federation import concerns
from fedprotip.federation.concerns import best_ahead
from fedprotip.models import heads, register
from fedprotip.settings import KNOWN, to_toml
from tests.small import small


class Scaled(nn.Module):
    """A backbone without any layer that has an input subspace."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, images):
        return images.flatten(1) * self.scale


@pytest.fixture
def backbones(monkeypatch):
    monkeypatch.setitem(KNOWN, "model.name", dict(KNOWN["model.name"]))
    monkeypatch.setattr(heads, "_builders", dict(heads._builders))
    register("scaled")(lambda settings, shape: Scaled())
    register("linear")(lambda settings, shape: nn.Sequential(nn.Flatten(), nn.Linear(64, 12)))


def warnings(folder):
    lines = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [line["text"] for line in lines if line["event"] == "warning"]


def told(tmp_path, call, *overrides):
    """The warnings of a run by command; each stands once in the terminal and in the report."""
    settings, folder = tmp_path / "small.toml", tmp_path / "r"
    settings.write_text(to_toml(small("train.rounds=1", *overrides)))
    code, _, err = call("run", settings, "--out", folder)
    assert code == 0, err
    page, found = (folder / "report.html").read_text().replace("&#39;", "'"), warnings(folder)
    for text in found:
        assert err.count(text) == page.count(text) == 1
    return found


def test_layers_without_room_are_named_once(tmp_path, call):
    """With ε = 1 hidden layers are full after a task or two: each is named after the task that filled it."""
    found = told(tmp_path, call, "method.threshold=1.0", "method.budget=none", "stream.tasks=3", "model.width=8")
    full = [text for text in found if "span all inputs" in text]
    assert full
    assert all("A smaller method.threshold or a larger model.width" in text for text in full)
    assert sum(text.count("3.weight") for text in full) == 1
    assert not any("routing bases" in text for text in found)  # the configured router does not need them


def test_a_full_routing_basis(tmp_path, call, backbones):
    full = ("method.threshold=1.0", "method.budget=none")
    found = told(tmp_path, call, *full, "method.router=cosine", "stream.tasks=2", "model.name=linear")
    (text,) = [text for text in found if "routing bases" in text]
    assert "span all 12 features" in text
    assert "method.routing_rank = 20" in text


def test_plenty_of_room_is_no_concern(tmp_path, call):
    assert told(tmp_path, call, "method.threshold=0.3", "stream.tasks=2", "method.router=statistics") == []


def test_a_backbone_that_cannot_be_protected(tmp_path, call, backbones):
    found = told(tmp_path, call, "model.name=scaled", "stream.tasks=1")
    assert [text for text in found if "nothing to protect" in text] == found[:1]
    assert "'scaled' has no layer of type nn.Linear or nn.Conv2d" in found[0]
    fedprotip.run(
        small("train.rounds=1", "stream.tasks=1", "model.name=scaled", "method.name=fedavg"), out=tmp_path / "a"
    )
    assert warnings(tmp_path / "a") == []


def test_classes_without_statistics_are_named(tmp_path, call):
    """Three clients share about 140 samples of a digit: none has 130 of most."""
    found = told(tmp_path, call, "statistics.minimum=90", "stream.tasks=2")
    untold = [text for text in found if text.startswith("No statistics of ")]
    assert untold
    assert "none of 3 clients has 90 samples" in untold[0]
    assert "Lower statistics.minimum" in untold[0]


def test_where_one_sample_is_enough_no_minimum_is_to_be_lowered():
    """As with secure sums, whatever statistics.minimum says."""

    class Nobody:
        settings = fedprotip.load_settings({"method": {"name": "lda", "secure": True}})

        class progress:
            present: ClassVar = {"0": 1, "1": 1}

        class site:
            task, known = 0, {concerns.COUNTS: torch.tensor([0.0, 3.0])}
            network = SimpleNamespace(labels=[[0, 1]], head_of=lambda task: 0)

        stream = SimpleNamespace(dataset=SimpleNamespace(classes=["cat", "dog"]))

    (said,) = concerns._untold(Nobody)
    assert "No statistics of 'cat': none of 2 clients has a sample to train on" in said
    assert "minimum" not in said


def test_a_router_that_falls_behind(tmp_path, call):
    found = told(tmp_path, call, "method.router=cosine", "stream.tasks=3")
    behind = [text for text in found if "answers single samples better" in text]
    assert behind
    assert "than the configured 'cosine'" in behind[0]
    assert "a new run has it with method.router = '" in behind[0]
    assert len(behind) == len({text.partition("the router ")[2].partition(" answers")[0] for text in behind})


@pytest.mark.parametrize(
    ("other", "tests", "expected"),
    [
        ([60.0, 60.0], [500, 500], "b"),
        ([51.0, 51.0], [500, 500], ""),
        ([60.0, 60.0], [20, 20], ""),
        ([40.0, 40.0], [500, 500], ""),
        ([90.0], [500], ""),  # one task needs no router
        ([100.0, 50.0], [10, 990], ""),  # samples count, not tasks
    ],
)
def test_ahead_is_more_than_chance(other, tests, expected):
    ways = {"a": {"single": [50.0] * len(other)}, "b": {"single": other}}
    assert best_ahead(ways, "a", tests) == expected
    assert best_ahead({}, "a", tests) == ""


def test_tasks_without_test_data_do_not_count():
    ways = {"a": {"single": [None, 50.0]}, "b": {"single": [None, 60.0]}}
    assert best_ahead(ways, "a", [0, 900]) == "b"
    assert best_ahead(ways, "a", [900, 0]) == ""
