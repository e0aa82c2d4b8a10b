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


def test_a_class_that_comes_again_is_not_pushed_down(tmp_path):
    """With overlap: old classes are those that the task does not have."""
    overlap = {"tasks": 2, "task_size": 4, "overlap": 1}
    ends = Ends(settings("method.rho=1", name="lode", stream=overlap), tmp_path)
    site = ends.site(task=1)
    assert site.network.labels == [(0, 1, 2, 3), (3, 4, 5, 6)]
    images, labels = ends.stream.train_batch(1, ends.stream.tasks[1].train[:16])
    found = site.method.learning(ends.local(0, site), site.network.embed(images), labels)
    known = site.network(images)[:, [0, 1, 2, 4, 5, 6, 7]]
    torch.testing.assert_close(found, cross_entropy(known, labels))


def test_where_all_classes_come_again_there_is_nothing_to_tell_apart():
    assert new_or_old(torch.zeros(3, 0), torch.randn(3, 2)) == 0


def test_old_against_new_is_a_choice_of_two():
    old, new = torch.randn(3, 4), torch.randn(3, 2)
    share = torch.cat([old, new], 1).softmax(1)[:, 4:].sum(1)
    torch.testing.assert_close(new_or_old(old, new), -share.log().mean())


def test_domains_are_refused():
    domains = {"scenario": "domain", "domains": "rotate", "tasks": 2, "task_size": 0}
    with pytest.raises(UsageError, match="'lode'; it supports: class"):
        fedprotip.run(settings(name="lode", stream=domains))
