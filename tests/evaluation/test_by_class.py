"""Class by class and site by site, against plain counting."""

import base64
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedprotip.evaluation.by_class import ByClass, thumbnail
from fedprotip.evaluation.evaluate import evaluate
from fedprotip.evaluation.portions import Portion
from fedprotip.settings import load
from fedprotip.store.answers import SIDE, Answers
from fedprotip.stream import build_stream
from tests.evaluation.test_evaluate import by_cosine, told, world
from tests.stream.samples import made_dataset

COUNTS = (7, 5, 3, 6, 4, 9)


def answered(stream, settings, seed=0):
    """Random answers to all test samples, entered task by task: (task, sample, label, answer) each, and the record."""
    rng, found, rows = np.random.default_rng(seed), ByClass(stream, settings), []
    for task in stream.tasks:
        labels = stream.dataset.test_labels[task.test]
        said = torch.from_numpy(rng.integers(0, len(stream.dataset.classes), len(labels)))
        found.add(Portion(range(task.index, task.index + 1), torch.tensor([len(labels)])), labels, said)
        tests, known, answers = task.test.tolist(), labels.tolist(), said.tolist()
        rows += [(task.index, *row) for row in zip(tests, known, answers, strict=True)]
    return rows, Answers.model_validate(found.result())


def made(raw=None, **dataset):
    settings = load({"stream": {"tasks": 3}, "clients": {"count": 3, "partition": "dirichlet"}} | (raw or {}))
    return settings, build_stream(settings, replace(made_dataset((30, 20, 20, 20, 20, 10), COUNTS), **dataset))


def test_pairs_are_counted():
    settings, stream = made()
    rows, answers = answered(stream, settings)
    pairs = {(true, said): count for true, said, count in answers.taken}
    assert pairs == {pair: [row[2:] for row in rows].count(pair) for pair in {row[2:] for row in rows}}
    assert answers.samples == dict(enumerate(COUNTS))
    right = [sum(row[2] == row[3] == label for row in rows) for label in range(6)]
    assert answers.accuracy == pytest.approx({c: 100 * n / COUNTS[c] for c, n in enumerate(right)})


@pytest.mark.parametrize("routed", [True, False])
def test_they_are_the_answers_of_mode_single_or_agnostic(routed):
    settings, stream, network = world()
    predictor = by_cosine(network, stream, 0, 2) if routed else told(network, stream, None, 2)
    found = evaluate(predictor, stream, 2, settings)
    answers = Answers.model_validate(found.answers)
    sizes = [len(task.test) for task in stream.tasks]
    right = sum(count for true, said, count in answers.taken if true == said)
    by_task = zip(found.accuracy["single" if routed else "agnostic"], sizes, strict=True)
    assert right == round(sum(accuracy * size for accuracy, size in by_task) / 100)
    assert evaluate(by_cosine(network, stream, 0, 1), stream, 1, settings).answers == {}  # only at the end


def test_a_site_with_test_samples_is_measured_by_name():
    owners = torch.arange(sum(COUNTS)) % 3
    raw = {"stream": {"tasks": 3, "source": "columns"}}
    clients = {"train_clients": torch.arange(120) % 3, "test_clients": owners, "clients": ("0", "north", "2")}
    settings, stream = made(raw, **clients)
    rows, answers = answered(stream, settings)
    assert answers.sites.measured
    assert answers.sites.names == ["client 0", "north", "client 2"]
    for client in range(3):
        own = [row[2] == row[3] for row in rows if owners[row[1]] == client]
        assert answers.sites.samples[client] == len(own)
        assert answers.sites.accuracy[client] == pytest.approx(100 * sum(own) / len(own))
    settings, stream = made(**clients)  # the columns are not asked for: other clients hold the samples
    assert not answered(stream, settings)[1].sites.measured


@pytest.mark.parametrize("scenario", [{"tasks": 3}, {"tasks": 2, "scenario": "domain", "domains": "rotate"}])
def test_a_site_without_is_expected_from_its_mix_of_classes(scenario):
    settings, stream = made({"stream": scenario, "clients": {"count": 3, "partition": "dirichlet", "held_back": 0.1}})
    rows, answers = answered(stream, settings)
    assert not answers.sites.measured
    for client, (accuracy, samples) in enumerate(zip(answers.sites.accuracy, answers.sites.samples, strict=True)):
        expected = []
        for task in stream.tasks:
            for label in stream.dataset.train_labels[stream.client_samples(task.index, client)].tolist():
                same = [row[2] == row[3] for row in rows if row[0] == task.index and row[2] == label]
                expected.append(sum(same) / len(same))
        assert samples == len(expected)
        assert accuracy == pytest.approx(100 * sum(expected) / samples)


@pytest.mark.parametrize("most", [3, 0])
def test_examples_are_samples_of_their_pair(most):
    settings, stream = made({"evaluate": {"examples": most}})
    rows, answers = answered(stream, settings)
    assert bool(answers.examples) == bool(most)
    for example in answers.examples:
        own = {row[1] for row in rows if row[2:] == (example.true, example.said)}
        images = [bytes(stream.dataset.test_images[sample].flatten().tolist()) for sample in own]
        assert example.true != example.said
        assert example.raw in images
    pairs = [(example.true, example.said) for example in answers.examples]
    assert all(pairs.count(pair) <= most for pair in pairs)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((1, 8, 8), (8, 8, 1)),
        ((3, 224, 112), (SIDE, SIDE // 2, 3)),
        ((4, 5, 300), (1, SIDE, 3)),
        ((2, 7, 7), (7, 7, 1)),
    ],
)
def test_a_thumbnail_is_small(shape, expected):
    found = thumbnail(torch.full(shape, 200, dtype=torch.uint8))
    assert tuple(found["shape"]) == expected
    assert set(base64.b64decode(found["pixels"])) == {200}


def test_nothing_tested_is_nothing_said():
    settings, stream = made()
    found = ByClass(stream, settings)
    stream.tasks[0] = replace(stream.tasks[0], test=stream.tasks[0].test[:0])
    found.add(Portion(range(1), torch.tensor([0])), torch.tensor([], dtype=torch.int64), torch.tensor([]).long())
    assert found.result() == {}
