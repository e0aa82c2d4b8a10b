"""The routing basis from a second moment: that of the features themselves, and never empty."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from fedprotip.subspace.basis import FAINT, core_basis, core_of_moment
from tests.subspace import reference
from tests.subspace.reference import principal_angles
from tests.subspace.test_basis import orthonormality_error

seeds = st.integers(0, 10_000)
scales = st.sampled_from([1e-8, 1e-3, 1.0, 1e8])
rules = st.sampled_from(["mass", "energy"])


def features(rng, d, m, scale):
    return torch.tensor(rng.standard_normal((d, m)) * np.geomspace(1, 0.1, d)[:, None] * scale)


@given(seeds, st.integers(2, 16), st.floats(0.3, 0.95), scales, rules, st.booleans())
def test_the_moment_says_all_that_the_features_say(seed, d, threshold, scale, rule, with_past):
    rng = np.random.default_rng(seed)
    a = features(rng, d, 2 * d, scale)
    phi = torch.tensor(reference.random_basis(rng, d, d // 3 if with_past else 0)).float()
    sigma = np.linalg.svd(a.numpy() - phi.double().numpy() @ (phi.double().T @ a).numpy(), compute_uv=False)
    assume(sigma[: d - phi.shape[1]].min() > 2 * FAINT * a.norm().item())  # fainter ones are dropped for routing
    direct = core_basis(a, phi, threshold, rule)
    core = core_of_moment(a @ a.T, a.shape[1], phi, threshold, rule)
    rank = max(direct.basis.shape[1], 1)
    assert core.basis.shape == (d, rank)
    assert core.captured == pytest.approx(direct.captured, rel=1e-5, abs=1e-6 * a.square().sum().item())
    if direct.basis.shape[1]:
        assert core.sigma.numpy() == pytest.approx(direct.sigma.numpy(), rel=1e-4)
        assume(rank == len(sigma) or sigma[rank] / sigma[rank - 1] < 0.99)
        assert principal_angles(core.basis, direct.basis).max() < 1e-3


@given(seeds, st.integers(1, 16), st.integers(1, 20), scales, rules, st.integers(0, 20))
def test_orthonormal_outside_the_past_and_never_empty(seed, d, m, scale, rule, fixed):
    rng = np.random.default_rng(seed)
    a = features(rng, d, m, scale)
    phi = torch.tensor(reference.random_basis(rng, d, int(rng.integers(0, d + 1)))).float()
    core = core_of_moment(a @ a.T, a.shape[1], phi, 1.0, rule, fixed)
    assert 1 <= core.basis.shape[1] <= d
    assert len(core.sigma) == core.basis.shape[1]
    assert core.basis.dtype == torch.float32
    assert orthonormality_error(core.basis) < 1e-5
    if phi.shape[1] < d:
        assert (phi.double().T @ core.basis.double()).abs().sum() < 1e-4
    if fixed:
        assert core.basis.shape[1] <= fixed


@pytest.mark.parametrize("fixed", [1, 3, 5])
def test_a_fixed_rank_takes_the_dominant_directions(fixed):
    a = torch.diag(torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0, 0.0])).double()
    core = core_of_moment(a @ a.T, a.shape[1], torch.zeros(6, 0), 0.1, "mass", fixed)
    assert core.sigma.tolist() == pytest.approx([5.0, 4.0, 3.0, 2.0, 1.0][:fixed])
    assert torch.allclose(core.basis.abs(), torch.eye(6)[:, :fixed], atol=1e-6)


def test_a_fixed_rank_beyond_the_features_takes_all_there_are():
    a = torch.eye(6, 2).double()
    assert core_of_moment(a @ a.T, a.shape[1], torch.zeros(6, 0), 0.5, "energy", 5).basis.shape == (6, 2)


@pytest.mark.parametrize("rule", ["mass", "energy"])
@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e8])
def test_features_inside_the_past_keep_their_own_directions(rule, scale):
    """An empty basis would make the task invisible to routing."""
    rng = np.random.default_rng(0)
    phi = torch.tensor(reference.random_basis(rng, 9, 4)).float()
    a = phi.double() @ torch.tensor(rng.standard_normal((4, 30))) * scale
    core = core_of_moment(a @ a.T, a.shape[1], phi, 0.999999, rule)
    assert core.basis.shape[1] >= 1
    assert principal_angles(core.basis, phi).max() < 1e-3
    full = torch.tensor(reference.random_basis(rng, 9, 9)).float()
    assert core_of_moment(a @ a.T, a.shape[1], full, 0.9, rule).basis.shape[1] >= 1


@pytest.mark.parametrize("rule", ["mass", "energy"])
@pytest.mark.parametrize("past", [0, 2, 4])
def test_features_that_are_all_zero_still_give_one_direction(rule, past):
    core = core_of_moment(torch.zeros(4, 4), 5, torch.eye(4)[:, :past], 0.9, rule)
    assert core.basis.shape == (4, 1)
    assert orthonormality_error(core.basis) < 1e-12
    assert core.sigma.tolist() == [0.0]


@pytest.mark.parametrize("share", [0.1 * FAINT, 10 * FAINT])
def test_what_is_faint_outside_the_past_is_not_worth_a_routing_basis(share):
    """Then the dominant direction serves, although an earlier task has it too."""
    a = torch.diag(torch.tensor([1.0, share, 0.0])).double()
    core = core_of_moment(a @ a.T, a.shape[1], torch.eye(3, 1), 0.5, "mass")
    assert core.basis.abs().flatten().argmax().item() == (0 if share < FAINT else 1)
    assert core.basis.shape == (3, 1)


def test_where_the_past_holds_enough_energy_one_direction_is_still_taken():
    a = torch.diag(torch.tensor([10.0, 0.1, 0.05])).double()
    phi = torch.eye(3, 1)
    assert core_basis(a, phi, 0.9, "energy").basis.shape == (3, 0)
    core = core_of_moment(a @ a.T, a.shape[1], phi, 0.9, "energy")
    assert core.basis.abs().tolist() == [[0.0], [pytest.approx(1.0)], [0.0]]


@given(seeds, st.integers(1, 6), st.integers(64, 90), st.integers(0, 20), rules)
def test_few_samples_are_solved_within_their_own_span(seed, m, d, past, rule):
    """The short way for a moment of low rank finds what the long way finds."""
    rng = np.random.default_rng(seed)
    a = features(rng, d, m, 1.0)
    phi = torch.tensor(reference.random_basis(rng, d, past)).float()
    short = core_of_moment(a @ a.T, m, phi, 0.9, rule)
    long = core_of_moment(a @ a.T, d, phi, 0.9, rule)
    assert short.basis.shape == long.basis.shape
    assert short.sigma.numpy() == pytest.approx(long.sigma.numpy(), rel=1e-9)
    assert short.captured == pytest.approx(long.captured)
    assert principal_angles(short.basis, long.basis).max() < 1e-3
    assert orthonormality_error(short.basis) < 1e-5
