"""What cannot be summed in secret is refused before a run, in a sentence that says what to choose."""

import pytest

import fedprotip
from fedprotip import UsageError
from fedprotip.methods import create_method
from fedprotip.methods.parts import private
from tests.federation.secure.private_runs import REFUSED, REGISTERED, settings
from tests.small import small

pytest.importorskip("cryptography")
pytest.importorskip("Crypto")


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
