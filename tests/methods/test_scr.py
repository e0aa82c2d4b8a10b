"""Fed+SCR: what clients keep, what the prototypes are, what a review is."""

import pytest
import torch
import torch.nn.functional as F

import fedprotip
from fedprotip.inference.assemble import assemble
from fedprotip.messages import BadMessage, Message
from fedprotip.methods import create_method
from fedprotip.methods.exchange import Sender
from fedprotip.methods.parts import reservoir
from fedprotip.methods.parts.contrast import contrast
from fedprotip.methods.parts.stored import Stored
from fedprotip.methods.parts.views import Views, second_look
from fedprotip.methods.scr import PROJECTION, Prototypes
from fedprotip.models.batches import pieces
from fedprotip.models.heads import Features
from tests.sites import Ends
from tests.small import quick, small, tensors

OPTIONS = {"name": "scr", "buffer": 30, "retrieve": 12, "projection": 8}


def settings(*overrides, **sections):
    return small(*overrides, **{"method": OPTIONS, "train": {"rounds": 2}, **sections})


@pytest.fixture
def ends(tmp_path):
    return Ends(settings(), tmp_path)


def begun(ends, client, site, round_=0):
    """A client that has begun a round."""
    local = ends.local(client, site)
    object.__setattr__(local, "round", round_)
    ends.method.begin_round(local)
    return local


def test_samples_pass_once_a_task_and_no_more_are_kept_than_may_be(ends):
    site = ends.site()
    for round_ in range(2):
        local = begun(ends, 0, site, round_)
    kept = local.own.get("reservoir")
    assert len(kept["labels"]) == 30
    assert int(kept["seen"]) == len(local.samples)
    site.begin_task(1)
    kept, later = local.own.get("reservoir"), begun(ends, 0, site).own.get("reservoir")
    assert int(later["seen"]) == int(kept["seen"]) + len(ends.local(0, site).samples)
    assert set(later["labels"].tolist()) == {0, 1, 2, 3}


def test_a_batch_has_new_samples_and_kept_ones_and_a_review_only_those(ends):
    local = begun(ends, 0, ends.site())
    own = [(torch.zeros(5, 1, 8, 8), torch.zeros(5, dtype=torch.int64))]
    ((images, labels),) = ends.method.batches(local, iter(own))
    assert len(images) == len(labels) == 5 + 12
    review = begun(ends, 0, local.site, round_=2)
    found = torch.cat([labels for _, labels in ends.method.batches(review, iter(own))])
    assert torch.equal(found.sort().values, local.own.get("reservoir")["labels"].sort().values)


def test_kept_samples_join_a_batch_once_each_and_others_join_the_next(ends):
    local = begun(ends, 0, ends.site())
    own = [(torch.zeros(0, 1, 8, 8), torch.zeros(0, dtype=torch.int64)) for _ in range(2)]
    first, second = (images for images, _ in ends.method.batches(local, iter(own)))
    assert len(first.flatten(1).unique(dim=0)) == 12
    assert not torch.equal(first, second)
    assert len(torch.cat([first, second]).flatten(1).unique(dim=0)) > 12


def test_the_second_view_is_made_as_the_settings_say(tmp_path):
    chosen = {"crop": 0.4, "flip": 0.9, "jitter": 0.1, "grey": 0.6, "temperature": 0.3}
    ends = Ends(settings(method={**OPTIONS, **chosen}), tmp_path)
    local = begun(ends, 0, ends.site())
    images, labels = torch.rand(8, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3
    chance, pixels = local.chance("views"), ends.stream.pixels
    other = pixels.normalised(second_look(pixels.scaled(images), Views(0.4, 0.9, 0.1, grey=0.6), chance))
    network = local.network
    unit = F.normalize(network.extras[PROJECTION](network.embed(torch.cat([images, other]))))
    expected = contrast(unit, torch.cat([labels, labels]), 0.3)
    torch.testing.assert_close(ends.method.loss(local, images, labels), expected)


def test_kept_samples_vary_as_new_ones_do(tmp_path):
    ends = Ends(settings("train.augment=standard"), tmp_path)
    local = begun(ends, 0, ends.site())
    own = [(torch.zeros(0, 1, 8, 8), torch.zeros(0, dtype=torch.int64))]
    ((images, _),) = ends.method.batches(local, iter(own))
    kept, look = local.own.get("reservoir")["images"], local.site.look
    chance = local.chance("retrieval")
    plain = kept[torch.randperm(len(kept), generator=chance)[:12]]
    pixels = (look.pixels.scaled(plain) * 255).round().to(torch.uint8)
    torch.testing.assert_close(images, look.batch(pixels, chance))
    assert not torch.allclose(images, plain)


def test_who_was_drawn_in_no_round_keeps_samples_of_the_task_too(ends):
    site = ends.site()
    with torch.no_grad():
        counts = Prototypes().answer(ends.local(0, site)).tensors["counts"]
    assert counts.sum() == len(ends.local(0, site).own.get("reservoir")["labels"]) == 30


def test_a_review_has_a_tenth_of_the_gradient_and_the_full_rate(ends):
    site, losses = ends.site(), []
    images, labels = torch.rand(8, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 2
    for round_ in (1, 2):
        local = begun(ends, 0, site, round_)
        local.scratch["views"] = torch.Generator().manual_seed(5)
        losses.append(ends.method.loss(local, images, labels).item())
    assert losses[1] == pytest.approx(losses[0] / 10)
    falls = create_method(settings("train.fall=cosine"))
    assert falls.rounds(0) == 3
    assert falls.rate(0, 2.0) == falls.rate(0, 0.0) == falls.settings.train.lr
    assert falls.rate(0, 1.0) == pytest.approx(falls.settings.train.lr / 2)
    assert create_method(settings("method.review=false")).rounds(0) == 2


def test_no_head_moves_and_none_begins_in_closed_form(ends, tmp_path, monkeypatch):
    quick(monkeypatch)
    moving = ends.site().network.moving
    assert any(name.startswith(f"extras.{PROJECTION}.") for name in moving)
    assert not any(name.startswith("heads.") for name in moving)
    summary = fedprotip.run(settings("train.head_start=closed", "stream.tasks=1", "train.rounds=1"), out=tmp_path / "r")
    assert "start" not in summary["bytes"]["up"]
    assert summary["samples"] == {"raw": 90}


def prototypes(ends, site, clients):
    """What the server knows after these clients have answered."""
    exchange, sums = Prototypes(), None
    for client in clients:
        message = exchange.answer(ends.local(client, site))
        exchange.check(message, site)
        found = {name: tensor.double() for name, tensor in message.tensors.items()}
        sums = found if sums is None else {name: sums[name] + found[name] for name in sums}
    exchange.digest(Message(exchange.name, sums), site)
    return site.known["prototypes/labels"], site.known["prototypes/means"]


def keep(ends, client, labels, seed=0, task=0):
    """A client that keeps such samples, those of this task among them."""
    images = torch.rand(len(labels), 1, 8, 8, generator=torch.Generator().manual_seed(seed))
    known = torch.tensor(labels, dtype=torch.int64)
    kept = {"images": images, "labels": known, "seen": torch.tensor(9), "task": torch.tensor(task)}
    ends.local(client).own.put("reservoir", kept)
    return images


@torch.no_grad()
def test_prototypes_are_means_over_all_samples_of_all_clients(ends):
    """One client with all of them gives the same: clients count by their samples, not by their number."""
    site = ends.site()
    one, other = keep(ends, 0, [0, 0, 0, 1], 1), keep(ends, 1, [0], 2)
    keep(ends, 2, [])  # the third keeps nothing
    labels, means = prototypes(ends, site, [0, 1, 2])
    unit = F.normalize(ends.network.embed(torch.cat([one[:3], other])))
    assert labels.tolist() == [0, 1]
    assert torch.allclose(means[0], F.normalize(unit.mean(0), dim=0), atol=1e-6)
    both = {"images": torch.cat([one, other]), "labels": torch.tensor([0, 0, 0, 1, 0]), "task": torch.tensor(0)}
    ends.local(2).own.put("reservoir", {**reservoir.empty((1, 8, 8)), **both})
    assert torch.allclose(prototypes(ends, site, [2])[1], means, atol=1e-6)


@torch.no_grad()
def test_a_class_that_nobody_keeps_any_more_has_no_prototype_and_never_wins(ends):
    site = ends.site()
    keep(ends, 0, [0, 1])
    assert prototypes(ends, site, [0])[0].tolist() == [0, 1]
    keep(ends, 0, [1, 1])
    assert prototypes(ends, site, [0])[0].tolist() == [1]
    answers = assemble(ends.method.answering(), ends.network, site.known, ends.site().classes[:1])
    features = ends.network.look(torch.rand(20, 1, 8, 8, generator=torch.Generator().manual_seed(3)))
    heard = answers.hear(features)
    assert (answers.agnostic(heard) == 1).all()
    assert (answers.aware(heard, torch.zeros(20, dtype=torch.int64)) == 1).all()


def test_the_nearest_prototype_answers(ends):
    site = ends.site()
    means = F.normalize(torch.randn(2, ends.network.features, generator=torch.Generator().manual_seed(0)))
    site.known.update({"prototypes/labels": torch.tensor([0, 1]), "prototypes/means": means})
    answers = assemble(ends.method.answering(), ends.network, site.known, [site.classes[0]])
    features = torch.randn(30, ends.network.features, generator=torch.Generator().manual_seed(1))
    nearest = torch.cdist(F.normalize(features), means).argmin(1)
    assert torch.equal(answers.agnostic(answers.hear(Features(features, features))), nearest)
    scores = answers.experts["prototypes"](Features(features, features))
    torch.testing.assert_close(scores, -torch.cdist(F.normalize(features), means).square(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("counts", lambda counts: -counts),
        ("counts", lambda counts: counts * 10**6),
        ("counts", lambda counts: counts * 0),
        ("sums", lambda sums: sums * 1.5),
        ("sums", lambda sums: sums * torch.nan),
        ("sums", lambda sums: sums[:1]),
    ],
)
def test_sums_that_cannot_be_are_refused(ends, name, change):
    site, exchange = ends.site(), Prototypes()
    keep(ends, 0, [0, 0, 1])
    with torch.no_grad():
        honest = exchange.answer(ends.local(0, site))

    def check():
        exchange.check(honest, site)
        exchange.check_sender(honest, site, Sender(0, 10))

    check()
    honest.tensors[name] = change(honest.tensors[name])
    with pytest.raises(BadMessage):
        check()


def test_a_client_keeps_no_more_than_it_may(ends):
    """A sum of many clients' may be larger, and is checked too where nobody sees a single reply."""
    site, exchange = ends.site(), Prototypes()
    keep(ends, 0, [0, 0, 1])
    with torch.no_grad():
        honest = exchange.answer(ends.local(0, site))
    for tensor in honest.tensors.values():
        tensor *= 11
    exchange.check(honest, site)
    with pytest.raises(BadMessage, match="it keeps 33 samples, and may keep 30"):
        exchange.check_sender(honest, site, Sender(0, 40))
    many = Message("stored", {"raw": torch.tensor(33)})
    Stored("reservoir", 30).check(many, site)
    with pytest.raises(BadMessage, match="it keeps 33 samples, and may keep 30"):
        Stored("reservoir", 30).check_sender(many, site, Sender(0, 40))


def test_features_of_a_relu_have_no_negative_sums_and_a_reply_says_nothing_more(ends):
    site, exchange = ends.site(), Prototypes()
    keep(ends, 0, [0, 0, 1])
    with torch.no_grad():
        honest = exchange.answer(ends.local(0, site))
    negated = Message(honest.kind, {**honest.tensors, "sums": -honest.tensors["sums"]})
    with pytest.raises(BadMessage, match="cannot be negative"):
        exchange.check(negated, site)
    with pytest.raises(BadMessage, match="unexpected"):
        exchange.check(Message(honest.kind, honest.tensors, {"more": 1}), site)


def test_of_a_new_class_nobody_keeps_more_samples_than_it_has(ends):
    """Of earlier tasks the server does not know how many it had."""
    site, exchange = ends.site(task=1), Prototypes()
    keep(ends, 0, [0, 0, 0, 2, 3], task=1)
    with torch.no_grad():
        honest = exchange.answer(ends.local(0, site))
    exchange.check_sender(honest, site, Sender(0, 2))
    for samples in (1, None):
        with pytest.raises(BadMessage, match="it keeps 2 samples"):
            exchange.check_sender(honest, site, Sender(0, samples))


def test_prototypes_are_those_of_the_last_model(tmp_path, monkeypatch):
    """One client: what its folder answers with is what its samples and the saved model give."""
    quick(monkeypatch)
    one = settings("clients.count=1", "stream.tasks=2", "train.rounds=1", "method.buffer=100000")
    fedprotip.run(one, out=tmp_path / "r")
    predictor, ends = fedprotip.load(tmp_path / "r"), Ends(one, tmp_path / "ends")
    found = tensors(tmp_path / "r", "prototypes")
    for task, site in ((0, ends.site()), (1, ends.site(task=1))):
        with torch.no_grad():
            parts = [(F.normalize(predictor.network.embed(x)), y) for x, y in ends.local(0, site).labelled(64)]
        features, labels = (torch.cat(part) for part in zip(*parts, strict=True))
        for label in ends.stream.tasks[task].classes:
            mean = F.normalize(features[labels == label].mean(0), dim=0)
            assert torch.allclose(found["means"][found["labels"] == label][0], mean, atol=1e-5)


def test_one_client_is_the_centralised_form(tmp_path, monkeypatch):
    """The model of a round is what plain steps of SGD make of the same batches."""
    quick(monkeypatch)
    one = settings(
        *("clients.count=1", "stream.tasks=1", "train.rounds=1", "method.review=false", "method.buffer=100000"),
        *("train.weight_decay=0.01", "train.batch=64"),
    )
    fedprotip.run(one, out=tmp_path / "r")
    ends = Ends(one, tmp_path / "ends")
    site = ends.site()
    local = begun(ends, 0, site)
    images, labels = (torch.cat(part) for part in zip(*local.labelled(512), strict=True))
    network, place = site.network.train(), {sample: row for row, sample in enumerate(sorted(local.samples))}
    moving = [network.get_parameter(name) for name in network.moving]
    optimizer = torch.optim.SGD(moving, one.train.lr, weight_decay=0.01)
    views, retrieval, pixels = local.chance("views"), local.chance("retrieval"), ends.stream.pixels
    for samples in pieces(local.draw("batches").permutation(local.samples), 64):
        new = torch.tensor([place[sample] for sample in samples])
        rows = torch.cat([new, torch.randperm(len(labels), generator=retrieval)[:12]])
        other = pixels.normalised(second_look(pixels.scaled(images[rows]), Views(), views))
        unit = F.normalize(network.extras[PROJECTION](network.backbone(torch.cat([images[rows], other]))))
        loss = contrast(unit, labels[rows].repeat(2), 0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    found = tensors(tmp_path / "r", "model")
    for name in network.moving:
        assert torch.allclose(found[name], network.get_parameter(name), atol=1e-5), name


def test_with_domains_a_class_has_one_prototype(tmp_path, monkeypatch):
    quick(monkeypatch)
    domains = {"scenario": "domain", "domains": "permute", "task_size": 0, "tasks": 2}
    fedprotip.run(settings("train.rounds=1", "method.buffer=300", stream=domains), out=tmp_path / "r")
    assert tensors(tmp_path / "r", "prototypes")["labels"].tolist() == list(range(10))
