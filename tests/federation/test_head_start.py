"""train.head_start = "closed": a new head begins as the linear discriminant of the clients' summed statistics."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedprotip
from fedprotip.federation.server import Server
from fedprotip.inference.statistics import Gaussians, Sums
from fedprotip.messages import Message
from fedprotip.methods.parts.start import LEAST, SPREAD, STEEPEST, ClosedStart, scaled
from fedprotip.models import build_network
from fedprotip.stream import build_stream
from tests.sites import through
from tests.small import quick, results, small, tensors
from tests.test_resume import stop_after

CLOSED = "train.head_start=closed"


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    quick(monkeypatch)


def ledger(folder):
    return [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]


@pytest.fixture
def starts(monkeypatch):
    """Accuracy on the test samples of each new task before its first round, and the head it begins with."""
    found, original = [], Server.choose

    def watched(self, present, task, round_):
        if round_ == 0:
            images, labels = self.stream.test_batch(task, self.stream.tasks[task].test)
            with torch.no_grad():
                answers = self.network.logits(self.network.eval().embed(images), task).argmax(1)
            share = (answers == self.network.targets(labels, task)).double().mean().item()
            head = {name: tensor.clone() for name, tensor in self.network.heads[-1].state_dict().items()}
            found.append((share, head))
        return original(self, present, task, round_)

    monkeypatch.setattr(Server, "choose", watched)
    return found


def settings_of(method, *more):
    sections = {"stream": {"tasks": 3, "task_size": 3}, "model": {"width": 32}, "method": {"name": method}}
    return small(CLOSED, "train.lr=0.005", *more, **sections)


@pytest.mark.parametrize("method", ["fedavg", "fedprotip"])
def test_a_new_head_answers_before_any_training(tmp_path, starts, method):
    fedprotip.run(settings_of(method), out=tmp_path / "closed")
    assert len(starts) == 3
    assert all(share > 0.8 for share, _ in starts)  # chance is a third
    starts.clear()
    fedprotip.run(settings_of(method, "train.head_start=random"), out=tmp_path / "random")
    assert all(share < 0.6 for share, _ in starts)


@pytest.mark.parametrize("lr", [0.05, 0.1])
def test_no_learning_rate_that_a_random_head_bears_destroys_the_backbone(tmp_path, lr):
    """With outputs of spread 1 whatever the step, tasks ended at 47, 59 and 99 with steps of 0.1."""
    summary = fedprotip.run(settings_of("fedavg", f"train.lr={lr}", "train.rounds=3"), out=tmp_path / "r")
    assert min(summary["matrix"]["aware"][-1]) > 85


def test_it_is_the_discriminant_of_all_samples_together(tmp_path, starts):
    """The first task: features of the initial backbone, all clients in one sum, outputs of a moderate spread."""
    settings = settings_of("fedavg", "statistics.minimum=1")
    fedprotip.run(settings, out=tmp_path / "r")
    stream = build_stream(settings)
    network = build_network(settings, stream.dataset.image_shape, False).eval()
    images, labels = stream.train_batch(0, stream.tasks[0].train)
    sums = Sums.zeros(3, 32)
    with torch.no_grad():
        features = network.embed(images)
    sums.add(features, labels)
    weight, bias = Gaussians.of(sums, least=LEAST).head()
    outputs = features @ weight.T + bias
    factor = SPREAD / (outputs - outputs.mean(1, keepdim=True)).square().mean().sqrt()
    weight, bias = factor * weight, factor * bias
    head = starts[0][1]
    torch.testing.assert_close(head["weight"], weight, rtol=1e-3, atol=1e-3 * weight.abs().max().item())
    torch.testing.assert_close(head["bias"], bias, rtol=1e-3, atol=1e-3 * bias.abs().max().item())


@given(st.integers(0, 10**6), st.sampled_from([1e-3, 0.1, 1.0, 30.0]), st.floats(1e-4, 1.0))
def test_a_head_is_as_sure_as_training_through_it_can_bear(seed, apart, step):
    """Features that hardly vary, or classes that hardly differ, make long rows, through which steps go too far."""
    chance = torch.Generator().manual_seed(seed)
    labels = torch.arange(60) % 3
    features = 1 + apart * (torch.randn(3, 8, generator=chance)[labels] + torch.randn(60, 8, generator=chance))
    sums = Sums.zeros(3, 8)
    sums.add(features, labels)
    weight, bias = Gaussians.of(sums, least=LEAST).head()
    rows, biases = scaled(weight, bias, sums, step)
    outputs = features @ (rows - rows.mean(0)).T + biases - biases.mean()
    assert torch.equal(outputs.argmax(1), (features @ (weight - weight.mean(0)).T + bias).argmax(1))
    sure = outputs.square().mean().item() / SPREAD**2
    longest = torch.linalg.matrix_norm(rows - rows.mean(0), 2).square().item()
    steep = step * longest * features.square().sum(1).mean().item() / STEEPEST
    assert max(sure, steep) == pytest.approx(1, rel=0.02)


def test_a_head_of_classes_that_do_not_differ_stays_as_it_is():
    sums = Sums.zeros(2, 4)
    sums.add(torch.ones(10, 4), torch.arange(10) % 2)
    weight, bias = torch.zeros(2, 4), torch.zeros(2)
    assert all(torch.equal(one, torch.zeros_like(one)) for one in scaled(weight, bias, sums, 0.01))


def test_statistics_go_up_once_per_task_and_the_head_comes_down(tmp_path):
    fedprotip.run(settings_of("fedavg"), out=tmp_path / "r")
    lines = ledger(tmp_path / "r")
    told = [(line["task"], line["client"]) for line in lines if line["kind"] == "start"]
    assert told == [(task, client) for task in range(3) for client in range(3)]
    head, whole = 4 * (32 * 3 + 3), 4 * (64 * 32 + 32 + 32 * 32 + 32 + 32 * 3 + 3)
    down = [ln["bytes"] for ln in lines if (ln["direction"], ln["kind"], ln["client"]) == ("down", "model", 0)]
    assert down[:2] == [whole, head]  # the model for the statistics, then only the new head
    features_stay_whole = [ln for ln in lines if ln["kind"] == "start"]
    assert {ln["bytes"] for ln in features_stay_whole} == {
        3 * 8 + 4 * 3 * 32 + 4 * 32 * 33 // 2 + len(f'{{"withheld": 0, "step": {step}}}') for step in (2, 12)
    }


def test_statistics_of_the_start_are_of_features_as_they_are(tmp_path, starts):
    """statistics.features widens what is kept at the end of a task, not what a head can be made of."""
    fedprotip.run(settings_of("fedprotip", "statistics.features=64"), out=tmp_path / "r")
    assert all(share > 0.8 for share, _ in starts)
    assert starts[0][1]["weight"].shape == (3, 32)


@pytest.mark.parametrize("method", ["fedavg", "fedprotip"])
@pytest.mark.parametrize(("verb", "calls", "every"), [("summarise", 2, 1), ("train", 2, 1), ("train", 17, 2)])
def test_interrupted_it_ends_with_the_same_bytes(tmp_path, monkeypatch, method, verb, calls, every):
    settings = settings_of(method, f"run.checkpoint={every}")
    fedprotip.run(settings, out=tmp_path / "whole")
    with monkeypatch.context() as patch:
        stop_after(patch, calls, verb)
        with pytest.raises(KeyboardInterrupt):
            fedprotip.run(settings, out=tmp_path / "r")
    fedprotip.resume(tmp_path / "r")
    assert results(tmp_path / "r") == results(tmp_path / "whole")


def test_stopped_between_the_start_of_a_later_task_and_its_first_round(tmp_path, monkeypatch):
    """Clients have told their statistics of task 1; the first of them begins to train when the run stops."""
    settings = settings_of("fedavg")
    fedprotip.run(settings, out=tmp_path / "whole")
    with monkeypatch.context() as patch:
        stop_after(patch, 3 * 3 + 1)
        with pytest.raises(KeyboardInterrupt):
            fedprotip.run(settings, out=tmp_path / "r")
    fedprotip.resume(tmp_path / "r")
    assert results(tmp_path / "r") == results(tmp_path / "whole")


@pytest.mark.parametrize("projection", ["local", "global"])
def test_stopped_after_a_first_round_without_any_update(tmp_path, monkeypatch, projection):
    """Then only the head has moved in the task; all other tensors begin where they are, and Φ is respected."""

    def fails(answer, local, name):
        if (local.task, local.round) == (1, 0):
            raise ValueError("no power")
        return answer()

    through(monkeypatch, fails)
    settings = settings_of("fedprotip", f"method.projection={projection}", "train.rounds=3")
    fedprotip.run(settings, out=tmp_path / "whole")
    with monkeypatch.context() as patch:
        stop_after(patch, 3 * 3 + 3 + 1)
        with pytest.raises(KeyboardInterrupt):
            fedprotip.run(settings, out=tmp_path / "r")
    fedprotip.resume(tmp_path / "r")
    assert results(tmp_path / "r") == results(tmp_path / "whole")


def test_with_nothing_told_the_head_begins_at_random(tmp_path, starts):
    fedprotip.run(settings_of("fedavg", "statistics.minimum=1000000"), out=tmp_path / "r")
    silent = [head for _, head in starts]
    starts.clear()
    fedprotip.run(settings_of("fedavg", "train.head_start=random"), out=tmp_path / "random")
    assert all(torch.equal(one["weight"], other["weight"]) for one, (_, other) in zip(silent, starts, strict=True))


def test_a_class_nobody_tells_about_can_still_be_learned(tmp_path, monkeypatch):
    """Class 1 is withheld by every client: its output begins neutral, and training finds it."""

    def silent(answer, local, name):
        message = answer()
        message.tensors["counts"][1] = 0
        message.tensors["sums"][1] = 0
        return message

    monkeypatch.setattr("fedprotip.methods.parts.statistics.check_counts", lambda *_: None)
    through(monkeypatch, silent, "summarise")
    summary = fedprotip.run(settings_of("fedavg", "train.rounds=8"), out=tmp_path / "r")
    assert all(tensor.isfinite().all() for tensor in tensors(tmp_path / "r", "model").values())
    assert summary["matrix"]["aware"][0][0] > 80


@pytest.mark.parametrize("domains", ["rotate", "permute"])
def test_a_head_that_all_domains_share_is_started_once(tmp_path, domains):
    stream = {"scenario": "domain", "tasks": 2, "domains": domains, "task_size": 0}
    settings = small(CLOSED, method={"name": "fedavg"}, stream=stream)
    fedprotip.run(settings, out=tmp_path / "r")
    assert {line["task"] for line in ledger(tmp_path / "r") if line["kind"] == "start"} == {0}


def test_closed_forms_need_no_head_start(tmp_path):
    fedprotip.run(settings_of("lda"), out=tmp_path / "closed")
    fedprotip.run(settings_of("lda", "train.head_start=random"), out=tmp_path / "random")
    one, other = results(tmp_path / "closed"), results(tmp_path / "random")
    assert one["summary"]["bytes"] == other["summary"]["bytes"]
    assert one["model.safetensors"] == other["model.safetensors"]


def test_rounded_on_its_way_it_is_the_same_for_server_and_clients(tmp_path, monkeypatch):
    """In bf16 the server goes on with the head that clients received, as after every round."""
    held, original = [], ClosedStart.receive

    def watched(self, message, site):
        original(self, message, site)
        sent = site.wire.unpack(Message.from_bytes(message.to_bytes()).tensors)
        own = dict(site.network.named_parameters())
        held.append(all(torch.equal(own[name], tensor) for name, tensor in sent.items()))

    monkeypatch.setattr(ClosedStart, "receive", watched)
    fedprotip.run(settings_of("fedavg", "train.wire=bf16"), out=tmp_path / "r")
    assert held == [True] * 3


@pytest.mark.parametrize(("norm", "started"), [("freeze_after_first", [1, 2]), ("frozen", [0, 1, 2])])
def test_no_head_is_made_for_features_that_norms_are_about_to_change(tmp_path, norm, started):
    """Norm layers that have seen nothing pass images on as they are, and no longer do so in the first step."""
    model = {"name": "small_cnn", "width": 16, "depth": 2, "norm": norm}
    fedprotip.run(small(CLOSED, stream={"tasks": 3}, model=model), out=tmp_path / "r")
    assert sorted({line["task"] for line in ledger(tmp_path / "r") if line["kind"] == "start"}) == started
