"""Eq. 4: projection with the basis or the complement, idempotent, and anchored over many steps."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedprotip.subspace.project import Projector, complement, project
from tests.subspace import reference
from tests.subspace.test_basis import orthonormality_error, seeds

shapes = st.integers(1, 20).flatmap(lambda d: st.tuples(st.just(d), st.integers(0, d)))


def make(seed, shape, dtype=torch.float64):
    rng = np.random.default_rng(seed)
    d, r = shape
    phi = torch.tensor(reference.random_basis(rng, d, r)).to(dtype)
    return torch.tensor(rng.standard_normal((5, d))).to(dtype), phi


@given(seeds, shapes)
def test_projector_equals_the_dense_one_and_is_idempotent(seed, shape):
    g, phi = make(seed, shape)
    dense = g @ (torch.eye(shape[0], dtype=g.dtype) - phi @ phi.T)
    projector = Projector.outside(phi)
    assert torch.allclose(projector(g), dense, atol=1e-10)
    assert torch.allclose(project(g, phi), dense, atol=1e-10)
    assert torch.allclose(projector(projector(g)), projector(g), atol=1e-10)
    assert torch.allclose(projector(g) @ phi, torch.zeros(5, shape[1], dtype=g.dtype), atol=1e-10)


@given(seeds, shapes)
def test_the_smaller_side_is_held(seed, shape):
    _, phi = make(seed, shape)
    d, r = shape
    assert Projector.outside(phi).basis.shape[1] == min(r, d - r)


@given(seeds, shapes)
def test_complement_completes_the_basis(seed, shape):
    _, phi = make(seed, shape, torch.float32)
    n = complement(phi)
    assert n.shape == (shape[0], shape[0] - shape[1])
    assert orthonormality_error(torch.cat([phi, n], dim=1)) < 1e-5


@given(seeds, shapes, st.data())
def test_without_further_directions(seed, shape, data):
    g, phi = make(seed, shape)
    first = data.draw(st.integers(0, shape[1]))
    projector = Projector.outside(phi[:, :first]).without(phi[:, first:])
    assert projector.room == shape[0] - shape[1]
    assert torch.allclose(projector(g), project(g, phi), atol=1e-10)


@pytest.mark.parametrize("r", [1, 6, 15, 20])
def test_anchored_weight_never_leaves_the_admissible_space(r):
    rng = np.random.default_rng(r)
    phi = torch.tensor(reference.random_basis(rng, 20, r)).float()
    start = torch.tensor(rng.standard_normal((8, 20))).float()
    projector = Projector.outside(phi)
    anchored, weight, expected = projector.anchor(start), start.clone(), start.double()
    for _ in range(500):
        update = torch.tensor(rng.standard_normal((8, 20))).float() * 0.01
        weight -= update
        anchored.pull_back_(weight)
        expected -= project(update.double(), phi.double())
    change = weight - start
    assert (change @ phi).norm() <= 1e-5 * max(change.norm(), 1e-3)
    assert torch.allclose(weight.double(), expected, atol=1e-4)
