"""Which way answers is what clients counted, and no single one of them decides it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedprotip.inference.calibration import BINS, FADING, MEASURES, MOST_LOSS, TEMPERATURES, Calibration, best_way
from fedprotip.inference.calibration import SURE as BINS_OF_SURENESS
from fedprotip.messages import Message
from fedprotip.methods.parts.calibration import Calibrating, capped
from fedprotip.settings import TrainSettings
from fedprotip.stream.plan import Answering, WayPlan
from tests.sites import Ends
from tests.small import small

WAYS, EXPERTS = ("simple", "other"), {"heads": {}, "statistics": {}}


def trying(ways):
    plans = {name: WayPlan(router=name, expert="heads") for name in ways}
    return Answering(experts=EXPERTS, ways=plans, chosen=ways[-1], tried=ways, auto=True)


ANSWERING = trying(WAYS)
SURE, UNSURE = 8, 20
"""Places of the temperatures 1 and about 32."""


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    return Ends(small(clients={"held_back": 0.1}), tmp_path_factory.mktemp("ends"))


def told(samples, right, best=SURE, still=None, both=None):
    """A client whose answers have the least loss at this temperature, of which so many are right in both ways."""
    distances = torch.zeros(len(MEASURES), BINS, dtype=torch.int64)
    distances[:, 900] = samples
    loss = samples * (0.05 + 0.1 * (torch.arange(len(TEMPERATURES)) - best).abs().double()).expand(len(WAYS), -1)
    sure = torch.zeros(len(WAYS), len(TEMPERATURES), 2, BINS_OF_SURENESS, dtype=torch.int64)
    sure[:, :, 0, -1], sure[:, :, 1, -1] = samples, torch.tensor(right)[:, None]
    tensors = {"right": torch.tensor(right), "loss": loss.clone(), "hits": sure, "distances": distances}
    apart = (sum(right) - 2 * (min(right) if both is None else both)) * (1 - torch.eye(2, dtype=torch.int64))
    lasting = torch.tensor(still or [2 * count for count in right])
    return Message("calibration", tensors | {"still": lasting, "apart": apart})


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


@pytest.mark.parametrize("aggregate", ["trimmed", "median"])
def test_many_held_back_samples_count_like_the_usual_ones_in_a_robust_aggregate(ends, aggregate):
    """How unusual inputs are, and how sure answers: nobody has more say than the median client."""
    others, far = [told(20, [19, 19]) for _ in range(3)], torch.zeros(len(MEASURES), BINS, dtype=torch.int64)
    idle, liar = told(0, [0, 0]), told(200, [200, 200])
    far[:, 1] = 200
    liar.tensors["distances"] = far
    found = known(ends, *others, idle, liar, aggregate=aggregate)
    assert found["calibration/distances"][0, [1, 900]].tolist() == [20, 60]
    assert found["calibration/asked"].item() == 80


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


def test_right_answers_about_earlier_tasks_count_as_far_as_they_last(ends):
    """`birth` has a network that nobody moves: whatever clients say, it loses nothing."""
    answering = trying(("birth", "other"))
    site, exchange = ends.site(), Calibrating(answering, TrainSettings())
    exchange.digest(iter(enumerate([told(40, [30, 40])])), site)
    assert best_way(answering, site.known) == "other"
    alike = [told(10, [10, 10], still=[0, 20 - 2 * lost]) for lost in (5, 4)]
    exchange.digest(iter(enumerate(alike)), site)
    assert site.known["calibration/right"].tolist() == [30 + 20, 40 * (1 - 8 / 20) + 20]  # 5 counts as 4
    assert best_way(answering, site.known) == "birth"


def test_what_some_clients_lose_by_chance_others_win(ends):
    """Of many clients with few samples each some lose answers and others win as many: nothing is lost then."""
    site, exchange = ends.site(), Calibrating(trying(("birth", "other")), TrainSettings())
    exchange.digest(iter(enumerate([told(40, [30, 40])])), site)
    exchange.digest(iter(enumerate([told(4, [2, 2], still=[4, 4 + change]) for change in (2, -2) * 10])), site)
    assert site.known["calibration/right"].tolist() == [30 + 40, 40 + 40]


def test_nobody_says_that_more_lasts_than_was_there(ends):
    """By more than the client next to it: what earlier tasks lost would be hidden."""
    site, exchange = ends.site(), Calibrating(trying(("birth", "other")), TrainSettings())
    exchange.digest(iter(enumerate([told(40, [30, 40])])), site)
    exchange.digest(iter(enumerate(told(10, [4, 4], still=[8, still]) for still in (6, 6, 20))), site)
    assert site.known["calibration/right"].tolist() == [30 + 12, 40 * (1 - (1 + 1 - 1) / 12) + 12]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=3, max_size=8), st.data())
def test_a_lie_costs_at_most_what_one_honest_client_found(ends, right, data):
    """How far one way is ahead of the other, whatever one client adds to it."""
    lie = data.draw(st.tuples(st.integers(0, 30), st.integers(0, 30)))
    found = known(ends, *(told(30, list(one)) for one in right), told(30, list(lie)))["calibration/right"]
    assert 0 <= found.min() <= found.max() <= 30 * (len(right) + 1)
    ahead = torch.tensor([other - simple for simple, other in right])
    assert abs((found[1] - found[0]) - ahead.sum()) <= ahead.abs().max()


@pytest.mark.parametrize(
    ("right", "way"),
    [
        ([(19, 17), (19, 20), (19, 20)], "simple"),  # three wrong each, and those of one client used not to count
        ([(17, 20), (17, 20), (20, 20)], "other"),
        ([(20, 17), (20, 17), (20, 20)], "simple"),
    ],
)
def test_what_most_clients_found_level_stays_so(ends, right, way):
    """It is what a client found of one way against the other that is bounded, not what was wrong with each of them."""
    assert best_way(ANSWERING, known(ends, *(told(20, list(one)) for one in right))) == way


@pytest.mark.parametrize(("both", "way"), [(None, "other"), (40, "simple")])
def test_a_tie_is_told_by_samples_that_one_way_alone_has_right(ends, both, way):
    """10 answers ahead of 100 is much where the ways agree about all others, and chance where they hardly agree."""
    assert best_way(ANSWERING, known(ends, told(200, [100, 110], both=both))) == way


def test_nobody_makes_ways_level_by_being_apart(ends):
    honest = [told(20, [15, 19]) for _ in range(4)]
    assert best_way(ANSWERING, known(ends, *honest, told(2000, [1000, 1000], both=0))) == "other"


def test_a_single_client_is_believed():
    assert capped(torch.tensor([[3, 4]])).tolist() == [[3, 4]]
    assert capped(torch.tensor([[3, 4], [9, 0]])).tolist() == [[3, 0], [3, 0]]
