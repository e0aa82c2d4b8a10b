"""Sums and means that one client of many cannot move far."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedprotip.inference.statistics import FeatureMap, Sums
from fedprotip.methods.parts.robust import bounded, geometric_median, middle, robust_sums, supported, usual
from fedprotip.subspace.basis import orthonormalise

AGGREGATES = ("trimmed", "median")
OMEGA = FeatureMap(6, columns=3).omega


def chance(seed):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_equal_rows_are_given_back(aggregate):
    rows = torch.randn(1, 7, generator=chance(0), dtype=torch.float64).expand(5, 7)
    torch.testing.assert_close(middle(rows, aggregate, 0.2, torch.tensor([1.0, 50, 3, 2, 9])), rows[0])
    torch.testing.assert_close(middle(rows[:1], aggregate, 0.2), rows[0])


@given(st.integers(3, 9), st.integers(0, 10**6), st.sampled_from(AGGREGATES), st.sampled_from([0.05, 0.2, 0.45]))
def test_one_row_cannot_leave_the_range_of_the_others(count, seed, aggregate, trim):
    """However few there are, and however many samples it says it has: its weight is left out at each end."""
    rows = torch.randn(count, 11, generator=chance(seed), dtype=torch.float64)
    rows[0] = 1e30
    weights = torch.rand(count, generator=chance(seed)) + 0.1
    weights[0] = 1e12
    for some in (None, weights):
        found = middle(rows, aggregate, trim, some)
        assert (found <= rows[1:].amax(0) + 1e-9).all()
        assert (found >= rows[1:].amin(0) - 1e-9).all()


@given(st.lists(st.floats(0.1, 100), min_size=2, max_size=9))
def test_nobody_weighs_more_than_forty_percent(others):
    """However unevenly the others are: a median of large ones would let it have more than half."""
    weights = torch.tensor([1e12, *others], dtype=torch.float64)
    found = bounded(weights)
    assert found.max() <= 0.4 * found.sum() + 1e-9
    assert (found <= weights).all()


def test_weights_that_are_fair_stay():
    assert bounded(torch.tensor([10.0, 20, 30, 20, 25])).tolist() == [10, 20, 30, 20, 25]
    assert bounded(torch.tensor([5.0, 80])).tolist() == [5, 5]
    assert bounded(torch.tensor([7.0])).tolist() == [7]


def test_nobody_makes_the_usual_number_of_samples_larger():
    for count in range(3, 12):
        numbers = torch.arange(1, count + 1)
        assert usual(numbers).max() <= (count + 1) // 2
        numbers[0] = 10**12
        assert usual(numbers).max() <= count  # the largest of the others
    assert usual(torch.tensor([10, 5000])).tolist() == [10, 10]
    assert usual(torch.tensor([30, 20, 20, 25, 8])).tolist() == [20, 20, 20, 20, 8]


def test_a_trimmed_mean_in_plain_words():
    rows = torch.tensor([[1.0], [2], [3], [4], [100]], dtype=torch.float64)
    torch.testing.assert_close(middle(rows, "trimmed", 0.2)[0].item(), 3.0)
    assert middle(rows, "trimmed", 0.1)[0].item() == pytest.approx(3.0)  # at least one
    half = middle(rows, "trimmed", 0.3)[0].item()
    assert half == pytest.approx((0.5 * 2 + 3 + 0.5 * 4) / 2)
    assert middle(rows, "median", 0.2)[0].item() == pytest.approx(3.0)
    assert middle(rows[:2], "trimmed", 0.2)[0].item() == pytest.approx(1.5)  # two have no middle


def test_a_geometric_median_has_the_least_sum_of_distances():
    points = torch.randn(6, 4, generator=chance(1), dtype=torch.float64)
    found = geometric_median(points)

    def cost(point):
        return (points - point).norm(dim=1).sum()

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


@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("count", [3, 5])
def test_many_stated_samples_do_not_make_statistics_count_for_more(aggregate, count):
    """Classes swapped, and a hundred times the samples: no more harm than with as many samples as the others have."""
    each, total = clients(2, count)
    lie = Sums(each[1].counts.flip(0), each[1].sums.flip(0), each[1].moment, each[1].sketches.flip(0))
    found = [robust_sums([each[0], lie.times(n), *each[2:]], aggregate, 0.2, OMEGA) for n in (1, 100)]
    for part in ("counts", "sums"):
        torch.testing.assert_close(*(getattr(sums, part) for sums in found))
    torch.testing.assert_close(*map(own_spread, found), rtol=0.01, atol=0.01)
    torch.testing.assert_close(*(sums.scatter() / sums.freedom() for sums in found), rtol=0.01, atol=0.01)
    torch.testing.assert_close(found[1].means(), total.means(), atol=0.4, rtol=0)


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
