"""Extraction and merging of float32 bases at the width of real layers, against float64 by the book."""

import numpy as np
import pytest
import torch

from fedprotip.subspace.basis import Core, core_basis
from fedprotip.subspace.merge import EnergyMerge, UnionMerge
from fedprotip.subspace.project import Projector
from tests.subspace import reference
from tests.subspace.reference import principal_angles
from tests.subspace.test_basis import orthonormality_error

D = 1152
"""Inputs of a 3×3 kernel on 128 channels, the narrowest layer behind the frozen prefix of a ResNet-18."""


@pytest.fixture(scope="module")
def space():
    """An orthonormal basis of everything, float64: its first columns are what earlier tasks hold."""
    return reference.random_basis(np.random.default_rng(0), D, D)


def earlier(space, share, as_projector):
    phi = torch.tensor(space[:, : int(share * D)]).float()
    return phi, Projector.outside(phi) if as_projector else phi


@pytest.mark.parametrize(("share", "as_projector"), [(0.0, False), (0.3, False), (0.7, False), (0.7, True)])
@pytest.mark.parametrize("rule", ["mass", "energy"])
def test_the_core_basis_is_that_of_a_full_svd(space, share, as_projector, rule):
    rng = np.random.default_rng(1)
    a = space @ (np.geomspace(1, 1e-3, D)[rng.permutation(D), None] * rng.standard_normal((D, 300)))
    a = torch.tensor(a).float()
    phi, known = earlier(space, share, as_projector)
    expected, sigma = reference.core_basis(a.double().numpy(), phi.double().numpy(), 0.8, rule)
    core = core_basis(a, known, 0.8, rule)
    rank = expected.shape[1]
    assert core.basis.shape == (D, rank)
    assert rank > (0 if share == 0.7 and rule == "energy" else 20)
    assert core.sigma.numpy() == pytest.approx(sigma[:rank], rel=1e-5)
    assert orthonormality_error(torch.cat([phi, core.basis], dim=1)) < 1e-6
    assert principal_angles(core.basis, torch.tensor(expected)).max() < 1e-3


@pytest.mark.parametrize(("share", "as_projector"), [(0.0, False), (0.3, False), (0.7, False), (0.7, True)])
def test_the_union_holds_every_client_and_nothing_else(space, share, as_projector):
    rng = np.random.default_rng(2)
    phi, known = earlier(space, share, as_projector)
    free = space[:, phi.shape[1] :]
    common, own = free[:, :40], [free[:, 40 + 30 * k : 70 + 30 * k] for k in range(3)]
    merger, clients = UnionMerge(known), []
    for part in own:  # directions that all have, some of its own, and one that another client nearly has
        near = part[:, :1] + 1e-3 * own[0][:, 1:2]
        mixed = np.linalg.qr(np.hstack([common, part, near]) @ rng.standard_normal((71, 70)))[0]
        clients.append(torch.tensor(mixed).float())
        merger.add(Core(clients[-1], torch.ones(70), 0.0))
    union = merger.result()
    assert union.shape == (D, 40 + 3 * 30)
    assert orthonormality_error(torch.cat([phi, union], dim=1)) < 1e-6
    assert all(principal_angles(union, client).max() < 1e-5 for client in clients)


def test_the_energy_merge_of_many_clients_keeps_only_their_sum():
    """More columns than dimensions: the same basis as by one SVD of all of them."""
    rng, d = np.random.default_rng(3), 60
    phi = torch.tensor(reference.random_basis(rng, d, 12)).float()
    cores, scaled = [], []
    for _ in range(9):
        a = rng.standard_normal((d, 40)) * np.geomspace(1, 0.01, d)[:, None]
        cores.append(core_basis(torch.tensor(a).float(), phi, 1.0, "energy"))
        scaled.append((cores[-1].basis.double() * cores[-1].sigma).numpy())
    merger = EnergyMerge(phi, 0.9, "mass")
    for core in cores:
        merger.add(core)
    assert merger._factor.shape[1] <= d < sum(part.shape[1] for part in scaled)
    expected, _ = reference.core_basis(np.hstack(scaled), phi.double().numpy(), 0.9, "mass")
    merged = merger.result()
    assert merged.shape == expected.shape
    assert principal_angles(merged, torch.tensor(expected)).max() < 1e-4
    assert orthonormality_error(torch.cat([phi, merged], dim=1)) < 1e-6


def test_a_full_space_takes_no_further_client(monkeypatch):
    merger = UnionMerge(torch.eye(6, 2))
    merger.add(Core(torch.eye(6), torch.ones(6), 0.0))
    assert merger.result().shape == (6, 4)
    monkeypatch.setattr("fedprotip.subspace.merge.added", None)
    merger.add(Core(torch.eye(6), torch.ones(6), 0.0))
    assert merger.result().shape == (6, 4)


@pytest.mark.parametrize(("share", "as_projector"), [(0.3, False), (0.7, False), (0.7, True)])
def test_faint_directions_are_exactly_orthogonal_too(space, share, as_projector):
    """A first pass in float32 leaves a share of up to 1e-3 of such directions inside Φ; the result must not."""
    rng = np.random.default_rng(4)
    phi, known = earlier(space, share, as_projector)
    inside, faint = space[:, : phi.shape[1]], space[:, -20:] * np.geomspace(1, 0.2, 20)
    a = inside @ rng.standard_normal((phi.shape[1], 300)) + 3e-3 * faint @ rng.standard_normal((20, 300))
    core = core_basis(torch.tensor(a).float(), known, 1.0, "mass")
    merger = UnionMerge(known)
    merger.add(Core(torch.tensor(np.linalg.qr(inside[:, :20] + 0.1 * faint)[0]).float(), torch.ones(20), 0.0))
    for basis in (core.basis, merger.result()):
        assert basis.shape == (D, 20)
        assert orthonormality_error(torch.cat([phi, basis], dim=1)) < 1e-6
        assert principal_angles(basis, torch.tensor(space[:, -20:])).max() < 0.01
