"""Sketches that add up: the law of A·G from second moments, and the basis that the corrected threshold takes."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedprotip.subspace.merge import EnergyMerge
from fedprotip.subspace.project import Projector, complement
from fedprotip.subspace.sketch import Root, corrected_threshold, sketch_basis, sketch_core, upright
from tests.subspace import reference
from tests.subspace.reference import principal_angles

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
    return root.factor @ torch.randn(root.factor.shape[1], width, generator=torch.Generator().manual_seed(seed))


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


def cores(seed, clients=3, rank=4):
    """Core bases of clients, whose spectra fall, outside of nothing."""
    found = []
    for client in range(clients):
        u, sigma, _ = torch.linalg.svd(columns(10 * seed + client), full_matrices=False)
        found.append((u[:, :rank], sigma[:rank]))
    return found


def summed(some, width, seed=0):
    """Σ U_k·diag(σ_k)·G_k (d, s)."""
    chance = torch.Generator().manual_seed(seed)
    return sum((u * sigma) @ torch.randn(len(sigma), width, generator=chance) / width**0.5 for u, sigma in some)


@given(seed=st.integers(0, 20))
def test_directions_of_a_summed_sketch_are_those_of_all_clients(seed):
    """As wide as all ranks together it spans all of them; then the union and the sketch are the same space."""
    some = cores(seed, clients=3, rank=4)
    merger = EnergyMerge(torch.zeros(D, 0), 1.0, "energy")
    merger.add(sketch_core(summed(some, width=12, seed=seed), 0.0, 0.0))
    plain = torch.linalg.qr(torch.cat([u for u, _ in some], dim=1))[0]
    assert principal_angles(merger.result(), plain).max() < 1e-2


def test_a_wide_sketch_has_the_energies_of_all_clients():
    some = cores(0)
    plain = torch.linalg.svdvals(torch.cat([u * sigma for u, sigma in some], dim=1))
    found = torch.linalg.svdvals(summed(some, width=20_000))[: len(plain)]
    torch.testing.assert_close(found, plain, rtol=0.05, atol=0.05 * plain[0].item())


@pytest.mark.parametrize(("captured", "tail"), [(0.0, 0.0), (30.0, 0.0), (0.0, 30.0)])
def test_the_rank_rule_counts_what_is_captured_and_what_was_cut_off(captured, tail):
    """As a plain count over the squares of singular values."""
    sketch = summed(cores(1), width=200)
    merger = EnergyMerge(torch.zeros(D, 0), 0.8, "energy")
    merger.add(sketch_core(sketch, captured, tail))
    energies = torch.linalg.svdvals(sketch.double()).square()
    wanted = 0.8 * (energies.sum() + captured + tail) - captured
    assert merger.result().shape[1] == min(int((energies.cumsum(0) < wanted).sum()) + 1, 12)


def test_a_sketch_of_nothing_has_no_direction():
    merger = EnergyMerge(torch.zeros(D, 0), 0.8, "energy")
    merger.add(sketch_core(torch.zeros(D, 8), 0.0, 0.0))
    assert merger.result().shape == (D, 0)


def test_signs_of_a_basis_are_not_left_to_rounding():
    basis = torch.linalg.qr(torch.randn(D, 5, generator=torch.Generator().manual_seed(0)))[0]
    turned = basis * torch.tensor([1.0, -1.0, -1.0, 1.0, -1.0])
    assert torch.equal(upright(turned), upright(basis))
    assert torch.equal(upright(basis).abs(), basis.abs())
    assert (upright(basis).amax(0) == basis.abs().amax(0)).all()
    assert upright(basis[:, :0]).shape == (D, 0)


def test_whoever_knows_the_gaussians_finds_every_client_in_the_sum():
    """Why G_k must be a client's secret: where the sketch is as wide as all ranks together, the sum can be solved."""
    some, chance = cores(2, clients=3, rank=4), torch.Generator().manual_seed(0)
    known = torch.randn(12, 16, generator=chance)
    total = sum((u * sigma) @ g for (u, sigma), g in zip(some, known.split(4), strict=True))
    found = (total @ torch.linalg.pinv(known)).split(4, dim=1)
    for one, (u, sigma) in zip(found, some, strict=True):
        torch.testing.assert_close(one, u * sigma, rtol=1e-3, atol=1e-3)
    guessed = (total @ torch.linalg.pinv(torch.randn(12, 16, generator=chance))).split(4, dim=1)
    assert (guessed[0] - some[0][0] * some[0][1]).norm() > 0.5 * some[0][1].norm()
