"""Eq. 10: the merged span is the union of the clients' spans, in every order, and stays orthonormal."""

from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from fedprotip.subspace.bank import SubspaceBank
from fedprotip.subspace.basis import Core, core_basis
from fedprotip.subspace.merge import EnergyMerge, UnionMerge
from tests.subspace import reference
from tests.subspace.test_basis import orthonormality_error, seeds


def merged(merger, cores):
    for core in cores:
        merger.add(core)
    return merger.result()


def merge_union(bases, earlier):
    return merged(UnionMerge(earlier), [Core(b, torch.ones(b.shape[1]), 0.0) for b in bases])


def merge_energy(cores, earlier, *options, **named):
    return merged(EnergyMerge(earlier, *options, **named), cores)


def overlapping_bases(rng, d, clients):
    """Client bases that share some directions, as clients of one task do."""
    common = reference.random_basis(rng, d, max(d // 4, 1))
    bases = []
    for _ in range(clients):
        own = rng.standard_normal((d, int(rng.integers(0, d // 3 + 1))))
        bases.append(np.linalg.qr(np.hstack([common, own]))[0])
    return [torch.tensor(basis).float() for basis in bases]


@given(seeds, st.integers(4, 20), st.integers(1, 4))
def test_merged_span_is_the_union_in_every_order(seed, d, clients):
    rng = np.random.default_rng(seed)
    bases = overlapping_bases(rng, d, clients)
    stacked = np.hstack([b.double().numpy() for b in bases])
    sines = np.linalg.svd(stacked, compute_uv=False)
    assume(not ((sines > 1e-5) & (sines < 0.1)).any())  # between the same and another direction
    expected = reference.projector_onto(stacked)
    for order in permutations(bases):
        union = merge_union(order, torch.zeros(d, 0)).double().numpy()
        assert union.shape[1] == round(np.trace(expected)) <= d
        assert np.abs(union @ union.T - expected).max() < 1e-3


@given(seeds, st.integers(4, 16))
def test_near_dependent_columns_are_dropped(seed, d):
    rng = np.random.default_rng(seed)
    basis = torch.tensor(reference.random_basis(rng, d, d // 2))
    noisy = torch.linalg.qr(basis + 1e-8 * torch.tensor(rng.standard_normal(basis.shape)))[0]
    assert merge_union([basis.float(), noisy.float(), -basis.float()], torch.zeros(d, 0)).shape[1] == d // 2


@pytest.mark.parametrize("seed", range(4))
def test_many_clients_of_one_space_do_not_leave_it(seed):
    """Rounding of directions that were barely new must not count as new directions of later clients."""
    rng = np.random.default_rng(seed)
    space = reference.random_basis(rng, 400, 96)
    bases = [torch.tensor(space @ reference.random_basis(rng, 96, 16)).float() for _ in range(120)]
    merged = merge_union(bases, torch.zeros(400, 0))
    assert merged.shape[1] == 96
    assert np.linalg.norm(merged.double().numpy() - space @ (space.T @ merged.double().numpy()), 2) < 1e-3


def test_an_empty_basis_changes_nothing():
    basis = torch.eye(4)[:, :2]
    empty = torch.zeros(4, 0)
    union = merge_union([empty, basis, empty], empty)
    assert torch.allclose(union @ union.T, basis @ basis.T)
    assert merge_union([], empty).shape == (4, 0)
    assert merge_union([empty], torch.eye(4)).shape == (4, 0)


@pytest.mark.parametrize("merge", ["union", "energy"])
def test_orthonormal_after_a_hundred_random_tasks(merge):
    rng = np.random.default_rng(7)
    d, bank = 96, SubspaceBank()
    for task in range(100):
        phi = bank.basis("layer", d)
        cores = []
        for _ in range(3):  # low-rank activations of random size and direction
            scale = 10.0 ** rng.integers(-8, 9)
            a = rng.standard_normal((d, 2)) @ rng.standard_normal((2, 20)) * scale
            cores.append(core_basis(torch.tensor(a).float(), phi, 0.95, "mass"))
        if merge == "union":
            new = merge_union([core.basis for core in cores], phi)
        else:
            new = merge_energy(cores, phi, 0.95, "mass")
        bank.extend("layer", new, task)
        assert bank.layers["layer"].shape[1] <= d
    assert bank.layers["layer"].shape[1] == d  # three clients × a direction each fill 96 long before
    assert orthonormality_error(bank.layers["layer"]) <= 1e-5
    assert len(bank.ranks["layer"]) == 100
    assert sum(bank.ranks["layer"]) == d


@given(seeds, st.integers(4, 16), st.integers(1, 6))
def test_energy_merge_is_the_svd_of_all_clients(seed, d, clients):
    rng = np.random.default_rng(seed)
    activations = [rng.standard_normal((d, 40)) * np.geomspace(1, 0.01, d)[:, None] for _ in range(clients)]
    cores = [core_basis(torch.tensor(a), torch.zeros(d, 0), 1.0, "energy") for a in activations]
    together = merge_energy(cores, torch.zeros(d, 0), 0.9, "energy").double().numpy()
    expected, _ = reference.core_basis(np.hstack(activations), np.zeros((d, 0)), 0.9, "energy")
    assert together.shape == expected.shape
    assert np.abs(together @ together.T - expected @ expected.T).max() < 1e-2


@pytest.mark.parametrize("clients", [1, 2, 5])
def test_energy_merge_counts_what_earlier_bases_hold_of_every_client(clients):
    """Most of the energy is inside Φ already: the energies of all clients there add up."""
    rng = np.random.default_rng(clients)
    phi = reference.random_basis(rng, 16, 3)
    own = reference.random_basis(rng, 16, 16) * np.geomspace(1, 0.01, 16)
    activations = [4 * phi @ rng.standard_normal((3, 40)) + own @ rng.standard_normal((16, 40)) for _ in range(clients)]
    cores = [core_basis(torch.tensor(a), torch.tensor(phi), 1.0, "energy") for a in activations]
    together = merge_energy(cores, torch.tensor(phi), 0.985, "energy")
    expected, _ = reference.core_basis(np.hstack(activations), phi, 0.985, "energy")
    assert 0 < expected.shape[1] < 13
    assert together.shape == expected.shape


def test_energy_merge_bounds_the_rank_of_many_clients():
    rng = np.random.default_rng(3)
    shared = reference.random_basis(rng, 64, 4) * 10
    cores = []
    for _ in range(40):
        a = shared @ rng.standard_normal((4, 30)) + 0.1 * rng.standard_normal((64, 30))
        cores.append(core_basis(torch.tensor(a), torch.zeros(64, 0), 0.95, "mass"))
    assert merge_union([core.basis for core in cores], torch.zeros(64, 0)).shape[1] == 64
    assert merge_energy(cores, torch.zeros(64, 0), 0.5, "mass").shape[1] <= 5


def test_fixed_rank_and_full_space():
    core = Core(torch.eye(6), torch.ones(6).double(), 0.0)
    assert merge_energy([core], torch.zeros(6, 0), 0.9, "energy", fixed=2).shape == (6, 2)
    assert merge_energy([core], torch.eye(6)[:, :5], 0.9, "energy", fixed=4).shape == (6, 1)
    assert merge_energy([core], torch.eye(6), 0.9, "energy").shape == (6, 0)
    assert merge_energy([], torch.zeros(6, 0), 0.9, "mass").shape == (6, 0)


@given(seeds, st.integers(4, 20), st.sampled_from(["mass", "energy"]), st.floats(0.3, 0.99), st.booleans())
def test_the_basis_of_a_single_client_survives_the_energy_merge(seed, d, rule, threshold, with_past):
    rng = np.random.default_rng(seed)
    phi = torch.tensor(reference.random_basis(rng, d, d // 4 if with_past else 0))
    a = torch.tensor(rng.standard_normal((d, 30)) * np.geomspace(1, 0.05, d)[:, None])
    core = core_basis(a, phi, threshold, rule)
    assert merge_energy([core], phi, threshold, rule).shape == core.basis.shape


@pytest.mark.parametrize(
    "merge",
    [
        merge_union,
        lambda bases, earlier: merge_energy(
            [Core(b, torch.ones(b.shape[1]), 0.0) for b in bases], earlier, 0.9, "energy", fixed=5
        ),
    ],
)
def test_bases_inside_the_earlier_span_add_nothing(merge):
    earlier = torch.eye(12)[:, :8]
    inside = earlier @ torch.linalg.qr(torch.randn(8, 3))[0]
    assert merge([inside, inside], earlier).shape == (12, 0)
