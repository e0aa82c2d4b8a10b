"""Updates outside Φ survive d − r numbers per row, to float precision."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedprotip.subspace.coordinates import Held, Reflected, complement_of
from fedprotip.subspace.project import Projector, complement


def basis(d, r, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64)).Q[:, :r].float()


def outside(phi, out, seed, scale=1.0):
    """An update (out, d) without any part inside Φ, to float precision."""
    generator = torch.Generator().manual_seed(seed)
    update = scale * torch.randn(out, len(phi), generator=generator, dtype=torch.float64)
    return (update - update @ phi.double() @ phi.double().T).float()


def check(coordinates, phi, seed, scale=1.0):
    update = outside(phi, 5, seed, scale)
    sent = coordinates.encode(update)
    assert sent.shape == (5, len(phi) - phi.shape[1]) == (5, coordinates.width)
    assert sent.dtype == torch.float32
    back, size = coordinates.decode(sent), update.norm()
    assert (back - update).norm() <= 3e-6 * size
    assert (back.double() @ phi.double()).norm() <= 3e-6 * size
    assert sent.norm().item() == pytest.approx(size.item(), rel=1e-5)  # so rounding is not blown up on the way


@given(st.integers(1, 40), st.data(), st.integers(0, 1000), st.sampled_from([1e-6, 1.0, 1e6]))
def test_an_update_outside_the_basis_comes_back(d, data, seed, scale):
    phi = basis(d, data.draw(st.integers(0, d - 1)), seed)
    check(complement_of(Projector.outside(phi)), phi, seed, scale)


@given(st.integers(1, 40), st.data(), st.integers(0, 1000))
def test_both_forms_agree_on_what_comes_back(d, data, seed):
    phi = basis(d, data.draw(st.integers(0, d - 1)), seed)
    check(Held(complement(phi)), phi, seed)
    if 2 * phi.shape[1] <= d:
        check(Reflected.outside(phi), phi, seed)


def test_a_full_basis_leaves_nothing_to_send():
    for coordinates in (complement_of(Projector.outside(basis(6, 6, 0))), Reflected.outside(basis(6, 6, 0))):
        assert coordinates.encode(torch.ones(3, 6)).shape == (3, 0)
        assert torch.equal(coordinates.decode(torch.zeros(3, 0)), torch.zeros(3, 6))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_basis_of_unit_vectors(sign):
    """With the plain signs T does not exist for one of the two."""
    phi = sign * torch.eye(9, 4)
    check(Reflected.outside(phi), phi, seed=3)
    near = torch.linalg.qr((phi + 1e-4 * torch.randn(9, 4, generator=torch.Generator().manual_seed(0))).double()).Q
    near = (near * (near * phi).sum(0).sign()).float()  # QR may flip columns
    check(Reflected.outside(near), near, seed=3)


@given(st.integers(2, 20), st.data(), st.integers(0, 1000))
def test_what_is_inside_is_left_out(d, data, seed):
    phi = basis(d, data.draw(st.integers(1, d - 1)), seed)
    update, coordinates = outside(phi, 3, seed), complement_of(Projector.outside(phi))
    inside = torch.ones(3, phi.shape[1]) @ phi.T
    assert (coordinates.encode(update + inside) - coordinates.encode(update)).abs().max() <= 1e-5


@given(st.integers(2, 20), st.data(), st.integers(0, 1000))
def test_the_average_of_coordinates_is_that_of_the_updates(d, data, seed):
    phi = basis(d, data.draw(st.integers(1, d - 1)), seed)
    coordinates = complement_of(Projector.outside(phi))
    updates = [outside(phi, 3, seed + k) for k in range(4)]
    average = sum(coordinates.encode(update) for update in updates) / 4
    assert (coordinates.decode(average) - sum(updates) / 4).abs().max() <= 1e-5
