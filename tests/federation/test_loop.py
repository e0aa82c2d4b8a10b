"""Algorithm 1 under stress: failing clients, missing data, any order of clients, many clients."""

import gc
import json
import weakref

import numpy as np
import pytest
import torch

import fedprotip
from fedprotip.errors import RunError
from fedprotip.federation.aggregate import Average
from fedprotip.federation.engines.local import LocalEngine
from fedprotip.messages import Message
from fedprotip.methods import create_method
from fedprotip.methods.exchange import Exchange
from fedprotip.methods.fedavg import FedAvg
from tests.sites import through
from tests.small import results, small, tensors


def events(folder, name):
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == name]


def ledger(folder):
    return [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]


@pytest.fixture
def train_with(monkeypatch):
    """Replace a client's training by a function of (original message, client, task, round).

    Or its other answers: then by a function of (original message, client, task, name of the exchange).
    """

    def install(change, verb="train"):
        def changed(answer, local, name):
            return change(answer(), local.client, local.task, local.round if verb == "train" else name)

        through(monkeypatch, changed, verb)

    return install


def test_a_client_that_raises_is_left_out_and_counted(tmp_path, train_with):
    def broken(message, client, task, round_):
        if client == 1 and task == 1:
            raise OSError("the disk of this hospital is full")
        return message

    train_with(broken)
    summary = fedprotip.run(small(), out=tmp_path / "r")
    assert summary["failures"] == {"count": 3, "by_reason": {"OSError: the disk of this hospital is full": 3}}
    assert [(e["client"], e["task"], e["round"]) for e in events(tmp_path / "r", "failure")] == [
        (1, 1, 0),
        (1, 1, 1),
        (1, 1, 2),
    ]
    assert [e["clients"] for e in events(tmp_path / "r", "round")] == [3, 3, 3, 2, 2, 2, 3, 3, 3]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_are_rejected(tmp_path, train_with, value):
    def poisoned(message, client, task, round_):
        if client == 0 and round_ == 1:
            message.tensors["backbone.1.weight"].view(-1)[0] = value
        return message

    train_with(poisoned)
    summary = fedprotip.run(small(), out=tmp_path / "r")
    assert summary["failures"]["count"] == 3
    rejected = [line for line in ledger(tmp_path / "r") if line["status"] == "rejected"]
    assert {(line["client"], line["kind"], line["direction"]) for line in rejected} == {(0, "model", "up")}
    assert "not finite" in rejected[0]["reason"]
    model = (tmp_path / "r" / "model.safetensors").read_bytes()
    assert all(torch.isfinite(t).all() for t in __import__("safetensors.torch").torch.load(model).values())


def test_a_missing_or_misshapen_tensor_is_rejected(tmp_path, train_with):
    def mangled(message, client, task, round_):
        if client == 0:
            message.tensors.pop("backbone.1.weight")
        elif client == 1:
            message.tensors["backbone.1.weight"] = torch.zeros(2, 2)
        return message

    train_with(mangled)
    summary = fedprotip.run(small(), out=tmp_path / "r")
    assert summary["failures"]["count"] == 18
    assert all(e["clients"] == 1 for e in events(tmp_path / "r", "round"))


def test_failures_at_the_end_of_a_task_do_not_stop_the_run(tmp_path, train_with):
    def broken(message, client, task, kind):
        if client == 0 and kind == "basis":
            raise RuntimeError("unplugged")
        if client == 1 and kind == "reference" and task == 2:
            message.tensors["values"][0, 0] = torch.nan
        return message

    train_with(broken, "summarise")
    summary = fedprotip.run(small(), out=tmp_path / "r")
    assert summary["failures"]["by_reason"] == {
        "RuntimeError: unplugged": 3,
        "values has values that are not finite": 1,
    }
    assert summary["tasks"] == 3


def test_when_all_clients_fail_the_run_stops_with_the_reason_and_can_be_resumed(tmp_path, monkeypatch):
    def broken(answer, local, name):
        raise OSError("no route to host")

    with monkeypatch.context() as patch:
        through(patch, broken)
        with pytest.raises(fedprotip.RunError, match="no route to host"):
            fedprotip.run(small(), out=tmp_path / "r")
    assert fedprotip.resume(tmp_path / "r")["tasks"] == 3


def test_when_no_client_delivers_a_basis_the_run_stops(tmp_path, train_with):
    def broken(message, client, task, kind):
        raise OSError("gone")

    train_with(broken, "summarise")
    with pytest.raises(fedprotip.RunError, match="gone"):
        fedprotip.run(small(), out=tmp_path / "r")


def test_clients_with_no_data_and_with_one_sample(tmp_path):
    """200 clients share about 270 samples of a task: many have none, many have one."""
    settings = small(
        clients={"count": 200, "alpha": 0.05}, model={"name": "small_cnn", "width": 8}, train={"rounds": 1}
    )
    summary = fedprotip.run(settings, out=tmp_path / "r")
    absent = events(tmp_path / "r", "absent")
    assert len(absent) == 3
    assert all(event["clients"] for event in absent)
    assert summary["tasks"] == 3
    trained = {line["client"] for line in ledger(tmp_path / "r") if line["task"] == 0 and line["round"] == 0}
    assert not trained & set(absent[0]["clients"])


class Backwards(LocalEngine):
    """Runs the clients in the opposite order and hands the replies on in the order of clients."""

    def ask(self, requests):
        replies = list(super().ask(list(requests)[::-1]))
        return reversed(replies)


@pytest.mark.parametrize("norm", ["track", "freeze_after_first", "frozen"])
def test_the_order_in_which_clients_run_does_not_matter(tmp_path, monkeypatch, norm):
    settings = small(model={"name": "small_cnn", "width": 8, "norm": norm}, train={"rounds": 2})
    fedprotip.run(settings, out=tmp_path / "forwards")
    monkeypatch.setattr("fedprotip.federation.engines.LocalEngine", Backwards)
    fedprotip.run(settings, out=tmp_path / "backwards")
    assert results(tmp_path / "forwards") == results(tmp_path / "backwards")


def test_the_same_settings_give_the_same_result_and_another_seed_another(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        fedprotip.run(small(run={"seed": seed}), out=tmp_path / name)
    assert results(tmp_path / "a") == results(tmp_path / "b")
    assert results(tmp_path / "a")["model.safetensors"] != results(tmp_path / "c")["model.safetensors"]


@pytest.mark.parametrize(("fraction", "expected"), [(0.5, 2), (0.25, 1), (0.01, 1), (1.0, 4)])
def test_a_share_of_the_clients_trains_but_all_extract(tmp_path, fraction, expected):
    settings = small(clients={"count": 4, "fraction": fraction, "partition": "iid"})
    fedprotip.run(settings, out=tmp_path / "r")
    lines = [line for line in ledger(tmp_path / "r") if line["direction"] == "up"]
    rounds = {}
    for line in lines:
        rounds.setdefault((line["task"], line["round"], line["kind"]), set()).add(line["client"])
    trained = {(task, round_): clients for (task, round_, kind), clients in rounds.items() if kind == "model"}
    assert {len(clients) for clients in trained.values()} == {expected}
    assert all(len(c) == 4 for (_, round_, kind), c in rounds.items() if kind in ("basis", "reference"))
    if expected < 4:
        for task in range(3):  # another draw in another round of a task
            assert len({tuple(sorted(clients)) for (of, _), clients in trained.items() if of == task}) > 1


def test_only_one_update_is_alive_at_a_time(tmp_path, monkeypatch):
    """The server's memory does not grow with clients: each update is gone before the next one is made."""
    alive, most = [], []
    original = Average.add

    def counting(self, tensors, weight):
        gc.collect()
        alive[:] = [ref for ref in alive if ref() is not None]
        alive.append(weakref.ref(tensors["backbone.1.weight"]))
        most.append(len(alive))
        original(self, tensors, weight)

    monkeypatch.setattr(Average, "add", counting)
    gc.freeze()  # what is there before the run need not be looked through each time
    try:
        fedprotip.run(small(clients={"count": 12, "partition": "iid"}), out=tmp_path / "r")
    finally:
        gc.unfreeze()
    assert len(most) == 12 * 9
    assert max(most) <= 2


def test_fedavg_with_one_client_is_central_sgd(tmp_path):
    from fedprotip.methods.parts.training import local_batches
    from fedprotip.models import build_network
    from fedprotip.seeds import numpy_stream
    from fedprotip.stream import build_stream

    settings = small(clients={"count": 1}, method={"name": "fedavg"}, train={"momentum": 0.0})
    fedprotip.run(settings, out=tmp_path / "r")
    stream = build_stream(settings)
    network = build_network(settings, stream.dataset.image_shape, routes=False)
    for task in range(3):
        network.add_head(stream.tasks[task].classes, 0, task)
        moving = [*network.backbone.parameters(), *network.heads[task].parameters()]
        optimizer = torch.optim.SGD(moving, lr=0.05, weight_decay=5e-4)
        for round_ in range(3):
            rng = numpy_stream(0, "batches", task, round_, 0)
            for batch in local_batches(stream.client_samples(task, 0), settings.train, rng):
                images, labels = stream.train_batch(task, batch)
                logits = network.heads[task](network.backbone(images))
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(logits, network.targets(labels, task)).backward()
                optimizer.step()
    found = tensors(tmp_path / "r", "model")
    for name, tensor in network.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6)


def test_uniform_and_weighted_averages_differ_as_they_should(tmp_path):
    summaries = {}
    for average in ("weighted", "uniform"):
        summaries[average] = fedprotip.run(small(train={"average": average}), out=tmp_path / average)
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in summaries]
    assert models[0] != models[1]


def test_ledger_counts_what_is_sent(tmp_path):
    """Totals are the sum of the lines; after the first task only the current head and free directions travel."""
    summary = fedprotip.run(small(clients={"count": 3, "partition": "iid"}), out=tmp_path / "r")
    lines = ledger(tmp_path / "r")
    for direction in ("up", "down"):
        for kind, total in summary["bytes"][direction].items():
            assert total == sum(ln["bytes"] for ln in lines if (ln["direction"], ln["kind"]) == (direction, kind))
    weights = 4 * (64 * 24 + 24 * 24)
    head = 4 * (24 * 2 + 2)
    biases = 4 * 2 * 24
    down = [ln["bytes"] for ln in lines if ln["direction"] == "down" and ln["kind"] == "model" and ln["client"] == 0]
    assert down[:3] == [weights + biases + head] * 3
    subspaces = tensors(tmp_path / "r", "subspaces")
    free = [
        4
        * 24
        * sum(d - int(subspaces[f"ranks/{name}"][:task].sum()) for name, d in (("1.weight", 64), ("3.weight", 24)))
        for task in (1, 2)
    ]
    assert free[1] <= free[0] < 0.85 * weights
    assert down[4:7] == [free[0] + head] * 3
    assert down[7:] == [free[1] + head] * 3  # at the end of a task clients receive what the next one starts with
    assert np.mean([ln["bytes"] for ln in lines if ln["kind"] == "reference"]) < 200


@pytest.mark.parametrize("domains", ["rotate", "permute"])
@pytest.mark.parametrize("method", ["fedavg", "fedprotip"])
def test_domain_incremental_runs(tmp_path, method, domains):
    stream = {"scenario": "domain", "tasks": 2, "domains": domains, "task_size": 0}
    summary = fedprotip.run(small(stream=stream, method={"name": method}), out=tmp_path / "r")
    assert summary["scenario"] == "domain"
    shared = method == "fedavg"
    heads = set(heads_of(tmp_path / "r"))
    assert heads == ({"0"} if shared else {"0", "1"})
    assert ("single" in summary["accuracy"]) is not shared


def heads_of(folder):
    return [name.split(".")[1] for name in tensors(folder, "model") if name.startswith("heads.")]


def test_class_overlap_runs(tmp_path):
    stream = {"tasks": 3, "task_size": 4, "overlap": 1}
    summary = fedprotip.run(small(stream=stream), out=tmp_path / "r")
    assert len(summary["matrix"]["aware"][-1]) == 3


class Tied(torch.nn.Module):
    """A weight in two modules, and a module under two names."""

    def __init__(self):
        super().__init__()
        self.first, self.one, self.two = torch.nn.Linear(64, 24), torch.nn.Linear(24, 24), torch.nn.Linear(24, 24)
        self.two.weight = self.one.weight
        self.alias = self.first

    def forward(self, images):
        return torch.relu(self.two(torch.relu(self.one(torch.relu(self.alias(images.flatten(1)))))))


def test_tied_weights_and_shared_modules_run_and_stay_protected(tmp_path, monkeypatch):
    from tests.methods.parts.test_projection import leak, two_tasks

    monkeypatch.setitem(__import__("fedprotip.models.heads").models.heads._builders, "mlp", lambda *_: Tied())
    layers, _, _ = two_tasks(tmp_path / "r")
    assert set(layers) == {"first.weight", "one.weight"}
    assert all(leak(change, phi) <= 1e-5 for change, phi in layers.values())


@pytest.mark.parametrize(
    "meta",
    [
        {},
        {"samples": torch.nan, "loss": 1.0},
        {"samples": 0, "loss": 1.0},
        {"samples": "5"},
        {"samples": 1e300, "loss": 1.0},
    ],
)
def test_bad_metadata_is_rejected(tmp_path, train_with, meta):
    def changed(message, client, task, round_):
        if client == 2:
            message.meta.clear()
            message.meta.update(meta)
        return message

    train_with(changed)
    summary = fedprotip.run(small(), out=tmp_path / "r")
    assert summary["failures"]["count"] == 9
    assert all(e["clients"] == 2 for e in events(tmp_path / "r", "round"))


def test_a_full_disk_is_not_the_fault_of_a_client(tmp_path, monkeypatch):
    """With client state on disk, a write that fails stops the run instead of losing a client's state."""
    from fedprotip.store.objects import ObjectFolder
    from tests.small import results as all_results

    settings = small(run={"state_mb": 0})
    fedprotip.run(settings, out=tmp_path / "whole")
    with monkeypatch.context() as patch:
        original, seen = ObjectFolder.write, []

        def failing(self, tensors):
            if "root" in tensors:
                seen.append(1)
                if len(seen) == 2:
                    raise OSError(28, "No space left on device")
            return original(self, tensors)

        patch.setattr(ObjectFolder, "write", failing)
        with pytest.raises(fedprotip.RunError, match="No space left"):
            fedprotip.run(settings, out=tmp_path / "r")
    fedprotip.resume(tmp_path / "r")
    assert all_results(tmp_path / "r") == all_results(tmp_path / "whole")


def test_a_client_that_comes_back_receives_what_it_missed(tmp_path):
    """Client 2 is away in task 1: in task 2 it gets the tensors that moved since, and the knowledge."""
    fedprotip.run(small(clients={"roster": {"1": "0-1", "2": "0-2"}, "partition": "iid"}), out=tmp_path / "r")
    lines = [ln for ln in ledger(tmp_path / "r") if ln["client"] == 2 and ln["direction"] == "down"]
    assert {ln["task"] for ln in lines} == {0, 2}
    first = [ln for ln in lines if (ln["task"], ln["round"]) == (2, 0)]
    head, weights = 4 * (24 * 2 + 2), 4 * (64 * 24 + 24 * 24)
    assert [ln["kind"] for ln in first] == ["ask", "knowledge", "model"]
    assert first[2]["bytes"] == weights + head


def test_losses_too_large_to_add_up_do_not_stop_the_run(tmp_path, train_with):
    def changed(message, client, task, round_):
        if client < 2:
            message.meta["loss"] = int(1.7e308)
        return message

    train_with(changed)
    summary = fedprotip.run(small(stream={"tasks": 1}), out=tmp_path / "r")
    assert summary["failures"]["count"] == 0
    assert [e["loss"] for e in events(tmp_path / "r", "round")] == [None] * 3


@pytest.mark.parametrize(
    "meta", [{"samples": 10**5000}, {"more": object()}, {("a", "b"): 1}], ids=["huge", "odd", "key"]
)
def test_metadata_that_cannot_travel_is_the_fault_of_the_client(tmp_path, train_with, meta):
    """Also where nothing travels."""

    def changed(message, client, task, round_):
        if client == 2:
            message.meta.update(meta)
        return message

    train_with(changed)
    summary = fedprotip.run(small(stream={"tasks": 1}), out=tmp_path / "r")
    assert summary["failures"]["count"] == 3


def test_metadata_is_what_it_is_after_a_journey():
    """A method sees the same in every engine: lists and names, no tuples, no numbers as names."""
    message = Message("any", meta={"pairs": [(1, 2)], 3: "three"})
    there = Message.from_bytes(message.to_bytes()).meta
    assert there == {"pairs": [[1, 2]], "3": "three"}


@pytest.mark.parametrize("off", [50.0, -50.0])
def test_a_moment_that_no_samples_have_does_not_stop_the_run(tmp_path, train_with, off):
    def changed(message, client, task, name):
        if client == 2 and name in ("start", "statistics"):
            message.tensors["moment"] = message.tensors["moment"].clone()
            message.tensors["moment"][1] = off * message.tensors["moment"].abs().max()
        return message

    train_with(changed, "summarise")
    summary = fedprotip.run(small(stream={"tasks": 2}, train={"rounds": 1, "head_start": "closed"}), out=tmp_path / "r")
    assert summary["tasks"] == 2


def test_energies_too_large_to_be_squared_are_rejected(tmp_path, train_with):
    def changed(message, client, task, name):
        if client == 2 and name == "basis":
            message.meta["rest"] = {layer: [1e200, 1e200] for layer in message.meta["rest"]}
        return message

    train_with(changed, "summarise")
    options = {"merge": "energy", "rank_rule": "mass"}
    summary = fedprotip.run(small(stream={"tasks": 1}, train={"rounds": 1}, method=options), out=tmp_path / "r")
    assert summary["failures"]["by_reason"] == {"the energies of 1.weight are not finite numbers ≥ 0": 1}


def test_when_nobody_with_data_delivers_references_the_run_stops(tmp_path, train_with):
    """Those without data deliver empty ones, of which nothing can be made."""

    def changed(message, client, task, name):
        if name == "reference" and client > 0:
            raise OSError("no")
        if name == "reference":  # as if it had no data
            message.tensors.update({part: torch.zeros_like(tensor) for part, tensor in message.tensors.items()})
        return message

    train_with(changed, "summarise")
    settings = small(stream={"tasks": 1}, train={"rounds": 1})
    with pytest.raises(RunError, match="No client with data delivered its references at the end of task 1"):
        fedprotip.run(settings, out=tmp_path / "r")


class Steering(Exchange):
    """A step of the server alone after every round but those of the first task."""

    name, when, who = "steering", "round", "nobody"

    def due(self, site):
        return site.task > 0

    def digest(self, combined, site):
        assert site.task > 0
        return


def test_a_step_of_the_server_after_a_round_is_no_barren_round(tmp_path, monkeypatch):
    monkeypatch.setattr(FedAvg, "at_end", lambda self: [Steering()])
    settings = small(stream={"tasks": 2}, train={"rounds": 4}, method={"name": "fedavg"})
    fedprotip.run(settings, out=tmp_path / "r")
    assert [e["clients"] for e in events(tmp_path / "r", "round")] == [3] * 8
    assert all(e["loss"] for e in events(tmp_path / "r", "round"))


class Loose(Exchange):
    """A method's own training, which checks nothing of what comes back."""

    name, when, trains = "loose", "round", True

    def answer(self, local):
        return Message(self.name, meta={"loss": 1.0} if local.client else {})

    def digest(self, combined, site):
        for _ in combined:
            pass


def test_a_client_that_states_no_loss_is_left_out_whatever_the_method_checks(tmp_path, monkeypatch):
    monkeypatch.setattr(FedAvg, "in_round", lambda self: [Loose()])
    settings = small(stream={"tasks": 1}, train={"rounds": 2}, method={"name": "fedavg"})
    fedprotip.run(settings, out=tmp_path / "r")
    assert [e["clients"] for e in events(tmp_path / "r", "round")] == [2, 2]
    assert {(e["client"], e["reason"]) for e in events(tmp_path / "r", "failure")} == {
        (0, "loss = None is not a finite number")
    }


def test_weights_come_only_from_what_is_a_training(monkeypatch):
    monkeypatch.setattr(Loose, "name", "model")
    monkeypatch.setattr(FedAvg, "in_round", lambda self: [Loose()])
    with pytest.raises(ValueError, match="for what derives from Training"):
        create_method(small(method={"name": "fedavg"}))
