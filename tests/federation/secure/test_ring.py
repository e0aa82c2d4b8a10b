"""Fixed point: sums and weighted means to 1e-6 and better, exact for integers, loud where they cannot be."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedprotip.federation.secure.ring import COUNTER, WHOLE, Layout, decode, encode
from fedprotip.messages import BadMessage, Message
from fedprotip.methods.parts.training import UNIT


def reply(seed, scale=1.0):
    chance = torch.Generator().manual_seed(seed)
    tensors = {
        "b": scale * torch.randn(3, 4, generator=chance),
        "a": scale * torch.randn(5, dtype=torch.float64, generator=chance),
        "n": torch.randint(0, 100, (2,), generator=chance),
        "none": torch.zeros(0, 7),
    }
    return Message("x", tensors, {"samples": seed + 1, "loss": 0.25 * seed})


def summed(replies, weights, mean):
    vectors = [encode(message, weight, len(replies), mean) for message, weight in zip(replies, weights, strict=True)]
    return decode(np.sum(vectors, axis=0, dtype=np.uint64), Layout.of(replies[0]), len(replies), mean)


@given(st.lists(st.integers(8, 50_000), min_size=2, max_size=9), st.sampled_from([1e-2, 1.0, 1e3]))
def test_a_weighted_mean(samples, scale):
    """Of clients with eight samples and more."""
    weights = [one / UNIT for one in samples]
    replies = [reply(seed, scale) for seed in range(len(weights))]
    whole, exact = summed(replies, weights, mean=True)
    for name in ("a", "b"):
        plain = sum(w * r.tensors[name].double() for w, r in zip(weights, replies, strict=True)) / sum(weights)
        assert (exact[name] - plain).norm() <= 1e-6 * plain.norm()
        assert whole.tensors[name].dtype == replies[0].tensors[name].dtype
    assert whole.meta == {
        "samples": sum(r.meta["samples"] for r in replies),
        "loss": pytest.approx((len(weights) - 1) / 8),
    }
    assert whole.tensors["none"].shape == (0, 7)


def test_counters_and_variances_of_large_federations_fit():
    """100 clients of 50,000 samples each, which weigh as they do in a round (Training.weight)."""
    clients, weight = 100, 50_000 / UNIT
    told = {"running_var": torch.tensor([300.0, 1e-3]), "num_batches_tracked": torch.tensor(10**9)}
    message = Message("model", told, {"samples": 50_000, "loss": 2.0})
    vector = encode(message, weight, clients, mean=True)
    whole, exact = decode(vector * np.uint64(clients), Layout.of(message), clients, mean=True)
    torch.testing.assert_close(exact["running_var"], told["running_var"].double(), rtol=1e-6, atol=0)
    assert whole.tensors["num_batches_tracked"] == 10**9


@given(st.lists(st.tuples(st.integers(1, 50_000), st.integers(0, 10**7)), min_size=2, max_size=20))
def test_counters_are_averaged_and_rounded(told):
    replies = [Message("x", {"n": torch.tensor(count)}) for _, count in told]
    weights = [samples / UNIT for samples, _ in told]
    whole, _ = summed(replies, weights, mean=True)
    plain = sum(w * count for w, (_, count) in zip(weights, told, strict=True)) / sum(weights)
    assert abs(whole.tensors["n"].item() - plain) <= 0.5 + UNIT / COUNTER  # of clients with one sample


def test_a_sum_has_exact_integers():
    replies = [reply(seed) for seed in range(4)]
    whole, exact = summed(replies, [1.0] * 4, mean=False)
    assert (exact["n"] == sum(message.tensors["n"] for message in replies)).all()
    assert exact["n"].dtype == torch.int64
    plain = sum(message.tensors["b"].double() for message in replies)
    assert (exact["b"] - plain).abs().max() < 1e-8
    assert whole.meta["samples"] == 1 + 2 + 3 + 4


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("scale", [1e-7, 1e-3, 1e5])
def test_double_precision_stays_what_it_is(mean, scale):
    """Of numbers however small beside the point: class sums of faint features keep their spread."""
    chance = torch.Generator().manual_seed(0)
    replies = [Message("x", {"a": scale * torch.randn(50, dtype=torch.float64, generator=chance)}) for _ in range(5)]
    weights = [0.25 * (1 + seed) if mean else 1.0 for seed in range(5)]
    whole, exact = summed(replies, weights, mean)
    plain = sum(w * r.tensors["a"] for w, r in zip(weights, replies, strict=True)) / (sum(weights) if mean else 1)
    torch.testing.assert_close(exact["a"], plain, rtol=1e-9, atol=1e-9 * scale)
    assert torch.equal(whole.tensors["a"], exact["a"])


def test_the_order_of_clients_changes_no_bit():
    replies = [reply(seed) for seed in range(5)]
    one, other = (summed(some, [1.0] * 5, mean=False)[1] for some in (replies, replies[::-1]))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("value", [2.0**30, -(2.0**30), float("nan"), float("inf")])
def test_what_does_not_fit_is_refused_by_name(value):
    message = Message("x", {"weight": torch.tensor([0.0, value])})
    with pytest.raises(BadMessage, match="weight reaches"):
        encode(message, 1.0, 3, mean=False)


def test_integers_that_do_not_fit_are_refused():
    with pytest.raises(BadMessage, match="counts reaches"):
        encode(Message("x", {"counts": torch.tensor([2**61])}), 1.0, 3, mean=False)


@pytest.mark.parametrize("meta", [{"name": "cat"}, {"has": True}, {"rest": [1.0]}])
def test_what_is_no_number_cannot_be_summed(meta):
    with pytest.raises(BadMessage, match="cannot be summed in secret"):
        Layout.of(Message("x", {}, meta))


def test_a_sum_that_cannot_be_one_is_refused():
    replies = [reply(seed) for seed in range(2)]
    layout, total = Layout.of(replies[0]), encode(replies[0], 1.0, 2, False) + encode(replies[1], 1.0, 2, False)
    with pytest.raises(BadMessage, match="not what clients said"):
        decode(total, layout, 3, mean=False)
    total[-1] = np.uint64(int(WHOLE) + 2**10)
    with pytest.raises(BadMessage, match="out of bounds"):
        decode(total, layout, 2, mean=False)


@pytest.mark.parametrize(
    "text", [None, "", "[]", "[[], [[1]]]", '[[["a", "list"]], []]', '[[], [["a", "torch.int8", [1]]]]']
)
def test_a_layout_that_is_none_is_refused(text):
    with pytest.raises(BadMessage):
        Layout.read(text)


def test_a_layout_survives_its_journey():
    layout = Layout.of(reply(0))
    assert Layout.read(layout.text()) == layout
    assert len(encode(reply(0), 1.0, 2, True)) == layout.length
