"""Which way answers is what clients counted, and no single one of them decides it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedprotip.inference.calibration import BINS, FADING, MEASURES, MOST_LOSS, TEMPERATURES, Calibration, best_way
from fedprotip.inference.calibration import SURE as BINS_OF_SURENESS
from fedprotip.messages import Message
from fedprotip.methods.parts.calibration import Calibrating, bounded
from fedprotip.settings import TrainSettings
from fedprotip.stream.plan import Answering, WayPlan
from tests.sites import Ends
from tests.small import small

WAYS = ("simple", "other")
ANSWERING = Answering(
    ways={name: WayPlan(router=name, expert="heads") for name in WAYS}, chosen="simple", tried=WAYS, auto=True
)
SURE, UNSURE = 8, 20
"""Places of the temperatures 1 and about 32."""


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    return Ends(small(clients={"held_back": 0.1}), tmp_path_factory.mktemp("ends"))


def told(samples, right, best=SURE):
    """A client whose answers have the least loss at this temperature."""
    distances = torch.zeros(len(MEASURES), BINS, dtype=torch.int64)
    distances[:, 900] = samples
    loss = samples * (0.05 + 0.1 * (torch.arange(len(TEMPERATURES)) - best).abs().double()).expand(len(WAYS), -1)
    sure = torch.zeros(len(WAYS), len(TEMPERATURES), 2, BINS_OF_SURENESS, dtype=torch.int64)
    sure[:, :, 0, -1], sure[:, :, 1, -1] = samples, torch.tensor(right)[:, None]
    tensors = {"right": torch.tensor(right), "loss": loss.clone(), "hits": sure, "distances": distances}
    return Message("calibration", tensors)


def known(ends, *replies, aggregate="mean"):
    site, exchange = ends.site(), Calibrating(ANSWERING, TrainSettings(aggregate=aggregate))
    for reply in replies:
        exchange.check(reply, site)
    exchange.digest(iter(enumerate(replies)), site)
    return site.known


@pytest.mark.parametrize(("honest", "lie", "chosen"), [([19, 15], [0, 20], "simple"), ([15, 19], [20, 0], "other")])
@pytest.mark.parametrize("samples", [20, 2000])
def test_one_client_does_not_overturn_the_choice_of_all_others(ends, honest, lie, chosen, samples):
    """Not even with a hundred times their samples."""
    others = [told(20, honest) for _ in range(4)]
    liar = told(samples, [count * samples // 20 for count in lie])
    assert best_way(ANSWERING, known(ends, *others)) == chosen
    assert best_way(ANSWERING, known(ends, *others, liar)) == chosen


def test_two_of_five_who_found_otherwise_are_heard(ends):
    found = known(ends, *[told(20, [18, 19])] * 3, *[told(20, [5, 19])] * 2)
    assert best_way(ANSWERING, found) == "other"


@pytest.mark.parametrize(("aggregate", "steps"), [("mean", 8), ("trimmed", 1), ("median", 1)])
@pytest.mark.parametrize("lie", ["sure", "unsure"])
def test_one_client_does_not_decide_how_sure_answers_are(ends, lie, aggregate, steps):
    """Of 25 temperatures it may move the answer by so many; without bounds to the first or the last one."""
    honest, liar = [told(20, [19, 19], best=14) for _ in range(4)], told(20, [19, 19])
    most = MOST_LOSS * 20.0
    ramp = torch.linspace(0, most, len(TEMPERATURES)).double()
    liar.tensors["loss"] = (ramp if lie == "sure" else most - ramp).expand(len(WAYS), -1).clone()
    places = []
    for some in (honest, [*honest, liar]):
        found = Calibration.recall(known(ends, *some, aggregate=aggregate), ANSWERING, "simple")
        places.append(int((TEMPERATURES - found.temperature).abs().argmin()))
    assert abs(places[0] - places[1]) <= steps


def test_what_was_found_is_a_sum_where_two_have_the_most(ends):
    found = known(ends, told(20, [18, 10]), told(20, [18, 10]), told(10, [10, 8]))
    assert found["calibration/right"].tolist() == [46, 28]
    assert found["calibration/distances"].sum(1).tolist() == [50, 50]


def test_newer_samples_count_more_but_for_the_choice_of_a_way(ends):
    """Where unusual begins depends on how many classes there are; which way is right is counted over all samples."""
    site, exchange = ends.site(), Calibrating(ANSWERING, TrainSettings())
    for samples in (40, 20):
        exchange.digest(iter(enumerate([told(samples, [samples, 0])])), site)
    assert site.known["calibration/asked"].tolist() == [60]
    assert site.known["calibration/right"].tolist() == [60, 0]
    assert site.known["calibration/distances"].sum(1).tolist() == [20 + FADING * 40] * 2
    assert site.known["calibration/hits"].sum().item() == (20 + FADING * 40) * 3 * len(TEMPERATURES)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=3, max_size=8), st.data())
def test_a_lie_costs_at_most_what_one_honest_client_found_wrong(wrong, data):
    """The way with the fewest `bounded` wrong answers, whatever one client adds to them, is nearly the best one."""
    lie = data.draw(st.tuples(st.integers(0, 1000), st.integers(0, 1000)))
    honest = torch.tensor(wrong)
    chosen = int(bounded(torch.cat([honest, torch.tensor([lie])])).sum(0).argmin())
    assert honest.sum(0)[chosen] <= honest.sum(0).min() + honest.max()


def test_a_single_client_is_believed():
    assert bounded(torch.tensor([[3, 4]])).tolist() == [[3, 4]]
    assert bounded(torch.tensor([[3, 4], [9, 0]])).tolist() == [[3, 0], [3, 0]]
