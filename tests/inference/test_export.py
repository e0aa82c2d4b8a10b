"""An exported run answers in onnxruntime as it does here. The graph itself needs no extra; the file does (slow)."""

import json
from copy import deepcopy
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import nn

import fedprotip
from fedprotip.inference.experts import HeadExpert
from fedprotip.inference.export import Answers, Fit, as_onnx, differences, export, outputs
from fedprotip.inference.parts import Router
from fedprotip.stream.plan import Pixels
from fedprotip.stream.stream import build_stream
from tests.inference.test_predictor import SCENARIOS, possible
from tests.small import missing, quick

ASKED = {
    "fedprotip": ("fedprotip", "classes", {"clients": {"held_back": 0.1}}),
    "birth": ("fedprotip", "classes", {"clients": {"held_back": 0.1}, "method": {"router": "auto"}}),
    "overlap": ("fedprotip", "overlap", {}),
    "domains": ("fedprotip", "domains", {}),
    "convolutions": ("fedprotip", "classes", {"model": {"name": "small_cnn", "width": 16, "depth": 2}}),
    "resnet18": (
        "fedavg",
        "classes",
        {"model": {"name": "resnet18"}, "train": {"rounds": 1, "epochs": 1, "batch": 64}},
    ),
    "vit": ("lda", "classes", {"model": {"name": "vit", "width": 16, "depth": 2}}),
    "vit of its own size": ("lda", "classes", {"model": {"name": "vit", "width": 16, "depth": 1, "image_size": 14}}),
    "vit of a smaller size": ("lda", "classes", {"model": {"name": "vit", "width": 16, "depth": 1, "image_size": 6}}),
    "enlarged": ("lda", "classes", {"data": {"size": 12}}),
    "fedavg": ("fedavg", "classes", {}),
    "lda": ("lda", "classes", {"clients": {"held_back": 0.1}}),
    "ridge": ("ridge", "classes", {}),
    "scr": ("scr", "classes", {}),
    "pec": ("pec", "classes", {}),
    "pec of another size": ("pec", "classes", {"data": {"size": [9, 11]}}),
}


@pytest.fixture(scope="module")
def predictors(tmp_path_factory):
    """Made when first asked for: what a run answers with, and 500 images, all of its test images among them."""
    made = {}

    def make(name):
        if name not in made:
            method, scenario, changes = ASKED[name]
            settings = possible(method, **SCENARIOS[scenario])
            settings = fedprotip.load_settings(
                settings, [f"{s}.{key}={value}" for s, part in changes.items() for key, value in part.items()]
            )
            path = tmp_path_factory.mktemp(name) / "run"
            with pytest.MonkeyPatch.context() as patch:
                quick(patch)
                fedprotip.run(settings, out=path)
            data = build_stream(settings).dataset
            images = torch.cat([data.test_images, data.train_images])[:500]
            made[name] = fedprotip.load(path), images.numpy()
        return made[name]

    return make


def ways_of(predictor):
    """The same run with each of its ways chosen; one without ways as it is."""
    inference = predictor.inference
    for name in inference.ways or [""]:
        yield name, replace(predictor, inference=replace(inference, chosen=name))


@pytest.mark.parametrize("name", ["lda", "overlap", "pec"])
def test_the_graph_says_what_the_predictor_says(predictors, name):
    predictor, images = predictors(name)
    for way, chosen in ways_of(predictor):
        module = Answers(chosen).eval()
        with torch.no_grad():
            found = dict(zip(module.names, module(torch.from_numpy(images)), strict=True))
        for output, expected in outputs(chosen, images).items():
            np.testing.assert_allclose(found[output].numpy(), expected, rtol=0, atol=1e-5, err_msg=f"{way} {output}")
        answers = chosen.predict(images)
        assert [chosen.classes_[place] for place in found["label"]] == [answer.label for answer in answers]
        assert found["task"].tolist() == [answer.task for answer in answers]


@pytest.mark.slow
@pytest.mark.parametrize("name", ASKED)
def test_onnxruntime_answers_500_images_as_we_do(predictors, name):
    import onnxruntime

    predictor, images = predictors(name)
    assert len(images) == 500
    for way, chosen in ways_of(predictor):
        session = onnxruntime.InferenceSession(as_onnx(chosen), providers=["CPUExecutionProvider"])
        names = [output.name for output in session.get_outputs()]
        found = dict(zip(names, session.run(None, {"images": images}), strict=True))
        for output, expected in outputs(chosen, images).items():
            np.testing.assert_allclose(found[output], expected, rtol=0, atol=1e-4, err_msg=f"{way} {output}")
        answers = chosen.predict(images)
        assert [chosen.classes_[place] for place in found["label"]] == [answer.label for answer in answers]
        one = session.run(["probability"], {"images": images[:1]})[0]
        assert one == pytest.approx(found["probability"][:1], abs=1e-5)


@pytest.mark.slow
def test_the_file_says_what_its_images_and_answers_are(predictors, tmp_path):
    import onnxruntime

    predictor, _ = predictors("fedprotip")
    export(predictor, tmp_path / "mine.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "mine.onnx")
    told = {key: json.loads(value) for key, value in session.get_modelmeta().custom_metadata_map.items()}
    assert told["fedprotip.classes"] == predictor.classes_
    assert told["fedprotip.tasks"] == [task.name for task in predictor.plan.tasks]
    assert tuple(told["fedprotip.size"]) == predictor.plan.pixels.given
    assert tuple(told["fedprotip.mean"]) == predictor.plan.pixels.mean
    assert told["fedprotip.filter"] == "bilinear"
    assert session.get_inputs()[0].shape[1:] == list(predictor.plan.pixels.given)
    assert "relevance" in [output.name for output in session.get_outputs()]


@pytest.mark.parametrize("fit", ["crop", "pad", "stretch"])
@pytest.mark.parametrize("shape", [(3, 24, 20), (3, 9, 17), (3, 12, 10), (3, 5, 5)])
def test_images_are_scaled_by_products_as_in_training(shape, fit):
    pixels = Pixels(shape=shape, given=(3, 12, 10), mean=(0.5,), std=(0.5,), fit=fit)
    images = torch.rand(4, 3, 12, 10)
    torch.testing.assert_close(pixels.normalised(Fit(pixels)(images)), pixels.normalised(images), rtol=0, atol=1e-5)


class Strange(nn.Module):
    """A backbone with a step that ONNX does not have."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 8)

    def forward(self, images):
        return torch.special.i1(self.layer(images.flatten(1)))


@dataclass(frozen=True)
class Counting(Router):
    """A router that looks at how many samples come together: a graph would keep the number it was made with."""

    def evidence(self, seen):
        count = len(seen.features)
        return torch.arange(3.0).expand(count, 3).roll(count, 1)


@pytest.mark.slow
def test_what_onnx_cannot_express_is_one_sentence_and_leaves_no_file(predictors, tmp_path):
    predictor, _ = predictors("fedavg")
    network = replace_backbone(predictor.network)
    inference = replace(predictor.inference, experts={"heads": HeadExpert(network, len(predictor.plan.tasks))})
    with pytest.raises(fedprotip.UsageError, match=r"ONNX cannot express \(.*i1"):
        export(replace(predictor, network=network, inference=inference), tmp_path / "mine.onnx")
    predictor, _ = predictors("fedprotip")
    way = replace(next(iter(predictor.inference.ways.values())), router=Counting())
    inference = replace(predictor.inference, ways={"counting": way}, chosen="counting")
    with pytest.raises(fedprotip.RunError, match=r"would not answer as the run does"):
        export(replace(predictor, inference=inference), tmp_path / "mine.onnx")
    assert not list(tmp_path.iterdir())


def replace_backbone(network):
    network = deepcopy(network)
    network.backbone, network.taps = Strange(), ()
    network.heads = nn.ModuleList(nn.Linear(8, head.out_features) for head in network.heads)
    return network.eval().requires_grad_(False)


@pytest.mark.slow
def test_a_file_that_answers_otherwise_is_noticed(predictors):
    predictor, _ = predictors("fedavg")
    written = as_onnx(predictor)
    with torch.no_grad():
        predictor.network.heads[0].bias.add_(0.5)
    try:
        assert "differs by" in differences(predictor, written)
    finally:
        with torch.no_grad():
            predictor.network.heads[0].bias.sub_(0.5)
    assert differences(predictor, written) == ""


def test_without_the_extra_it_says_what_to_install(predictors, tmp_path, monkeypatch):
    missing(monkeypatch, "onnx", "onnx")
    predictor, _ = predictors("fedavg")
    with pytest.raises(fedprotip.UsageError, match=r"fedprotip\[export\]"):
        export(predictor, tmp_path / "mine.onnx")


@pytest.mark.parametrize("target", ["", "nowhere/mine.onnx"])
def test_a_place_where_no_file_can_be_is_a_sentence(predictors, tmp_path, target):
    predictor, _ = predictors("fedavg")
    with pytest.raises(fedprotip.UsageError, match="name a file"):
        export(predictor, tmp_path / target)


@pytest.mark.parametrize("target", ["run/model.safetensors", "run/mine.onnx", "mine.safetensors", "mine"])
def test_no_other_file_is_written_over(predictors, tmp_path, target):
    predictor, _ = predictors("fedavg")
    (tmp_path / "run").mkdir()
    for name in ("manifest.json", "model.safetensors"):
        (tmp_path / "run" / name).write_text("kept")
    with pytest.raises(fedprotip.UsageError, match="no name for an ONNX file"):
        export(predictor, tmp_path / target)
    assert sorted(path.name for path in tmp_path.rglob("*.*")) == ["manifest.json", "model.safetensors"]
    assert (tmp_path / "run" / "model.safetensors").read_text() == "kept"
