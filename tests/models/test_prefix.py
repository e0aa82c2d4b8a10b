"""The frozen prefix runs once per image, and nobody can tell from the results."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedprotip
from fedprotip import models
from fedprotip.models import Network, build_network
from fedprotip.models.prefix import PrefixCache, _advance
from fedprotip.models.steps import Hidden, run_steps, steps_of, still_steps
from fedprotip.seeds import torch_stream
from fedprotip.settings import load
from fedprotip.store.scratch import IN_USE
from fedprotip.stream import build_stream
from fedprotip.stream.datasets import load_dataset
from fedprotip.stream.transforms import Augmentation
from tests.small import TENSORS, small, tensors

CNN = {"name": "small_cnn", "width": 8, "depth": 3, "freeze": "layer2"}


def frozen(**sections):
    """A small convolutional network whose first two stages stand still from the start."""
    model = {**CNN, "freeze_from": "start", "norm": "frozen"} | sections.pop("model", {})
    return small(model=model, **sections)


def world(settings, **changed):
    dataset = load_dataset(settings.data)
    stream = build_stream(settings, replace(dataset, **changed))
    network = build_network(settings, stream.dataset.image_shape, routes=True)
    for name, parameter in network.backbone.named_parameters():
        parameter.requires_grad_(not name.startswith(("0.", "1.", "4.", "5.")))
    return stream, network.eval(), PrefixCache(stream, settings)


class Counted(nn.Module):
    """A convolution that counts the images it sees."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(1, 4, 3)
        self.images = 0

    def forward(self, images):
        self.images += len(images)
        return self.convolution(images)


# Steps


@pytest.mark.parametrize(
    ("name", "options"),
    [("small_cnn", {"depth": 2}), ("mlp", {"depth": 2}), ("resnet18", {}), ("vit", {"width": 32, "depth": 2})],
)
def test_the_steps_in_a_row_are_the_backbone(name, options):
    settings = small(model={"name": name, "width": 16, **options})
    backbone = build_network(settings, (3, 32, 32), routes=True).backbone
    images = torch.randn(3, 3, 32, 32)
    steps = steps_of(backbone)
    assert torch.equal(run_steps(backbone, images, 0), backbone(images))
    for cut in range(len(steps) + 1):
        network = Network(backbone, 1, shared_head=False)
        assert torch.equal(network.embed(Hidden(run_steps(backbone, images, 0, cut), cut)), backbone(images))
    owned = {n for n, _ in (*backbone.named_parameters(), *backbone.named_buffers())}
    assert all(any(n.startswith(step.names) for step in steps if step.names) for n in owned)


def test_steps_stand_still_up_to_the_first_that_moves():
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU())
    everything = {name for name, _ in backbone.named_parameters()}
    assert still_steps(backbone, everything) == 0  # Flatten alone is not worth keeping
    assert still_steps(backbone, {"3.weight"}) == 3  # with the ReLU behind the frozen layer
    assert still_steps(backbone, set()) == 5
    assert still_steps(nn.Linear(4, 4), set()) == 0  # a module that does not say what its steps are


# Batches


def same_features(network, inputs, images):
    """Rows were made in other batches than the images run in here, which rounds products in another way."""
    torch.testing.assert_close(network.embed(inputs), network.backbone(images), rtol=1e-4, atol=1e-5)


def test_rows_and_images_give_the_same_features():
    stream, network, cache = world(frozen())
    samples = stream.client_samples(0, 0)
    batches = [samples[5:9], samples[:7], samples[5:9]]
    found = list(cache.train_batches(network, 0, batches))
    plain = list(stream.train_batches(0, batches))
    for (inputs, labels), (images, expected) in zip(found, plain, strict=True):
        assert isinstance(inputs, Hidden)
        assert torch.equal(labels, expected)
        same_features(network, inputs, images)
    test = stream.tasks[1].test
    ((inputs, labels),) = cache.test_batches(network, 1, 1, [test])
    same_features(network, inputs, stream.test_batch(1, test)[0])
    assert torch.equal(labels, stream.test_batch(1, test)[1])


def test_the_prefix_runs_once_per_image():
    settings = small()
    stream = build_stream(settings)
    counted = Counted()
    network = Network(nn.Sequential(counted, nn.Flatten(), nn.LazyLinear(8)), 8, shared_head=False)
    network.backbone(torch.zeros(1, *stream.dataset.image_shape))
    network.backbone[0].requires_grad_(False)
    cache, samples, test = PrefixCache(stream, settings), stream.tasks[0].train, stream.tasks[0].test
    counted.images = 0
    for _ in range(3):
        list(cache.train_batches(network, 0, [samples[:40], samples[20:60]]))
        list(cache.test_batches(network, 0, 0, [test]))
    assert counted.images == 60 + len(test)


def test_without_a_prefix_or_without_a_cache_images_come():
    stream, network, cache = world(frozen(run={"cache_mb": 0}))
    assert isinstance(next(cache.train_batches(network, 0, [stream.tasks[0].train[:3]]))[0], torch.Tensor)
    stream, network, cache = world(frozen())
    network.requires_grad_(True)
    assert isinstance(next(cache.train_batches(network, 0, [stream.tasks[0].train[:3]]))[0], torch.Tensor)


def test_rows_beyond_the_budget_live_in_files_and_are_removed(tmp_path):
    settings = frozen()
    stream, network, _ = world(settings)
    cache = PrefixCache(stream, settings, tmp_path)
    cache._budget = 1
    samples = stream.tasks[0].train
    inputs, _ = next(cache.train_batches(network, 0, [samples[:50]]))
    assert [path.stat().st_size for path in tmp_path.rglob("train-*")] == [len(samples) * inputs.flat()[0].nbytes]
    same_features(network, inputs, stream.train_batch(0, samples[:50])[0])
    cache.close()
    assert not list(tmp_path.iterdir())


def test_without_room_on_the_disk_nothing_is_kept(tmp_path, monkeypatch):
    settings = frozen()
    stream, network, _ = world(settings)
    cache = PrefixCache(stream, settings, tmp_path)
    cache._budget = 1
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("usage", (), {"free": 10}))
    samples = stream.tasks[0].train[:50]
    inputs, _ = next(cache.train_batches(network, 0, [samples]))
    same_features(network, inputs, stream.train_batch(0, samples)[0])
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.name != IN_USE]


def test_rows_follow_a_prefix_that_grows_and_are_forgotten_when_it_shrinks():
    stream, network, cache = world(frozen())
    test = stream.tasks[0].test
    images = stream.test_batch(0, test)[0]

    def steps():
        ((inputs, _),) = cache.test_batches(network, 0, 0, [test])
        same_features(network, inputs, images)
        return inputs.steps

    first = steps()
    network.requires_grad_(False)
    whole = steps()
    assert 0 < first < whole == len(steps_of(network.backbone))
    network.backbone[8].weight.requires_grad_(True)
    with torch.no_grad():
        network.backbone[8].weight.add_(1.0)
    assert steps() == first


def test_training_rows_of_an_earlier_task_are_dropped():
    stream, network, cache = world(frozen())
    for task in (0, 1):
        list(cache.train_batches(network, task, [stream.tasks[task].train[:5]]))
        list(cache.test_batches(network, 0, task, [stream.tasks[0].test]))
    assert sorted(cache._rows) == [("test", 0), ("train", 1)]


# Views


def test_views_are_fixed_and_differ():
    settings = frozen(train={"augment": "standard", "views": 2})
    stream, network, cache = world(settings)
    samples = stream.tasks[0].train[:20]
    first, second = (next(stream.view_batches(0, [(samples, np.full(20, view))]))[0] for view in (0, 1))
    assert not torch.equal(first, second)
    again = next(stream.view_batches(0, [(samples[3:5], np.array([1, 0]))]))[0]
    assert torch.equal(again[0], second[3])
    assert torch.equal(again[1], first[4])
    inputs, _ = next(cache.train_batches(network, 0, [samples], torch_stream(0, "augment")))
    rows = network.embed(inputs)
    found = torch.stack([network.backbone(view) for view in (first, second)])
    each = torch.isclose(found, rows, rtol=1e-4, atol=1e-5).all(2)  # (view, image)
    assert each.any(0).all()
    assert not each.all(1).any()


def test_new_views_every_time_are_not_kept():
    stream, network, cache = world(frozen(train={"augment": "standard"}))
    samples = stream.tasks[0].train[:20]
    one, two = (next(cache.train_batches(network, 0, [samples], torch_stream(0, "augment", i)))[0] for i in range(2))
    assert not torch.equal(one, two)
    assert not cache._rows


def test_flips_alone_are_two_views_that_are_kept():
    settings = frozen(train={"augment": "flip"})
    stream, network, cache = world(settings, augmentation=Augmentation())
    samples = stream.tasks[0].train[:20]
    plain, mirrored = (next(stream.view_batches(0, [(samples, np.full(20, view))]))[0] for view in (0, 1))
    assert torch.equal(plain, next(stream.train_batches(0, [samples]))[0])
    assert torch.equal(mirrored, plain.flip(3))
    rows = network.embed(next(cache.train_batches(network, 0, [samples], torch_stream(0, "augment")))[0])
    found = torch.stack([network.backbone(view) for view in (plain, mirrored)])
    each = torch.isclose(found, rows, rtol=1e-4, atol=1e-5).all(2)  # (view, image)
    assert each.any(0).all()
    assert each.any(1).all()  # some of both
    assert [kind for kind, _ in cache._rows] == ["views"]


# Whole runs


def same_outcome(one: Path, other: Path):
    """The same run up to rounding: with rows of a cache, products are taken of other batches."""
    for name in TENSORS:
        if not (one / name).exists():
            continue
        ours, theirs = (tensors(folder, name.removesuffix(".safetensors")) for folder in (one, other))
        assert {key: tensor.shape for key, tensor in ours.items()} == {k: tensor.shape for k, tensor in theirs.items()}
        for key, tensor in ours.items():
            if name == "subspaces.safetensors" and tensor.dim() == 2:  # a span: its directions may be turned
                tensor = tensor @ (tensor.T @ theirs[key])
            torch.testing.assert_close(tensor, theirs[key], rtol=1e-3, atol=1e-3, equal_nan=True)
    ours, theirs = (json.loads((folder / "summary.json").read_text()) for folder in (one, other))
    assert ours["bytes"] == theirs["bytes"]
    assert ours["unknown"].keys() == theirs["unknown"].keys()
    for mode, rows in ours["matrix"].items():
        for row, expected in zip(rows, theirs["matrix"][mode], strict=True):
            assert row == pytest.approx(expected, abs=1.5)  # a sample at a border, of 70 to 90


@pytest.mark.parametrize(
    "sections",
    [
        {"method": {"name": "fedavg"}},
        {},
        {"model": {"freeze_from": "first", "norm": "freeze_after_first"}},
        {"train": {"augment": "standard"}},
        {"method": {"threshold": 1.0, "columns": 4096}},  # layers fill up and join the prefix
    ],
    ids=["fedavg", "start", "first", "augmented", "full rank"],
)
def test_a_run_with_the_cache_is_the_run_without(tmp_path, sections):
    for name, megabytes in (("with", 64), ("without", 0)):
        fedprotip.run(frozen(**{**sections, "run": {"cache_mb": megabytes}}), out=tmp_path / name)
    same_outcome(tmp_path / "with", tmp_path / "without")


def test_an_extended_run_passes_every_image_once(tmp_path, monkeypatch):
    """Also the test images of the new task, which are looked at before it is learned and after."""
    settings, images = frozen(stream={"tasks": 1}), []
    fedprotip.run(settings, out=tmp_path / "r")
    monkeypatch.setattr(
        "fedprotip.models.prefix._advance",
        lambda *given: images.append(len(given[1]) * (not isinstance(given[1], Hidden))) or _advance(*given),
    )
    summary = fedprotip.extend(tmp_path / "r", tasks=1)
    assert summary["unknown"]
    stream = build_stream(load(settings, ["stream.tasks=2"]))
    assert sum(images) == len(stream.tasks[1].train) + sum(len(task.test) for task in stream.tasks)


@pytest.mark.slow
def test_extraction_sees_the_same_images_with_and_without_the_cache(tmp_path):
    """Few columns are wanted, so it stops early: after as many images either way."""
    settings = frozen(clients={"count": 2}, method={"columns": 40, "per_image": 4})
    for name, megabytes in (("with", 64), ("without", 0)):
        fedprotip.run(load(settings, [f"run.cache_mb={megabytes}"]), out=tmp_path / name)
    bases = [tensors(tmp_path / name, "subspaces") for name in ("with", "without")]
    assert bases[0].keys() == bases[1].keys()
    for name, one in bases[0].items():
        other = bases[1][name]
        assert one.shape == other.shape
        if one.dim() == 2:  # the same span; its directions may be turned by rounding
            torch.testing.assert_close(one @ (one.T @ other), other, rtol=0, atol=1e-3)


@pytest.mark.slow
def test_a_run_with_kept_views_is_the_run_that_makes_them_anew(tmp_path):
    """To float precision: a convolution of one image and of thirty differ in their last bits."""
    weights = []
    for name, megabytes in (("with", 64), ("without", 0)):
        settings = frozen(train={"augment": "standard", "views": 2}, run={"cache_mb": megabytes})
        fedprotip.run(settings, out=tmp_path / name)
        weights.append(tensors(tmp_path / name, "model"))
    for name, tensor in weights[0].items():
        assert torch.allclose(tensor, weights[1][name], rtol=1e-4, atol=1e-5), name


def test_dropout_in_front_of_what_moves_is_the_same_with_and_without(tmp_path):
    def build(settings, image_shape):
        return nn.Sequential(
            nn.Flatten(), nn.Linear(image_shape[1] * image_shape[2], 24), nn.Dropout(0.5), nn.ReLU(), nn.Linear(24, 12)
        )

    models.register("dropped", {"first": ("1.",)})(build)
    for name, megabytes in (("with", 64), ("without", 0)):
        settings = small(
            model={"name": "dropped", "freeze": "first", "freeze_from": "start"}, run={"cache_mb": megabytes}
        )
        fedprotip.run(settings, out=tmp_path / name)
    same_outcome(tmp_path / "with", tmp_path / "without")


def test_a_method_that_needs_images_gets_them(tmp_path, monkeypatch):
    method = fedprotip.methods.base._methods["fedavg"]
    seen = []
    loss = method.loss

    def watch(self, local, inputs, labels):
        seen.append(type(inputs))
        return loss(self, local, inputs, labels)

    monkeypatch.setattr(method, "loss", watch)
    monkeypatch.setattr(method, "sees_images", True)
    fedprotip.run(frozen(method={"name": "fedavg"}), out=tmp_path / "run")
    assert set(seen) == {torch.Tensor}
