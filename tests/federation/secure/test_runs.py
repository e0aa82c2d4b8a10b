"""Runs with `method.secure`: as without it but for fixed point, on every engine, resumed, and with clients lost."""

import json
from contextlib import nullcontext
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
import torch

import fedprotip
from fedprotip import RunError
from fedprotip.federation.client import Client
from fedprotip.federation.engines.apart import ApartEngine
from fedprotip.federation.parcels import Ask
from fedprotip.federation.secure.desk import Desk
from fedprotip.federation.secure.sums import check_whole
from fedprotip.messages import BadMessage, Message
from fedprotip.methods.exchange import Exchange
from fedprotip.methods.parts import private
from fedprotip.seeds import torch_stream
from fedprotip.store.plain import PlainFolder
from tests.federation.secure.private_runs import REFUSED, REGISTERED, events, run, settings
from tests.small import REDUCED, results, tensors

pytest.importorskip("cryptography")
pytest.importorskip("Crypto")


SHOWN = ["fedavg", "fedprotip", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fot", "lda", "ridge"))]


@pytest.fixture
def one_secret(monkeypatch):
    """Gaussians of sketches as they are without `secure`: so that two runs can be compared."""

    def seeded(local, purpose, name, rows, columns):
        chance = torch_stream(local.settings.run.seed, purpose, local.task, local.client, name)
        return torch.randn(rows, columns, generator=chance)

    for part in ("parts.sketches", "fot"):
        monkeypatch.setattr(f"fedprotip.methods.{part}.gaussian", seeded)


@pytest.mark.parametrize("method", SHOWN)
def test_a_secure_run_is_the_plain_one_but_for_fixed_point(tmp_path, one_secret, method):
    """And the same on engines where only bytes pass, whatever the masks were."""
    summary, local = run(tmp_path / "local", method)
    plain, _ = run(tmp_path / "plain", method, secure=False)
    assert summary["failures"]["count"] == 0
    files = {"model"} | ({"statistics"} if method in ("lda", "ridge", "fedprotip") else set())
    for file in files | ({"subspaces"} if method in ("fot", "fedprotip") else set()):
        one, other = tensors(tmp_path / "local", file), tensors(tmp_path / "plain", file)
        assert one.keys() == other.keys()
        for name in one:
            if file == "subspaces" and one[name].is_floating_point():  # a basis may turn in its span
                ours, theirs = one[name].double(), other[name].double()
                assert (ours @ ours.T - theirs @ theirs.T).abs().max() < 2e-2
            else:
                torch.testing.assert_close(one[name], other[name], rtol=1e-4, atol=1e-4)
    assert abs(summary["accuracy"]["agnostic"] - plain["accuracy"]["agnostic"]) <= 1.0
    assert run(tmp_path / "apart", method, "run.engine=apart")[1] == local


@pytest.mark.parametrize("method", SHOWN)
@pytest.mark.parametrize("engine", ["apart", pytest.param("local", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_killed_and_resumed_is_uninterrupted(tmp_path, monkeypatch, one_secret, method, engine):
    """In the middle of a sum: keys are gone with the process, and are made anew."""
    whole = run(tmp_path / "whole", method, f"run.engine={engine}")[1]
    original, seen = Desk.answer, []

    def answer(self, exchange, local, ask, parcel):
        seen.append(1)
        if ask.phase == "masked" and ask.task == 1 and local.client == 2:
            raise KeyboardInterrupt
        return original(self, exchange, local, ask, parcel)

    with monkeypatch.context() as patch:
        patch.setattr(Desk, "answer", answer)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "killed", method, f"run.engine={engine}")
    assert seen
    fedprotip.resume(tmp_path / "killed")
    folder = tmp_path / "killed"
    assert results(folder) | {path.name: path.read_bytes() for path in folder.glob("*.safetensors")} == whole


def lose(monkeypatch, phase, clients, when=lambda ask: True):
    """Let clients be lost in a phase of every sum: they never answer it."""
    original = Desk.answer

    def answer(self, exchange, local, ask, parcel):
        if ask.phase == phase and local.client in clients and when(ask):
            raise RuntimeError("the line is dead")
        return original(self, exchange, local, ask, parcel)

    monkeypatch.setattr(Desk, "answer", answer)


@pytest.mark.parametrize("phase", ["keys", "shares", "masked", "unmask"])
def test_a_sum_is_that_of_the_clients_that_stay(tmp_path, monkeypatch, phase):
    """A client that is lost before its vector arrives is as one that sent nothing; afterwards it is in the sum."""
    only = ("stream.tasks=1",)
    with monkeypatch.context() as patch:
        lose(patch, phase, [1], lambda ask: ask.exchange == "model")
        run(tmp_path / "lost", "fedavg", *only)
    with monkeypatch.context() as patch:
        if phase != "unmask":
            lose(patch, "", [1], lambda ask: ask.exchange == "model")
        run(tmp_path / "plain", "fedavg", *only, secure=False)
    one, other = (tensors(tmp_path / name, "model") for name in ("lost", "plain"))
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-4, atol=1e-5)
    failures = events(tmp_path / "lost", "failure")
    assert {(event["client"], "the line is dead" in event["reason"]) for event in failures} == {(1, True)}


@pytest.mark.parametrize("phase", ["keys", "shares", "masked", "unmask"])
def test_below_the_threshold_the_run_says_so_and_keeps_what_it_has(tmp_path, monkeypatch, phase):
    lose(monkeypatch, phase, [0, 1], lambda ask: ask.exchange == "model" and ask.round == 1)
    run(tmp_path / "r", "fedavg", "stream.tasks=1")
    said = events(tmp_path / "r", "unsummed")
    assert len(said) == 1
    assert "2 clients are left, and at least 3 must be" in said[0]["text"]
    rounds = events(tmp_path / "r", "round")
    assert [event["clients"] for event in rounds] == [4, 0]


def test_a_round_without_a_sum_leaves_the_model_as_it_is(tmp_path, monkeypatch):
    only = ("stream.tasks=1", "train.fall=none")
    run(tmp_path / "one", "fedavg", *only, "train.rounds=1")
    lose(monkeypatch, "masked", [0, 1], lambda ask: ask.round == 1)
    run(tmp_path / "more", "fedavg", *only, "train.rounds=2")
    assert (tmp_path / "one/model.safetensors").read_bytes() == (tmp_path / "more/model.safetensors").read_bytes()


def test_a_run_that_never_has_enough_clients_stops_with_the_reason(tmp_path, monkeypatch):
    lose(monkeypatch, "masked", [0, 1])
    with pytest.raises(RunError, match="at least 3 must be, so nothing is revealed"):
        run(tmp_path / "r", "lda")


def test_a_changed_vector_spoils_the_sum_and_not_the_run(tmp_path, monkeypatch):
    original = ApartEngine._deliver

    def deliver(self, client, parcel):
        reply = original(self, client, parcel)
        if client == 1 and "sum" in reply.tensors and parcel[0].meta["round"] == 0:
            reply.tensors["sum"][5] += 1
        return reply

    monkeypatch.setattr(ApartEngine, "_deliver", deliver)
    run(tmp_path / "r", "fedavg", "run.engine=apart", "stream.tasks=1")
    assert ["masks do not cancel out" in event["text"] for event in events(tmp_path / "r", "unsummed")] == [True]
    assert [event["clients"] for event in events(tmp_path / "r", "round")] == [0, 4]


@pytest.mark.parametrize(("least", "effort", "refused"), [(0.0, 1.0, True), (5.0, 1.0, False), (0.0, 2.0, False)])
def test_a_sum_may_be_as_large_as_any_reply_may_be(least, effort, refused):
    """Longer than earlier ones where all are short, or where more samples stand behind it."""

    class Lengths(Exchange):
        name, when, trains = "model", "round", True
        sizes = staticmethod(lambda message, site: {"update": message.meta["length"]})
        least = staticmethod(lambda message, site: {"update": message.meta["least"]})
        effort = staticmethod(lambda message, site, sender: message.meta["effort"])

    class Standing:
        site = None

        class progress:
            line: ClassVar = {}

    check_whole(Message("model", {}, {"length": 2.0, "least": least, "effort": 1.0}), Standing, Lengths())
    later = Message("model", {}, {"length": 10.0, "least": least, "effort": effort})
    with pytest.raises(BadMessage, match="out of line") if refused else nullcontext():
        check_whole(later, Standing, Lengths())


def test_a_client_whose_keys_are_none_is_named_and_the_others_go_on(tmp_path, monkeypatch):
    """They could not agree on a mask with it, and would all be lost."""
    original = ApartEngine._deliver

    def deliver(self, client, parcel):
        reply = original(self, client, parcel)
        if client == 1 and parcel[0].meta.get("phase") == "keys":
            reply.tensors["keys"].zero_()
        return reply

    monkeypatch.setattr(ApartEngine, "_deliver", deliver)
    run(tmp_path / "r", "fedavg", "run.engine=apart", "stream.tasks=1", "train.rounds=1")
    assert {(event["client"], event["reason"]) for event in events(tmp_path / "r", "failure")} == {
        (1, "its keys are none")
    }
    assert [event["clients"] for event in events(tmp_path / "r", "round")] == [3]


@pytest.mark.parametrize("change", [{"exchange": "start"}, {"task": 1}, {"round": 7}])
def test_a_client_adds_nothing_but_what_all_told_their_keys_for(change):
    """A server could ask the others for something short and small, and find this one's part in the sum."""

    class Local:
        settings, client = settings("fedavg"), 1

    desk, ask = Desk(), Ask("model", task=0, round=0, step=3, since=None, keep=0, phase="keys")
    desk.run = "1"
    desk.answer(None, Local(), ask, [])
    with pytest.raises(BadMessage, match="was asked for in a sum of run 1, model, task 0, round 0, question 3"):
        desk.answer(None, Local(), replace(ask, phase="masked", step=5, **change), [])


def test_no_name_of_a_run_stands_for_a_question():
    """The server names runs, so a name could be the beginning of what all told their keys for."""

    class Local:
        settings, client = settings("fedavg"), 1

    desk, ask = Desk(), Ask("model", task=0, round=0, step=3, since=None, keep=0, phase="keys")
    desk.run = "1, start, task 0, round None"
    desk.answer(None, Local(), ask, [])
    desk.run = "1"
    with pytest.raises(BadMessage, match="start, task 0, round None, was asked for in a sum of run 1"):
        desk.answer(None, Local(), replace(ask, exchange="start", round=None, phase="masked", step=5), [])


def test_rubbish_that_a_client_can_see_itself_is_named_by_it(tmp_path, monkeypatch):
    """What the server cannot check any more, the client does: here a loss that is no number."""
    from fedprotip.methods.parts import training

    original = training.train
    monkeypatch.setattr(training, "train", lambda local: float("nan") if local.client == 2 else original(local))
    run(tmp_path / "r", "fedavg", "stream.tasks=1")
    failures = events(tmp_path / "r", "failure")
    assert {event["client"] for event in failures} == {2}
    assert all("loss = nan is not a finite number" in event["reason"] for event in failures)


def transcript(folder, monkeypatch, method):
    """Everything that reached the server, by client."""
    heard, original = [], ApartEngine._deliver

    def deliver(self, client, parcel):
        reply = original(self, client, parcel)
        heard.append((client, parcel[0].meta, Message.from_bytes(reply.to_bytes())))
        return reply

    with monkeypatch.context() as patch:
        patch.setattr(ApartEngine, "_deliver", deliver)
        run(folder, method, "run.engine=apart")
    return heard


SUMMED = {
    "fedavg": {"start", "model"},
    "fedprotip": {"start", "model", "birth", "sketch", "reference", "statistics", "calibration"},
    "fot": {"start", "model", "sketch"},
    "lda": {"statistics", "calibration"},
    "ridge": {"statistics", "calibration"},
}
"""What the server learns of all clients together, by method."""


@pytest.mark.parametrize("method", SHOWN)
def test_the_server_hears_nothing_of_a_single_client(tmp_path, monkeypatch, one_secret, method):
    """Masked vectors pass for noise and differ from run to run; beside them there are keys, letters and one bit."""
    one, other = (transcript(tmp_path / name, monkeypatch, method) for name in ("one", "other"))
    assert len(one) == len(other)
    long, layouts = 0, {}
    for (_, ask, reply), (_, _, again) in zip(one, other, strict=True):
        if "phase" not in ask:
            assert ask["exchange"] == "presence"
            assert reply.meta["samples"] in (0, 1)
            assert not reply.tensors
        elif ask["phase"] == "masked":
            assert reply.tensors.keys() == {"sum"}
            assert reply.meta.keys() == {"layout", "step"}
            layouts.setdefault(ask["step"], set()).add(reply.meta["layout"])
            words, twice = (message.tensors["sum"].numpy() for message in (reply, again))
            assert not (words == twice).any()
            counts = np.bincount(words.view(np.uint8), minlength=256)
            mean = counts.mean()
            assert ((counts - mean) ** 2 / mean).sum() < 255 + 8 * (2 * 255) ** 0.5
            long += len(words) > 2000
        else:
            assert all(tensor.dtype in (torch.uint8, torch.int64) for tensor in reply.tensors.values())
            assert reply.meta.keys() == {"step"}
    assert long
    assert all(len(told) == 1 for told in layouts.values())  # the form of a reply says nothing of its client
    lines = map(json.loads, (tmp_path / "one/ledger.jsonl").read_text().splitlines())
    assert {line["kind"] for line in lines if line["direction"] == "up"} == {"presence", "secure", *SUMMED[method]}


OTHERS = sorted({*REGISTERED} - {*REFUSED, "fedavg", "fedprotip", "fot", "lda", "ridge"})


@pytest.mark.parametrize("method", [pytest.param(one, marks=[pytest.mark.slow] * (one != "scr")) for one in OTHERS])
def test_every_other_method_runs_in_private_as_in_the_clear(tmp_path, method):
    """What bounds a single client's reply must not refuse the sum of all."""
    own = {**REDUCED.get(method, {}), "name": method}
    told = [tmp_path / name for name in ("secure", "plain")]
    for folder in told:
        raw = settings(method, secure=folder.name == "secure").model_dump()
        fedprotip.run({**raw, "method": {**own, "secure": folder.name == "secure"}}, out=folder)
        assert not events(folder, "failure")
        assert not events(folder, "unsummed")
    for file in sorted(path.stem for path in told[0].glob("*.safetensors")):
        one, other = (tensors(folder, file) for folder in told)
        assert one.keys() == other.keys()
        for name in one:
            torch.testing.assert_close(one[name], other[name], rtol=1e-3, atol=1e-3)


def started_anew(monkeypatch, client, before):
    """Let a client have a new process for every answer; `before` is done to its desk."""
    original = Desk.answer

    def answer(self, exchange, local, ask, parcel):
        if local.client == client:
            self._member = None
            before(self, ask)
        return original(self, exchange, local, ask, parcel)

    monkeypatch.setattr(Desk, "answer", answer)


def test_a_client_may_have_a_process_of_its_own_for_every_answer(tmp_path, monkeypatch):
    """As behind Flower: what a sum needs is in its folder meanwhile, for its owner alone, and not any longer."""
    modes, path = set(), tmp_path / "r/clients/3/sum.json"
    started_anew(
        monkeypatch, 3, lambda desk, ask: ask.bare and path.exists() and modes.add(path.stat().st_mode & 0o777)
    )
    summary, _ = run(tmp_path / "r", "fedavg", "stream.tasks=1", "run.engine=apart")
    assert summary["failures"]["count"] == 0
    assert modes == {0o600}
    assert not path.exists()


@pytest.mark.parametrize("engine", ["local", "apart"])
def test_a_client_that_lost_its_secrets_is_lost_to_the_sum_it_was_in(tmp_path, monkeypatch, engine):
    def forget(desk, ask):
        if ask.phase == "masked" and desk._folder:
            desk._folder.remove("sum.json")

    started_anew(monkeypatch, 3, forget)
    run(tmp_path / "r", "fedavg", "stream.tasks=1", f"run.engine={engine}")
    assert {(event["client"], event["reason"].partition(": ")[2]) for event in events(tmp_path / "r", "failure")} == {
        (3, "it has no keys of this sum any more")
    }


@pytest.mark.parametrize("closes", [True, False])
def test_a_client_that_is_lost_at_the_end_of_the_last_sum_leaves_no_secrets(tmp_path, monkeypatch, closes):
    """Whether it is closed with the engine, or its process has ended long before."""
    lose(monkeypatch, "unmask", [3])
    if not closes:
        monkeypatch.setattr(Client, "close", lambda self: None)
    run(tmp_path / "r", "fedavg", "stream.tasks=1", "train.rounds=1", "run.engine=apart")
    assert (tmp_path / "r/clients/3").exists()
    assert not list(tmp_path.glob("r/clients/*/sum.json"))


def test_a_question_beside_sums_removes_secrets_of_the_one_before(tmp_path):
    class Local:
        settings, client = settings("fedavg"), 1

    class Clear:
        in_clear = True

        def answer(self, local):
            return Message("presence")

    desk, ask = Desk(PlainFolder(tmp_path)), Ask("model", task=0, round=0, step=3, since=None, keep=0, phase="keys")
    desk.answer(None, Local(), ask, [])
    assert (tmp_path / "sum.json").exists()
    (tmp_path / "sum.json.tmp").write_text("half of them, left by a kill")
    desk.answer(Clear(), Local(), replace(ask, exchange="presence", task=1, step=4, phase=""), [])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["", "{", "[]", "[1, 2, 3]", '[1, 0.5, "", 1, ["00", "", ""], [], []]', "null"])
def test_damaged_secrets_are_lost_secrets(tmp_path, text):
    class Local:
        settings, client = settings("fedavg"), 1

    (tmp_path / "sum.json").write_text(text)
    desk, ask = Desk(PlainFolder(tmp_path)), Ask("model", task=0, round=0, step=3, since=None, keep=0, phase="shares")
    with pytest.raises(BadMessage, match="no keys of this sum any more"):
        desk.answer(None, Local(), ask, [])
    desk.answer(None, Local(), replace(ask, phase="keys"), [])
    assert Desk(PlainFolder(tmp_path))._kept().client == 1


def test_no_random_word_becomes_an_infinite_number():
    found = private.bell(torch.tensor([-(2**63), -1, 0, 2**63 - 2**11, 2**63 - 1]))
    assert found.isfinite().all()
    assert (found.diff() >= 0).all()
    assert found[0] < -8 < 8 < found[-1]


def test_gaussians_of_a_client_are_its_secret_and_last(tmp_path):
    """Two runs with one seed have other sketches; within a run a client has the same ones."""

    class Own(dict):
        def put(self, name, group):
            self[name] = group

    class Local:
        settings, task, client = settings("fot"), 0, 1

        def __init__(self):
            self.own = Own()

    one, other = Local(), Local()
    first = private.gaussian(one, "sketch", "a", 300, 20)
    assert torch.equal(first, private.gaussian(one, "sketch", "a", 300, 20))
    assert not torch.equal(first, private.gaussian(one, "sketch", "b", 300, 20))
    assert not (first == private.gaussian(other, "sketch", "a", 300, 20)).any()
    assert abs(first.mean()) < 0.06
    assert abs(first.std() - 1) < 0.05
    assert first.abs().max() < 6
