"""Envelopes between processes of one machine, and a sentence where Flower is missing."""

import io
import socket
import threading

import pytest

from fedprotip import envelopes
from fedprotip.envelopes import Envelope, require_flower
from fedprotip.errors import UsageError
from fedprotip.flower.site import serve


@pytest.mark.parametrize("parts", [[], [b""], [b"one", b"two" * 10**5]])
def test_what_is_written_is_read(parts):
    stream = io.BytesIO()
    Envelope({"client": 3, "name": "Zürich"}, parts).write(stream)
    stream.seek(0)
    assert Envelope.read(stream) == Envelope({"client": 3, "name": "Zürich"}, parts)


def test_an_end_in_the_middle_is_noticed():
    stream = io.BytesIO()
    Envelope({"client": 3}, [b"many bytes"]).write(stream)
    for length in range(len(stream.getvalue())):
        with pytest.raises(EOFError):
            Envelope.read(io.BytesIO(stream.getvalue()[:length]))
    with pytest.raises(EOFError, match="too long"):
        Envelope.read(io.BytesIO(b"\xff" * 16))


@pytest.mark.parametrize("records", [{}, {"head": {"json": "[]"}, "parts": {}}, {"head": {"json": "{}"}, "parts": 3}])
def test_other_records_are_no_envelope(records):
    with pytest.raises(ValueError, match="not a readable envelope"):
        Envelope.of(records)


def test_without_flower_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(envelopes, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"fedprotip\[flower\]"):
        require_flower()


def test_a_site_answers_on_when_whoever_asked_is_gone(tmp_path):
    """In the middle of a long answer, as where its SuperNode is killed."""
    asked, left = threading.Semaphore(0), threading.Semaphore(0)

    class Program:
        def answer(self, envelope):
            asked.release()
            assert left.acquire(timeout=20)
            return Envelope({"to": envelope.head["from"]}, [b"x" * 10**6])

    door, ready = tmp_path / "door", threading.Event()
    threading.Thread(target=serve, args=(Program(), door, ready.set), daemon=True).start()
    assert ready.wait(20)
    for client in range(2):
        with socket.socket(socket.AF_UNIX) as line, line.makefile("rwb") as stream:
            line.connect(str(door))
            Envelope({"from": client}).write(stream)
            assert asked.acquire(timeout=20)
            if client == 1:
                left.release()
                assert Envelope.read(stream).head == {"to": 1}
        if client == 0:
            left.release()
