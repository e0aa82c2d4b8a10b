"""One hostile client of five: whatever it says, the server goes on, names it and keeps its logs short.

The attacks are `benchmarks/hostile`; what they cost in accuracy is measured by `python -m benchmarks attacks`.
"""

import json
from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import fedprotip
from benchmarks import attacks, hostile
from benchmarks.attacks import CLIENT, LINE
from benchmarks.harness import Bench
from benchmarks.hostile import ATTACKS, EVERY, HONEST, Attack
from benchmarks.hostile.door import ALIKE, with_tensors
from fedprotip import UsageError
from fedprotip.messages import Message
from tests.small import REDUCED, quick, results

TINY = {
    "data": {"train_limit": 25, "test_limit": 10},
    "stream": {"tasks": 5, "task_size": 2},
    "clients": {"count": 5, "held_back": 0.1},
    "model": {"width": 12, "depth": 1},
    "train": {"rounds": 2, "epochs": 1, "batch": 64, "lr": 0.005},  # larger steps from a closed start differ too much
    "method": {"name": "fedprotip", "threshold": 0.9, "rank_rule": "energy"},
    "statistics": {"minimum": 1},
    "evaluate": {"draws": 1},
    "run": {"threads": 1, "checkpoint": 100},
}
TASKS, ROUNDS = TINY["stream"]["tasks"], TINY["train"]["rounds"]
ASKED = (*EVERY, *ALIKE)
TURNS = TASKS * (ROUNDS + len(ASKED) - 1)
"""Questions that a client is asked in a run after it has joined."""


def some(**wanted):
    """Names of attacks that the server should stand, of those that begin after a client has joined."""
    return [
        name
        for name, one in ATTACKS.items()
        if one is not HONEST and one.on[0] in EVERY and "labels" not in name
        if all(getattr(one, key) == value for key, value in wanted.items())
    ]


REFUSED, OTHERS = some(refused=True), some(refused=False)
JOINING = [name for name, one in ATTACKS.items() if one.refused and one.on[0] not in EVERY]


def attacked(folder, name, *overrides):
    """A tiny run with this attack; its records."""
    with hostile.among(name, CLIENT):
        fedprotip.run(TINY, overrides, folder)
    return records(folder)


def records(folder):
    """Events and ledger of a run, whose lines are short."""
    lines = {log: (folder / f"{log}.jsonl").read_text().splitlines() for log in ("events", "ledger")}
    assert max(len(line) for log in lines.values() for line in log) <= LINE
    events, ledger = ([json.loads(line) for line in lines[log]] for log in ("events", "ledger"))
    failures = [event for event in events if event["event"] == "failure"]
    return SimpleNamespace(
        events=events,
        ledger=ledger,
        named=[event for event in failures if event["client"] == CLIENT],
        blamed=[event for event in failures if event["client"] != CLIENT],
    )


def in_turn(monkeypatch, names, run=0):
    """An attack that is one of these after another, at every question the next one that fits, in run after run."""
    fitting = {asked: [name for name in names if ALIKE.get(asked, asked) in ATTACKS[name].on] for asked in ASKED}
    used = {asked: [] for asked in ASKED}

    def change(message, scene):
        mine, before = fitting[scene.ask.exchange], used[scene.ask.exchange]
        first = run * TASKS * (ROUNDS if scene.ask.exchange == "model" else 1)
        before.append(mine[(first + len(before)) % len(mine)])
        return ATTACKS[before[-1]].change(message, scene)

    monkeypatch.setitem(ATTACKS, "in_turn", Attack("in_turn", "One after another.", EVERY, change))
    return used


def runs_of(names):
    """So many runs give every one of these its turn; the first ones every time, the others with `make test-all`."""
    counts = Counter(exchange for name in names for exchange in ATTACKS[name].on)
    turns = {exchange: TASKS * (ROUNDS if exchange == "model" else 1) for exchange in EVERY}
    runs = range(max(-(-counts[exchange] // turns[exchange]) for exchange in EVERY))
    return [pytest.param(run, marks=pytest.mark.slow if run > 2 else ()) for run in runs]


def test_the_door_itself_changes_nothing(tmp_path, monkeypatch):
    quick(monkeypatch)
    attacked(tmp_path / "door", HONEST.name, "stream.tasks=2")
    fedprotip.run(TINY, ["stream.tasks=2"], tmp_path / "plain")
    assert results(tmp_path / "door") == results(tmp_path / "plain")


@pytest.mark.parametrize("run", runs_of(REFUSED))
def test_what_no_honest_client_says_is_left_out_and_named(tmp_path, monkeypatch, run):
    """Every reply is refused, and the run goes on as if the client had failed each time."""
    quick(monkeypatch)
    used = in_turn(monkeypatch, REFUSED, run)
    found = attacked(tmp_path / "r", "in_turn")
    assert sum(map(len, used.values())) == TURNS
    assert len(found.named) == TURNS, used
    assert not found.blamed
    if run == 0:
        attacked(tmp_path / "failed", "raises")
        for path in (tmp_path / "failed").glob("*.safetensors"):
            if path.stem != "data":
                assert (tmp_path / "r" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("name", JOINING)
def test_a_client_that_joins_with_nonsense_takes_no_part(tmp_path, monkeypatch, name):
    quick(monkeypatch)
    found = attacked(tmp_path / "r", name, "stream.tasks=1", "train.rounds=1")
    assert len(found.named) == 1
    assert not found.blamed
    ups = {line["kind"] for line in found.ledger if (line["client"], line["direction"]) == (CLIENT, "up")}
    assert ups == {"presence", "reference"}  # which everyone is asked for


@pytest.mark.parametrize("run", runs_of(OTHERS))
def test_no_sequence_of_attacks_ends_a_run(tmp_path, monkeypatch, run):
    """What one attack leaves behind does not help the next one."""
    quick(monkeypatch)
    used = in_turn(monkeypatch, OTHERS, run)
    found = attacked(tmp_path / "r", "in_turn")
    assert all(used.values())
    assert not found.blamed


def test_a_report_is_written_whatever_was_said(tmp_path, monkeypatch):
    in_turn(monkeypatch, [*REFUSED, *OTHERS])
    attacked(tmp_path / "r", "in_turn", "stream.tasks=3")
    page = (tmp_path / "r" / "report.html").read_text()
    assert len(page) < 500_000
    assert "\x1b" not in page


ALONE = [name for name, one in ATTACKS.items() if one is not HONEST and name not in REFUSED + JOINING]


@pytest.mark.slow
@pytest.mark.parametrize("name", ALONE)
def test_no_attack_ends_a_run(tmp_path, monkeypatch, name):
    quick(monkeypatch)
    found = attacked(tmp_path / "r", name, "stream.tasks=2")
    assert not found.blamed
    assert found.named or not ATTACKS[name].refused


NAMED = (
    *("weights_times_100", "weights_times_minus_3", "update_times_1e6", "samples_1e12", "samples_1e12_negated"),
    *("counts_1e9", "features_times_1000", "sums_negated", "rest_list", "full_rank_basis"),
    *("kind_of_100_kB", "withheld_1e308", "replayed_statistics", "losses_for_sure_answers"),
    *("ten_times_as_many_of_everything", "means_swapped"),
)
"""The attacks that were found first, but for those that only a robust aggregate limits; and the dearest ones."""


@pytest.mark.slow
def test_no_attack_costs_more_than_its_bar(tmp_path):
    """The attacks that were found first, one seed, as `python -m benchmarks attacks` runs them."""
    bench = Bench("attacks", tmp_path, 1, {})
    attacks.attacks(bench, seeds=(0,), aggregates=("mean",), only=",".join(NAMED), workers=1)
    bench.refuse_disagreement()
    for name in NAMED:
        verdicts = {figure.verdict for figure in bench.figures if f" {name} " in f"{figure.name} "}
        assert verdicts == {"met"}, name


@pytest.mark.slow
@pytest.mark.parametrize("aggregate", ["trimmed", "median"])
def test_no_dear_attack_costs_more_than_five_points_with_a_robust_aggregate(tmp_path, aggregate):
    names = ("ten_times_as_many_of_everything", "labels_flipped")
    bench = Bench("attacks", tmp_path, 1, {})
    attacks.attacks(bench, seeds=(0,), aggregates=(aggregate,), only=",".join(names), workers=1)
    bench.refuse_disagreement()
    judged = [figure for figure in bench.figures if any(f" {name} " in f"{figure.name} " for name in names)]
    assert [(figure.bar, figure.verdict) for figure in judged] == [(5.0, "met")] * 2


def test_who_swaps_classes_is_left_out_of_all_statistics_and_named(tmp_path, monkeypatch):
    """However many samples it states: in the start of the head, of the network as it is, and at birth."""
    quick(monkeypatch)
    with hostile.among("ten_times_as_many_of_everything", CLIENT):
        summary = fedprotip.run(attacks.SETTINGS, ["stream.tasks=1", "train.rounds=1"], tmp_path / "r")
    found = records(tmp_path / "r")
    assert [event["reason"] for event in found.named] == ["its mean of class 0 lies where the others have class 1"] * 3
    refused = {line["kind"] for line in found.ledger if (line["client"], line["status"]) == (CLIENT, "rejected")}
    assert refused == {"start", "birth", "statistics"}
    assert not found.blamed
    assert summary["accuracy"]["single"] > 99


@pytest.mark.parametrize("merge", ["energy", "sketch"])
@pytest.mark.parametrize("place", [0, 1])
def test_who_tells_energies_that_nobody_has_is_left_out_and_named(tmp_path, monkeypatch, merge, place):
    """All in earlier bases, so that nothing more is kept of the task, or all cut off, so that everything is."""
    quick(monkeypatch)

    def change(message, scene):
        tensors, rest = dict(message.tensors), message.meta.get("rest", {})
        if merge == "sketch":
            tensors["rest"] = tensors["rest"].index_fill(1, torch.tensor(place), 1e30)
        told = {name: [value if at != place else 1e30 for at, value in enumerate(two)] for name, two in rest.items()}
        return Message(message.kind, tensors, {"rest": told} if told else {})

    name = {"energy": "basis", "sketch": "sketch"}[merge]
    monkeypatch.setitem(ATTACKS, "energies", Attack("energies", "Energies.", (name,), change))
    found = attacked(tmp_path / "r", "energies", f"method.merge={merge}", "stream.tasks=2", "train.rounds=1")
    assert len(found.named) == 2
    assert all("whole energy" in event["reason"] for event in found.named)
    assert not found.blamed


def test_the_campaign_goes_on_where_it_stopped(tmp_path, monkeypatch):
    """Finished cells are read from the file; those of other code or other settings are not."""
    done = []

    def run(cell, overrides):
        done.append(cell.attack)
        ended = "it crashed: OSError: disk" if cell.attack == "sign_flip" else ""
        accuracy = {} if ended else {"aware": 90.0 - 20 * (cell.attack == "weights_times_100"), "single": 80.0}
        return {"ended": ended, "told": {"failure: x": 1}, "blamed": 0, "longest": 9, "seconds": 0.1, **accuracy}

    monkeypatch.setattr(attacks, "run", run)
    kept, sizes = tmp_path / "cells.jsonl", {"seeds": (0,), "aggregates": ("mean",), "workers": 1}
    for only, new in (("weights_times_100", 3), ("weights_times_100,sign_flip", 1), ("weights_times_100", 0)):
        bench = Bench("attacks", tmp_path, 1, {})
        attacks.attacks(bench, only=only, kept=kept, **sizes)
        assert len(done) == new
        done.clear()
        costs = [figure for figure in bench.figures if "weights_times_100" in figure.name]
        assert [(figure.value, figure.bar, figure.verdict) for figure in costs] == [(20.0, 10.0, "not met")]
        ended = [figure.verdict for figure in bench.figures if "sign_flip" in figure.name]
        assert ended == ["not met"] * ("sign_flip" in only)
    bench = Bench("attacks", tmp_path, 1, {})
    attacks.attacks(bench, only="weights_times_100", kept=kept, overrides=("train.lr=1",), **sizes)
    assert len(done) == 3
    with pytest.raises(UsageError, match="No attack is named like 'zero'"):
        attacks.attacks(bench, only="zero", **sizes)


def test_settings_that_are_refused_end_the_campaign(tmp_path):
    bench, sizes = Bench("attacks", tmp_path, 1, {}), {"seeds": (0,), "aggregates": ("mean", "mode"), "workers": 1}
    with pytest.raises(UsageError, match=r"^train.rate is not a setting"):
        attacks.attacks(bench, only="weights_times_100", overrides=("train.rate=1",), **sizes)


FEW = ["clients.count=5", "stream.tasks=2", "train.rounds=2", "train.epochs=1", "data.train_limit=40"]
HONEST_RUNS = {
    "fifty clients": ["clients.count=50", "stream.tasks=2"],
    "five clients": ["clients.count=5"],
    "a part of the clients": ["clients.count=10", "clients.fraction=0.4", "clients.alpha=0.1"],
    "momentum": ["clients.count=8", "train.momentum=0.9"],
    "random start": ["clients.count=10", "clients.fraction=0.4", "train.head_start=random", "train.fall=none"],
    "random start, momentum": ["clients.count=8", "train.momentum=0.9", "train.head_start=random", "train.fall=none"],
    "Adam": ["clients.count=8", "train.optimizer=Adam", "train.lr=0.003"],
    "norm layers": ["clients.count=5", "model.name=small_cnn", "model.width=16", "stream.tasks=2", "model.norm=track"],
    "permuted pixels": ["clients.count=8", "stream.scenario=domain", "stream.domains=permute", "stream.task_size=0"],
    "turned digits": [
        "clients.count=8",
        "stream.scenario=domain",
        "stream.domains=rotate",
        "stream.task_size=0",
        "stream.tasks=4",
    ],
    "frozen ResNet": ["model.name=resnet18", "model.freeze=layer3", "model.freeze_from=start", *FEW],
    "energies": ["clients.count=8", "method.merge=energy", "method.rank_rule=energy", "method.threshold=0.9"],
    "FedAvg": ["clients.count=6", "method.name=fedavg", "train.rounds=8"],
    "lda": ["clients.count=8", "method.name=lda"],
    "median": ["clients.count=8", "train.aggregate=median"],
    "clipped, bf16": ["clients.count=8", "train.aggregate=clipped", "train.wire=bf16"],
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n != "five clients" else ()) for n in HONEST_RUNS]
)
def test_nobody_is_out_of_line_in_an_honest_run(tmp_path, monkeypatch, name):
    """However unevenly data are spread."""
    quick(monkeypatch)
    sections = {"train": {"rounds": 3, "epochs": 2, "lr": 0.05}, "clients": {"alpha": 0.05, "held_back": 0.1}}
    summary = fedprotip.run({**sections, "run": {"threads": 1}}, HONEST_RUNS[name], tmp_path / "r")
    assert summary["failures"] == {"count": 0, "by_reason": {}}


def test_one_client_that_fails_does_not_end_a_run_in_which_it_is_drawn_alone(tmp_path, monkeypatch):
    """With a fifth of five clients a round is one client's; three rounds in a row may be the same one's."""
    quick(monkeypatch)
    with hostile.among("raises", CLIENT):
        summary = fedprotip.run(TINY, ["clients.fraction=0.2", "train.rounds=12", "stream.tasks=1"], tmp_path / "r")
    assert summary["tasks"] == 1
    assert summary["failures"]["count"] > 0


@pytest.mark.parametrize(("method", "loss"), [("fedavg", 1e308), ("pec", -1e30), ("fedprotip", 40_000)])
def test_who_states_a_loss_that_nobody_has_is_left_out_and_named(tmp_path, monkeypatch, method, loss):
    """One would be the whole loss curve of the report."""
    quick(monkeypatch)
    name = "students" if method == "pec" else "model"
    change = partial(with_tensors, loss=loss)
    lie = Attack("loss", "A loss.", (name,), lambda message, scene: change(message, message.tensors))
    monkeypatch.setitem(ATTACKS, "loss", lie)
    changed = {**TINY, "method": {"name": method, **REDUCED.get(method, {})}}
    with hostile.among("loss", CLIENT):
        fedprotip.run(changed, ["stream.tasks=1"], tmp_path / "r")
    found = records(tmp_path / "r")
    assert len(found.named) == ROUNDS
    assert all("its loss is" in event["reason"] for event in found.named)
    assert max(abs(event["loss"]) for event in found.events if event["event"] == "round") < 10
    assert not found.blamed


@pytest.mark.parametrize("name", ["update_times_1e6", "everything_largest"])
def test_of_two_that_are_asked_one_with_a_huge_update_is_left_out(tmp_path, monkeypatch, name):
    """Nobody else is there to compare it with, and no round before; the other one's losses may not explode."""
    quick(monkeypatch)
    found = attacked(tmp_path / "r", name, "clients.count=2", "stream.tasks=1")
    refused = [event["reason"] for event in found.named if event["round"] is not None]
    assert len(refused) == ROUNDS
    assert "out of all proportion" in refused[0]
    assert not found.blamed


def test_many_stated_samples_against_all_others_do_not_make_a_run_diverge(tmp_path, monkeypatch):
    """Ten times its samples and negated steps, ten rounds long: without bounds the loss reaches 240."""
    quick(monkeypatch)
    with hostile.among("ten_times_as_many_samples", CLIENT):
        summary = fedprotip.run(attacks.SETTINGS, ["stream.tasks=1", "train.rounds=10"], tmp_path / "r")
    found = records(tmp_path / "r")
    assert max(event["loss"] for event in found.events if event["event"] == "round") < 10
    assert [event["client"] for event in found.events if event["event"] == "bounded"] == [CLIENT]
    anew = [event["text"] for event in found.events if event["event"] == "anew"]
    assert len(anew) == 1
    assert anew[0].startswith("after round 6 the task begins anew: the loss of most clients exploded")
    assert sum("began anew" in reason for reason in summary["failures"]["by_reason"]) == 1
    assert not found.blamed


def test_a_client_that_lies_about_every_way_does_not_choose_it(tmp_path, monkeypatch):
    """It held samples back enough to be the majority of those that found anything wrong."""
    quick(monkeypatch)
    with hostile.among("right_for_the_last_way", CLIENT):
        fedprotip.run(attacks.SETTINGS, ["stream.tasks=2", "train.rounds=1"], tmp_path / "r")
    found = records(tmp_path / "r")
    assert [event["router"] for event in found.events if event["event"] == "task"] == ["birth", "birth"]
    assert not found.named
