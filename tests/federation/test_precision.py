"""Faster arithmetic by setting: what it may change, and what it must not."""

import pytest
import torch

import fedprotip
from fedprotip.models.steps import Hidden, channels_last

BASE = {
    "stream": {"tasks": 2, "task_size": 2},
    "clients": {"count": 2},
    "model": {"name": "small_cnn", "width": 16, "depth": 2, "norm": "frozen"},
    "train": {"rounds": 3, "epochs": 2, "lr": 0.1, "batch": 16},
    "method": {"name": "fedprotip", "rank_rule": "energy", "threshold": 0.9},
    "run": {"geometry": 0, "threads": 1},
}


def accuracy(tmp_path, *overrides):
    name = "-".join(overrides).replace("=", "_") or "plain"
    return fedprotip.run(BASE, overrides, out=tmp_path / name)


def test_channels_last_changes_the_memory_and_not_the_values():
    images = torch.randn(2, 3, 4, 5)
    for found in (channels_last(images), channels_last(Hidden(images, 2)).values):
        assert torch.equal(found, images)
        assert found.is_contiguous(memory_format=torch.channels_last)
    assert channels_last(Hidden(images, 2)).steps == 2
    flat = torch.randn(2, 3)
    assert channels_last(flat) is flat


def test_channels_last_gives_the_same_result_but_for_rounding(tmp_path):
    plain, changed = accuracy(tmp_path), accuracy(tmp_path, "train.channels_last=true")
    assert changed["accuracy"]["aware"] == pytest.approx(plain["accuracy"]["aware"], abs=2)


def test_autocast_trains_in_bf16_and_keeps_updates_outside_the_bases(tmp_path):
    plain, changed = accuracy(tmp_path), accuracy(tmp_path, "train.autocast=bf16")
    assert changed["accuracy"]["aware"] == pytest.approx(plain["accuracy"]["aware"], abs=5)
    assert changed["forgetting"]["aware"] < 5


def test_autocast_reaches_the_layers(monkeypatch, tmp_path):
    seen = set()
    forward = torch.nn.Linear.forward

    def watched(self, inputs):
        output = forward(self, inputs)
        seen.add(output.dtype)
        return output

    monkeypatch.setattr(torch.nn.Linear, "forward", watched)
    accuracy(tmp_path, "train.autocast=bf16", "stream.tasks=1")
    assert torch.bfloat16 in seen
