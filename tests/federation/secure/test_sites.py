"""Sites that protect themselves: what they ask of a plan, and keys that are theirs, in runs with `method.secure`."""

import pytest

from fedprotip.federation.client import Client
from fedprotip.federation.engines import apart
from fedprotip.federation.engines.apart import ApartEngine
from fedprotip.federation.secure.demands import NONE, Demands
from fedprotip.federation.secure.desk import as_rows, rows
from fedprotip.flower.keys import site_key
from fedprotip.messages import Message
from fedprotip.store.plain import PlainFolder
from tests.federation.secure.private_runs import events, run

pytest.importorskip("cryptography")
pytest.importorskip("Crypto")

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedprotip.federation.secure.signed import Signer


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
