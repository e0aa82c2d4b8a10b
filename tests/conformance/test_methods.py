"""What every method must stand, without a line of test of its own: registered methods, and two from files of their own.

Killed and resumed = uninterrupted; `local` = `pool` = `apart`; the order of clients changes nothing; every message that
crossed is in the ledger with its size; bad clients are left out and named.
"""

import json
from importlib import import_module

import pytest
import torch

import fedprotip
from fedprotip.federation.client import Client
from fedprotip.federation.engines.apart import ApartEngine
from fedprotip.federation.engines.local import LocalEngine
from fedprotip.federation.parcels import STEP
from fedprotip.messages import Message
from fedprotip.methods import base
from fedprotip.settings import KNOWN
from tests.small import REDUCED, quick, results, small

REGISTERED = sorted(name for name, cls in base._methods.items() if cls.__module__.startswith("fedprotip."))
OWN = {"replay": "tests.conformance.methods.replay", "dream": "tests.conformance.methods.dream"}
SHORT = ("fedavg", "fedprotip", "lda", "fedlwf", *OWN)
"""In `make test`; every other one is in `make test-all`."""
METHODS = [pytest.param(name, marks=() if name in SHORT else pytest.mark.slow, id=name) for name in (*REGISTERED, *OWN)]
SEVERAL = [given for given in METHODS if given.id != "gpm"]
CLIENTS = {"count": 4, "fraction": 0.75, "roster": {"1": "0-2,5", "2": "1-3,5"}, "held_back": 0.1}
"""Three of four train in a round; from task to task some leave and some join."""


@pytest.fixture(autouse=True)
def _own_methods(monkeypatch):
    """Methods from files of their own are known in these tests only."""
    monkeypatch.setattr(base, "_methods", dict(base._methods))
    monkeypatch.setitem(KNOWN, "method.name", dict(KNOWN["method.name"]))
    for name, module in OWN.items():
        cls = next(c for c in vars(import_module(module)).values() if getattr(c, "name", "") == name)
        base.register(cls)
    quick(monkeypatch)


def settings(method, *overrides):
    """A short run; a centralised method has one client."""
    clients = {"count": 1} if method == "gpm" else CLIENTS
    only = {"stream": {"tasks": 3, "task_size": 2}, "train": {"rounds": 2, "epochs": 1, "batch": 32, "lr": 0.05}}
    own = {"router": "auto"} if method == "fedprotip" else REDUCED.get(method, {})
    return small(*overrides, method={"name": method, **own}, clients=clients, **only)


def run(folder, method, *overrides):
    fedprotip.run(settings(method, *overrides), out=folder)
    return everything(folder)


def everything(folder):
    """Artefacts, metrics, ledger and events."""
    return results(folder) | {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


@pytest.mark.parametrize("engine", ["apart", pytest.param("pool", marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", METHODS)
def test_all_engines_give_the_same_bytes(tmp_path, method, engine):
    local = run(tmp_path / "local", method)
    assert run(tmp_path / engine, method, f"run.engine={engine}") == local


def stop(monkeypatch, question):
    """Let the answer to the n-th question of a run stop everything, as a kill would."""
    seen = []
    for cls, verb in ((Client, "handle"), (LocalEngine, "_answer")):
        original = getattr(cls, verb)

        def counted(self, *arguments, original=original):
            answer = original(self, *arguments)
            seen.append(1)
            if len(seen) == question:
                raise KeyboardInterrupt
            return answer

        monkeypatch.setattr(cls, verb, counted)
    return seen


@pytest.mark.parametrize("engine", ["local", "apart"])
@pytest.mark.parametrize("method", METHODS)
def test_killed_and_resumed_is_uninterrupted(tmp_path, monkeypatch, method, engine):
    """The kill comes after a client has answered and stored its state, and before the server has."""
    with monkeypatch.context() as patch:
        questions = stop(patch, 0)
        whole = run(tmp_path / "whole", method, f"run.engine={engine}", "run.checkpoint=2")
    for part in (0.62,) if engine == "local" else (0.3, 0.95):
        folder = tmp_path / f"{part}"
        with monkeypatch.context() as patch:
            stop(patch, int(part * len(questions)))
            with pytest.raises(KeyboardInterrupt):
                run(folder, method, f"run.engine={engine}", "run.checkpoint=2")
        fedprotip.resume(folder)
        assert everything(folder) == whole


@pytest.mark.parametrize("method", METHODS)
def test_every_message_that_crossed_is_in_the_ledger(tmp_path, monkeypatch, method):
    """Counted from the bytes themselves, at the door of every client."""
    crossed, original = [], Client.handle

    def handle(self, parcel):
        reply = original(self, parcel)
        crossed.extend(("down", message.kind, Message.from_bytes(message.to_bytes()).nbytes) for message in parcel)
        crossed.append(("up", reply.kind, reply.nbytes))
        return reply

    monkeypatch.setattr(Client, "handle", handle)
    run(tmp_path / "r", method, "run.engine=apart")
    lines = [json.loads(line) for line in (tmp_path / "r" / "ledger.jsonl").read_text().splitlines()]
    assert [(line["direction"], line["kind"], line["bytes"]) for line in lines] == crossed
    sums = json.loads((tmp_path / "r" / "summary.json").read_text())["bytes"]
    assert sum(size for _, _, size in crossed) == sum(sum(kinds.values()) for kinds in sums.values())


@pytest.mark.parametrize("cls", [LocalEngine, ApartEngine])
@pytest.mark.parametrize("method", SEVERAL)
def test_the_order_in_which_clients_work_changes_nothing(tmp_path, monkeypatch, method, cls):
    """The last client works first; replies are handed over in the order of clients, as every engine must."""
    engine, original = "local" if cls is LocalEngine else "apart", cls.ask
    plain = run(tmp_path / "plain", method, f"run.engine={engine}")

    def backwards(self, requests):
        replies = [reply for request in list(requests)[::-1] for reply in original(self, [request])]
        yield from replies[::-1]

    monkeypatch.setattr(cls, "ask", backwards)
    assert run(tmp_path / "backwards", method, f"run.engine={engine}") == plain


def nothing(message):
    raise RuntimeError("the disk of this client is full")


def nan(message):
    tensors = {n: t.clone() for n, t in message.tensors.items()}
    for tensor in tensors.values():
        if tensor.is_floating_point() and tensor.numel():
            tensor.view(-1)[0] = torch.nan
    return Message(message.kind, tensors, {name: float("nan") for name in message.meta})


def other_kind(message):
    return Message("knowledge", message.tensors, message.meta)


def other_shape(message):
    shapes = {name: torch.cat([tensor.reshape(-1), tensor.reshape(-1)[:1]]) for name, tensor in message.tensors.items()}
    return Message(message.kind, shapes or {"more": torch.zeros(1)}, message.meta)


def other_names(message):
    return Message(
        message.kind, {f"{name}.": tensor for name, tensor in message.tensors.items()} or {"x": torch.ones(1)}
    )


FAULTS = {fault.__name__: fault for fault in (nothing, nan, other_kind, other_shape, other_names)}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("method", SEVERAL)
def test_a_bad_client_is_left_out_and_named(tmp_path, monkeypatch, method, fault):
    """Client 1 answers every question but the first badly; the others go on as if it had failed."""
    original = ApartEngine._deliver

    def deliver(self, client, parcel):
        reply = original(self, client, parcel)
        return FAULTS[fault](reply) if client == 1 and reply.kind != "presence" else reply

    monkeypatch.setattr(ApartEngine, "_deliver", deliver)
    summary = fedprotip.run(settings(method, "run.engine=apart", "stream.tasks=2"), out=tmp_path / "r")
    assert summary["tasks"] == 2
    events = [json.loads(line) for line in (tmp_path / "r" / "events.jsonl").read_text().splitlines()]
    failures = [event for event in events if event["event"] == "failure"]
    assert failures
    assert {event["client"] for event in failures} == {1}
    assert summary["failures"]["count"] == len(failures)
    lines = [json.loads(line) for line in (tmp_path / "r" / "ledger.jsonl").read_text().splitlines()]
    ups = [line for line in lines if line["client"] == 1 and line["direction"] == "up" and line["kind"] != "presence"]
    assert all(line["status"] == "rejected" for line in ups)
    assert bool(ups) == (fault != "nothing")


def times(factor, most):
    """Every number of a reply many times as large; of integers the largest that are still possible."""

    def change(message):
        tensors = {n: t * factor if t.is_floating_point() else t * most for n, t in message.tensors.items()}
        return Message(message.kind, tensors, message.meta)

    return change


def largest(message):
    tensors = {
        name: torch.full_like(tensor, torch.finfo(tensor.dtype).max if tensor.is_floating_point() else 2**62)
        for name, tensor in message.tensors.items()
    }
    return Message(
        message.kind, tensors, {n: 2**39 if type(v) is int and n != STEP else v for n, v in message.meta.items()}
    )


def turned(message):
    return Message(
        message.kind,
        {name: tensor.flip(0) if tensor.dim() else tensor for name, tensor in message.tensors.items()},
        message.meta,
    )


def deep(message):
    nested = []
    for _ in range(400):
        nested = [nested]
    return Message(
        message.kind,
        message.tensors,
        {n: v if n == STEP else nested for n, v in message.meta.items()} | {"more": "x" * 10**5},
    )


CROWD = ("clients.count=5", "clients.fraction=1", "clients.roster={}", "train.head_start=closed")
LIES = (times(1e6, 1), times(-1.0, 1), largest, times(0.0, 1), times(1e30, 2**20), turned, times(0.0, 0), deep)
"""Finite numbers, but for the last one: what a check of shapes and of NaN lets through."""


@pytest.mark.parametrize("first", [0, *(pytest.param(place, marks=pytest.mark.slow) for place in (3, 6))])
@pytest.mark.parametrize("method", SEVERAL)
def test_no_lie_of_one_client_ends_a_run(tmp_path, monkeypatch, method, first):
    """Client 1 lies with every answer but the first, each time in another way; nobody else is left out."""
    original, told = ApartEngine._deliver, []

    def deliver(self, client, parcel):
        reply = original(self, client, parcel)
        if client != 1 or reply.kind == "presence":
            return reply
        told.append(reply.kind)
        return LIES[(first + len(told)) % len(LIES)](reply)

    monkeypatch.setattr(ApartEngine, "_deliver", deliver)
    summary = fedprotip.run(settings(method, "run.engine=apart", "train.lr=0.01", *CROWD), out=tmp_path / "r")
    assert summary["tasks"] == 3
    assert len(told) >= 3
    lines = (tmp_path / "r" / "events.jsonl").read_text().splitlines()
    assert max(map(len, lines)) <= 2000
    failures = [event for event in map(json.loads, lines) if event["event"] == "failure"]
    assert {event["client"] for event in failures} == {1}
