"""Eq. 6 against a plain sum; identical models are left alone to the last bit."""

import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedprotip.federation.aggregate import Average, combine
from fedprotip.messages import Message
from fedprotip.methods.exchange import Exchange
from fedprotip.methods.parts.robust import middle
from fedprotip.settings import TrainSettings
from fedprotip.store.files import serialise

floats32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
weights = st.lists(st.one_of(st.integers(1, 10**6), st.floats(1e-3, 1e6)), min_size=1, max_size=40)


@given(arrays(np.float32, st.integers(0, 6), elements=floats32), weights, st.integers(0, 2**40))
def test_identical_models_give_that_model_bit_by_bit(values, weights, counter):
    model = {
        "weight": torch.from_numpy(values),
        "half": torch.from_numpy(values).clamp(-6e4, 6e4).half(),
        "bfloat": torch.from_numpy(values).clamp(-1e38, 1e38).bfloat16(),
        "counter": torch.tensor(counter),
        "small": torch.tensor([3, 250], dtype=torch.uint8),
        "flag": torch.tensor([True, False]),
    }
    average = Average()
    for weight in weights:
        average.add({name: tensor.clone() for name, tensor in model.items()}, weight)
    result = average.result()
    assert {name: tensor.dtype for name, tensor in result.items()} == {n: t.dtype for n, t in model.items()}
    assert serialise(result) == serialise(model)


@given(st.integers(0, 1000), st.integers(1, 37))
def test_the_average_is_the_weighted_sum(seed, clients):
    rng = np.random.default_rng(seed)
    models = rng.standard_normal((clients, 3, 4)) * 10.0 ** rng.integers(-3, 4)
    counts = rng.integers(1, 500, clients)
    average = Average()
    for model, count in zip(models, counts, strict=True):
        average.add({"w": torch.tensor(model)}, float(count))
    expected = sum(count / counts.sum() * model for model, count in zip(models, counts, strict=True))
    assert average.result()["w"].numpy() == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_a_scale_of_all_weights_changes_nothing():
    results = []
    for scale in (1.0, 1024.0):
        average = Average()
        average.add({"w": torch.tensor([0.1, 7.0])}, 3 * scale)
        average.add({"w": torch.tensor([0.3, -7.0])}, 5 * scale)
        results.append(average.result()["w"])
    assert torch.equal(*results)
    assert results[0].tolist() == pytest.approx([0.225, -1.75])


def test_counters_take_the_largest_value_in_any_order():
    for counts in ([3, 9, 5], [9, 5, 3]):
        average = Average()
        for count in counts:
            average.add({"n": torch.tensor(count)}, 1.0)
        assert average.result()["n"].item() == 9
        assert average.result()["n"].dtype == torch.int64


def test_the_clients_tensors_are_left_alone():
    mine, counter = torch.tensor([1.0, 2.0], dtype=torch.float64), torch.tensor(4)
    average = Average()
    average.add({"w": mine, "n": counter}, 1.0)
    average.add({"w": torch.zeros(2, dtype=torch.float64), "n": torch.tensor(7)}, 3.0)
    average.result()["w"].zero_()
    assert mine.tolist() == [1.0, 2.0]
    assert counter.item() == 4
    assert average.result()["w"].tolist() == [0.25, 0.5]


def test_no_client_is_no_average():
    average = Average()
    assert not average
    average.add({"w": torch.ones(1)}, 2.0)
    assert average


def test_tensors_of_any_size_and_order_find_their_place():
    """Larger than the pieces that are added at once, of different dtypes, named in another order."""
    generator = torch.Generator().manual_seed(0)
    models = [
        {
            "large": torch.randn(3, 50_001, generator=generator),
            "n": torch.tensor(k),
            "half": torch.randn(7, generator=generator).bfloat16(),
            "transposed": torch.randn(20, 10, generator=generator).T,
        }
        for k in range(3)
    ]
    average = Average()
    for model in models:
        average.add(model if model["n"] else dict(reversed(model.items())), 1.0)
    result = average.result()
    for name in ("large", "half", "transposed"):
        expected = sum(model[name].double() for model in models) / 3
        assert torch.equal(result[name], expected.to(result[name].dtype))
        assert result[name].dtype == models[0][name].dtype


def test_small_contributions_are_not_lost_among_large_ones():
    """float32 sums would lose all 1,000 of them."""
    average = Average()
    average.add({"w": torch.tensor([2.0**24])}, 1.0)
    for _ in range(1000):
        average.add({"w": torch.tensor([1.0])}, 1.0)
    assert average.result()["w"].item() == pytest.approx((2.0**24 + 1000) / 1001, rel=1e-7)


# combine

SITE = SimpleNamespace(settings=SimpleNamespace(train=TrainSettings()))


def replies(count, earlier):
    """Replies of clients; none is made while one before the last is still held."""
    for client in range(count):
        assert all(message() is None for message in earlier[:-1])
        message = Message("x", {"w": torch.full((2,), float(client))})
        earlier.append(weakref.ref(message))
        yield client, message
        del message


@pytest.mark.parametrize("how", ["mean", "sum", "each"])
def test_no_more_than_the_last_reply_is_held(how):
    exchange, earlier = Exchange(), []
    exchange.combine = how
    combined = combine(exchange, replies(4, earlier), site=SITE)
    if how == "each":
        for _, message in combined:
            assert message.kind == "x"
    else:
        assert combined.tensors["w"].tolist() == ([1.5, 1.5] if how == "mean" else [6.0, 6.0])
    assert len(earlier) == 4


@pytest.mark.parametrize("how", ["mean", "sum", "each"])
def test_without_replies_there_is_nothing_to_digest(how):
    exchange = Exchange()
    exchange.combine = how
    assert combine(exchange, [], site=SITE) is None


class Weighed(Exchange):
    """A mean of updates that begin at 1, weighed by what clients state."""

    name, combine = "weighed", "mean"

    def weight(self, message, site):
        return message.meta["samples"]

    def origin(self, name, site):
        return torch.ones(3) if name == "w" else None


def combined(how, rows, samples, trim=0.2):
    site = SimpleNamespace(settings=SimpleNamespace(train=TrainSettings(aggregate=how, trim=trim)))
    replies = [
        (client, Message("weighed", {"w": torch.tensor(row), "n": torch.tensor(client)}, {"samples": count}))
        for client, (row, count) in enumerate(zip(rows, samples, strict=True))
    ]
    return combine(Weighed(), iter(replies), site).tensors


ROWS = [[1.0, 2.0, 3.0], [1.5, 2.5, 3.5], [1.0, 2.0, 4.0], [2.0, 2.0, 3.0], [-5e5, 4e5, 1e6]]


@pytest.mark.parametrize("how", ["trimmed", "median"])
def test_one_client_cannot_move_a_robust_mean_far(how):
    found = combined(how, ROWS, [10, 10, 10, 10, 10])
    honest = torch.tensor(ROWS[:4])
    assert (found["w"] >= honest.amin(0)).all()
    assert (found["w"] <= honest.amax(0)).all()
    assert found["n"].item() == 2  # counters: the middle one, not the largest


@pytest.mark.parametrize("how", ["trimmed", "median"])
@pytest.mark.parametrize("trim", [0.05, 0.2])
def test_however_many_samples_it_states_one_client_cannot_move_a_robust_mean_far(how, trim):
    """Weights are bounded, and at each end as much is left out as the heaviest client weighs."""
    found = combined(how, ROWS, [10, 30, 5, 20, 10**6], trim)
    honest = torch.tensor(ROWS[:4])
    assert (found["w"] >= honest.amin(0)).all()
    assert (found["w"] <= honest.amax(0)).all()


def test_a_long_update_is_clipped_to_the_median_length():
    """Lengths from (1, 1, 1): with equal directions the result is known."""
    rows = [[1.0 + length, 1.0, 1.0] for length in (1.0, 2.0, 3.0, 1000.0, 2.0)]
    found = combined("clipped", rows, [1, 1, 1, 1, 1])
    assert found["w"].tolist() == pytest.approx([1 + (1 + 2 + 2 + 2 + 2) / 5, 1.0, 1.0])


def test_robust_means_of_many_pieces_are_those_of_each_number(monkeypatch):
    monkeypatch.setattr("fedprotip.federation.aggregate.PIECE", 2)
    rows = torch.randn(7, 3, generator=torch.Generator().manual_seed(0))
    found = combined("median", rows.tolist(), [1] * 7)
    assert torch.allclose(found["w"], middle(rows, "median", 0.2))
