"""Asking a finished run about images."""

import pytest
import torch

import fedprotip
from fedprotip.settings import load
from fedprotip.stream import build_stream

SETTINGS = {
    "stream": {"tasks": 3, "task_size": 2},
    "clients": {"count": 3, "held_back": 0.15},
    "model": {"name": "mlp", "width": 64, "depth": 2},
    "train": {"rounds": 4, "epochs": 3, "lr": 0.1, "batch": 16},
    "method": {"rank_rule": "energy", "threshold": 0.98},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("asked") / "run"
    return path, fedprotip.run(SETTINGS, out=path)


@pytest.fixture(scope="module")
def stream():
    return build_stream(load(SETTINGS | {"stream": {"tasks": 5, "task_size": 2}}))


def images_of(stream, task, count=60):
    chosen = torch.from_numpy(stream.tasks[task].test[:count])
    labels = [stream.dataset.classes[int(label)] for label in stream.dataset.test_labels[chosen]]
    return stream.dataset.test_images[chosen], labels


def share(answers, labels):
    return sum(answer.label == label for answer, label in zip(answers, labels, strict=True)) / len(labels)


def test_answers_are_those_of_the_evaluation(run, stream):
    path, summary = run
    right = total = 0
    for task in range(3):
        images, labels = images_of(stream, task, 10_000)
        right += share(fedprotip.ask(path, images), labels)
        total += 1
    assert 100 * right / total == pytest.approx(summary["accuracy"]["single"])


def test_every_answer_says_how_sure_it_is(run, stream):
    answers = fedprotip.ask(run[0], images_of(stream, 1)[0])
    assert all(0 < answer.probability <= 1.001 for answer in answers)
    assert all(answer.probability <= answer.task_probability + 1e-4 for answer in answers)
    assert len({answer.probability for answer in answers}) > 10


def test_digits_that_were_never_learned_look_unusual(run, stream):
    known = torch.tensor([answer.unusual for answer in fedprotip.ask(run[0], images_of(stream, 0)[0])])
    unknown = torch.tensor([answer.unusual for answer in fedprotip.ask(run[0], images_of(stream, 4)[0])])
    assert known.min() >= 0
    assert unknown.max() <= 1
    assert unknown.mean() > known.mean() + 0.2


@pytest.mark.parametrize("router", ["fused", "cosine"])
def test_images_that_come_together_help_each_other(run, stream, router, tmp_path):
    path, _ = run
    if router == "cosine":
        fedprotip.run(SETTINGS, ["method.router=cosine"], out=tmp_path / "cosine")
        path = tmp_path / "cosine"
    images, labels = images_of(stream, 1)
    together = fedprotip.ask(path, images, together=True)
    assert share(together, labels) >= share(fedprotip.ask(path, images), labels)
    assert {answer.task for answer in together} == {1}


def test_a_run_that_cannot_answer_says_why(run, tmp_path):
    with pytest.raises(fedprotip.UsageError, match=r"needs \(n, 1, 8, 8\)"):
        fedprotip.ask(run[0], torch.zeros(2, 3, 8, 8))
    with pytest.raises(fedprotip.UsageError, match="needs"):
        fedprotip.ask(run[0], torch.zeros(0, 1, 8, 8))
    fedprotip.run(SETTINGS, ["method.name=fedavg", "train.rounds=1"], out=tmp_path / "fedavg")
    with pytest.raises(fedprotip.UsageError, match="cannot be asked"):
        fedprotip.ask(tmp_path / "fedavg", torch.zeros(1, 1, 8, 8))
