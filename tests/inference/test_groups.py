"""Groups of samples of one task, and of several."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedprotip.inference.groups import mixture

seeds = st.integers(0, 5000)


def likelihoods(tasks, seed=0, apart=2.0, total=4):
    """log N(x; apart·e_t, I) of samples x of these tasks, for every task."""
    rng = np.random.default_rng(seed)
    centres = apart * np.eye(total)
    x = centres[list(tasks)] + rng.standard_normal((len(tasks), total))
    return torch.tensor(-0.5 * ((x[:, None] - centres) ** 2).sum(2)).float()


@settings(max_examples=25)
@given(seeds, st.integers(1, 6), st.sampled_from([0.1, 3.0, 300.0]))
@example(541, 6, 3.0)
def test_one_sample_is_decided_as_if_alone(seed, tasks, scale):
    evidence = scale * torch.tensor(np.random.default_rng(seed).standard_normal((1, tasks)))
    assert mixture(evidence)[0].tolist() == pytest.approx(evidence.log_softmax(1)[0].tolist(), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("task", range(4))
def test_a_pure_group_decides_as_one(seed, task):
    evidence = likelihoods([task] * 64, seed)
    found = mixture(evidence)
    assert found.shape == (64, 4)
    assert (found == found[0]).all()
    assert found[0].argmax() == task
    assert found[0].tolist() == pytest.approx(evidence.double().sum(0).log_softmax(0).tolist(), abs=1e-3)
    assert (evidence.argmax(1) != task).any()  # alone some of them would be lost


@pytest.mark.parametrize("seed", range(8))
def test_in_a_mixed_group_every_sample_decides_and_learns_from_the_others(seed):
    truth = [1] * 48 + [2] * 16
    evidence = likelihoods(truth, seed)
    found, right = mixture(evidence).argmax(1), torch.tensor(truth)
    alone, pooled = evidence.argmax(1), evidence.sum(0).argmax().expand(64)
    assert (found == right).sum() > (alone == right).sum()
    assert (found == right).sum() > (pooled == right).sum()


@pytest.mark.parametrize("seed", range(4))
def test_shares_are_those_that_explain_the_group_best(seed):
    """The fixed point of EM: the mean of p(task | sample) is the share that p(task | sample) was made with."""
    evidence = likelihoods([0] * 30 + [1] * 20 + [3] * 14, seed)
    found = mixture(evidence).exp()
    shares = found.mean(0)
    again = (evidence.double() + shares.log()).softmax(1)
    assert found.numpy() == pytest.approx(again.numpy(), abs=1e-3)


@settings(max_examples=25)
@given(seeds, st.integers(1, 40))
def test_probabilities_add_up_and_order_does_not_matter(seed, n):
    rng = np.random.default_rng(seed)
    evidence = likelihoods(rng.integers(0, 4, n), seed).double()
    found, order = mixture(evidence), rng.permutation(n)
    assert found.exp().sum(1).tolist() == pytest.approx([1.0] * n)
    assert mixture(evidence[order]).numpy() == pytest.approx(found[order].numpy(), rel=1e-6, abs=1e-6)


def test_a_task_without_statistics_gets_nothing_and_nothing_is_nan():
    evidence = likelihoods([0] * 20 + [1] * 20)
    evidence[:, 3] = -1e30
    found = mixture(evidence)
    assert not found.isnan().any()
    assert (found.exp()[:, 3] == 0).all()
