"""Extraction against a full SVD."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from fedprotip.subspace.basis import core_basis, left_svd, orthonormalise, residual
from tests.subspace import reference
from tests.subspace.reference import principal_angles

seeds = st.integers(0, 10_000)
dims = st.tuples(st.integers(2, 24), st.integers(1, 40))
scales = st.sampled_from([1e-8, 1e-3, 1.0, 1e8])
rules = st.sampled_from(["mass", "energy"])


def orthonormality_error(u):
    return (u.double().T @ u.double() - torch.eye(u.shape[1], dtype=torch.float64)).abs().max().item()


@given(seeds, dims, scales)
def test_svd_equals_the_full_svd(seed, shape, scale):
    a = torch.tensor(np.random.default_rng(seed).standard_normal(shape)) * scale
    u, sigma = left_svd(a)
    full_u, full_sigma, _ = np.linalg.svd(a.numpy(), full_matrices=False)
    assert sigma.numpy() == pytest.approx(full_sigma[: len(sigma)], rel=1e-6, abs=1e-6 * full_sigma[0])
    u = orthonormalise(u)
    assert orthonormality_error(u) < 1e-10
    angles = principal_angles(u, torch.tensor(full_u[:, : len(sigma)]))
    assert angles.max() < 1e-5


@given(seeds, st.integers(2, 20), st.integers(1, 20), scales)
def test_svd_finds_the_numerical_rank(seed, d, rank, scale):
    rank = min(rank, d)
    rng = np.random.default_rng(seed)
    factors = reference.random_basis(rng, d, rank), rng.standard_normal((rank, 3 * d))
    u, sigma = left_svd(torch.tensor(factors[0] @ factors[1] * scale))
    assert u.shape == (d, rank)
    assert len(sigma) == rank


@pytest.mark.parametrize("a", [torch.zeros(5, 3), torch.zeros(5, 0), torch.zeros(0, 4)])
def test_svd_of_nothing_is_empty(a):
    u, sigma = left_svd(a)
    assert u.shape == (a.shape[0], 0)
    assert len(sigma) == 0


@given(seeds, st.integers(3, 24), st.integers(2, 40), st.floats(0.3, 0.95), scales, rules, st.booleans())
def test_core_basis_equals_the_textbook(seed, d, m, threshold, scale, rule, with_past):
    rng = np.random.default_rng(seed)
    a = rng.standard_normal((d, m)) * np.geomspace(1, 0.05, d)[:, None] * scale
    phi = reference.random_basis(rng, d, d // 3 if with_past else 0)
    expected, sigma = reference.core_basis(a, phi, threshold, rule)
    core = core_basis(torch.tensor(a), torch.tensor(phi), threshold, rule)
    assert core.basis.shape == expected.shape
    assert core.sigma.numpy() == pytest.approx(sigma[: len(core.sigma)], rel=1e-6)
    r = expected.shape[1]
    if r:
        gap = sigma[r] / sigma[r - 1] if r < len(sigma) else 0
        assume(gap < 0.99)  # without a gap the r-dimensional subspace itself is not defined
        assert principal_angles(core.basis, torch.tensor(expected)).max() < 1e-3


@given(seeds, st.integers(2, 20), scales, rules)
def test_core_basis_is_orthonormal_and_outside_the_past(seed, d, scale, rule):
    rng = np.random.default_rng(seed)
    phi = torch.tensor(reference.random_basis(rng, d, int(rng.integers(0, d + 1)))).float()
    a = torch.tensor(rng.standard_normal((d, 30)) * scale).float()
    core = core_basis(a, phi, 1.0, rule)
    both = torch.cat([phi, core.basis], dim=1)
    assert both.shape[1] <= d
    assert orthonormality_error(both) < 1e-5


@pytest.mark.parametrize("rule", ["mass", "energy"])
@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e8])
def test_activations_inside_the_past_add_nothing(rule, scale):
    rng = np.random.default_rng(0)
    phi = torch.tensor(reference.random_basis(rng, 12, 4)).float()
    a = (phi.double() @ torch.tensor(rng.standard_normal((4, 50))) * scale).float()
    assert core_basis(a, phi, 1.0, rule).basis.shape == (12, 0)


@pytest.mark.parametrize("rule", ["mass", "energy"])
def test_one_column_and_zero_activations(rule):
    column = torch.tensor([[3.0], [4.0]])
    core = core_basis(column, torch.zeros(2, 0), 0.7, rule)
    assert core.basis.abs().flatten().tolist() == pytest.approx([0.6, 0.8])
    assert core_basis(torch.zeros(4, 6), torch.zeros(4, 0), 0.7, rule).basis.shape == (4, 0)


@given(seeds, st.integers(1, 16))
def test_residual_is_idempotent_and_orthogonal(seed, d):
    rng = np.random.default_rng(seed)
    phi = torch.tensor(reference.random_basis(rng, d, int(rng.integers(0, d + 1)))).float()
    a = torch.tensor(rng.standard_normal((d, 7)))
    rest = residual(a, phi)
    assert (phi.double().T @ rest).abs().max().item() < 1e-6 if phi.shape[1] else True
    assert torch.allclose(residual(rest, phi), rest, atol=1e-6)


def test_orthonormalise_keeps_directions():
    u = torch.tensor([[1.0, 1e-9], [0.0, 1.0]], dtype=torch.float64)
    assert torch.allclose(orthonormalise(u), torch.eye(2, dtype=torch.float64), atol=1e-8)
