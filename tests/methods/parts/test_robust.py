"""Sums and means that one client of many cannot move far."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedprotip.inference.statistics import FeatureMap, Sums
from fedprotip.methods.parts.robust import bounded, geometric_median, middle, robust_sums, supported
from fedprotip.subspace.basis import orthonormalise

AGGREGATES = ("trimmed", "median")
OMEGA = FeatureMap(6, columns=3).omega


def chance(seed):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_equal_rows_are_given_back(aggregate):
    rows = torch.randn(1, 7, generator=chance(0), dtype=torch.float64).expand(5, 7)
    torch.testing.assert_close(middle(rows, torch.tensor([1.0, 50, 3, 2, 9]), aggregate, 0.2), rows[0])
    torch.testing.assert_close(middle(rows[:1], torch.ones(1), aggregate, 0.2), rows[0])


@given(st.integers(3, 9), st.integers(0, 10**6), st.sampled_from(AGGREGATES))
def test_one_row_cannot_leave_the_range_of_the_others(count, seed, aggregate):
    """Whatever it holds, and however many samples it says it has."""
    rows = torch.randn(count, 11, generator=chance(seed), dtype=torch.float64)
    rows[0] = 1e30
    weights = torch.ones(count)
    if aggregate == "median":
        weights[0] = 1e12
    found = middle(rows, weights, aggregate, 0.45)
    assert (found <= rows[1:].amax(0) + 1e-9).all()
    assert (found >= rows[1:].amin(0) - 1e-9).all()


def test_nobody_weighs_as_much_as_all_others_together():
    for count in range(3, 12):
        weights = torch.ones(count)
        weights[0] = 1e12
        share = bounded(weights)[0] / bounded(weights).sum()
        assert share <= 0.4
    assert bounded(torch.tensor([10.0, 20, 30, 20, 25])).tolist() == [10, 20, 30, 20, 25]


def test_a_trimmed_mean_in_plain_words():
    rows = torch.tensor([[1.0], [2], [3], [4], [100]], dtype=torch.float64)
    torch.testing.assert_close(middle(rows, torch.ones(5), "trimmed", 0.2)[0].item(), 3.0)
    half = middle(rows, torch.ones(5), "trimmed", 0.1)[0].item()
    torch.testing.assert_close(half, (0.5 * 1 + 2 + 3 + 4 + 0.5 * 100) / 4)
    assert middle(rows, torch.ones(5), "median", 0.2)[0].item() == 3.0


def test_a_geometric_median_has_the_least_sum_of_distances():
    points = torch.randn(6, 4, generator=chance(1), dtype=torch.float64)
    weights = torch.tensor([1.0, 2, 1, 1, 3, 1], dtype=torch.float64)
    found = geometric_median(points, weights)

    def cost(point):
        return (weights * (points - point).norm(dim=1)).sum()

    for step in torch.randn(20, 4, generator=chance(2), dtype=torch.float64):
        assert cost(found) <= cost(found + 0.05 * step / step.norm()) + 1e-6


def clients(seed, count=5, classes=3):
    """Samples of the same Gaussians at every client, and their sums."""
    generator, found, d = chance(seed), [], len(OMEGA)
    centres = 3 * torch.randn(classes, d, generator=generator, dtype=torch.float64)
    for _ in range(count):
        rows = torch.arange(classes).repeat(200)
        features = centres[rows] + torch.randn(len(rows), d, generator=generator, dtype=torch.float64)
        sums = Sums.zeros(classes, d, OMEGA.shape[1])
        sums.add(features, rows, OMEGA)
        found.append(sums)
    return found, sum(found[1:], start=found[0])


def own_spread(sums):
    """Every class's own covariance, as sketched: (C, d, k)."""
    return sums.own_scatter(OMEGA) / (sums.counts - 1)[:, None, None]


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_statistics_of_like_clients_are_their_sums(aggregate):
    each, total = clients(0)
    found = robust_sums(each, aggregate, 0.2, OMEGA)
    assert torch.equal(found.counts, total.counts)
    torch.testing.assert_close(found.means(), total.means(), atol=0.2, rtol=0)
    spread, expected = (sums.scatter() / sums.freedom() for sums in (found, total))
    torch.testing.assert_close(spread, expected, atol=0.2, rtol=0)
    torch.testing.assert_close(own_spread(found), own_spread(total), atol=0.2, rtol=0)


@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("factor", [-1.0, 1e6])
def test_statistics_of_one_client_cannot_move_those_of_all(aggregate, factor):
    each, total = clients(1)
    bad = each[2]
    each[2] = Sums(bad.counts, bad.sums * factor, bad.moment * factor**2, bad.sketches * factor**2)
    found = robust_sums(each, aggregate, 0.2, OMEGA)
    torch.testing.assert_close(found.means(), total.means(), atol=0.3, rtol=0)
    spread, expected = (sums.scatter() / sums.freedom() for sums in (found, total))
    assert (spread - expected).norm() < 0.5 * expected.norm()
    assert torch.linalg.eigvalsh(spread)[0] > 0
    assert (own_spread(found) - own_spread(total)).norm() < 0.5 * own_spread(total).norm()


def test_a_class_that_nobody_has_stays_empty():
    found = robust_sums([Sums.zeros(2, 6, 3)] * 3, "median", 0.2, OMEGA)
    assert not found.seen.any()
    assert not found.moment.any()
    assert not found.sketches.any()


def basis(*columns, d=8):
    return torch.eye(d)[:, list(columns)]


def test_directions_that_only_one_client_asks_for_are_left_out():
    bases = [basis(0, 1), basis(1, 2), basis(2, 0, 5)]
    kept = [given @ rotation.float() for given, rotation in zip(bases, supported(bases), strict=True)]
    assert [each.shape[1] for each in kept] == [2, 2, 2]
    assert not kept[2][5].any()


def test_a_full_basis_adds_nothing_that_others_do_not_ask_for():
    generator = chance(3)
    common = torch.randn(20, 4, generator=generator, dtype=torch.float64)
    near = [orthonormalise(common + 0.05 * torch.randn(20, 4, generator=generator).double()) for _ in range(4)]
    rotations = supported([torch.eye(20, dtype=torch.float64), *near])
    assert rotations[0].shape[1] == 4
    assert [rotation.shape[1] for rotation in rotations[1:]] == [4] * 4


def test_two_clients_cannot_be_told_apart():
    assert [each.shape for each in supported([basis(0), basis(3, 4)])] == [(1, 1), (2, 2)]
