"""Tar+LODE: ρ = 0 is TARGET, ρ = t is the whole cross-entropy."""

import pytest
import torch
from torch.nn.functional import cross_entropy

import fedprotip
from fedprotip.errors import UsageError
from fedprotip.methods.lode import new_or_old
from tests.methods.test_target import settings
from tests.sites import Ends
from tests.small import quick


def test_without_rho_it_is_target(tmp_path, monkeypatch):
    quick(monkeypatch)
    found = {}
    for name, overrides in {"target": (), "lode": ("method.rho=0",), "other": ("method.rho=1",)}.items():
        folder = tmp_path / name
        fedprotip.run(settings(*overrides, name="target" if name == "target" else "lode"), out=folder)
        found[name] = (folder / "model.safetensors").read_bytes(), (folder / "pool.safetensors").read_bytes()
    assert found["target"] == found["lode"] != found["other"]


@pytest.mark.parametrize("task", [1, 2])
def test_with_rho_t_new_samples_have_the_whole_cross_entropy(tmp_path, task):
    ends = Ends(settings(f"method.rho={task}", name="lode"), tmp_path)
    site = ends.site(task=task)
    images, labels = ends.stream.train_batch(task, ends.stream.tasks[task].train[:16])
    found = site.method.learning(ends.local(0, site), site.network.embed(images), labels)
    torch.testing.assert_close(found, cross_entropy(site.network(images), labels))  # label n is output n here


def test_old_against_new_is_a_choice_of_two():
    old, new = torch.randn(3, 4), torch.randn(3, 2)
    share = torch.cat([old, new], 1).softmax(1)[:, 4:].sum(1)
    torch.testing.assert_close(new_or_old(old, new), -share.log().mean())


def test_domains_are_refused():
    domains = {"scenario": "domain", "domains": "rotate", "tasks": 2, "task_size": 0}
    with pytest.raises(UsageError, match="'lode'; it supports: class"):
        fedprotip.run(settings(name="lode", stream=domains))
