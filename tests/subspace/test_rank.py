"""Rank rules on spectra whose answer is known."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedprotip.subspace.rank import rank_energy, rank_mass

SCALES = [1e-8, 1.0, 1e8]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(
    ("sigma", "threshold", "expected"),
    [
        ([3, 1], 0.75, 1),  # exactly at ε
        ([3, 1], 0.7501, 2),
        ([1] * 10, 0.7, 7),
        ([1] * 10, 0.1, 1),
        ([1] * 10, 1.0, 10),
        ([5], 0.01, 1),
        ([5], 1.0, 1),
        ([5, 0, 0], 1.0, 1),  # rank-deficient: zeros are not directions
        ([4, 3, 2, 1], 0.9, 3),
        ([1e8, 1, 1e-8], 0.999, 1),  # badly scaled inside one spectrum
        ([1e8, 1, 1e-8], 1.0, 2),  # 1e-8 is below the rounding of 1e8
    ],
)
def test_mass_is_eq_9(sigma, threshold, expected, scale):
    assert rank_mass(torch.tensor(sigma, dtype=torch.float64) * scale, threshold) == expected


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(
    ("sigma", "captured", "threshold", "expected"),
    [
        ([3, 1], 0, 0.9, 1),  # 9 of 10
        ([3, 1], 0, 0.9001, 2),
        ([3, 1], 90, 0.9, 0),  # the old bases hold 90 of 100 already
        ([3, 1], 90, 0.95, 1),
        ([3, 1], 90, 1.0, 2),
        ([1] * 10, 0, 0.7, 7),
        ([2], 0, 1.0, 1),
        ([2, 0], 0, 1.0, 1),
    ],
)
def test_energy_is_the_rule_of_gpm(sigma, captured, threshold, expected, scale):
    sigma = torch.tensor(sigma, dtype=torch.float64) * scale
    assert rank_energy(sigma, captured * scale**2, threshold) == expected


@pytest.mark.parametrize("threshold", [0.1, 0.7, 1.0])
@pytest.mark.parametrize("sigma", [[], [0.0], [0.0, 0.0]])
def test_a_zero_spectrum_has_no_direction(sigma, threshold):
    assert rank_mass(torch.tensor(sigma), threshold) == 0
    assert rank_energy(torch.tensor(sigma), 0.0, threshold) == 0
    assert rank_energy(torch.tensor(sigma), 5.0, threshold) == 0


spectra = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=30).map(lambda s: sorted(s, reverse=True))


@given(spectra, st.floats(0.01, 1.0))
def test_mass_is_the_smallest_sufficient_rank(sigma, threshold):
    r = rank_mass(torch.tensor(sigma, dtype=torch.float64), threshold)
    assert 1 <= r <= len(sigma)
    assert sum(sigma[:r]) >= threshold * sum(sigma) * (1 - 1e-9)
    assert sum(sigma[: r - 1]) < threshold * sum(sigma) * (1 + 1e-9)


@given(spectra, st.floats(0, 1e6), st.floats(0.01, 1.0))
def test_energy_is_the_smallest_sufficient_rank(sigma, captured, threshold):
    r = rank_energy(torch.tensor(sigma, dtype=torch.float64), captured, threshold)
    energy = [value**2 for value in sigma]
    target = threshold * (captured + sum(energy))
    assert captured + sum(energy[:r]) >= target * (1 - 1e-9)
    assert r == 0 or captured + sum(energy[: r - 1]) < target * (1 + 1e-9)
