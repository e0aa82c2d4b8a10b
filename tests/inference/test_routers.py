"""Routers against plain densities."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from fedprotip.inference import Seen
from fedprotip.inference.answers import Way
from fedprotip.inference.candidates import Candidates
from fedprotip.inference.experts import HEADS, STATISTICS
from fedprotip.inference.route import energies
from fedprotip.inference.routers import ClassEvidence, LargestOutput, RelevanceGaussians
from tests.inference.samples import CLASSES, alone, by, scores_of, seeds, told
from tests.subspace.reference import random_basis


@settings(max_examples=25)
@given(seeds)
def test_the_evidence_of_classes_is_their_mean_density(seed):
    scores = scores_of(seed)
    found = ClassEvidence(Candidates.of(CLASSES)).evidence(Seen(torch.zeros(7, 1), {STATISTICS: scores}))
    parts = [scores[:, :2], scores[:, 2:5], scores[:, 5:]]
    assert found.exp().numpy() == pytest.approx(np.stack([part.exp().mean(1).numpy() for part in parts], 1))


@settings(max_examples=25)
@given(seeds)
def test_the_largest_output_decides(seed):
    scores, candidates = scores_of(seed), Candidates.of(CLASSES)
    way = Way(LargestOutput(candidates, HEADS), HEADS)
    evidence = way.router.evidence(Seen(torch.zeros(7, 1), {HEADS: scores}))
    inference = by(way)
    labels, _ = alone(inference, told(inference, {HEADS: scores}, evidence))
    assert labels.tolist() == candidates.labels[scores.argmax(1)].tolist()


def test_relevance_gaussians_are_log_normal_densities():
    """Energies drawn from log-normals with the given means and variances score highest where they come from."""
    rng = np.random.default_rng(0)
    bases = [torch.tensor(random_basis(rng, 6, 2)).float() for _ in range(3)]
    means = torch.tensor(rng.uniform(0.5, 4, (3, 3)))
    variances = torch.tensor(rng.uniform(0.1, 2, (3, 3)))
    features = torch.tensor(rng.standard_normal((9, 6))).float()
    found = RelevanceGaussians(bases, means, variances).evidence(Seen(features, {}))
    logs = energies(features, bases).double().log().numpy()
    for task in range(3):
        spread = np.log1p(variances[task].numpy() / means[task].numpy() ** 2)
        centre = np.log(means[task].numpy()) - spread / 2
        expected = (-0.5 * (logs - centre) ** 2 / spread - 0.5 * np.log(spread)).sum(1)
        assert found[:, task].numpy() == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_an_energy_of_zero_is_no_reason_for_infinity():
    router = RelevanceGaussians([torch.eye(4, 1)] * 2, torch.tensor([[1.0, 0.0], [0.0, 0.0]]), torch.zeros(2, 2))
    assert router.evidence(Seen(torch.zeros(3, 4), {})).isfinite().all()
