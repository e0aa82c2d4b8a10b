"""How far classes are from their statistics, and whether a task that was never learned looks strange."""

import pytest
import torch

from fedprotip.evaluation.confidence import auroc
from fedprotip.evaluation.drift import Drift
from fedprotip.evaluation.evaluate import evaluate, evaluate_unknown, hear
from fedprotip.inference.answers import Inference, Way
from fedprotip.inference.candidates import Candidates
from fedprotip.inference.experts import HEADS, STATISTICS, StatisticsExpert
from fedprotip.inference.predictor import Predictor
from fedprotip.inference.routers import ClassEvidence
from fedprotip.inference.statistics import FeatureMap, Sums
from fedprotip.models import Network
from fedprotip.models.prefix import PrefixCache


class Shift(torch.nn.Module):
    """Features are the images, moved."""

    def __init__(self):
        super().__init__()
        self.by = torch.nn.Parameter(torch.zeros(4))

    def forward(self, images):
        return images + self.by


def drawn(labels, generator):
    centres = 6 * torch.eye(4)
    return centres[labels] + torch.randn(len(labels), 4, generator=generator)


@pytest.fixture
def world():
    """Two tasks of two classes each, unit variance around means that are far apart."""
    chance = torch.Generator().manual_seed(0)
    labels = torch.arange(4000) % 4
    sums = Sums.zeros(4, 4)
    sums.add(drawn(labels, chance), labels)
    candidates = Candidates.of([(0, 1), (2, 3)])
    expert = StatisticsExpert.of(sums, candidates, FeatureMap(4, 0, 0), pooled=True)
    inference = Inference(
        candidates, {STATISTICS: expert}, {"s": Way(ClassEvidence(candidates), STATISTICS, False)}, "s"
    )
    return Network(Shift(), 4, False), inference, chance


def drift(world, by, task=0, n=400):
    network, inference, chance = world
    with torch.no_grad():
        network.backbone.by.copy_(torch.tensor(by))
    labels = 2 * task + torch.arange(n) % 2
    return measured(network, [(drawn(labels, chance), labels)], inference, torch.full((n,), task))[task]


def measured(network, batches, inference, tasks):
    drift = Drift(inference)
    hear(Predictor(network, inference, None), batches, drift.watch(tasks))
    return drift.by_task(1)


@pytest.mark.parametrize("task", [0, 1])
@pytest.mark.parametrize("size", [0.5, 1.0, 3.0])
def test_drift_is_measured_in_standard_deviations(world, task, size):
    assert drift(world, [size / 2] * 4, task) == pytest.approx(size, rel=0.15)


def test_chance_is_taken_off(world):
    """Means of 10 samples lie √(4/10) ≈ 0.63 off by chance; what is left is small."""
    assert sum(drift(world, [0.0] * 4, n=20) for _ in range(30)) / 30 < 0.35
    assert drift(world, [0.0] * 4, n=4000) < 0.1


def test_without_statistics_nothing_is_said(world):
    network, inference, chance = world
    labels = torch.arange(8) % 2
    without = Inference(inference.candidates, {HEADS: lambda features: features.final})
    assert measured(network, [(drawn(labels, chance), labels)], without, torch.zeros(8, dtype=torch.int64)) == []


def test_a_task_without_samples_was_not_measured(world):
    network, inference, chance = world
    labels = torch.arange(8) % 2
    found = measured(network, [(drawn(labels, chance), labels)], inference, torch.zeros(8, dtype=torch.int64))
    assert found[0] > 0
    assert found[1] is None


def test_features_without_bounds_have_no_drift(world):
    """Of a model that training has ruined: a record has no place for infinity."""
    assert drift(world, [3e38] * 4) is None


def test_drift_is_the_same_in_one_batch_and_in_many(world):
    network, inference, chance = world
    labels = torch.arange(60) % 2
    images = drawn(labels, chance)
    tasks = torch.zeros(60, dtype=torch.int64)
    whole = measured(network, [(images, labels)], inference, tasks)
    parts = measured(network, zip(images.split(7), labels.split(7), strict=True), inference, tasks)
    assert whole[0] == pytest.approx(parts[0], rel=1e-4)


def test_samples_of_the_next_task_are_compared_with_known_ones():
    from tests.evaluation.test_evaluate import by_cosine
    from tests.evaluation.test_evaluate import world as made

    settings, found, network = made()
    predictor = by_cosine(network, found, 0, 1)
    known = evaluate(predictor, found, 1, settings)
    unknown = evaluate_unknown(predictor, found, 2, settings, PrefixCache(found, settings), known.inside)
    assert set(unknown) == {"energy"}
    assert 0 <= unknown["energy"] <= 1
    scores = []
    for task in range(3):
        heard, _ = hear(predictor, found.test_batches(task, [found.tasks[task].test]))
        scores.append(-heard.scores[HEADS].logsumexp(1))
    assert unknown["energy"] == pytest.approx(auroc(torch.cat(scores[:2]), scores[2]), abs=0.01)


def test_only_the_last_evaluation_sweeps():
    from tests.evaluation.test_evaluate import by_cosine
    from tests.evaluation.test_evaluate import world as made

    settings, found, network = made()
    evaluations = [evaluate(by_cosine(network, found, 0, seen), found, seen, settings) for seen in range(3)]
    assert [bool(evaluation.sweeps) for evaluation in evaluations] == [False, False, True]
    matrix, routing = {}, {}
    for evaluation in evaluations:
        evaluation.enter(matrix, routing)
    assert routing["sweeps"] == evaluations[2].sweeps
