"""Reliability and AUROC against plain loops and scikit-learn."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from fedprotip.evaluation.confidence import auroc, calibration_error, reliability, summary

seeds = st.integers(0, 5000)


@settings(max_examples=25)
@given(seeds, st.integers(1, 30), st.integers(1, 30), st.sampled_from([2, 10**6]))
def test_auroc_is_that_of_scikit_learn_with_ties_too(seed, inside, outside, values):
    rng = np.random.default_rng(seed)
    known, unknown = rng.integers(0, values, inside), rng.integers(0, values + 1, outside)
    expected = roc_auc_score([0] * inside + [1] * outside, np.concatenate([known, unknown]))
    assert auroc(torch.tensor(known).float(), torch.tensor(unknown).float()) == pytest.approx(expected)


def test_the_ends_of_auroc():
    low, high = torch.tensor([0.0, 1.0]), torch.tensor([2.0, torch.inf])
    assert auroc(low, high) == 1.0
    assert auroc(high, low) == 0.0
    assert auroc(low, low) == 0.5


@settings(max_examples=25)
@given(seeds, st.integers(1, 60))
def test_bins_are_those_of_a_plain_loop(seed, n):
    rng = np.random.default_rng(seed)
    sure, right = np.append(rng.random(n), 1.0), np.append(rng.random(n) < 0.5, True)
    bins = reliability(torch.tensor(sure), torch.tensor(right))
    places = np.minimum((sure * 10).astype(int), 9)
    expected = [(int((places == b).sum()), sure[places == b].mean(), right[places == b].mean()) for b in set(places)]
    found = [(line["count"], line["confidence"], line["accuracy"]) for line in bins]
    assert found == [pytest.approx(line) for line in sorted(expected, key=lambda line: line[1])]
    error = sum(count * abs(a - b) for count, a, b in expected) / (n + 1)
    assert calibration_error(bins) == pytest.approx(error)
    assert summary(torch.tensor(sure), torch.tensor(right)) == {"bins": bins, "ece": pytest.approx(error)}


def test_honest_answers_have_no_error_and_boasting_has():
    sure = torch.full((100,), 0.75)
    right = torch.arange(100) < 75
    assert calibration_error(reliability(sure, right)) == pytest.approx(0.0, abs=1e-6)
    assert calibration_error(reliability(torch.ones(100), right)) == pytest.approx(0.25)
    assert calibration_error([]) == 0
