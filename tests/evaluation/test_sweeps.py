"""Group sizes and mixed groups, on tasks that a router tells apart a little."""

import numpy as np
import pytest
import torch

from fedprotip.evaluation.portions import Portion
from fedprotip.evaluation.sweeps import GROUP, PURITIES, SIZES, Sweep
from fedprotip.inference import Router
from fedprotip.inference.answers import Heard, Inference, Way
from fedprotip.inference.candidates import Candidates
from fedprotip.inference.experts import HEADS
from tests.small import small


class Added(Router):
    """Evidence is a log-likelihood."""


class Voted(Router):
    adds = False


def swept(seed=0, samples=150, apart=1.2):
    """Three tasks of a class each: whoever knows the task knows the label."""
    candidates = Candidates.of([(0,), (1,), (2,)])
    inference = Inference(candidates, {}, {"added": Way(Added(), HEADS), "cosine": Way(Voted(), HEADS)}, "added")
    sweep, rng = Sweep(inference, small("evaluate.draws=4")), np.random.default_rng(seed)
    centres = apart * np.eye(3)
    for task in range(3):
        x = centres[task] + rng.standard_normal((samples, 3))
        evidence = torch.tensor(-0.5 * ((x[:, None] - centres) ** 2).sum(2)).float()
        said = {HEADS: torch.zeros(samples, 3)}, {"added": evidence, "cosine": evidence}
        portion = Portion(range(task, task + 1), torch.tensor([samples]))
        sweep.add(Heard(candidates, *said), torch.full((samples,), task), portion)
    return sweep


@pytest.fixture(scope="module")
def found():
    return swept().result()


def test_larger_groups_of_one_task_are_recognised_better(found):
    by_size = found["size"]["added"]
    assert found["sizes"] == list(SIZES)
    assert len(by_size) == len(SIZES)
    assert by_size[0] < 80
    assert by_size[-1] == 100
    assert by_size[0] < by_size[2] < by_size[4]


def test_mixed_groups_are_asked_by_every_rule_that_fits(found):
    assert found["purities"] == list(PURITIES)
    assert set(found["purity"]["added"]) == {"pooled", "alone", "mixture"}
    assert set(found["purity"]["cosine"]) == {"pooled", "alone"}


def test_one_decision_is_right_about_the_pure_part_and_a_mixture_does_better_on_the_rest(found):
    rules = found["purity"]["added"]
    assert rules["pooled"][0] == rules["mixture"][0] == 100  # pure: one task is recognised
    assert rules["pooled"][1] == pytest.approx(75, abs=3)
    assert rules["pooled"][2] == pytest.approx(50, abs=6)
    assert rules["alone"] == pytest.approx([rules["alone"][0]] * 3, abs=6)
    assert rules["mixture"][2] > rules["pooled"][2]


def test_groups_hold_as_many_of_their_task_as_they_say():
    sweep, tasks = swept(), torch.repeat_interleave(torch.arange(3), 150)
    for purity in PURITIES:
        groups = sweep._groups(tasks, GROUP, purity)
        assert all(len(group) == GROUP and len(set(group.tolist())) == GROUP for group in groups)
        own = [int(torch.bincount(tasks[group], minlength=3).max()) for group in groups]
        assert set(own) == {round(GROUP * purity)}


def test_with_one_task_all_groups_are_pure_and_few_samples_are_drawn_again():
    groups = swept()._groups(torch.zeros(10, dtype=torch.int64), 64, 0.5)
    assert all(len(group) == 64 for group in groups)


def test_the_same_seed_gives_the_same_figures(found):
    assert swept().result() == found
