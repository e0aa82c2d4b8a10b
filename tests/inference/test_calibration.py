"""Temperatures and how unusual an input is, from sums."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedprotip.inference.calibration import BINS, TEMPERATURES, Calibration, bin_of, losses


@given(st.integers(0, 5000))
def test_losses_are_those_of_a_plain_loop_and_add_up(seed):
    rng = np.random.default_rng(seed)
    scores, right = torch.tensor(rng.standard_normal((9, 5)) * 4), torch.tensor(rng.random((9, 5)) < 0.4)
    right[:, 0] = True
    expected = []
    for temperature in TEMPERATURES.tolist():
        p = np.exp(scores.numpy() / temperature)
        p = p / p.sum(1, keepdims=True)
        expected.append(np.minimum(-np.log((p * right.numpy()).sum(1)), 50).sum())
    assert losses(scores, right).tolist() == pytest.approx(expected, rel=1e-6)
    parts = losses(scores[:4], right[:4]) + losses(scores[4:], right[4:])
    assert parts.tolist() == pytest.approx(losses(scores, right).tolist())


def test_a_right_answer_without_any_probability_costs_50_not_infinity():
    scores = torch.tensor([[0.0, -torch.inf]])
    assert losses(scores, torch.tensor([[False, True]])).tolist() == [50.0] * len(TEMPERATURES)


@pytest.mark.parametrize("factor", [0.2, 1.0, 8.0])
def test_the_temperature_undoes_what_made_scores_too_sure(factor):
    rng = np.random.default_rng(0)
    honest = torch.tensor(rng.standard_normal((4000, 3)) * 2).log_softmax(1)
    drawn = torch.multinomial(honest.exp(), 1, generator=torch.Generator().manual_seed(0))
    right = torch.zeros(4000, 3, dtype=torch.bool).scatter(1, drawn, True)
    found = Calibration.of(losses(factor * honest, right), torch.ones(BINS))
    steps = TEMPERATURES[1] / TEMPERATURES[0]
    assert factor / steps <= found.temperature <= factor * steps


def test_without_held_back_samples_the_temperature_stays_at_one():
    assert Calibration.of(torch.arange(25.0), torch.zeros(BINS)) == Calibration()
    assert Calibration().temperature == 1.0


def test_bins_are_in_order_and_the_last_has_no_end():
    distances = torch.tensor([-1.0, 0.0, 1e-2, 1.0, 100.0, 1e4, 1e30])
    bins = bin_of(distances)
    assert bins[0] == bins[1] == 0
    assert (bins.diff() >= 0).all()
    assert bins[-1] == BINS - 1
    assert bins[3] < bins[4] < bins[5] < bins[6]


def test_an_infinite_distance_is_in_the_last_bin():
    """A model without any class statistics finds everything infinitely far."""
    assert bin_of(torch.tensor([torch.inf])).tolist() == [BINS - 1]


def test_unusual_is_the_share_of_held_back_samples_that_are_nearer():
    held = torch.distributions.Chi2(8.0).sample((5000,))
    counts = torch.bincount(bin_of(held), minlength=BINS)
    found = Calibration(1.0, counts)
    for distance in (3.0, 8.0, 15.0):
        expected = (held < distance).double().mean().item()
        assert found.unusual(torch.tensor([distance])).item() == pytest.approx(expected, abs=0.05)
    assert found.unusual(torch.tensor([1e9])).item() == pytest.approx(1.0, abs=1e-3)
    assert found.unusual(torch.tensor([0.0])).item() == pytest.approx(0.0, abs=1e-2)


def test_without_held_back_samples_only_the_order_is_told():
    found = Calibration().unusual(torch.tensor([-1.0, 0.0, 0.5, 3.0]))
    assert found[0] == found[1] == 0
    assert found[1] < found[2] < found[3] < 1
