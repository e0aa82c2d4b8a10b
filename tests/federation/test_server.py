"""Whom the server asks: in every round another draw, for everyone the same chance."""

import pytest

from fedprotip.federation.server import Server
from fedprotip.methods import create_method
from fedprotip.models import build_network
from fedprotip.stream import build_stream
from tests.small import small


@pytest.fixture(scope="module")
def choose():
    """Who is drawn of ten clients, a few of whom may have no data."""

    def build(seed=0, fraction=0.3):
        settings = small(clients={"count": 10, "fraction": fraction}, run={"seed": seed})
        method, stream = create_method(settings), build_stream(settings)
        network = build_network(settings, stream.dataset.image_shape, method.routes)
        return Server(settings, method, network, stream).choose

    return build


def test_clients_are_drawn_in_every_round_anew(choose):
    draw = choose()
    drawn = [tuple(draw(list(range(10)), 0, round_)) for round_ in range(60)]
    assert len(set(drawn)) > 40  # of 120 there are
    often = [sum(client in chosen for chosen in drawn) for client in range(10)]
    assert min(often) > 8  # 18 on average
    assert max(often) < 30


def test_task_round_and_seed_decide_and_nothing_else(choose):
    once, again, other = choose(), choose(), choose(seed=1)
    draws = [
        [drawn(list(range(10)), task, round_) for task in range(3) for round_ in range(5)] for drawn in (once, again)
    ]
    assert draws[0] == draws[1]
    assert len(set(map(tuple, draws[0]))) > 10
    assert [other(list(range(10)), 0, round_) for round_ in range(5)] != draws[0][:5]


@pytest.mark.parametrize(("fraction", "expected"), [(0.3, 3), (0.05, 1), (1.0, 4)])
def test_a_share_of_all_is_drawn_of_those_with_data(choose, fraction, expected):
    chosen = choose(fraction=fraction)([1, 4, 6, 9], 0, 0)
    assert len(chosen) == expected
    assert set(chosen) <= {1, 4, 6, 9}
    assert chosen == sorted(chosen)
