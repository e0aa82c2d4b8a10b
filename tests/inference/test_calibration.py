"""Temperatures and how unusual an input is, from sums."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.isotonic import IsotonicRegression

from fedprotip.evaluation.confidence import summary
from fedprotip.inference.calibration import (
    BINS,
    SHARES,
    SURE,
    TEMPERATURES,
    Calibration,
    best_way,
    bin_of,
    count_bins,
    hits,
    losses,
    rising,
)
from fedprotip.stream.plan import Answering, WayPlan


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


def test_no_loss_is_negative_however_many_answers_are_right():
    """As with domains, where a label stands in every task: p(right) is a sum, and its rounding may exceed 1."""
    scores = torch.randn(200, 40, generator=torch.Generator().manual_seed(0)) * 3
    for sample in scores.split(1):
        found = losses(sample, torch.ones(1, 40, dtype=torch.bool))
        assert (found >= 0).all()
        assert found.tolist() == pytest.approx([0.0] * len(TEMPERATURES), abs=1e-5)


@pytest.mark.parametrize("nothing", [-torch.inf, torch.inf, torch.nan])
def test_scores_that_say_nothing_cost_50(nothing):
    scores = torch.full((1, 3), nothing)
    assert losses(scores, torch.tensor([[True, False, False]])).tolist() == [50.0] * len(TEMPERATURES)


def test_a_right_answer_without_any_probability_costs_50_not_infinity():
    scores = torch.tensor([[0.0, -torch.inf]])
    assert losses(scores, torch.tensor([[False, True]])).tolist() == [50.0] * len(TEMPERATURES)


@pytest.mark.parametrize("factor", [0.2, 1.0, 8.0])
def test_the_temperature_undoes_what_made_scores_too_sure(factor):
    rng = np.random.default_rng(0)
    honest = torch.tensor(rng.standard_normal((4000, 3)) * 2).log_softmax(1)
    drawn = torch.multinomial(honest.exp(), 1, generator=torch.Generator().manual_seed(0))
    right = torch.zeros(4000, 3, dtype=torch.bool).scatter(1, drawn, True)
    found = Calibration.of(losses(factor * honest, right), torch.ones(2, BINS))
    steps = TEMPERATURES[1] / TEMPERATURES[0]
    assert factor / steps <= found.temperature <= factor * steps


def test_few_right_answers_do_not_make_anybody_sure():
    """Ten samples, all right at any temperature: sure to a tenth of a nat a sample, no more."""
    scores = torch.tensor([[0.0, -8.0]]).repeat(10, 1)
    found = Calibration.of(losses(scores, torch.tensor([[True, False]]).repeat(10, 1)), torch.ones(2, BINS))
    assert 0.8 < (scores[0] / found.temperature).softmax(0)[0] < 0.99


@given(st.integers(0, 5000))
def test_rising_is_isotonic_regression(seed):
    rng = np.random.default_rng(seed)
    values, weights = rng.random(9), rng.random(9) + 0.1
    expected = IsotonicRegression().fit_transform(np.arange(9), values, sample_weight=weights)
    assert rising(torch.tensor(values), torch.tensor(weights)).tolist() == pytest.approx(expected.tolist())


def too_sure(count, seed):
    """Probabilities of three labels, and which answers were right: of those that are 0.95 sure, fewer are."""
    rng = np.random.default_rng(seed)
    honest = torch.tensor(rng.standard_normal((count, 3)) * 2).softmax(1)
    right = honest.amax(1) > torch.tensor(rng.random(count))
    return (3 * honest.log()).softmax(1), right


def test_answers_are_right_as_often_as_they_are_sure():
    probabilities, right = too_sure(20_000, 0)
    counts = hits(probabilities.amax(1), right).expand(len(TEMPERATURES), 2, SURE)
    known = Calibration.of(torch.arange(float(len(TEMPERATURES))), torch.ones(2, BINS), counts)
    probabilities, right = too_sure(20_000, 1)
    before = summary(probabilities.amax(1), right)["ece"]
    found = known.honest(probabilities)
    assert before > 0.1
    assert summary(found.amax(1), right)["ece"] < 0.02
    assert found.sum(1).tolist() == pytest.approx([1.0] * len(found))
    assert torch.equal(found.argsort(1), probabilities.argsort(1))


def test_what_cannot_be_still_cannot_and_few_samples_change_little():
    counts = torch.zeros(len(TEMPERATURES), 2, SURE)
    counts[:, 0, -1] = 1.0  # one answer that was sure and wrong
    known = Calibration.of(torch.zeros(len(TEMPERATURES)), torch.ones(2, BINS), counts)
    found = known.honest(torch.tensor([[0.9, 0.1, 0.0], [1.0, 0.0, 0.0]]))
    assert found[:, 2].tolist() == [0.0, 0.0]
    assert found[1].tolist() == [1.0, 0.0, 0.0]
    assert 0.75 < found[0, 0] < 0.9


def test_without_held_back_samples_the_temperature_stays_at_one():
    assert Calibration.of(torch.arange(25.0), torch.zeros(2, BINS)) == Calibration()
    assert Calibration().temperature == 1.0


def test_bins_are_in_order_and_have_no_end():
    figures = torch.tensor([-1e30, -1.0, 0.0, 1e-2, 0.9, 1.0, 1.1, 100.0, 1e4, 1e30])
    bins = bin_of(figures)
    assert (bins.diff() > 0).all()
    assert (bins[0], bins[-1]) == (0, BINS - 1)


def test_an_infinite_figure_is_in_the_last_bin():
    """A model without any class statistics finds everything infinitely far."""
    assert bin_of(torch.tensor([torch.inf])).tolist() == [BINS - 1]


def both(odd, new):
    return {"odd": torch.tensor(odd), "new": torch.tensor(new)}


def test_unusual_is_the_share_of_held_back_samples_that_are_less_strange():
    """In either of two measures, each of which has its share of the false alarms."""
    held = torch.distributions.Chi2(8.0).sample((2, 5000)) / 8
    found = Calibration(1.0, count_bins(both(*held.tolist())))
    for figure in (1.5, 2.0, 2.5, 3.0):
        for place, strange in enumerate((both([figure], [0.1]), both([0.1], [figure]))):
            usual = (held[place] < figure).double().mean().item()
            assert found.unusual(strange).item() == pytest.approx(usual ** (1 / SHARES[place].item()), abs=0.1)
    assert found.unusual(both([1e9], [0.0])).item() == pytest.approx(1.0, abs=1e-3)
    assert found.unusual(both([0.0], [0.0])).item() == 0.0
    flagged = found.unusual(both(*torch.distributions.Chi2(8.0).sample((2, 5000)).div(8).tolist())) > 0.95
    assert flagged.double().mean() == pytest.approx(0.05, abs=0.015)


def test_without_held_back_samples_only_the_order_is_told():
    found = Calibration().unusual(both([-1.0, 0.0, 0.1, 3.0], [-1.0, -1.0, 0.5, 0.1]))
    assert found[0] == found[1] == 0
    assert found[1] < found[2] < found[3] < 1


WAYS = {name: WayPlan(router=name, expert="heads") for name in ("cosine", "statistics", "fused")}
EXPERTS = {"heads": {}, "statistics": {}}
TRIED = Answering(experts=EXPERTS, ways=WAYS, chosen="statistics", tried=("statistics", "fused"), auto=True)


@pytest.mark.parametrize(
    ("right", "way"),
    [
        ([70, 90], "fused"),
        ([84, 90], "fused"),
        ([87, 90], "statistics"),
        ([9, 9], "statistics"),
        ([0, 0], "statistics"),
    ],
)
def test_the_way_that_was_right_most_often_answers_ties_to_the_simpler(right, way):
    """Of 100 samples; one that is behind by no more than the root of its errors is level."""
    knowledge = {"calibration/right": torch.tensor(right, dtype=torch.float64)}
    knowledge["calibration/distances"] = torch.tensor([[60, 40], [50, 50]])
    assert best_way(TRIED, knowledge) == way  # as older versions counted them
    knowledge |= {"calibration/asked": torch.tensor([100.0]), "calibration/distances": torch.ones(2, 2)}
    assert best_way(TRIED, knowledge) == way
    assert best_way(TRIED, {}) == "statistics"
    stated = TRIED.model_copy(update={"auto": False, "chosen": "cosine"})
    assert best_way(stated, knowledge) == "cosine"


@pytest.mark.parametrize(
    ("right", "apart", "way"),
    [([48, 50], 2, "statistics"), ([48, 50], 3, "statistics"), ([47, 50], 3, "fused"), ([40, 45], 11, "fused")],
)
def test_two_samples_are_no_lead(right, apart, way):
    """Of so few chance takes one side as often as not."""
    found = {"right": torch.tensor(right), "apart": apart * (1 - torch.eye(2)), "asked": torch.tensor([55.0])}
    assert best_way(TRIED, {f"calibration/{name}": tensor.double() for name, tensor in found.items()}) == way


def test_every_way_has_its_own_temperature():
    loss = torch.ones(2, len(TEMPERATURES), dtype=torch.float64)
    loss[0, 3], loss[1, 5] = -9.0, -9.0
    knowledge = {"calibration/loss": loss, "calibration/distances": torch.ones(2, BINS)}
    for way, place in (("statistics", 3), ("fused", 5)):
        assert Calibration.recall(knowledge, TRIED, way).temperature == pytest.approx(float(TEMPERATURES[place]))
    assert Calibration.recall(knowledge, TRIED, "cosine").temperature == 1.0


@pytest.mark.parametrize(
    ("counts", "classes", "way"),
    [
        ([0, 0, 0, 0], [[0, 1], [2, 3]], "cosine"),
        ([0, 9, 0, 0], [[0, 1], [2, 3]], "cosine"),
        ([0, 9, 0, 0], [[0, 1], [1, 3]], "statistics"),
        ([0, 9, 0, 9], [[0, 1], [2, 3]], "statistics"),
    ],
)
def test_where_statistics_say_nothing_about_half_of_the_tasks_heads_answer(counts, classes, way):
    """Clients with a few samples of a class tell nothing of it; a class seen again is known from its other task."""
    known = {"statistics/counts": torch.tensor(counts, dtype=torch.float64)}
    assert best_way(TRIED, known, classes) == way
    assert best_way(TRIED.model_copy(update={"auto": False}), known, classes) == "statistics"


def test_without_evidence_the_simplest_way_answers():
    """A network that was trained on next to nothing need not be better than the one it began as."""
    ways = {name: WayPlan(router=name, expert=name) for name in ("birth", "statistics")}
    answering = Answering(experts=EXPERTS | {"birth": {}}, ways=ways, chosen="statistics", tried=tuple(ways), auto=True)
    nothing = {"right": torch.zeros(2), "apart": torch.zeros(2, 2), "asked": torch.zeros(1)}
    for knowledge in ({}, {f"calibration/{name}": tensor for name, tensor in nothing.items()}):
        assert best_way(answering, knowledge) == "birth"
