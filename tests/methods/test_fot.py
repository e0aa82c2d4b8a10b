"""FOT: what clients send, what the server makes of the sum, and what its projection keeps."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import unfold

import fedprotip
from fedprotip.errors import UsageError
from fedprotip.federation.secure.ring import Layout, decode, encode
from fedprotip.messages import BadMessage, Message
from fedprotip.methods.exchange import Sender
from fedprotip.methods.fot import RATIOS, _Inputs, _See
from fedprotip.methods.parts.private import gaussian
from fedprotip.methods.parts.training import Training
from fedprotip.models import build_network
from fedprotip.models.capture import capture, find_layers
from fedprotip.settings import load
from fedprotip.subspace.project import project
from tests.sites import Ends
from tests.small import quick, small, tensors
from tests.subspace.reference import principal_angles

LAYERS = ("1.weight", "3.weight")


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    quick(monkeypatch)


def settings(*overrides, model=(), **options):
    return small(*overrides, method={"name": "fot", "threshold": 0.9, **options}, model=dict(model))


def answers(ends, known=(), task=0):
    """Everybody's sketches, and the server's end."""
    sketches, server = ends.method.exchange("sketch"), ends.site(known, task)
    with torch.no_grad():
        return sketches, server, [sketches.answer(ends.local(client, ends.site(known, task))) for client in range(3)]


def added(messages):
    return Message("sketch", {n: sum(m.tensors[n].double() for m in messages) for n in messages[0].tensors})


def inputs(ends, clients=range(3), task=0):
    """All input columns of every layer."""
    site = ends.site(task=task)
    found = []
    for client in clients:
        batches = [batch for batch, _ in ends.local(client, site).labelled(64)]
        layers = find_layers(ends.network.backbone, False)
        found.append(capture(ends.network.backbone, batches, 10**6, (0, "all"), layers))
    return {name: torch.cat([one[name] for one in found], dim=1) for name in LAYERS}


@pytest.mark.parametrize("ratio", ["norms", "energies"])
def test_the_sum_of_wide_sketches_gives_exact_pca_of_all_clients_inputs(tmp_path, ratio):
    ends = Ends(settings(width=20_000, ratio=ratio), tmp_path)
    sketches, server, messages = answers(ends)
    for message in messages:
        sketches.check(message, server)
    bases = sketches.digest(added(messages), server).tensors
    for name, a in inputs(ends).items():
        vectors, sigma = torch.linalg.svd(a.double(), full_matrices=False)[:2]
        energy = sigma.square().cumsum(0) / sigma.square().sum()
        rank = int((energy < 0.9).sum()) + 1
        assert abs(bases[name].shape[1] - rank) <= 1
        dominant = bases[name][:, :2]
        assert principal_angles(dominant, vectors[:, : rank + 1]).max() < 0.05


def test_the_second_task_adds_what_is_missing_outside_the_first(tmp_path):
    ends = Ends(settings(width=20_000, ratio="energies"), tmp_path)
    sketches, server, messages = answers(ends)
    sketches.receive(sketches.digest(added(messages), server), server)
    sketches, server, messages = answers(ends, server.known, task=1)
    first = {name: server.known[f"subspaces/layers/{name}"] for name in LAYERS}
    a = inputs(ends, task=1)
    for name in LAYERS:
        part, whole = added(messages).tensors[RATIOS][LAYERS.index(name)]
        rest = project(a[name].T, first[name])
        assert float(part / whole) == pytest.approx(float(rest.square().sum() / a[name].square().sum()), rel=1e-4)
        assert max((first[name].T @ message.tensors[name]).abs().max() for message in messages) < 1e-3
    sketches.receive(sketches.digest(added(messages), server), server)
    for name in LAYERS:
        phi = server.known[f"subspaces/layers/{name}"]
        assert torch.equal(phi[:, : first[name].shape[1]], first[name])
        assert (phi.T @ phi - torch.eye(phi.shape[1])).abs().max() < 1e-5
        outside = project(a[name].T, phi).square().sum() / a[name].square().sum()
        assert outside < 0.1 * 1.05
        assert server.known[f"subspaces/ranks/{name}"].tolist()[1] > 0


def test_what_is_new_is_a_ratio_of_norms_averaged_by_samples(tmp_path):
    """ρ = Σ n_k·‖R_k‖/‖A_k‖ over Σ n_k, not of squares."""
    ends = Ends(settings(width=8), tmp_path)
    phi = {f"subspaces/layers/{name}": torch.eye(len(a))[:, ::2] for name, a in inputs(ends).items()}
    ranks = {name: phi[f"subspaces/layers/{name}"].shape[1] for name in LAYERS}
    known = phi | {f"subspaces/ranks/{name}": torch.tensor([rank]) for name, rank in ranks.items()}
    _, _, messages = answers(ends, known, task=1)
    for client, message in enumerate(messages):
        samples = len(ends.local(client, ends.site(known, task=1)).samples)
        for row, (name, a) in enumerate(inputs(ends, [client], task=1).items()):
            ratio = project(a.T, phi[f"subspaces/layers/{name}"]).norm() / a.norm()
            assert message.tensors[RATIOS][row].tolist() == pytest.approx([samples * ratio.item(), samples], rel=1e-4)


def test_a_task_that_is_known_already_adds_nothing(tmp_path):
    """The same inputs once more: ρ < 1 − ε."""
    ends = Ends(settings(ratio="energies"), tmp_path)
    phi = {f"subspaces/layers/{name}": torch.eye(a.shape[0])[:, :-1] for name, a in inputs(ends).items()}
    known = phi | {
        f"subspaces/ranks/{name}": torch.tensor([phi[f"subspaces/layers/{name}"].shape[1]]) for name in LAYERS
    }
    sketches, server, messages = answers(ends, known, task=1)
    merged = sketches.digest(added(messages), server)
    assert all(basis.shape[1] == 0 for basis in merged.tensors.values())
    sketches.receive(merged, server)
    assert server.known["subspaces/ranks/1.weight"].tolist() == [63, 0]


def test_every_client_and_task_has_gaussians_of_its_own(tmp_path):
    """Of two clients with the same samples the sum would else be a sketch of one, twice as long."""
    ends = Ends(settings(), tmp_path)
    drawn = [gaussian(ends.local(*place), "sketch", "a", 6, 5) for place in ((0,), (1,), (0, ends.site(task=1)))]
    assert torch.equal(gaussian(ends.local(0, ends.site()), "sketch", "a", 6, 5), drawn[0])
    assert not (drawn[0] == drawn[1]).any()
    assert not (drawn[0] == drawn[2]).any()


@pytest.mark.parametrize(("share", "wanted"), [(0.49, 1), (0.51, 2), (0.79, 2), (0.81, 3), (0.94, 3), (0.96, 4)])
def test_the_direction_that_reaches_the_threshold_is_in(tmp_path, share, wanted):
    """Energies 10, 6, 3, 1 of 20: as few as hold ε of them."""
    ends = Ends(settings(threshold=share), tmp_path)
    sketches, server, (message, *_) = answers(ends)
    tensors = {name: torch.zeros_like(tensor) for name, tensor in message.tensors.items()}
    for name in LAYERS:
        tensors[name][range(4), range(4)] = torch.tensor([10.0, 6.0, 3.0, 1.0]).sqrt()
    tensors[RATIOS] = torch.tensor([[7.0, 7.0]] * 2, dtype=torch.float64)
    bases = sketches.digest(Message("sketch", tensors), server).tensors
    assert [bases[name].shape[1] for name in LAYERS] == [wanted] * 2
    assert all(bases[name][4:].abs().max() < 1e-6 for name in LAYERS)


def test_half_of_what_is_new_is_less_where_less_is_new(tmp_path):
    """ε = ½ of everything, of which 0.6 lies outside Φ: a sixth of the residual is missing."""
    ends = Ends(settings(threshold=0.5), tmp_path)
    sketches, server, (message, *_) = answers(ends)
    tensors = {name: torch.zeros_like(tensor) for name, tensor in message.tensors.items()}
    for name in LAYERS:
        tensors[name][range(20), range(20)] = 1.0
    for part, wanted in ((10.0, 10), (6.0, 4), (5.0, 0)):
        tensors[RATIOS] = torch.tensor([[part, 10.0]] * 2, dtype=torch.float64)
        bases = sketches.digest(Message("sketch", tensors), server).tensors
        assert [bases[name].shape[1] for name in LAYERS] == [wanted] * 2


def test_layers_that_later_tasks_leave_alone_are_not_sketched(tmp_path):
    frozen = {"name": "small_cnn", "width": 4, "depth": 2, "freeze": "layer1"}
    ends = Ends(settings(model=frozen), tmp_path)
    site = ends.site()
    assert "backbone.0.weight" in site.network.moving  # in this task it does move
    assert [layer.parameter for layer in ends.method.exchange("sketch").layers(site)] == ["4.weight"]


def test_every_group_of_a_convolution_has_the_columns_of_its_own_channels():
    module, images = nn.Conv2d(4, 6, 3, padding=1, groups=2), torch.randn(5, 4, 6, 6)
    groups = [_Inputs(SimpleNamespace(d=18), None) for _ in range(2)]
    _See(groups, 0, len(images), torch.Generator())(module, (images,))
    for seen, own in zip(groups, images.split(2, 1), strict=True):
        columns = unfold(own, 3, padding=1).transpose(0, 1).flatten(1)
        factor = seen.root.factor
        torch.testing.assert_close(factor @ factor.T, columns @ columns.T, atol=1e-3, rtol=1e-4)
        assert seen.total == seen.residual == pytest.approx(columns.square().sum().item(), rel=1e-5)


def test_a_layer_that_is_full_is_not_sketched_any_more(tmp_path):
    ends = Ends(settings(), tmp_path)
    known = {"subspaces/layers/1.weight": torch.eye(64), "subspaces/ranks/1.weight": torch.tensor([64])}
    sketches, server, messages = answers(ends, known, task=1)
    assert messages[0].tensors.keys() == {"3.weight", RATIOS}
    sketches.check(messages[0], server)
    assert set(sketches.digest(added(messages), server).tensors) == {"3.weight"}


def test_local_models_leave_the_complement_and_the_average_does_not(tmp_path, monkeypatch):
    """∆W·Φ = 0 after every aggregation, though clients are free."""
    inside, kept, original, received = [], [], Training.answer, Training.receive

    def moved(site):
        weights = dict(site.network.named_parameters())
        for layer, projector in site.view.projectors:
            change = weights[f"backbone.{layer.parameter}"].detach() - site.start[f"backbone.{layer.parameter}"]
            yield (change - projector(change)).norm() / change.norm().clamp_min(1e-12)

    def answer(self, local):
        message = original(self, local)
        inside.extend(moved(local.site) if local.task else ())
        return message

    def receive(self, message, site):
        received(self, message, site)
        kept.extend(moved(site) if site.task else ())

    monkeypatch.setattr(Training, "answer", answer)
    monkeypatch.setattr(Training, "receive", receive)
    fedprotip.run(settings("train.weight_decay=0.01", "train.momentum=0.9"), out=tmp_path / "r")
    assert len(inside) == 3 * len(kept) == 2 * 3 * 3 * 2  # layers, clients, rounds, tasks
    assert min(inside) > 0.02
    assert max(kept) < 1e-4


@pytest.mark.parametrize(
    "sections",
    [
        {"stream": {"tasks": 2, "task_size": 4, "overlap": 1}},
        {"stream": {"scenario": "domain", "tasks": 2, "domains": "rotate", "task_size": 0}},
        {"model": {"name": "small_cnn", "width": 4, "freeze": "layer1"}, "stream": {"tasks": 2}},
        {"train": {"wire": "bf16"}, "stream": {"tasks": 2}},
        {"run": {"geometry": 1}, "stream": {"tasks": 2}},
    ],
    ids=["overlap", "rotate", "convolutions", "bf16", "geometry"],
)
def test_it_runs_whatever_the_stream_and_the_network(tmp_path, sections):
    sections = {"train": {"rounds": 2, **sections.pop("train", {})}, **sections}
    given = small(method={"name": "fot"}, **sections)
    summary = fedprotip.run(given, out=tmp_path / "r")
    assert summary["failures"]["count"] == 0
    for name, phi in tensors(tmp_path / "r", "subspaces").items():
        if name.startswith("layers/"):
            assert 0 < phi.shape[1] <= phi.shape[0]
            assert (phi.T @ phi - torch.eye(phi.shape[1])).abs().max() < 1e-4


@pytest.mark.parametrize("vectors", ["free", "fixed"])
def test_biases_move_freely_or_not_at_all(tmp_path, monkeypatch, vectors):
    fedprotip.run(settings("stream.tasks=1", vectors=vectors), out=tmp_path / "one")
    fedprotip.run(settings("stream.tasks=2", vectors=vectors), out=tmp_path / "two")
    before, after = tensors(tmp_path / "one", "model"), tensors(tmp_path / "two", "model")
    assert torch.equal(before["backbone.1.bias"], after["backbone.1.bias"]) == (vectors == "fixed")
    assert not torch.equal(before["backbone.1.weight"], after["backbone.1.weight"])


@pytest.mark.parametrize(("width", "columns"), [(7, (7, 7)), ("d", (64, 24)), ("5d", (320, 120))])
def test_a_sketch_is_as_wide_as_asked_and_the_ledger_says_so(tmp_path, width, columns):
    fedprotip.run(settings("stream.tasks=1", width=width), out=tmp_path / "r")
    lines = [json.loads(line) for line in (tmp_path / "r" / "ledger.jsonl").read_text().splitlines()]
    sent = [line["bytes"] for line in lines if line["kind"] == "sketch" and line["direction"] == "up"]
    floats = 64 * columns[0] + 24 * columns[1]
    assert len(sent) == 3
    assert all(0 <= size - (4 * floats + 8 * 4) < 32 for size in sent)  # and the number of the question


def test_the_papers_48_mb_are_512_columns_of_ten_convolutions():
    """Table of the paper: act, 24,576 × 512 × 4 bytes; 5d columns would be 1,647 MiB and more."""
    network = build_network(load({"model": {"name": "resnet18", "freeze": "layer2"}}), (3, 32, 32), False)
    layers = [layer for group in find_layers(network.backbone, False).values() for layer in group]
    ds = [layer.d for layer in layers if layer.name.startswith(("layer3", "layer4"))]
    assert len(ds) == 10
    assert sum(4 * 512 * d for d in ds) == 48 * 2**20


def test_some_columns_are_enough(tmp_path):
    """As many as asked for, drawn evenly: the strongest direction is found all the same."""
    ends = Ends(settings(columns=20, width=5_000), tmp_path)
    sketches, server, messages = answers(ends)
    bases = sketches.digest(added(messages), server).tensors
    for name, a in inputs(ends).items():
        strongest = torch.linalg.svd(a.double(), full_matrices=False)[0][:, :1]
        assert principal_angles(bases[name][:, :1], strongest).max() < 0.4
        seen = {client: torch.linalg.matrix_rank(message.tensors[name]) for client, message in enumerate(messages)}
        assert max(seen.values()) <= min(20, a.shape[0])
    whole = answers(Ends(settings(width=5_000), tmp_path / "whole"))[2]
    for some, every in zip(messages, whole, strict=True):  # some count as much as all of them
        lengths = [message.tensors["1.weight"].norm().item() for message in (some, every)]
        assert lengths[0] == pytest.approx(lengths[1], rel=0.15)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: {**m, RATIOS: -m[RATIOS]},
        lambda m: {**m, RATIOS: m[RATIOS].flip(1) * 2 + torch.tensor([1.0, 0.0])},
        lambda m: {**m, RATIOS: m[RATIOS] * torch.nan},
        lambda m: {**m, "1.weight": m["1.weight"] * torch.inf},
        lambda m: {**m, "1.weight": m["1.weight"][:, :-1]},
        lambda m: {**m, "1.weight": m["1.weight"].double()},
        lambda m: {**m, RATIOS: m[RATIOS] * torch.tensor([0.0, 1.0])},
        lambda m: {RATIOS: m[RATIOS]},
        lambda m: {**m, "2.weight": m["1.weight"]},
    ],
)
def test_sketches_that_cannot_be_are_refused(tmp_path, change):
    sketches, server, messages = answers(Ends(settings(), tmp_path))
    with pytest.raises(BadMessage):
        sketches.check(Message("sketch", change(messages[0].tensors)), server)


def test_a_sketch_is_of_the_samples_that_its_sender_has(tmp_path):
    ends = Ends(settings(), tmp_path)
    sketches, server, messages = answers(ends)
    count = len(ends.local(0).samples)
    sketches.check_sender(messages[0], server, Sender(0, count))
    with pytest.raises(BadMessage, match="samples"):
        sketches.check_sender(messages[0], server, Sender(0, count + 1))


def test_a_sketch_far_longer_than_the_others_is_left_out(tmp_path, monkeypatch):
    from fedprotip.methods.fot import Sketches

    original = Sketches.answer

    def answer(self, local):
        message = original(self, local)
        longer = {name: tensor * 1000 if name != RATIOS else tensor for name, tensor in message.tensors.items()}
        return Message(message.kind, longer) if local.client == 1 else message

    monkeypatch.setattr(Sketches, "answer", answer)
    summary = fedprotip.run(settings("clients.count=4", "train.rounds=1", "stream.tasks=2"), out=tmp_path / "r")
    assert summary["failures"]["count"] == 2
    assert all("out of line" in reason for reason in summary["failures"]["by_reason"])


def test_energies_are_compared_as_they_are_told(tmp_path):
    """Beside the sketch, which says nothing about what lies inside Φ."""
    sketches, server, messages = answers(Ends(settings(ratio="energies"), tmp_path))
    honest = messages[0].tensors
    told = Message("sketch", {**honest, RATIOS: honest[RATIOS] * 1e8})
    sketches.check(told, server)
    large, small_ = (sketches.sizes(Message("sketch", m.tensors), server) for m in (told, messages[0]))
    name = "told length of inputs of 1.weight"
    assert large[name] == pytest.approx(1e4 * small_[name])


def test_energies_of_many_images_fit_into_a_secure_sum(tmp_path):
    """50,000 images at 1,024 places, 4,608 inputs with a mean square of 1; a hundred clients share them, or five."""
    sketches, whole = answers(Ends(settings(ratio="energies"), tmp_path))[0], 50_000 * 1024 * 4608.0
    for clients in (5, 100):
        seen = SimpleNamespace(residual=whole / clients / 2, total=whole / clients)
        told = Message("sketch", {RATIOS: torch.tensor([sketches._ratio(seen, 10)], dtype=torch.float64)})
        vector = encode(told, 1.0, clients, False, sketches.fraction) * np.uint64(clients)
        ratios = decode(vector, Layout.of(told), clients, False, sketches.fraction)[1][RATIOS]
        assert ratios[0, 0] / ratios[0, 1] == 0.5


def test_stated_samples_count_as_far_as_they_are_believed(tmp_path):
    sketches, server, messages = answers(Ends(settings(), tmp_path))
    samples = int(messages[0].tensors[RATIOS][0, 1])
    assert sketches.weight(messages[0], server) == 1
    assert sketches.effort(messages[0], server, Sender(0, samples)) == samples
    server.most = samples / 4
    assert sketches.weight(messages[0], server) == 0.25
    assert sketches.effort(messages[0], server, Sender(0, samples)) == server.most


def test_values_at_the_edge_of_float_do_no_harm(tmp_path):
    sketches, server, messages = answers(Ends(settings(), tmp_path))
    huge = {
        n: torch.full_like(t, torch.finfo(torch.float32).max) for n, t in messages[0].tensors.items() if n != RATIOS
    }
    message = Message("sketch", {**huge, RATIOS: messages[0].tensors[RATIOS]})
    sketches.check(message, server)
    assert all(value > 0 for value in sketches.sizes(message, server).values())
    bases = sketches.digest(added([message, *messages]), server).tensors
    assert all(torch.isfinite(basis).all() for basis in bases.values())


@pytest.mark.parametrize("aggregate", ["trimmed", "median"])
def test_sums_are_not_robust_and_are_refused_as_such(aggregate):
    with pytest.raises(UsageError, match="sketches can only be summed"):
        fedprotip.methods.create_method(settings(f"train.aggregate={aggregate}"))


def test_the_threshold_grows_and_ends_at_one():
    sketches = fedprotip.methods.create_method(settings(threshold=0.9995)).exchange("sketch")
    assert [sketches.threshold(task) for task in (0, 7)] == [0.9995, 1.0]
