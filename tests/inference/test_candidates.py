"""All answers there are, against plain loops over tasks."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from fedprotip.inference.candidates import Candidates
from fedprotip.inference.statistics import Sums
from tests.inference.samples import CLASSES, OVERLAP, scores_of, seeds


def test_candidates_are_the_classes_of_every_task_one_after_another():
    candidates = Candidates.of(CLASSES)
    assert candidates.labels.tolist() == [3, 1, 0, 5, 4, 2]
    assert candidates.tasks.tolist() == [0, 0, 1, 1, 1, 2]


@settings(max_examples=25)
@given(seeds)
def test_scores_are_taken_together_by_task(seed):
    scores, candidates = scores_of(seed), Candidates.of(CLASSES)
    parts = [scores[:, :2].numpy(), scores[:, 2:5].numpy(), scores[:, 5:].numpy()]
    pooled = np.stack([np.log(np.exp(part).sum(1)) for part in parts], 1)
    assert candidates.by_task(scores).numpy() == pytest.approx(pooled)
    assert candidates.largest(scores).numpy() == pytest.approx(np.stack([part.max(1) for part in parts], 1))
    within = np.concatenate([np.exp(part) / np.exp(part).sum(1, keepdims=True) for part in parts], 1)
    assert candidates.within_task(scores).exp().numpy() == pytest.approx(within)


def test_a_task_without_any_score_has_no_probability_and_no_nan():
    scores = scores_of(0)
    scores[:, 2:5] = -torch.inf
    scores[:, 0] = -torch.inf
    found = Candidates.of(CLASSES).within_task(scores)
    assert not found.isnan().any()
    assert found.exp().tolist() == [[0.0, 1.0, 0.0, 0.0, 0.0, 1.0]] * 7


def test_labels_of_several_tasks_add_up():
    sums = Sums(torch.arange(1.0, 7).double(), torch.arange(12.0).view(6, 2).double(), torch.eye(2).double())
    found, rows = Candidates.of(OVERLAP).by_label(sums)
    assert rows.tolist() == [0, 1, 1, 2, 2, 0]
    assert found.counts.tolist() == [7, 5, 9]
    assert found.sums.tolist() == [[10, 12], [6, 8], [14, 16]]
    assert torch.equal(found.moment, sums.moment)
