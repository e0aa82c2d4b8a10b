"""Sketches that add up: the law of A·G from second moments, and the basis that the corrected threshold takes."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedprotip.subspace.geometry import principal_angles
from fedprotip.subspace.project import Projector, complement
from fedprotip.subspace.sketch import Root, corrected_threshold, sketch_basis
from tests.subspace import reference

D = 24


def columns(seed, count=400, d=D, falls=0.7):
    """Activations (d, n) whose energy falls by a factor from direction to direction."""
    rng = np.random.default_rng(seed)
    scales = falls ** np.arange(d) * (1 + 0.1 * rng.random(d))
    turned = np.linalg.qr(rng.standard_normal((d, d)))[0]
    return torch.tensor(turned @ (scales[:, None] * rng.standard_normal((d, count)))).float()


def sketched(a, width, seed=0):
    root = Root(len(a))
    for part in a.split(37, dim=1):
        root.add(part)
    return root.sketch(width, torch.Generator().manual_seed(seed))


def shares(a, phi):
    """How much of the energy of a lies outside phi."""
    return float(1 - (phi.double().T @ a.double()).square().sum() / a.double().square().sum())


@given(count=st.integers(0, 200), d=st.integers(1, 12), piece=st.integers(1, 60), seed=st.integers(0, 9))
def test_a_root_has_the_second_moment_of_all_columns_and_stays_short(count, d, piece, seed):
    a = columns(seed, count, d)
    root = Root(d)
    for part in a.split(piece, dim=1):
        root.add(part)
        assert root.factor.shape[1] < 2 * d
    torch.testing.assert_close(root.factor @ root.factor.T, a @ a.T, atol=1e-3, rtol=1e-4)


def test_columns_of_a_few_directions_are_split_too():
    """A second moment of rank 1 has no Cholesky factor by itself."""
    a = torch.ones(6, 1) @ torch.randn(1, 100, generator=torch.Generator().manual_seed(0))
    root = Root(6)
    root.add(a)
    torch.testing.assert_close(root.factor @ root.factor.T, a @ a.T, atol=1e-3, rtol=1e-4)
    nothing = Root(6)
    nothing.add(torch.zeros(6, 100))
    assert nothing.factor.abs().max() < 1e-12


def test_a_root_does_not_hold_on_to_what_it_was_given():
    a, root = torch.ones(3, 2), Root(3)
    root.add(a)
    a.zero_()
    assert root.factor.sum() == 6


def test_the_sketch_has_the_law_of_the_columns_times_a_gaussian():
    """Both have the covariance A·Aᵀ: here of 20,000 columns each, so up to 1 %."""
    a = columns(1)
    y, direct = sketched(a, 20_000), a @ torch.randn(a.shape[1], 20_000, generator=torch.Generator().manual_seed(3))
    for found in (y, direct):
        error = torch.linalg.matrix_norm(found @ found.T / 20_000 - a @ a.T) / torch.linalg.matrix_norm(a @ a.T)
        assert error < 0.02


@pytest.mark.parametrize("threshold", [0.8, 0.95, 0.99])
def test_wide_sketches_of_clients_add_up_to_exact_pca_of_their_data(threshold):
    """Any split, any order: the dominant directions of all columns together."""
    a = columns(2)
    clients = [a[:, :50], a[:, 50:130], a[:, 130:]]
    y = sum(sketched(part, 40_000, seed) for seed, part in enumerate(clients))
    basis = sketch_basis(y.double(), torch.zeros(D, 0), 1.0, threshold)
    vectors, sigma = np.linalg.svd(a.numpy(), full_matrices=False)[:2]
    exact = int((np.cumsum(sigma**2) / np.sum(sigma**2) < threshold).sum()) + 1
    assert basis.shape == (D, exact)
    assert principal_angles(basis, torch.tensor(vectors[:, :exact])).max() < 0.1


@pytest.mark.parametrize("held", [4, 18])
def test_with_the_ratio_of_energies_the_basis_holds_the_threshold_and_one_direction_less_does_not(held):
    """ε' of the residual is ε of everything; whichever of Φ and its complement the projector holds."""
    a = columns(3, falls=0.9)
    phi = torch.tensor(reference.random_basis(np.random.default_rng(0), D, held)).float()
    for earlier in (phi, Projector(complement(phi), True)):
        rest = Projector.of(earlier).columns(a)
        ratio = float(rest.square().sum() / a.square().sum())
        basis = sketch_basis(sketched(rest, 40_000).double(), earlier, ratio, 0.95)
        whole = torch.cat([phi, basis], dim=1)
        assert (whole.T @ whole - torch.eye(whole.shape[1])).abs().max() < 1e-5
        assert shares(a, whole) <= 0.05 * 1.02
        assert shares(a, whole[:, :-1]) > 0.05 * 0.98


def test_what_is_held_already_adds_nothing():
    a, phi = columns(4), torch.eye(D, 3)
    y = sketched(Projector.of(phi).columns(a), 64).double()
    assert sketch_basis(y, phi, 0.2, 0.9).shape[1] > 0
    assert sketch_basis(y, phi, 0.1, 0.9).shape == (D, 0)  # ρ = 1 − ε
    assert sketch_basis(y, phi, 0.05, 0.9).shape == (D, 0)  # ρ < 1 − ε: ε' is negative
    assert sketch_basis(y, phi, 0.0, 0.9).shape == (D, 0)
    assert sketch_basis(y, torch.eye(D), 1.0, 0.9).shape == (D, 0)  # no room
    assert sketch_basis(0 * y, phi, 1.0, 0.9).shape == (D, 0)


def test_a_narrow_sketch_has_no_more_directions_than_columns():
    assert sketch_basis(sketched(columns(5, falls=1.0), 5).double(), torch.zeros(D, 0), 1.0, 1.0).shape == (D, 5)


def test_everything_is_no_more_than_there_are_directions_above_rounding():
    """ε = 1, and inputs that lie in five directions, three of which are known."""
    a = torch.cat([columns(6, d=5, falls=1.0), torch.zeros(D - 5, 400)])
    phi = torch.eye(D, 3)
    rest = Projector.of(phi).columns(a)
    ratio = float((rest.square().sum() / a.square().sum()).sqrt())
    assert sketch_basis(sketched(rest, 512).double(), phi, ratio, 1.0).shape[1] == 2


@given(ratio=st.floats(0.01, 1), threshold=st.floats(0.01, 1))
def test_the_corrected_threshold_leaves_one_minus_epsilon_of_everything(ratio, threshold):
    assert ratio * (1 - corrected_threshold(ratio, threshold)) == pytest.approx(1 - threshold, abs=1e-9)
