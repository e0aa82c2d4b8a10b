"""Runs with `method.secure`: as without it but for fixed point, on every engine, resumed, and with clients lost."""

import json

import numpy as np
import pytest
import torch

import fedprotip
from fedprotip import RunError, UsageError
from fedprotip.federation.engines.apart import ApartEngine
from fedprotip.federation.secure.desk import Desk
from fedprotip.messages import Message
from fedprotip.methods import base, create_method
from fedprotip.methods.parts import private
from fedprotip.seeds import torch_stream
from tests.small import quick, results, small, tensors

pytest.importorskip("cryptography")
pytest.importorskip("Crypto")

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


def test_the_server_hears_nothing_of_a_single_client(tmp_path, monkeypatch, one_secret):
    """Masked vectors pass for noise and differ from run to run; beside them there are keys, letters and one bit."""
    one, other = (transcript(tmp_path / name, monkeypatch, "fedprotip") for name in ("one", "other"))
    assert len(one) == len(other)
    long = 0
    for (_, ask, reply), (_, _, again) in zip(one, other, strict=True):
        if "phase" not in ask:
            assert ask["exchange"] == "presence"
            assert reply.meta["samples"] in (0, 1)
            assert not reply.tensors
        elif ask["phase"] == "masked":
            assert reply.tensors.keys() == {"sum"}
            assert reply.meta.keys() == {"layout", "step"}
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
    kinds = {json.loads(line)["kind"] for line in (tmp_path / "one/ledger.jsonl").read_text().splitlines()}
    assert {"secure", "sketch", "reference", "statistics", "calibration", "model"} <= kinds


REGISTERED = sorted(name for name, cls in base._methods.items() if cls.__module__.startswith("fedprotip."))
REFUSED = ("glfc", "gpm", "lga")


def created(method):
    raw = {"method": {"name": method, "secure": True}, "clients": {"count": 1 if method == "gpm" else 4}}
    return create_method(fedprotip.load_settings(raw))


@pytest.mark.parametrize("method", REFUSED)
def test_a_method_that_needs_single_replies_is_refused_by_name(method):
    with pytest.raises(UsageError, match=f"method.secure = true is not possible with method.name = {method!r}: "):
        created(method)


@pytest.mark.parametrize("method", sorted({*REGISTERED} - {*REFUSED}))
def test_every_other_method_asks_for_sums_only(method):
    asked = [one for one in created(method).exchanges if one.who != "nobody" and not one.in_clear]
    assert all(one.combine in ("mean", "sum") for one in asked)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("train.aggregate=median", "train.aggregate = 'median' is not possible with"),
        ("train.aggregate=clipped", "train.aggregate = 'clipped', which compares single clients"),
        ("method.merge=union", "method.merge = 'union' is not possible with method.secure = true"),
        ("statistics.rank=2", "its server must see 'start' of every client"),
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
