"""Runs with `method.secure`: as without it but for fixed point, on every engine, resumed, and with clients lost."""

import json
from contextlib import nullcontext
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
import torch

import fedprotip
from fedprotip import RunError, UsageError
from fedprotip.federation.client import Client
from fedprotip.federation.engines import apart
from fedprotip.federation.engines.apart import ApartEngine
from fedprotip.federation.parcels import Ask
from fedprotip.federation.secure.demands import NONE, Demands
from fedprotip.federation.secure.desk import Desk, as_rows, rows
from fedprotip.federation.secure.sums import check_whole
from fedprotip.flower.keys import site_key
from fedprotip.messages import BadMessage, Message
from fedprotip.methods import base, create_method
from fedprotip.methods.exchange import Exchange
from fedprotip.methods.parts import private
from fedprotip.seeds import torch_stream
from fedprotip.store.plain import PlainFolder
from tests.small import REDUCED, quick, results, small, tensors

pytest.importorskip("cryptography")
pytest.importorskip("Crypto")

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedprotip.federation.secure.signed import Signer

SHOWN = ["fedavg", "fedprotip", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fot", "lda", "ridge"))]
OPTIONS = {"fedprotip": {"merge": "sketch", "sketch": 16}, "fot": {"width": 32}}
LESS = {"stream": {"tasks": 2, "task_size": 2}, "train": {"rounds": 2, "epochs": 1, "batch": 32, "lr": 0.05}}


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    quick(monkeypatch)


@pytest.fixture
def one_secret(monkeypatch):
    """Gaussians of sketches as they are without `secure`: so that two runs can be compared."""

    def seeded(local, purpose, name, rows, columns):
        chance = torch_stream(local.settings.run.seed, purpose, local.task, local.client, name)
        return torch.randn(rows, columns, generator=chance)

    for part in ("parts.sketches", "fot"):
        monkeypatch.setattr(f"fedprotip.methods.{part}.gaussian", seeded)


def settings(method, *overrides, secure=True, clients=4):
    own = {"name": method, "secure": secure, **OPTIONS.get(method, {})}
    plain = {} if secure else {"statistics": {"minimum": 1}}
    held = {"count": clients, "held_back": 0.1}
    raw = {**LESS, **plain, "method": own, "clients": held, "model": {"width": 24, "depth": 2}, "run": {"threads": 1}}
    return fedprotip.load_settings(raw, overrides)


def run(folder, method, *overrides, **changes):
    summary = fedprotip.run(settings(method, *overrides, **changes), out=folder)
    return summary, results(folder) | {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def events(folder, kind):
    lines = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == kind]


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


REGISTERED = sorted(name for name, cls in base._methods.items() if cls.__module__.startswith("fedprotip."))
REFUSED = ("glfc", "gpm", "lga")


def created(method):
    raw = {"method": {"name": method, "secure": True}, "clients": {"count": 1 if method == "gpm" else 4}}
    return create_method(fedprotip.load_settings(raw))


@pytest.mark.parametrize("method", REFUSED)
def test_a_method_that_needs_single_replies_is_refused_by_name(method):
    with pytest.raises(UsageError, match=f"secure = true is not possible with method.name = {method!r}: .*; choose "):
        created(method)


@pytest.mark.parametrize("method", sorted({*REGISTERED} - {*REFUSED}))
def test_every_other_method_asks_for_sums_only(method):
    asked = [one for one in created(method).exchanges if one.who != "nobody" and not one.in_clear]
    assert all(one.combine in ("mean", "sum") for one in asked)


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


@pytest.mark.parametrize(
    ("clients", "sentence"),
    [
        (
            {"count": 1},
            "where clients.count = 1: the sum of one is what it sent; choose 2 clients or more",
        ),
        ({"count": 4, "roster": {"1": "2"}}, "where clients.roster has one client from task 1 on"),
        ({"count": 7, "fraction": 0.25}, r"clients.fraction = 0.25 draws one of 7 .*; 0\.286 is enough"),
    ],
)
def test_a_run_that_would_sum_one_client_is_refused_before_it_begins(clients, sentence):
    raw = {"method": {"name": "fedavg", "secure": True}, "clients": clients}
    with pytest.raises(UsageError, match=sentence):
        create_method(fedprotip.load_settings(raw))
    if "fraction" in clients:  # nobody is drawn where nothing is trained
        create_method(fedprotip.load_settings({**raw, "method": {"name": "lda", "secure": True}}))


def test_the_share_that_is_proposed_draws_two():
    for active in range(3, 60):
        clients = fedprotip.load_settings({"clients": {"count": active, "fraction": 1.5 / active}})
        raw = clients.model_dump() | {"method": {"name": "fedavg", "secure": True}}
        with pytest.raises(UsageError) as refused:
            create_method(fedprotip.load_settings(raw))
        raw["clients"]["fraction"] = float(str(refused.value).split()[-3])
        create_method(fedprotip.load_settings(raw))


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("train.aggregate=median", "train.aggregate = 'median' is not possible with"),
        ("train.aggregate=clipped", "train.aggregate = 'clipped', which compares single clients"),
        ("method.merge=union", "method.merge = 'union' is not possible with method.secure = true"),
        ("statistics.rank=2", "its server must see 'start' of every client, .*; choose statistics.rank = 0"),
    ],
)
def test_what_cannot_be_summed_is_refused_before_the_run(override, sentence):
    with pytest.raises(UsageError, match=sentence):
        create_method(
            small(
                override,
                method={"name": "fedprotip", "secure": True, "merge": "sketch"},
                train={"head_start": "closed"},
            )
        )


def test_without_the_packages_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setattr(private, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"needs cryptography and pycryptodome; .*pip install 'fedprotip\[secure\]'"):
        create_method(settings("fedavg"))


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


def asking_for(monkeypatch, demands, client=1):
    """Let a client be a site that asks something of every plan."""

    def made(path, holding):
        return Client(path, holding, demands=demands if holding.client == client else NONE)

    monkeypatch.setattr(apart, "Client", made)


@pytest.mark.parametrize(
    ("demands", "secure", "sentence"),
    [
        (Demands(True), False, "the plan has method.secure = false, this site has true"),
        (Demands(True, 0.8), True, "the plan has method.secure_share = 0.5, this site has at least 0.8"),
        (Demands(True, 0.5, 1.0), True, "the plan has method.secure_noise = 0, this site has at least 1"),
    ],
)
def test_a_site_takes_no_plan_that_protects_it_less_than_it_asks(tmp_path, monkeypatch, demands, secure, sentence):
    asking_for(monkeypatch, demands)
    run(tmp_path / "r", "fedavg", "run.engine=apart", "stream.tasks=1", "train.rounds=1", secure=secure)
    failures = events(tmp_path / "r", "failure")
    assert {event["client"] for event in failures} == {1}
    assert all(sentence in event["reason"] for event in failures)


def test_a_site_takes_a_plan_that_protects_it_as_it_asks(tmp_path, monkeypatch):
    asking_for(monkeypatch, Demands(True, 0.5))
    run(tmp_path / "r", "fedavg", "run.engine=apart", "stream.tasks=1", "train.rounds=1")
    assert not events(tmp_path / "r", "failure")


@pytest.mark.parametrize("anew", [False, True])
@pytest.mark.parametrize(
    ("was", "becomes", "sentence"),
    [
        ("secure = true", "secure = false", "the plan has method.secure = false, its run has true"),
        (
            "secure_share = 0.6",
            "secure_share = 0.5",
            "the plan has method.secure_share = 0.5, its run has at least 0.6",
        ),
    ],
)
def test_a_plan_cannot_take_protection_away_within_a_run(tmp_path, monkeypatch, anew, was, becomes, sentence):
    """Before the second round a server asks client 1 in the clear; or a new process of it, told everything anew."""
    original, plans, heard = ApartEngine._deliver, [], []

    def deliver(self, client, parcel):
        plans.extend(message for message in parcel if message.kind == "plan")
        ask = parcel[0].meta
        if client == 1 and ask.get("phase") == "keys" and ask["round"] == 1:
            told = {**plans[0].meta, "settings": plans[0].meta["settings"].replace(was, becomes)}
            assert told != plans[0].meta
            if anew:
                del self._clients[1]
            changed = {name: value for name, value in ask.items() if name != "phase"} | (
                {"since": None} if anew else {}
            )
            parcel = [Message("ask", meta=changed), Message("plan", meta=told), *parcel[1:]]
            heard.append(1)
        return original(self, client, parcel)

    monkeypatch.setattr(ApartEngine, "_deliver", deliver)
    run(tmp_path / "r", "fedavg", "run.engine=apart", "stream.tasks=1", "method.secure_share=0.6", "train.rounds=3")
    assert heard
    (failure,) = events(tmp_path / "r", "failure")
    assert failure["client"] == 1
    assert sentence in failure["reason"]
    assert [event["clients"] for event in events(tmp_path / "r", "round")] == [4, 3, 4]  # it goes on with the true one


def test_signatures_are_of_one_run(tmp_path, monkeypatch):
    """Two runs with one seed have other names, which clients are told with the plan and sign with their keys."""
    signed, original = [], Signer.sign

    def sign(self, about, keys):
        signed.append(about)
        return original(self, about, keys)

    monkeypatch.setattr(Signer, "sign", sign)
    with_keys(monkeypatch, tmp_path)
    for name in ("one", "other"):
        run(tmp_path / name, "fedavg", "run.engine=apart", "stream.tasks=1", "train.rounds=1")
    names = [about.split(", ")[0] for about in signed]
    assert all(len(name) == len("run ") + 32 for name in names)
    assert len(set(names)) == 2


def with_keys(monkeypatch, folder):
    """Let every client be a site that has a key; no roster, so they believe the first key that they see."""

    def client(path, holding):
        number = holding.client
        site_key(folder / f"{number}.key")
        return Client(path, holding, signer=Signer(number, folder / f"{number}.key", PlainFolder(path, path.parent)))

    monkeypatch.setattr(apart, "Client", client)


def test_sites_with_keys_give_the_bytes_of_those_without(tmp_path, monkeypatch):
    """But for signatures, which are zeros there."""
    plain = run(tmp_path / "plain", "fedavg", "run.engine=apart")[1]
    with_keys(monkeypatch, tmp_path)
    assert run(tmp_path / "keys", "fedavg", "run.engine=apart")[1] == plain
    known = [(tmp_path / f"keys/clients/{client}/known-keys").read_text() for client in range(4)]
    assert len(set(known)) == 1
    assert len(known[0].splitlines()) == 4


def test_a_site_that_is_told_a_swapped_key_takes_no_part_and_the_run_says_so(tmp_path, monkeypatch):
    """By the server, from the second round on; the others' sum is made without that site."""
    original, own = ApartEngine._deliver, X25519PrivateKey.generate().public_key().public_bytes_raw()

    def deliver(self, client, parcel):
        if client == 1 and parcel[0].meta.get("phase") == "shares" and parcel[0].meta["round"] == 1:
            (told,) = [message for message in parcel if message.kind == "secure"]
            entries = rows(told, "keys")
            entries[3] = own + entries[3][len(own) :]
            parcel = [Message("secure", as_rows(entries, "keys")) if m is told else m for m in parcel]
        return original(self, client, parcel)

    with_keys(monkeypatch, tmp_path)
    monkeypatch.setattr(ApartEngine, "_deliver", deliver)
    run(tmp_path / "r", "fedavg", "run.engine=apart", "stream.tasks=1")
    (failure,) = events(tmp_path / "r", "failure")
    assert (failure["client"], failure["round"]) == (1, 1)
    assert "the keys of client 3 are not signed by its key, so this site takes no part" in failure["reason"]
    assert [event["clients"] for event in events(tmp_path / "r", "round")] == [4, 3]


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
