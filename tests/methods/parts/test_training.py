"""Local batches and optimisers."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fedprotip.errors import UsageError
from fedprotip.messages import Message
from fedprotip.methods.parts.training import UNIT, Training, build_optimizer, local_batches
from fedprotip.settings import TrainSettings, load


def batches(n, **train):
    return list(local_batches(np.arange(n) + 100, TrainSettings(**train), np.random.default_rng(0)))


def test_epochs_pass_over_every_sample():
    found = batches(10, batch=4, epochs=3)
    assert [len(b) for b in found] == [4, 4, 2] * 3
    for epoch in range(3):
        assert sorted(np.concatenate(found[3 * epoch : 3 * epoch + 3])) == list(range(100, 110))
    assert not np.array_equal(found[0], found[3])


@pytest.mark.parametrize(("n", "sizes"), [(1, [1]), (4, [4]), (5, [5]), (9, [4, 5]), (6, [4, 2])])
def test_a_single_sample_left_over_joins_the_batch_before(n, sizes):
    assert [len(b) for b in batches(n, batch=4, epochs=1)] == sizes


@pytest.mark.parametrize("steps", [1, 5, 40])
def test_a_number_of_steps_overrides_epochs(steps):
    assert len(batches(10, batch=4, epochs=2, steps=steps)) == steps


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam", "RAdam", "Adadelta", "ASGD"])
def test_any_optimiser_of_torch_trains(name):
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = build_optimizer(TrainSettings(optimizer=name), [parameter])
    parameter.grad = torch.ones(3)
    optimizer.step()
    assert (parameter < 1).all()


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ({"optimizer": "Adamm"}, "did you mean 'Adam'"),
        ({"optimizer": "LBFGS"}, "unknown"),
        ({"optimizer": "Optimizer"}, "unknown"),
        ({"optimizer": "Adam", "momentum": 0.9}, "Adam has none"),
        ({"optimizer_options": {"nesterov": True}}, "(?i)nesterov"),
        ({"optimizer_options": {"nonsense": 1}}, "nonsense"),
    ],
)
def test_impossible_optimisers_are_refused(train, words):
    with pytest.raises(UsageError, match=words):
        build_optimizer(TrainSettings(**train), [torch.nn.Parameter(torch.ones(1))])


def test_options_reach_the_optimiser():
    train = TrainSettings(optimizer="Adam", optimizer_options={"betas": [0.5, 0.9]}, lr=0.1, weight_decay=0.3)
    optimizer = build_optimizer(train, [torch.nn.Parameter(torch.ones(1))])
    assert optimizer.defaults["betas"] == (0.5, 0.9)
    assert optimizer.defaults["lr"] == 0.1
    assert optimizer.defaults["weight_decay"] == 0.3


@pytest.mark.parametrize(("average", "expected"), [("weighted", 7 / UNIT), ("uniform", 1.0)])
def test_a_model_weighs_its_samples_unless_all_weigh_the_same(average, expected):
    site = SimpleNamespace(settings=load({"train": {"average": average}}), most=math.inf)
    assert Training().weight(Message("model", meta={"samples": 7, "loss": 0.5}), site) == expected
