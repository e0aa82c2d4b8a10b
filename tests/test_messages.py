"""Messages survive the wire, and what does not is recognised."""

import json
import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedprotip.messages import BadMessage, Message, Spec

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
words = st.text(st.characters(exclude_categories=["Cs"]), max_size=10)
metas = st.dictionaries(
    words, st.recursive(st.none() | st.booleans() | st.integers() | words, lambda inner: st.lists(inner, max_size=3))
)


@st.composite
def tensors(draw):
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    dtype = draw(st.sampled_from(DTYPES))
    return (torch.randn(draw(shapes), generator=generator) * 5).to(dtype)


names = words.filter(lambda name: name != "__metadata__")


@given(words, st.dictionaries(names, tensors(), max_size=4), metas)
def test_round_trip_of_bytes(kind, content, meta):
    message = Message(kind, content, meta)
    again = Message.from_bytes(message.to_bytes())
    assert (again.kind, again.meta, again.tensors.keys()) == (kind, meta, content.keys())
    for name, tensor in content.items():
        assert again.tensors[name].dtype == tensor.dtype
        assert again.tensors[name].shape == tensor.shape
        assert torch.equal(again.tensors[name], tensor)
    assert again.nbytes == message.nbytes


def test_views_shared_memory_and_gradients_travel():
    base = torch.arange(12.0, requires_grad=True)
    square = base.view(3, 4)
    message = Message("model", {"a": base, "b": base, "t": square.T, "part": square[:, 1:3]})
    again = Message.from_bytes(message.to_bytes()).tensors
    assert torch.equal(again["a"], again["b"])
    assert torch.equal(again["t"], square.T)
    assert torch.equal(again["part"], square[:, 1:3])


def test_size_is_the_payload():
    tensors = {"w": torch.zeros(3, 5), "n": torch.zeros(2, dtype=torch.int64), "nothing": torch.zeros(4, 0)}
    assert Message("model", tensors).nbytes == 3 * 5 * 4 + 2 * 8
    assert Message("model", tensors, {"n": 1}).nbytes == 76 + len('{"n": 1}')
    assert Message("model", {}, {"ä": 1}).nbytes == len(json.dumps({"ä": 1}).encode())
    assert Message("empty").nbytes == 0


GOOD = Message("basis", {"a": torch.eye(3), "n": torch.tensor([4])}, {"captured": {"a": 0.5}}).to_bytes()


@given(st.integers(0, len(GOOD) - 1))
def test_truncated_bytes_are_recognised(length):
    with pytest.raises(BadMessage, match="not a readable message"):
        Message.from_bytes(GOOD[:length])


@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(1, 255)), min_size=1, max_size=4))
def test_flipped_bytes_never_end_in_a_traceback(flips):
    data = bytearray(GOOD)
    for place, mask in flips:
        data[place] ^= mask
    try:
        message = Message.from_bytes(bytes(data))
    except BadMessage:
        return
    assert isinstance(message.kind, str)
    assert isinstance(message.meta, dict)
    assert sum(tensor.numel() for tensor in message.tensors.values()) <= len(data)


@given(st.binary(max_size=200))
def test_noise_is_no_message(data):
    with pytest.raises(BadMessage):
        Message.from_bytes(data)


def container(header):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    "header",
    [
        {},
        {"__metadata__": {"kind": "model"}},
        {"__metadata__": {"meta": "{}"}},
        {"__metadata__": {"kind": "model", "meta": "[]"}},
        {"__metadata__": {"kind": "model", "meta": "{"}},
        {"__metadata__": {"kind": "model", "meta": 100_000 * "["}},
        {"__metadata__": {"kind": "model", "meta": "null"}},
        b"[]",
        b"\xff\xfe",
    ],
    ids=lambda header: repr(header)[:60],
)
def test_containers_that_hold_no_message(header):
    with pytest.raises(BadMessage, match="not a readable message"):
        Message.from_bytes(container(header))


def test_a_header_that_claims_to_be_huge():
    with pytest.raises(BadMessage):
        Message.from_bytes(struct.pack("<Q", 2**63 - 1) + GOOD[8:])


SPECS = {"u": Spec((4, -1), orthonormal=True, at_most=4), "n": Spec((2,), torch.int64)}


def valid(**changed):
    return Message("basis", {"u": torch.eye(4)[:, :2], "n": torch.tensor([1, 2]), **changed})


def test_a_good_message_passes_and_is_returned():
    message = valid()
    assert message.check("basis", SPECS) is message
    valid(u=torch.zeros(4, 0)).check("basis", SPECS)
    valid(u=torch.eye(4)).check("basis", SPECS)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (Message("model", valid().tensors), "'basis' message was expected, a 'model'"),
        (Message("basis", {"u": torch.eye(4)}), r"missing: \['n'\]"),
        (valid(x=torch.zeros(1)), r"unexpected: \['x'\]"),
        (valid(u=torch.eye(4).double()), "u is torch.float64"),
        (valid(n=torch.ones(2)), "n is torch.float32"),
        (valid(n=torch.tensor([1, 2, 3])), r"n has shape \(3,\)"),
        (valid(n=torch.tensor(1)), r"n has shape \(\)"),
        (valid(u=torch.eye(5)[:, :2]), r"u has shape \(5, 2\)"),
        (valid(u=torch.zeros(4, 5)), "u has 5 columns, at most 4"),
        (valid(u=torch.full((4, 1), torch.nan)), "u has values that are not finite"),
        (valid(u=torch.full((4, 1), torch.inf)), "u has values that are not finite"),
        (valid(u=1.01 * torch.eye(4)), "u is not orthonormal"),
        (valid(u=torch.eye(4)[:, [0, 0]]), "u is not orthonormal"),
        (valid(u=torch.zeros(4, 1)), "u is not orthonormal"),
    ],
)
def test_a_bad_message_is_refused_with_its_reason(message, reason):
    with pytest.raises(BadMessage, match=reason):
        message.check("basis", SPECS)


def test_a_rounded_basis_may_be_a_little_less_orthonormal():
    basis = torch.linalg.qr(torch.randn(200, 80, generator=torch.Generator().manual_seed(0))).Q.bfloat16()
    spec = {"u": Spec((200, -1), torch.bfloat16, orthonormal=True, at_most=200)}
    Message("basis", {"u": basis}).check("basis", spec)
    with pytest.raises(BadMessage, match="not orthonormal"):
        Message("basis", {"u": basis.float()}).check("basis", {"u": Spec((200, -1), orthonormal=True)})
    with pytest.raises(BadMessage, match="not orthonormal"):
        Message("basis", {"u": basis * 1.02}).check("basis", spec)


@pytest.mark.parametrize("value", [None, True, "5", [1], math.nan, math.inf, -math.inf, 10**400, -(10**400)])
def test_numbers_of_the_metadata_must_be_finite(value):
    meta = {"samples": 3, "loss": 0.5} if value is None else {"samples": value, "loss": 0.5}
    message = Message.from_bytes(Message("model", {}, meta).to_bytes())
    message.check_numbers("loss")
    with pytest.raises(BadMessage, match="is not a finite number"):
        message.check_numbers("loss", "missing" if value is None else "samples")


@given(st.integers(0, 500), st.integers(1, 12), st.data())
def test_float32_bases_are_orthonormal_enough(seed, d, data):
    rank = data.draw(st.integers(0, d))
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(d, d, generator=generator)).Q[:, :rank]
    Message("basis", {"u": basis}).check("basis", {"u": Spec((d, -1), orthonormal=True, at_most=d)})
