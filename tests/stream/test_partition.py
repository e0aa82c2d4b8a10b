"""Nothing lost, nothing doubled, and every client has every class that is large enough."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedprotip.stream.partition import split_dirichlet, split_iid

clients = st.one_of(st.integers(1, 6), st.integers(1, 300))
alphas = st.one_of(st.sampled_from([5e-324, 1e-300, 1e-9, 0.5, 1e9, 1e300, 1.7e308]), st.floats(1e-6, 1e6))
sizes = st.lists(st.one_of(st.just(1), st.integers(1, 40), st.integers(250, 320)), max_size=4)
seeds = st.integers(0, 1000)


def task(sizes, seed):
    """Shuffled indices with gaps, and their labels."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(len(sizes)) * 3, sizes).astype(np.int64)
    indices = rng.permutation(5 * len(labels))[: len(labels)]
    return indices, labels


@given(sizes, clients, seeds)
def test_iid_loses_and_doubles_nothing(sizes, clients, seed):
    indices, _ = task(sizes, seed)
    shares = split_iid(indices, clients, np.random.default_rng(seed))
    assert len(shares) == clients
    assert sorted(np.concatenate(shares)) == sorted(indices)
    counts = [len(share) for share in shares]
    assert max(counts) - min(counts) <= 1
    assert all((np.diff(share) > 0).all() for share in shares)


@given(sizes, clients, alphas, seeds)
def test_dirichlet_loses_and_doubles_nothing(sizes, clients, alpha, seed):
    indices, labels = task(sizes, seed)
    shares = split_dirichlet(indices, labels, clients, alpha, np.random.default_rng(seed))
    assert len(shares) == clients
    assert all(share.dtype.kind == "i" for share in shares)
    assert sorted(np.concatenate(shares)) == sorted(indices)
    assert all((np.diff(share) > 0).all() for share in shares)


@given(sizes, clients, alphas, seeds)
def test_every_client_has_every_class_that_has_enough_samples(sizes, clients, alpha, seed):
    indices, labels = task(sizes, seed)
    for share in split_dirichlet(indices, labels, clients, alpha, np.random.default_rng(seed)):
        held = set(labels[np.isin(indices, share)])
        assert held >= {label for label, size in zip(np.unique(labels), sizes, strict=True) if size >= clients}


@pytest.mark.parametrize("alpha", [1e6, 1e300, 1.7e308])
def test_a_huge_alpha_gives_equal_shares(alpha):
    labels = np.repeat([0, 1], 1000)
    shares = split_dirichlet(np.arange(2000), labels, 5, alpha, np.random.default_rng(0))
    assert all(abs(len(share) - 400) <= 8 for share in shares)


@pytest.mark.parametrize("alpha", [5e-324, 1e-300, 1e-6])
def test_a_tiny_alpha_gives_a_class_to_one_client(alpha):
    rng = np.random.default_rng(0)
    owners = set()
    for _ in range(20):
        counts = [len(s) for s in split_dirichlet(np.arange(100), np.zeros(100, int), 4, alpha, rng)]
        assert sorted(counts) == [1, 1, 1, 97]
        owners.add(counts.index(97))
    assert len(owners) > 1


def test_smaller_alpha_is_more_uneven():
    def spread(alpha):
        rng = np.random.default_rng(0)
        runs = [split_dirichlet(np.arange(500), np.zeros(500, int), 5, alpha, rng) for _ in range(40)]
        return np.mean([np.std([len(share) for share in shares]) for shares in runs])

    assert spread(0.1) > 1.5 * spread(1.0) > 2 * spread(20.0)


def test_classes_are_drawn_independently():
    labels = np.repeat(np.arange(10), 100)
    shares = split_dirichlet(np.arange(1000), labels, 5, 0.3, np.random.default_rng(1))
    counts = np.array([[np.sum(share // 100 == label) for share in shares] for label in range(10)])
    assert len(set(counts.argmax(1))) > 1
