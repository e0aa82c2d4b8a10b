"""Whom the server asks, what they count for, and what it does when training diverges."""

import pytest
import torch

from fedprotip.federation.server import Server
from fedprotip.messages import Message
from fedprotip.methods import create_method
from fedprotip.methods.parts.training import UNIT, steps_of_round
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


def test_no_share_loses_a_client_to_rounding():
    """0.29 · 100 is 28.999999999999996."""
    settings = small(clients={"count": 100, "fraction": 0.29})
    method, stream = create_method(settings), build_stream(settings)
    network = build_network(settings, stream.dataset.image_shape, method.routes)
    assert len(Server(settings, method, network, stream).choose(list(range(100)), 0, 0)) == 29


@pytest.fixture
def server():
    settings = small(clients={"count": 5})
    method, stream = create_method(settings), build_stream(settings)
    made = Server(settings, method, build_network(settings, stream.dataset.image_shape, method.routes), stream)
    made.begin_task(0)
    return made


def present(server, *samples):
    server.note_presence({client: {"samples": count} for client, count in enumerate(samples)}, lambda *_: None)


def test_no_client_counts_for_many_times_the_samples_of_all_others(server):
    training = server.method.exchange("model")

    def weights(*samples):
        present(server, *samples)
        replies = [Message("model", meta={"samples": count}) for count in samples]
        return [UNIT * training.weight(reply, server.site) for reply in replies]

    assert weights(400, 300, 1600, 2) == [400, 300, 1600, 2]
    assert weights(400, 300, 5000, 2) == [400, 300, 1600, 2]
    assert server.too_many() == {2: 5000}
    assert weights(1, 390, 2, 3) == [1, 390, 2, 3]  # of so few samples one client may well have all
    assert weights(1, 4000, 2, 3) == [1, 400, 2, 3]
    assert weights(10**6) == [10**6]
    assert not server.too_many()


def test_stated_samples_do_not_excuse_longer_updates(server):
    present(server, 100, 100, 100000)
    reply = Message("model", meta={"samples": 100000})
    effort = server.method.exchange("model").effort(reply, server.site, server.sender(2))
    assert effort == steps_of_round(server.settings.train, 400)


def trained(server, change):
    """A round whose result is the model changed by so much."""
    server.digest(server.method.exchange("model"), Message("model", moved(server, change)))


def moved(server, change=0.0):
    return {name: tensor + change for name, tensor in server.site.wire.pack(server.site.moving()).items()}


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("restored", [False, True])
def test_a_task_that_diverged_begins_anew(server, restored):
    server.begin_rounds()
    start = moved(server)
    for change in (1.0, 2.0):
        trained(server, change)
    if restored:
        state, groups = server.state(), {name: dict(tensors) for name, tensors in server.tensors().items()}
        server.restore(state, groups)
    assert not equal(moved(server), start)
    version = server.progress.version
    assert server.begin_anew()
    assert equal(moved(server), start)
    assert server.progress.version == version + 1  # clients are sent it
    assert not server.begin_anew()  # nothing has changed since
    trained(server, 5.0)
    assert server.begin_anew()
    assert equal(moved(server), start)


def test_most_losses_must_explode(server):
    server.begin_rounds()
    assert not server.diverged([0.5, 0.6, 0.7, 0.8, 1e308])
    assert not server.diverged([2.9, 2.9, 2.9, 1e9, 1e9])
    assert server.diverged([0.1, 0.1, 3.1, 3.1, 3.1])
    assert not server.diverged([1e9, 1e9])  # one of two may be lying
    server.begin_rounds()
    assert not server.diverged([20.0, 20.0, 20.0])  # a hard task
    assert not server.diverged([59.0, 59.0, 59.0])
    assert server.diverged([61.0, 61.0, 61.0])
