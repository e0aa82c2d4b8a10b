"""The upper bound: all data of all tasks so far, over all classes so far, in the same loop as everything else."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fedprotip
from fedprotip.messages import BadMessage, Message
from fedprotip.methods.exchange import Sender
from fedprotip.methods.joint import Everything, cross_entropy
from tests.sites import Ends
from tests.small import quick, results, small


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    quick(monkeypatch)


def settings(*overrides, **sections):
    return small(*overrides, method={"name": "joint"}, **sections)


def test_a_round_sees_every_sample_of_every_task_once_an_epoch(tmp_path):
    ends = Ends(settings("train.epochs=2", "train.batch=7"), tmp_path)
    local = ends.local(1, ends.site(task=2))
    expected = np.concatenate([ends.stream.client_samples(task, 1) for task in range(3)])
    labels = ends.stream.dataset.train_labels[torch.from_numpy(expected)]
    batches = list(ends.method.batches(local, iter(())))
    assert ends.method.count(local) == len(expected)
    assert [len(images) for images, _ in batches].count(7) >= 2 * (len(expected) // 7)
    seen = torch.cat([known for _, known in batches])
    assert torch.equal(seen.bincount(minlength=10), 2 * labels.bincount(minlength=10))
    assert any(len(set(known.tolist())) > 3 for _, known in batches)  # tasks are mixed
    images = torch.cat([pictures for pictures, _ in batches])
    for task in range(3):
        own = ends.stream.client_samples(task, 1)
        plain, _ = ends.stream.train_batch(task, own)
        assert all((images == image).flatten(1).all(1).sum() >= 2 for image in plain[:5])


def test_made_domains_show_a_sample_as_each_task_does(tmp_path):
    """The same samples in every task, each time turned otherwise."""
    sections = {"stream": {"scenario": "domain", "domains": "rotate", "tasks": 2, "task_size": 0}}
    ends = Ends(settings(**sections), tmp_path)
    local = ends.local(0, ends.site(task=1))
    images = torch.cat([pictures for pictures, _ in ends.method.batches(local, iter(()))])
    for task in range(2):
        plain, _ = ends.stream.train_batch(task, ends.stream.client_samples(task, 0)[:3])
        assert all((images == image).flatten(1).all(1).any() for image in plain)


def test_the_loss_is_cross_entropy_over_all_outputs():
    chance = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(9, 6, generator=chance), torch.randint(6, (9,), generator=chance)
    torch.testing.assert_close(
        cross_entropy(logits, targets[:, None] == torch.arange(6)), F.cross_entropy(logits, targets)
    )


def test_outputs_of_one_class_do_not_fight_each_other():
    logits = torch.tensor([[2.0, 0.5, 1.0]], requires_grad=True)
    loss = cross_entropy(logits, torch.tensor([[True, False, True]]))
    pairs = [F.cross_entropy(logits[:, [right, 1]], torch.tensor([0])) for right in (0, 2)]
    torch.testing.assert_close(loss, sum(pairs) / 2)
    loss.backward()
    assert logits.grad[0, 0] < 0 < logits.grad[0, 1]
    assert logits.grad[0, 2] < 0


def test_a_class_that_is_alone_has_no_loss():
    logits = torch.tensor([[3.0]], requires_grad=True)
    loss = cross_entropy(logits, torch.tensor([[True]]))
    loss.backward()
    assert loss == 0
    assert logits.grad == 0


def test_all_heads_begin_together_as_the_discriminant_of_everything(tmp_path):
    ends = Ends(settings("train.head_start=closed"), tmp_path)
    site = ends.site(task=1)
    start = ends.method.exchange("start")
    with torch.no_grad():
        messages = [start.answer(ends.local(client, site)) for client in range(3)]
    for client, message in enumerate(messages):
        start.check(message, site)
        start.check_sender(message, site, Sender(client, ends.method.count(ends.local(client, site))))
    total = {name: sum(message.tensors[name].double() for message in messages) for name in messages[0].tensors}
    told = start.digest(fedprotip.messages.Message("start", total), site)
    assert told.tensors.keys() == {f"heads.{head}.{part}" for head in (0, 1) for part in ("weight", "bias")}
    start.receive(told, site)
    right = []
    for task in range(2):
        images, labels = ends.stream.test_batch(task, ends.stream.tasks[task].test)
        known = torch.tensor([label for head in site.network.labels for label in head])
        with torch.no_grad():
            right.append((known[site.network(images).argmax(1)] == labels).float().mean())
    assert min(right) > 0.7  # none of the heads outvotes the other


def test_all_samples_so_far_are_counted_as_kept(tmp_path):
    summary = fedprotip.run(settings(), out=tmp_path / "r")
    stream = Ends(settings(), tmp_path / "ends").stream
    events = [json.loads(line) for line in (tmp_path / "r" / "events.jsonl").read_text().splitlines()]
    kept = [event["samples"]["raw"] for event in events if event["event"] == "task"]
    assert kept == np.cumsum([len(task.train) for task in stream.tasks]).tolist()
    assert summary["samples"] == {"raw": kept[-1]}


def test_who_has_only_old_data_trains_too(tmp_path, monkeypatch):
    """A client without samples of the second task is asked, and counts by those of the first."""
    from fedprotip.stream.holdings import Holding

    original = Holding.samples
    monkeypatch.setattr(
        Holding, "samples", lambda self, task: original(self, task)[: 0 if (task, self.client) == (1, 2) else None]
    )
    fedprotip.run(settings("stream.tasks=2", "train.rounds=1"), out=tmp_path / "r")
    lines = [json.loads(line) for line in (tmp_path / "r" / "ledger.jsonl").read_text().splitlines()]
    trained = {
        line["client"] for line in lines if line["kind"] == "model" and line["direction"] == "up" and line["task"]
    }
    assert trained == {0, 1, 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"stream": {"tasks": 3, "task_size": 4, "overlap": 1}},
        {"stream": {"scenario": "domain", "tasks": 2, "domains": "rotate", "task_size": 0}},
    ],
    ids=["plain", "overlap", "rotate"],
)
def test_it_learns_everything_whatever_the_stream_and_the_engine(tmp_path, sections):
    more = {"train": {"head_start": "closed", "rounds": 4}, **sections}
    summary = fedprotip.run(settings(**more), out=tmp_path / "local")
    assert summary["failures"]["count"] == 0
    assert summary["accuracy"]["agnostic"] > 75
    fedprotip.run(settings("run.engine=apart", **more), out=tmp_path / "apart")
    assert results(tmp_path / "apart") == results(tmp_path / "local")


def test_a_client_keeps_as_many_samples_as_it_trains_on(tmp_path):
    ends, exchange = Ends(settings(), tmp_path), Everything()
    site = ends.site(task=1)
    local = ends.local(0, site)
    message = exchange.answer(local)
    exchange.check(message, site)
    exchange.check_sender(message, site, Sender(0, ends.method.count(local)))
    for samples in (ends.method.count(local) - 1, None):
        with pytest.raises(BadMessage, match="samples, but has"):
            exchange.check_sender(message, site, Sender(0, samples))
    for bad in (Message("stored", {"raw": torch.tensor(-1)}), Message("stored", message.tensors, {"more": 1})):
        with pytest.raises(BadMessage):
            exchange.check(bad, site)
