"""GLFC: its losses by plain computations, the memory of its clients, and what its proxy server does."""

import json
import tomllib
from copy import deepcopy
from dataclasses import replace
from importlib.resources import files

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedprotip
from fedprotip.messages import BadMessage, Message
from fedprotip.methods.glfc import GLFC, compensation
from fedprotip.methods.parts import inversion, proxy, transition
from fedprotip.methods.parts.training import train
from fedprotip.models import Network
from tests.methods.test_target import same_gradients
from tests.sites import Ends
from tests.small import quick, results, small

LESS = {"name": "glfc", "memory": 12, "disturb_steps": 3, "steps": 4, "iterates": 2}


def ends(folder, *overrides, **sections):
    method = {**LESS, **sections.pop("method", {})}
    return Ends(small(*overrides, method=method, **sections), folder)


def at(site, local, task, round_=0):
    """The client at another round, where the site has begun the task."""
    if site.task != task:
        site.settle()
        site.begin_task(task)
    return replace(local, task=task, round=round_, scratch={})


# The loss


def test_weights_have_mean_one_among_old_and_among_new_samples():
    wrong = torch.rand(40, generator=torch.Generator().manual_seed(0))
    old = torch.arange(40) % 3 == 0
    weights = compensation(wrong, old)
    assert weights[old].mean().item() == pytest.approx(1, abs=1e-6)
    assert weights[~old].mean().item() == pytest.approx(1, abs=1e-6)
    assert torch.allclose(weights[old] / wrong[old], weights[old][0] / wrong[old][0])
    assert torch.allclose(compensation(wrong, old & False).mean(), torch.tensor(1.0))  # no old samples in the batch
    assert torch.equal(compensation(torch.zeros(4), torch.tensor([True, True, False, False])), torch.ones(4))


@pytest.mark.parametrize("per_class", ["sum", "mean"])
def test_the_loss_is_half_labels_and_half_relations(tmp_path, per_class):
    parts = ends(tmp_path, f"method.per_class={per_class}")
    site = parts.site()
    local = at(site, parts.local(0, site), 1)
    teacher = deepcopy(site.network)
    teacher.heads, teacher.labels = teacher.heads[:1], teacher.labels[:1]
    with torch.no_grad():
        teacher.heads[0].bias += torch.tensor([2.0, -1.0])
    local.scratch["teacher"] = teacher.requires_grad_(False)
    images, labels = torch.randn(6, 1, 8, 8), torch.tensor([0, 1, 2, 3, 3, 0])
    found = parts.method.loss(local, images, labels)

    z = site.network(images)
    y = torch.zeros(6, 4)
    y[torch.arange(6), labels] = 1
    g = (z.sigmoid()[torch.arange(6), labels] - 1).abs().detach()
    old = labels < 2
    w = torch.where(old, g / g[old].mean(), g / g[~old].mean())
    reduce = (lambda parts: parts.sum(1)) if per_class == "sum" else (lambda parts: parts.mean(1))
    compensated = (w * reduce(F.binary_cross_entropy_with_logits(z, y, reduction="none"))).mean()
    mixed = y.clone()
    mixed[:, :2] = teacher(images).sigmoid().detach()
    relations = reduce(F.binary_cross_entropy_with_logits(z, mixed, reduction="none")).mean()
    expected = 0.5 * compensated + 0.5 * relations
    assert torch.allclose(found, expected, atol=1e-6)
    same_gradients(found, expected, site.network)  # weights have none


@pytest.mark.parametrize("taught", [False, True])
def test_in_the_first_task_every_sample_counts_alike(tmp_path, taught):
    """A teacher there may be, where clients notice tasks by themselves: it knows nothing older."""
    parts = ends(tmp_path)
    local = parts.local(0)
    local.scratch["teacher"] = proxy.model_of(local.network, 0.5 * proxy.flat(local.network), 1) if taught else None
    images, labels = torch.randn(5, 1, 8, 8), torch.tensor([0, 1, 1, 0, 1])
    y = F.one_hot(labels, 2).float()
    expected = F.binary_cross_entropy_with_logits(local.network(images), y, reduction="sum") / 5
    assert torch.allclose(parts.method.loss(local, images, labels), expected)


def test_a_teacher_speaks_of_earlier_tasks_alone(tmp_path):
    """One that has begun to learn the task under way is no teacher of it."""
    site = ends(tmp_path).site(task=1)
    teacher = proxy.model_of(site.network, proxy.flat(site.network), 2)
    images, targets = torch.randn(3, 1, 8, 8), F.one_hot(torch.tensor([0, 2, 3]), 4).float()
    found = transition.softened(teacher, images, targets, 1)
    assert torch.equal(found[:, 2:], targets[:, 2:])
    torch.testing.assert_close(found[:, :2], teacher(images)[:, :2].sigmoid())


def test_a_class_belongs_to_the_last_task_that_has_it(tmp_path):
    site = ends(tmp_path, stream={"tasks": 3, "task_size": 4, "overlap": 1}).site(task=2)
    assert site.network.labels == [(0, 1, 2, 3), (3, 4, 5, 6), (6, 7, 8, 9)]
    assert transition.tasks_of(site.network, torch.tensor([0, 3, 4, 6, 9, 2])).tolist() == [0, 1, 1, 2, 2, 0]
    (row,) = transition.one_hot(site.network, torch.tensor([3]))
    assert row.nonzero()[:, 0].tolist() == [3, 4]


def test_the_teacher_receives_no_gradient(tmp_path):
    parts = ends(tmp_path)
    site = parts.site()
    weights = proxy.flat(site.network)
    site.known.update({"teacher/weights": weights, "teacher/heads": torch.tensor(1)})
    local = at(site, parts.local(0, site), 1)
    with torch.no_grad():
        train(local)
    teacher = local.scratch["teacher"]
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in teacher.parameters())
    assert torch.equal(proxy.flat(teacher), weights)
    assert not torch.equal(proxy.flat(site.network)[: len(weights)], weights)  # the model itself did learn


def test_old_heads_move(tmp_path):
    site = ends(tmp_path).site(task=1)
    assert {"heads.0.weight", "heads.1.weight"} <= set(site.network.moving)


# The memory of a client


def with_exemplars(parts):
    """A client in the first round of its second task, which keeps samples of its first."""
    site = parts.site()
    local = parts.local(0, site)
    transition.remember(local)
    local = at(site, local, 1)
    parts.method.begin_round(local)
    return local


def test_a_pass_is_as_long_as_samples_and_exemplars(tmp_path):
    parts = ends(tmp_path)
    local = with_exemplars(parts)
    assert parts.method.pass_length(local) == len(local.samples) + 12
    own = [(torch.zeros(len(local.samples), 1, 8, 8), torch.full((len(local.samples),), 2))]
    batches = list(parts.method.batches(local, iter(own)))
    assert sum(len(labels) for _, labels in batches) == len(local.samples) + 12
    assert len(batches) == -(-parts.method.pass_length(local) // parts.settings.train.batch)


def test_as_many_steps_as_asked_whatever_is_replayed(tmp_path):
    parts = ends(tmp_path, "train.steps=3")
    local = with_exemplars(parts)
    own = [(torch.zeros(32, 1, 8, 8), torch.full((32,), 2)) for _ in range(3)]  # with exemplars more than a batch
    assert len(list(parts.method.batches(local, iter(own)))) == 3


def test_exemplars_vary_as_new_samples_do(tmp_path):
    parts = ends(tmp_path, "train.augment=standard")
    local = with_exemplars(parts)
    new = torch.full((1, 1, 8, 8), 5.0)
    own = [(new.expand(len(local.samples), 1, 8, 8), torch.full((len(local.samples),), 2))]
    images, labels = (torch.cat(part) for part in zip(*parts.method.batches(local, iter(own)), strict=True))
    kept, again = local.own.get("exemplars")["images"], images[labels < 2]
    assert len(again) == len(kept)
    assert not all((image == kept).flatten(1).all(1).any() for image in again)


def test_the_memory_is_shared_by_ever_more_classes(tmp_path):
    parts = ends(tmp_path)
    site = parts.site()
    local = parts.local(0, site)
    before: dict[int, list] = {}
    for task in range(3):
        local = at(site, local, task)
        transition.remember(local)
        kept = local.own.get("exemplars")
        labels = kept["labels"].tolist()
        held = {label: labels.count(label) for label in labels}
        mine = {
            int(label)
            for t in range(task + 1)
            for label in parts.stream.dataset.train_labels[replace(local, task=t).samples]
        }
        assert set(held) == mine
        assert set(held.values()) == {12 // len(mine)}
        for label, images in before.items():  # the best ones stay, in their order
            assert torch.equal(kept["images"][kept["labels"] == label], images[: held[label]])
        before = {label: kept["images"][kept["labels"] == label] for label in held}


def test_a_client_that_lacks_a_class_keeps_and_shows_the_others(tmp_path):
    parts = ends(tmp_path)
    site = parts.site()
    local = parts.local(0, site)
    labels = parts.stream.dataset.train_labels[local.samples]
    local.__dict__["samples"] = local.samples[(labels == 1).numpy()]
    transition.remember(local)
    kept = local.own.get("exemplars")
    assert kept["labels"].tolist() == [1] * 12
    gradients = transition.shown(local, parts.method.options)
    assert inversion.recovered(proxy.encoder_of(site), gradients).tolist() == [1]
    proxy.Prototypes().check(Message("prototypes", {"gradients": gradients}), site)


def test_exemplars_are_learned_again_in_every_round(tmp_path, monkeypatch):
    quick(monkeypatch)
    seen, original = {}, GLFC.loss

    def loss(self, local, inputs, labels):
        seen.setdefault((local.task, local.round, local.client), set()).update(labels.tolist())
        return original(self, local, inputs, labels)

    monkeypatch.setattr(GLFC, "loss", loss)
    settings = small(method=LESS, clients={"partition": "iid"})
    fedprotip.run(settings, out=tmp_path / "r")
    assert set(seen) == {(task, round_, client) for task in range(3) for round_ in range(3) for client in range(3)}
    assert all(labels == set(range(2 * task + 2)) for (task, _, _), labels in seen.items())
    events = [json.loads(line) for line in (tmp_path / "r" / "events.jsonl").read_text().splitlines()]
    assert [event["samples"] for event in events if event["event"] == "task"] == [{"raw": 36}] * 3


# A new task, noticed


def entropies(monkeypatch, values):
    course = iter(values)
    monkeypatch.setattr(transition, "mean_entropy", lambda local: next(course))


def test_a_client_is_told_of_a_task_once(tmp_path):
    parts = ends(tmp_path)
    site = parts.site()
    local, found = parts.local(0, site), []
    for task, round_ in ((0, 0), (0, 1), (1, 3), (1, 4)):  # not asked in the first rounds of task 1
        local = at(site, local, task, round_)
        parts.method.begin_round(local)
        found.append(local.scratch["signal"])
    assert found == [True, False, True, False]


def test_entropy_that_rises_is_a_signal_and_a_false_alarm_does_no_lasting_harm(tmp_path, monkeypatch):
    parts = ends(tmp_path, "method.signal=entropy", "method.threshold=0.5")
    site = parts.site()
    local = parts.local(0, site)
    entropies(monkeypatch, [0.6, 0.1, 0.7, 0.9, 0.2, 0.8, 0.1])
    rounds = [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (1, 0), (1, 1)]
    signals, kept = [], []
    for task, round_ in rounds:
        local = at(site, local, task, round_)
        parts.method.begin_round(local)
        signals.append(local.scratch["signal"])
        exemplars = local.own.get("exemplars")
        kept.append(exemplars["labels"].tolist() if exemplars else [])
    assert signals == [True, False, True, False, False, True, False]  # the third is false
    assert kept[:2] == [[], []]
    assert kept[2] == kept[4] == [0] * 6 + [1] * 6
    assert kept[5] == kept[6] == [0] * 6 + [1] * 6  # chosen anew, not twice
    images = local.own.get("exemplars")["images"]
    assert len(images.flatten(1).unique(dim=0)) == len(images)


def test_who_was_not_asked_in_a_task_keeps_exemplars_of_it_all_the_same(tmp_path, monkeypatch):
    """Its samples of that task were there; the next signal finds them."""
    parts = ends(tmp_path, "method.signal=entropy", "method.threshold=0.5")
    site = parts.site()
    local = parts.local(0, site)
    entropies(monkeypatch, [0.6, 1.2])
    for task in (0, 2):
        local = at(site, local, task)
        parts.method.begin_round(local)
    assert local.own.get("exemplars")["labels"].tolist() == [label for label in range(4) for _ in range(3)]


@pytest.mark.parametrize(
    ("rounds", "values", "classes"),
    [
        ([(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)], [0.6, 0.1, 0.4, 1.2, 1.3], 2),
        ([(0, 0), (1, 0), (2, 0), (2, 1)], [0.6, 0.3, 0.4, 1.2], 4),
        ([(0, 0), (0, 1), (1, 0), (1, 1)], [0.1, 0.2, 0.3, 0.9], 2),
    ],
    ids=["in a later round", "in the task after", "for the first time"],
)
def test_who_notices_late_keeps_exemplars_of_all_it_has_not_chosen_from(tmp_path, monkeypatch, rounds, values, classes):
    """Until then it has kept those samples, and they are counted."""
    parts = ends(tmp_path, "method.signal=entropy", "method.threshold=0.5")
    site = parts.site()
    local = parts.local(0, site)
    samples = [len(replace(local, task=task).samples) for task in range(3)]
    entropies(monkeypatch, values)
    (counted,) = (one for one in parts.method.exchanges if one.name == "stored")
    signals, kept = [], []
    for task, round_ in rounds:
        local = at(site, local, task, round_)
        parts.method.begin_round(local)
        signals.append(local.scratch["signal"])
        kept.append(int(counted.answer(local).tensors["raw"]))
    noticed = max(place for place, signal in enumerate(signals) if signal)
    task = rounds[noticed][0]
    share = 12 // classes
    assert local.own.get("exemplars")["labels"].tolist() == [label for label in range(classes) for _ in range(share)]
    assert kept[noticed - 1] == sum(samples[: task + 1])
    assert kept[noticed] == 12 + samples[task]


def test_mean_entropy_is_that_of_the_softmax_of_all_outputs(tmp_path):
    parts = ends(tmp_path)
    local = parts.local(0)
    shares = torch.cat([local.network(inputs) for inputs, _ in local.labelled(1000)]).softmax(1)
    expected = -(shares * (shares + 1e-5).log()).sum(1).mean()
    assert transition.mean_entropy(local) == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.slow
def test_clients_that_notice_tasks_by_themselves_still_remember_them(tmp_path, monkeypatch):
    """A threshold that few classes can pass; the first task is shown by its first models' uncertainty."""
    quick(monkeypatch)
    method = LESS | {"signal": "entropy", "threshold": 0.15, "memory": 60}
    settings = small("train.rounds=6", "train.lr=0.2", "train.epochs=3", method=method)
    summary = fedprotip.run(settings, out=tmp_path / "r")
    assert summary["bytes"]["up"]["prototypes"] > 10_000
    assert summary["bytes"]["down"]["monitor"] > 0  # the best model so far, for whoever notices next
    assert summary["accuracy"]["agnostic"] > 60


@pytest.mark.slow
def test_noticing_tasks_depends_on_no_engine(tmp_path, monkeypatch):
    quick(monkeypatch)
    method = LESS | {"signal": "entropy", "threshold": 0.05}
    for engine in ("local", "apart"):
        fedprotip.run(
            small(f"run.engine={engine}", "clients.fraction=0.7", "clients.alpha=0.2", method=method),
            out=tmp_path / engine,
        )
    assert results(tmp_path / "local") == results(tmp_path / "apart")


def test_whoever_notices_a_task_learns_from_the_best_model_before_it_is_the_teacher(tmp_path, monkeypatch):
    """In later rounds from the teacher, which the server has made of it meanwhile."""
    parts = ends(tmp_path, "method.signal=entropy", "method.threshold=0.5")
    site = parts.site()
    weights = proxy.flat(site.network)
    for name, factor in (("best", 0.5), ("teacher", 0.25)):
        site.known.update({f"{name}/weights": factor * weights, f"{name}/heads": torch.tensor(1)})
    entropies(monkeypatch, [0.9, 0.8])
    for round_, factor in ((0, 0.5), (1, 0.25)):
        local = at(site, parts.local(0, site), 1, round_)
        parts.method.begin_round(local)
        assert torch.equal(proxy.flat(local.scratch["teacher"]), factor * weights)


# Prototypes


def test_what_is_shown_is_the_gradient_at_the_disturbed_sample_nearest_to_the_mean_of_its_class(tmp_path):
    parts = ends(tmp_path)
    site = parts.site(task=1)
    local, network = parts.local(0, site), site.network
    images, labels = (torch.cat(part) for part in zip(*local.labelled(64), strict=True))
    nearest = []
    for label in (2, 3):
        mine = images[labels == label]
        unit = F.normalize(network.embed(mine), dim=1)
        nearest.append(mine[(unit - unit.mean(0)).norm(dim=1).argmin()])
    moved = transition.disturbed(network, torch.stack(nearest), torch.eye(4)[2:], 3, 0.2)
    expected = inversion.gradients_of(proxy.encoder_of(site), moved, torch.tensor([2, 3]))
    with torch.no_grad():
        torch.testing.assert_close(transition.shown(local, parts.method.options), expected)


def test_a_step_of_a_prototype_is_down_its_own_loss_and_a_little_decay(tmp_path):
    network = ends(tmp_path).local(0).network
    images, targets = torch.randn(3, 1, 8, 8), torch.eye(2)[[0, 1, 1]]
    found = transition.disturbed(network, images, targets, 1, 1e4)
    for image, target, moved in zip(images, targets, found, strict=True):
        image = image.requires_grad_()
        loss = F.binary_cross_entropy_with_logits(network(image[None])[0], target)
        (slope,) = torch.autograd.grad(loss, image)
        torch.testing.assert_close(moved, image.detach() * (1 - 1e4 * 1e-5) - 1e4 * slope, rtol=1e-3, atol=1e-2)


def test_disturbing_a_prototype_changes_it_towards_its_class(tmp_path):
    parts = ends(tmp_path)
    network = parts.local(0).network
    images, targets = torch.randn(4, 1, 8, 8), transition.one_hot(network, torch.tensor([0, 1, 0, 1]))
    found = transition.disturbed(network, images, targets, 50, 0.2)
    before, after = (F.binary_cross_entropy_with_logits(network(x), targets) for x in (images, found))
    assert after < before
    assert (found - images).flatten(1).norm(dim=1).min() > 0.05
    assert all(parameter.grad is None for parameter in network.parameters())


def test_prototypes_come_from_the_model_that_the_client_has_trained(tmp_path, monkeypatch):
    parts = ends(tmp_path)
    site = parts.site()
    local, models, original = parts.local(0, site), [], transition.shown
    before = proxy.flat(site.network)

    def shown(given, options):
        models.append(proxy.flat(given.network))
        return original(given, options)

    monkeypatch.setattr(transition, "shown", shown)
    with torch.no_grad():
        train(replace(local, round=0))
    assert not torch.equal(models[0], before)
    assert len(local.own.get("transition")["gradients"]) == 2
    with torch.no_grad():
        train(replace(local, round=1, scratch={}))
    assert len(models) == 1
    assert not proxy.Prototypes().answer(local).tensors  # sent once


def good(site):
    encoder = proxy.encoder_of(site)
    images = torch.randn(2, *site.image_shape, generator=torch.Generator().manual_seed(0))
    return inversion.gradients_of(encoder, images, torch.tensor(site.classes[site.task]))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda g: g[:, :-1], "shape"),
        (lambda g: g.double(), "float64"),
        (lambda g: torch.cat([g, g]), "4 prototypes"),
        (lambda g: g[:0], "0 prototypes"),
        (lambda g: g[[0, 0]], "different classes"),
        (lambda g: torch.full_like(g, torch.nan), "finite"),
        (lambda g: torch.cat([g[:, :5] + 1e30, g[:, 5:]], 1), "steep"),
        (lambda g: g + 0.01, "cross-entropy"),
        (lambda g: 100 * g, "cross-entropy"),
    ],
)
def test_gradients_that_cannot_be_are_refused(tmp_path, change, why):
    site = ends(tmp_path).site(task=0)
    proxy.Prototypes().check(Message("prototypes", {"gradients": good(site)}), site)
    with pytest.raises(BadMessage, match=why):
        proxy.Prototypes().check(Message("prototypes", {"gradients": change(good(site))}), site)


def test_prototypes_of_an_earlier_task_are_refused(tmp_path):
    site = ends(tmp_path).site(task=1)
    encoder = proxy.encoder_of(site)
    old = inversion.gradients_of(encoder, torch.randn(1, *site.image_shape), torch.tensor([0]))
    with pytest.raises(BadMessage, match="of this task"):
        proxy.Prototypes().check(Message("prototypes", {"gradients": old}), site)


# The proxy server


@pytest.mark.slow
def test_the_server_sees_what_clients_showed(tmp_path):
    site = ends(tmp_path, "method.steps=120").site()
    images = torch.randn(2, *site.image_shape, generator=torch.Generator().manual_seed(0))
    proxy.Prototypes().digest(iter([(0, Message("prototypes", {"gradients": good(site)}))]), site)
    assert (site.known["monitor/images"][-2:] - images).abs().mean() < 0.1


def test_the_server_sees_images_of_all_who_showed_some_with_their_labels(tmp_path):
    site = ends(tmp_path, "method.steps=2").site()
    replies = [(client, Message("prototypes", {"gradients": good(site)} if client else {})) for client in range(3)]
    assert proxy.Prototypes().digest(iter(replies), site) is None
    assert site.known["monitor/labels"].tolist() == [0, 1, 0, 1] * 2
    found = site.known["monitor/images"]
    assert found.shape == (8, *site.image_shape)
    proxy.Prototypes().digest(iter([(3, replies[1][1])]), site)  # a late client of the same task
    assert len(site.known["monitor/labels"]) == 12
    proxy.Prototypes().digest(iter([replies[1], (3, replies[1][1])]), site)  # who was heard is not heard again
    assert len(site.known["monitor/labels"]) == 12
    site.settle()
    site.begin_task(1)
    proxy.Prototypes().digest(iter([(0, Message("prototypes", {"gradients": good(site)}))]), site)
    assert site.known["monitor/labels"].tolist() == [2, 3, 2, 3]


def test_where_clients_notice_tasks_by_themselves_the_first_of_them_tells_the_server(tmp_path):
    """It makes the best model the teacher and begins the search anew, once in a task; else a task's begin does."""
    for signal, told in (("entropy", [True, False]), ("oracle", [False, False])):
        site = ends(tmp_path / signal, f"method.signal={signal}", "method.steps=2").site(task=1)
        site.known.update({"best/weights": proxy.flat(site.network), "best/heads": torch.tensor(1)})
        for client, expected in enumerate(told):
            site.known["proxy/performance"] = torch.tensor(0.75)
            reply = client, Message("prototypes", {"gradients": good(site)})
            message = proxy.Prototypes().digest(iter([reply]), site)
            assert (message is not None) == expected
            assert site.known["proxy/performance"] == (0 if expected else 0.75)
            assert not expected or torch.equal(message.tensors["weights"], site.known["best/weights"])


def test_images_are_judged_by_running_statistics_and_do_not_change_them(tmp_path):
    site = ends(tmp_path, model={"name": "small_cnn", "width": 4, "depth": 2}).site()
    images = 3 + torch.randn(5, *site.image_shape)
    site.known.update({"monitor/images": images, "monitor/labels": torch.zeros(5, dtype=torch.int64)})
    before = proxy.flat(site.network)
    with torch.no_grad():
        expected = site.network.eval().embed(images)
    site.network.train()
    torch.testing.assert_close(proxy.monitor_features(site)[0], expected)
    assert torch.equal(proxy.flat(site.network), before)


def test_the_best_model_of_a_task_teaches_the_next(tmp_path, monkeypatch):
    parts = ends(tmp_path)
    site, monitor = parts.site(), proxy.Monitor()
    site.known.update({"monitor/images": torch.zeros(1, *site.image_shape), "monitor/labels": torch.tensor([0])})
    course = [0.3, 0.8, 0.5, 0.8, 0.7]
    models = []
    for value in course:
        monkeypatch.setattr(GLFC, "performance", lambda self, site, value=value: value)
        with torch.no_grad():
            site.network.heads[0].bias += 1
        models.append(proxy.flat(site.network))
        assert monitor.digest(None, site) is None  # clients are not told before the next task
    assert torch.equal(site.known["best/weights"], models[3])  # the last of the best
    site.settle()
    site.begin_task(1)
    teacher = proxy.Teacher()
    teacher.receive(teacher.digest(None, site), site)
    held = proxy.model_of(site.network, site.known["teacher/weights"], int(site.known["teacher/heads"]))
    assert torch.equal(proxy.flat(held), models[3])
    assert held.labels == [(0, 1)]
    monkeypatch.setattr(GLFC, "performance", lambda self, site: 0.1)  # judged anew in every task
    monitor.digest(None, site)
    assert torch.equal(site.known["best/weights"], proxy.flat(site.network))
    assert "best/weights" not in site.known.shared()


def test_a_model_comes_back_from_a_row_of_numbers_with_its_running_statistics():
    network = Network(nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.BatchNorm1d(3)), 3, shared_head=False)
    network.add_head([0, 1], 0, 0)
    network(torch.randn(8, 1, 2, 2))  # running statistics move
    row, images = proxy.flat(network), torch.randn(5, 1, 2, 2)
    expected = network.eval()(images)
    network.add_head([2], 0, 1)
    network.train()(10 + torch.randn(8, 1, 2, 2))
    assert torch.equal(proxy.model_of(network, row, 1)(images), expected)


def test_without_images_the_newest_model_is_the_best(tmp_path):
    site = ends(tmp_path).site()
    for _ in range(3):
        with torch.no_grad():
            site.network.heads[0].bias += 1
        proxy.Monitor().digest(None, site)
        assert torch.equal(site.known["best/weights"], proxy.flat(site.network))


def test_models_are_judged_over_all_classes(tmp_path):
    """Published code compared outputs of the new head with labels of all, so later tasks had no accuracy at all."""
    parts = ends(tmp_path)
    site = parts.site()
    site.settle()
    site.begin_task(1)
    features = torch.randn(9, site.network.features)
    labels = torch.cat([head(features) for head in site.network.heads], 1).argmax(1)
    labels[:3] = (labels[:3] + 1) % 4
    assert proxy.accuracy(site.network, features, labels) == pytest.approx(6 / 9)


@pytest.mark.parametrize("method", ["glfc", "lga"])
def test_the_cpu_variant_does_less_of_everything_and_leaves_nothing_out(method):
    table = tomllib.loads((files("fedprotip") / "configs" / "rivals-cpu.toml").read_text(encoding="utf-8"))[method]
    reduced, whole = small(method={"name": method, **table}).method, small(method={"name": method}).method
    assert all(0 < getattr(reduced, name) < getattr(whole, name) for name in table)


def test_domains_are_refused(tmp_path):
    with pytest.raises(fedprotip.UsageError, match="it supports: class"):
        fedprotip.run(small("stream.scenario=domain", "stream.domains=rotate", method=LESS), out=tmp_path / "r")
