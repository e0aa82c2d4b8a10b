"""Parcels as bytes: what goes in comes out, and what is damaged is refused."""

import pytest
import torch

from fedprotip.federation.parcels import Ask, answering, answers
from fedprotip.messages import BadMessage, Message, pack_parcel, unpack_parcel

ASK = Ask("model", task=2, round=None, step=17, since=None, keep=3)


def parcel():
    weights = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    return [
        ASK.message(),
        Message("plan", meta={"settings": "ä = 1\n", "classes": [[0, 1], []]}),
        Message("model", {"start/w": weights.T, "b": torch.ones(3, dtype=torch.bfloat16), "n": torch.tensor(5)}),
        Message("knowledge"),
    ]


def test_a_parcel_comes_back_bit_by_bit_and_in_its_order():
    sent, arrived = parcel(), unpack_parcel(pack_parcel(parcel()))
    assert [message.kind for message in arrived] == ["ask", "plan", "model", "knowledge"]
    for one, other in zip(sent, arrived, strict=True):
        assert one.meta == other.meta
        assert one.nbytes == other.nbytes
        assert one.tensors.keys() == other.tensors.keys()
        for name, tensor in one.tensors.items():
            assert other.tensors[name].dtype == tensor.dtype
            assert torch.equal(other.tensors[name], tensor)
            assert other.tensors[name].stride() == tensor.stride()  # so products of both are rounded alike


def test_a_question_comes_back():
    assert Ask.of(unpack_parcel(pack_parcel([ASK.message()]))[0]) == ASK


def test_an_empty_parcel_is_a_parcel():
    assert unpack_parcel(pack_parcel([])) == []


def test_a_parcel_cut_off_anywhere_is_refused_or_shorter():
    data = pack_parcel(parcel())
    ends = [len(pack_parcel(parcel()[:count])) for count in range(5)]
    for size in range(len(data)):
        if size in ends:
            assert len(unpack_parcel(data[:size])) == ends.index(size)
        else:
            with pytest.raises(BadMessage):
                unpack_parcel(data[:size])


@pytest.mark.parametrize("length", [0, 7, 2**40, 2**64 - 1])
def test_a_wrong_length_is_refused(length):
    data = pack_parcel(parcel())
    with pytest.raises(BadMessage):
        unpack_parcel(length.to_bytes(8, "little") + data[8:])


def test_bytes_that_are_no_parcel_are_refused():
    for junk in (b"\0", b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 4):
        with pytest.raises(BadMessage):
            unpack_parcel(junk)


def test_a_reply_says_which_question_it_answers():
    ask = Ask("model", 1, 2, step=7, since=6, keep=0)
    sent = answering(Message("model", meta={"loss": 0.5}), ask)
    assert sent.meta == {"loss": 0.5, "step": 7}
    assert answers(sent, 7).meta == {"loss": 0.5}
    for meta in ({"loss": 0.5}, {"step": 6}, {"step": "7"}, {"step": True}, {"step": None}):
        with pytest.raises(BadMessage, match="does not answer question 7"):
            answers(Message("model", meta=meta), 7)
