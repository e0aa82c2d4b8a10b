"""The frozen part of a backbone: it does not move, does not travel and has no bases."""

import json

import pytest
import torch

import fedprotip
from fedprotip import UsageError
from fedprotip.models import build_network
from fedprotip.models.freeze import frozen_prefixes
from fedprotip.settings import ModelSettings, load
from tests.small import small, tensors

LAYER2 = ("conv1.", "bn1.", "layer1.", "layer2.")
BLOCK1 = ("cls_token", "pos_embed", "patch_embed.", "blocks.0.", "blocks.1.")
MODELS = {
    "resnet18": ({"name": "resnet18", "freeze": "layer2"}, LAYER2),
    "vit": ({"name": "vit", "width": 16, "depth": 3, "freeze": "block1"}, BLOCK1),
    "small_cnn": ({"name": "small_cnn", "width": 16, "depth": 3, "freeze": "layer2"}, ("0.", "1.", "4.", "5.")),
    "mlp": ({"name": "mlp", "width": 16, "depth": 2, "freeze": "layer2"}, ("1.", "3.")),  # all of it
}


@pytest.mark.parametrize("model", MODELS)
def test_prefixes_follow_the_time_of_freezing(model):
    settings, prefixes = MODELS[model]
    first, start = ModelSettings(**settings), ModelSettings(**settings, freeze_from="start")
    assert [frozen_prefixes(first, task) for task in range(3)] == [(), prefixes, prefixes]
    assert [frozen_prefixes(start, task) for task in range(3)] == [prefixes] * 3
    assert frozen_prefixes(ModelSettings(**settings | {"freeze": "none"}), 1) == ()


@pytest.mark.parametrize("model", ["resnet18", "vit", "small_cnn", "mlp"])
def test_the_stages_cover_the_backbone_without_overlap(model):
    names = {"resnet18": "layer4", "vit": "block1", "small_cnn": "layer2", "mlp": "layer2"}
    settings = load({"model": {"name": model, "width": 16, "freeze": names[model]}})
    prefixes = frozen_prefixes(settings.model, 1)
    backbone = build_network(settings, (1, 8, 8), True).backbone
    for name, _ in backbone.named_parameters():
        owners = [prefix for prefix in prefixes if name.startswith(prefix)]
        assert len(owners) == (0 if model == "vit" and name.startswith("norm.") else 1), name


def test_the_paper_freezes_30_parameters_of_resnet18_and_half_of_the_vit():
    backbone = build_network(load({"model": {"name": "resnet18"}}), (3, 32, 32), True).backbone
    names = [name for name, _ in backbone.named_parameters()]
    assert sum(name.startswith(LAYER2) for name in names) == 30
    frozen = frozen_prefixes(ModelSettings(name="vit_b16", freeze="block5"), 1)
    assert frozen == (*BLOCK1[:3], *(f"blocks.{block}." for block in range(6)))


def model_bytes(folder, task):
    """Payload of each client's model in each round of a task, without its few bytes of JSON."""
    lines = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    up = [line["bytes"] for line in lines if (line["task"], line["direction"], line["kind"]) == (task, "up", "model")]
    assert up
    return up


@pytest.mark.parametrize(
    ("model", "freeze_from"),
    [
        pytest.param("resnet18", "first", marks=pytest.mark.slow),
        pytest.param("resnet18", "start", marks=pytest.mark.slow),
        ("vit", "first"),
        ("vit", "start"),
        ("small_cnn", "start"),
        ("mlp", "first"),
    ],
)
def test_the_frozen_part_stands_still(tmp_path, no_report, model, freeze_from):
    model_settings, prefixes = MODELS[model]
    frozen = tuple(f"backbone.{prefix}" for prefix in prefixes)
    settings = small(
        "method.columns=24",
        stream={"tasks": 1},
        clients={"count": 2},
        model={**model_settings, "freeze_from": freeze_from, "norm": "track"},
        train={"rounds": 1, "steps": 2, "batch": 16},
    )
    folder = tmp_path / "r"
    fedprotip.run(settings, out=folder)
    start, one = build_network(settings, (1, 8, 8), True).state_dict(), tensors(folder, "model")
    fedprotip.extend(folder, tasks=1)
    two, subspaces = tensors(folder, "model"), tensors(folder, "subspaces")

    def moved(before, after):
        return {name for name in before if not torch.equal(before[name], after[name])}

    in_first, in_second = moved(start, one), moved(one, two)
    assert not any(name.startswith(frozen) for name in in_second)  # parameters and statistics
    assert any(name.startswith(frozen) for name in in_first) == (freeze_from == "first")
    if model != "mlp":
        assert any(name.startswith("backbone.") for name in in_second)
    if model == "resnet18":
        assert "backbone.layer3.0.bn1.running_mean" in in_second

    based = {name.removeprefix("layers/") for name in subspaces if name.startswith("layers/")}
    weights = {name.removeprefix("backbone.") for name in one if name.endswith("weight") and one[name].dim() > 1}
    assert based == {name for name in weights if not name.startswith((*prefixes, "heads."))}

    free = [name for name in two if not name.startswith((*frozen, "heads.0."))]
    travels = [n for n in free if n.startswith("heads.1.") or n.removeprefix("backbone.") in based or is_statistic(n)]
    size = sum(wire_bytes(two[name], name.removeprefix("backbone."), subspaces) for name in travels)
    assert all(size < sent < size + 100 for sent in model_bytes(folder, task=1))
    everything = sum(tensor.numel() * tensor.element_size() for tensor in one.values())
    at_first = sum(t.numel() * t.element_size() for n, t in one.items() if not n.startswith(frozen))
    expected = everything if freeze_from == "first" else at_first
    assert all(expected < sent < expected + 100 for sent in model_bytes(folder, task=0))


def wire_bytes(tensor, name, subspaces):
    """A tensor in the second task: a layer with a basis travels as coordinates outside it, d − r of d numbers a row."""
    if f"layers/{name}" not in subspaces:
        return tensor.numel() * tensor.element_size()
    d, rank = len(subspaces[f"layers/{name}"]), int(subspaces[f"ranks/{name}"][0])
    return tensor.numel() // d * (d - rank) * tensor.element_size()


def is_statistic(name):
    return name.endswith(("running_mean", "running_var", "num_batches_tracked"))


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (
            {"name": "resnet18", "freeze": "layer5"},
            "model.freeze = 'layer5' is not a stage of 'resnet18'; known: none, stem, layer1, layer2, layer3, layer4.",
        ),
        (
            {"name": "vit", "width": 16, "depth": 3, "freeze": "block3"},
            "model.freeze = 'block3' is not a stage of 'vit'; known: none, stem, block0, block1, block2.",
        ),
        ({"name": "mlp", "freeze": ""}, "model.freeze = '' is not a stage of 'mlp'; known: none, layer1, layer2."),
    ],
)
@pytest.mark.parametrize("freeze_from", ["first", "start"])
def test_a_wrong_stage_is_one_sentence_that_lists_the_stages(tmp_path, model, sentence, freeze_from):
    with pytest.raises(UsageError) as error:
        fedprotip.run(small(model={**model, "freeze_from": freeze_from}), out=tmp_path / "r")
    assert str(error.value) == sentence
    assert not (tmp_path / "r").exists()
