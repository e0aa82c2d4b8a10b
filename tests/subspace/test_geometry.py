"""Section 5: coefficients and bounds against the formulas as they stand in the paper."""

from math import inf, pi, sqrt

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedprotip.subspace import geometry
from fedprotip.subspace.project import Projector
from tests.subspace import reference

seeds = st.integers(0, 5000)
rhos = st.floats(0.05, 1)
numbers = st.floats(0.01, 100)
counts = st.integers(1, 60)


@given(seeds, st.integers(2, 12))
def test_coefficients_are_shares_of_the_gradient(seed, d):
    rng = np.random.default_rng(seed)
    gradients = {name: torch.tensor(rng.standard_normal((3, d))) for name in "ab"}
    phi = reference.random_basis(rng, d, int(rng.integers(0, d + 1)))
    inside, whole = geometry.squared_norms(gradients, {"a": Projector.outside(torch.tensor(phi))})
    a, b = (gradients[name].numpy() for name in "ab")
    assert whole == pytest.approx((a**2).sum() + (b**2).sum())
    assert inside == pytest.approx(((a - a @ phi @ phi.T) ** 2).sum() + (b**2).sum())
    assert 0 < geometry.adequacy(inside, whole) <= 1 + 1e-9
    assert geometry.interference(inside, whole) ** 2 == pytest.approx(geometry.adequacy(inside, whole))


def test_coefficients_at_the_edges():
    assert geometry.adequacy(0.0, 0.0) == 1.0
    assert geometry.interference(0.0, 0.0) == 0.0
    assert geometry.adequacy(0.0, 4.0) == geometry.interference(0.0, 4.0) == 0.0
    assert geometry.adequacy(1.0, 4.0) == 0.25
    assert geometry.interference(1.0, 4.0) == 0.5
    assert geometry.squared_norms({}, {}) == (0.0, 0.0)


@given(st.integers(0, 8), st.data())
def test_mean_interference_is_the_double_sum(tasks, data):
    beta = [[data.draw(st.floats(0, 1)) for _ in range(t)] for t in range(tasks)]
    total = 0.0
    for t in range(tasks):
        for tau in range(t):
            total += beta[t][tau]
    expected = 2 / (tasks * (tasks - 1)) * total if tasks > 1 else 0.0
    assert geometry.mean_interference(beta) == pytest.approx(expected)


def test_loss_forgetting_is_the_mean_increase():
    assert geometry.loss_forgetting([0.5, -0.1, 0.2]) == pytest.approx(0.2)
    assert geometry.loss_forgetting([]) == 0.0


@given(numbers, rhos, counts, counts, numbers, numbers)
def test_the_canonical_bound_is_the_bound_at_the_canonical_step(gap, rho, rounds, steps, smoothness, moment):
    """Eq. 15 follows from Eq. 13 with Eq. 29."""
    lr = geometry.canonical_lr(rounds, steps, smoothness)
    assert lr == pytest.approx(1 / (smoothness * steps * sqrt(rounds)))
    general = geometry.taskwise_bound(gap, rho, rounds, steps, lr, smoothness, moment)
    assert geometry.taskwise_bound_canonical(gap, rho, rounds, smoothness, moment) == pytest.approx(general)


@given(st.integers(2, 10), st.data(), counts, counts, numbers, numbers)
def test_the_forgetting_bound_follows_from_the_bounds_of_single_tasks(tasks, data, rounds, steps, smoothness, moment):
    """Eq. 16 is the mean of Eq. 14 over the T − 1 old tasks at the step of Eq. 29."""
    beta = [[data.draw(st.floats(0, 1)) for _ in range(t)] for t in range(tasks)]
    lr = geometry.canonical_lr(rounds, steps, smoothness)
    single = [
        geometry.forgetting_bound(
            [beta[t][tau] for t in range(tau + 1, tasks)], [steps] * (tasks - 1 - tau), rounds, lr, smoothness, moment
        )
        for tau in range(tasks - 1)
    ]
    bar = geometry.mean_interference(beta)
    assert geometry.loss_forgetting_bound(tasks, bar, rounds, smoothness, moment) == pytest.approx(
        geometry.loss_forgetting(single)
    )


def test_the_forgetting_bound_by_hand():
    """G² Σ_t E (β_t S_t η + L/2 S_t² η²), with steps of their own for every later task."""
    expected = 3.0 * 5 * ((0.2 * 4 * 0.1 + 1.0 * 16 * 0.01) + (0.7 * 6 * 0.1 + 1.0 * 36 * 0.01))
    assert geometry.forgetting_bound([0.2, 0.7], [4, 6], 5, 0.1, 2.0, 3.0) == pytest.approx(expected)
    assert geometry.forgetting_bound([], [], 5, 0.1, 2.0, 3.0) == 0.0


@given(st.lists(st.tuples(st.floats(0, 1), counts), max_size=8), counts, numbers, numbers)
def test_eq_31_is_eq_14_with_the_canonical_step_of_every_task(later, rounds, smoothness, moment):
    """Each later task has steps S_t of its own, and so a step size of its own (Eq. 29)."""
    expected = 0.0
    for beta, steps in later:
        lr = 1 / (smoothness * steps * sqrt(rounds))
        expected += geometry.forgetting_bound([beta], [steps], rounds, lr, smoothness, moment)
    betas = [beta for beta, _ in later]
    assert geometry.forgetting_bound_canonical(betas, rounds, smoothness, moment) == pytest.approx(expected)


@given(st.floats(0, 1), counts, counts, st.floats(1e-4, 1), numbers, numbers)
def test_eq_14_is_eq_25_in_every_round(beta, steps, rounds, lr, smoothness, moment):
    single = beta * steps * lr * moment + smoothness / 2 * steps**2 * lr**2 * moment
    assert geometry.round_bound(beta, steps, lr, smoothness, moment) == pytest.approx(single)
    cumulative = geometry.forgetting_bound([beta], [steps], rounds, lr, smoothness, moment)
    assert cumulative == pytest.approx(rounds * single)


@given(seeds, st.integers(1, 8), st.integers(2, 10), st.floats(1e-3, 1))
def test_a_walk_of_projected_steps_stays_within_lemma_3(seed, steps, d, lr):
    """Any gradients, any projector: G² is the largest of their squared norms."""
    rng = np.random.default_rng(seed)
    gradients = rng.standard_normal((steps, d))
    phi = reference.random_basis(rng, d, int(rng.integers(0, d)))
    moment = float((gradients**2).sum(axis=1).max())
    walked = np.zeros(d)
    for s, gradient in enumerate(gradients, start=1):
        walked -= lr * (gradient - phi @ (phi.T @ gradient))
        assert (walked**2).sum() <= geometry.drift_bound(s, lr, moment) * (1 + 1e-9)
    straight = geometry.drift_bound(steps, lr, moment)
    assert straight == pytest.approx(float((steps * lr * np.sqrt(moment)) ** 2))  # all steps in one direction


def test_where_nothing_is_admissible_there_is_no_bound():
    assert geometry.taskwise_bound(1.0, 0.0, 5, 4, 0.1, 1.0, 1.0) == inf
    assert geometry.taskwise_bound_canonical(1.0, 0.0, 5, 1.0, 1.0) == inf


@given(numbers, counts, counts, numbers, numbers)
def test_a_smaller_admissible_share_makes_the_bound_worse(gap, rounds, steps, smoothness, moment):
    bounds = [geometry.taskwise_bound(gap, rho, rounds, steps, 0.01, smoothness, moment) for rho in (1.0, 0.5, 0.1)]
    assert bounds == sorted(bounds)
    assert bounds[0] < bounds[2]


@given(seeds, st.integers(2, 14), st.data())
def test_principal_angles_are_those_of_the_cosines(seed, d, data):
    r, s = data.draw(st.integers(1, d)), data.draw(st.integers(1, d))
    rng = np.random.default_rng(seed)
    a, b = reference.random_basis(rng, d, r), reference.random_basis(rng, d, s)
    angles = reference.principal_angles(torch.tensor(a), torch.tensor(b))
    cosines = np.clip(np.linalg.svd(a.T @ b, compute_uv=False), 0, 1)
    assert len(angles) == min(r, s)
    assert np.cos(angles.numpy()) == pytest.approx(cosines, abs=1e-7)
    assert (angles.diff() >= 0).all()
    swapped = reference.principal_angles(torch.tensor(b), torch.tensor(a))
    assert swapped.numpy() == pytest.approx(angles.numpy(), abs=1e-6)


def test_principal_angles_are_exact_where_cosines_are_not():
    tiny = 1e-9
    a = torch.tensor([[1.0], [0.0]], dtype=torch.float64)
    b = torch.tensor([[1.0], [tiny]], dtype=torch.float64)
    assert reference.principal_angles(a, b).item() == pytest.approx(tiny, rel=1e-6)
    assert reference.principal_angles(a, a).item() == 0.0
    assert reference.principal_angles(a, a.flip(0)).item() == pytest.approx(pi / 2)
    assert reference.principal_angles(a, a[:, :0]).shape == (0,)
