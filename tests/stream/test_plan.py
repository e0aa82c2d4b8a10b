"""The plan of a run: what is written is what is read, and images look as they did in training."""

import json

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from fedprotip.settings import load
from fedprotip.stream import build_stream
from fedprotip.stream.plan import Answering, Plan, WayPlan
from tests.stream.samples import made_dataset

ANSWERING = Answering(
    experts={"heads": {}, "ridge": {"strength": 0.1, "features": 0, "seed": 3, "pooled": True}},
    ways={"w": WayPlan(router="cosine", expert="heads", options={"voters": 2})},
    chosen="w",
)


def planned(tasks=2, shared=False, **sections):
    settings = load({"stream": {"tasks": 3}, "model": {"weights": "there.pth", "width": 7}} | sections)
    stream = build_stream(settings, made_dataset((7, 5, 3, 6, 4, 9), (7, 5, 3, 6, 4, 9)))
    return stream, stream.plan(ANSWERING, shared, tasks)


def test_a_plan_is_read_back_as_it_was_written():
    _, plan = planned()
    read = Plan.model_validate_json(plan.model_dump_json())
    assert read == plan
    assert list(read.answering.experts) == ["heads", "ridge"]
    assert isinstance(read.answering.experts["ridge"]["features"], int)
    assert read.answering.experts["ridge"]["pooled"] is True


def test_it_names_classes_and_tasks_so_far_and_what_rebuilds_the_backbone():
    stream, plan = planned()
    assert plan.classes == tuple(stream.dataset.classes)
    assert [task.classes for task in plan.tasks] == [(0, 1), (2, 3)]
    assert [task.name for task in plan.tasks] == [task.name for task in stream.tasks[:2]]
    assert (plan.model.width, plan.model.weights, plan.model.head) == (7, "", "per_task")
    assert planned(shared=True)[1].model.head == "shared"


@pytest.mark.parametrize("normalize", ["dataset", "half", "none"])
@pytest.mark.parametrize("size", [None, (7, 7), (5, 9)])
def test_images_look_to_the_model_as_in_training(normalize, size):
    settings = load({"stream": {"tasks": 3}, "data": {"normalize": normalize}})
    dataset = made_dataset((7, 5, 3, 6, 4, 9), (7, 5, 3, 6, 4, 9))
    object.__setattr__(dataset, "size", size)
    stream = build_stream(settings, dataset)
    plan = Plan.model_validate_json(stream.plan(Answering(), False, 3).model_dump_json())
    expected, _ = stream.test_batch(0, np.array([0, 1]))
    seen = plan.pixels.normalised(dataset.test_images[:2].float() / 255)
    assert torch.equal(seen, expected)
    assert seen.shape[1:] == plan.pixels.shape == dataset.image_shape
    assert plan.pixels.given == tuple(dataset.test_images.shape[1:])


@pytest.mark.parametrize(
    "damage", [{"wings": 2}, {"seed": "0"}, {"tasks": [{"name": "a"}]}, {"answering": {"ways": {"w": {}}}}]
)
def test_a_damaged_plan_is_refused(damage):
    raw = planned()[1].model_dump(mode="json") | damage
    with pytest.raises(ValidationError):
        Plan.model_validate_json(json.dumps(raw))


@pytest.mark.parametrize(
    ("answering", "reason"),
    [
        ({"experts": {}}, "there is no expert"),
        ({"chosen": "fused"}, "none of the ways"),
        ({"ways": {"fused": {"router": "r", "expert": "heads"}}}, "none of the ways"),
        ({"ways": {"w": {"router": "r", "expert": "wings"}}, "chosen": "w"}, "names the expert 'wings'"),
    ],
)
def test_answers_that_cannot_be_put_together_are_refused(answering, reason):
    with pytest.raises(ValidationError, match=reason):
        Answering.model_validate(answering)


def test_normalised_images_can_be_scaled_back():
    _, plan = planned()
    images = torch.rand(3, *plan.pixels.shape, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(plan.pixels.scaled(plan.pixels.normalised(images)), images, atol=1e-6)
    assert plan.pixels.scaled(plan.pixels.normalised(images) + 99).max() == 1
