"""TARGET: the loss of clients, the pool on its way, and the generator from task to task."""

import json

import pytest
import torch
from torch.nn.functional import cross_entropy

import fedprotip
from fedprotip.methods.parts import pool
from fedprotip.methods.target import MetaSynthesis
from tests.sites import Ends
from tests.small import quick, small, tensors
from tests.teachers import SMALL, learned_site

QUICK = SMALL | {"synthesis_batch": 8, "synthesis_rounds": 3, "generator_steps": 2, "student_steps": 2, "pool": 20}


def settings(*overrides, name="target", **sections):
    return small(*overrides, method={"name": name, **QUICK}, **sections)


def same_gradients(found, expected, network):
    """By what may move: two losses may have the same value and teach something else."""
    moving = [network.get_parameter(name) for name in network.moving]
    for one, other in zip(*(torch.autograd.grad(loss, moving) for loss in (found, expected)), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_the_loss_is_cross_entropy_and_distillation_on_the_pool(tmp_path):
    ends = Ends(settings("train.augment=none"), tmp_path)
    made = torch.randint(256, (20, 1, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    ends.site(task=1)
    site = ends.site({"pool/images": made}, task=2)
    local = ends.local(0, site)
    before = site.before()
    with torch.no_grad():  # as after some steps
        for parameter in site.network.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    images, labels = ends.stream.train_batch(2, ends.stream.tasks[2].train[:8])
    site.method.begin_round(local)
    found = site.method.loss(local, images, labels)
    batch = made[torch.randperm(20, generator=local.chance("pool"))[:16]]
    synthetic = (batch / 255 - 0.305) / 0.376
    new = cross_entropy(site.network(images)[:, 4:], labels - 4)
    told, said = before(synthetic)[:, :4] / 2, site.network(synthetic)[:, :4] / 2
    kept = -(told.softmax(1) * said.log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(found, new + 25 * kept)
    same_gradients(found, new + 25 * kept, site.network)
    assert all(parameter.grad is None for parameter in before.parameters())


def test_with_a_shared_head_all_outputs_are_kept(tmp_path):
    domains = {"scenario": "domain", "domains": "rotate", "tasks": 2, "task_size": 0}
    ends = Ends(settings(stream=domains), tmp_path)
    ends.site()
    site = ends.site({"pool/images": torch.zeros(16, 1, 8, 8, dtype=torch.uint8)}, task=1)
    local = ends.local(0, site)
    site.method.begin_round(local)
    said = site.network(site.look.batch(torch.zeros(16, 1, 8, 8, dtype=torch.uint8)))
    assert said.shape[1] == 10
    expected = -((said / 2).softmax(1) * (said / 2).log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(site.method.keeping(local), expected)


def test_a_frozen_part_runs_once_for_both_models(tmp_path):
    frozen = {"name": "small_cnn", "width": 8, "freeze": "layer1"}
    ends = Ends(settings(model=frozen), tmp_path)
    ends.site()
    made = torch.randint(256, (16, 1, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    site = ends.site({"pool/images": made}, task=1)
    passed = next(pool.synthetic(ends.local(0, site), 16))
    assert passed.steps > 0
    order = torch.randperm(16, generator=ends.local(0, site).chance("pool"))
    torch.testing.assert_close(site.network.embed(passed), site.network.embed(site.look.batch(made[order])))


def test_a_run_keeps_the_newest_pool_and_counts_what_was_sent(tmp_path, monkeypatch):
    quick(monkeypatch)
    fedprotip.run(settings(), out=tmp_path / "r")
    kept = tensors(tmp_path / "r", "pool")["images"]
    assert kept.dtype == torch.uint8
    assert kept.shape == (20, 1, 8, 8)
    lines = [json.loads(line) for line in (tmp_path / "r" / "ledger.jsonl").read_text().splitlines()]
    sent = [(line["task"], line["bytes"]) for line in lines if line["kind"] == "pool"]
    assert sorted(sent) == [(task, 20 * 64) for task in (1, 2) for _ in range(3)]
    events = [json.loads(line) for line in (tmp_path / "r" / "events.jsonl").read_text().splitlines()]
    assert [event["samples"] for event in events if event["event"] == "task"] == [{}, *[{"synthetic": 20}] * 2]


@pytest.mark.parametrize("meta", ["fomaml", "reptile"])
def test_the_generator_follows_its_copies_and_may_be_reused(tmp_path, meta):
    site = learned_site(tmp_path, "target", model="mlp", meta=meta, reuse=True, generator_steps=3)
    synthesis = MetaSynthesis(site, site.method.options)
    born = torch.nn.utils.parameters_to_vector(synthesis.generator.parameters()).detach().clone()
    synthesis.run()
    left = site.known["generator/state"]
    assert not torch.equal(born, left)
    assert torch.equal(born, torch.nn.utils.parameters_to_vector(fresh(site, reuse=False).generator.parameters()))
    assert torch.equal(left, torch.nn.utils.parameters_to_vector(fresh(site, reuse=True).generator.parameters()))


def fresh(site, reuse):
    return MetaSynthesis(site, site.method.options.model_copy(update={"reuse": reuse}))


def test_reptile_goes_towards_the_copy(tmp_path, monkeypatch):
    """Adam's first step has the sign of the gradient: 67·(θ − θ_copy)."""
    site = learned_site(tmp_path, "target", model="mlp", meta="reptile", generator_steps=1)
    synthesis = MetaSynthesis(site, site.method.options)
    born = torch.nn.utils.parameters_to_vector(synthesis.generator.parameters()).detach().clone()
    copies = []
    original = torch.optim.Adam

    def noted(groups, *arguments, **named):
        copies.append(groups[0]["params"])
        return original(groups, *arguments, **named)

    monkeypatch.setattr(torch.optim, "Adam", noted)
    targets = synthesis.targets()
    synthesis.make(targets, synthesis._score(targets, against=False))
    moved = torch.nn.utils.parameters_to_vector(synthesis.generator.parameters()).detach() - born
    copied = torch.nn.utils.parameters_to_vector(copies[0]).detach() - born
    assert copied.abs().max() > 0
    assert (moved.sign() == copied.sign()).float().mean() > 0.99


def test_a_transformer_gets_small_images(tmp_path):
    large = small(method={"name": "target", **QUICK}, model={"name": "vit", "width": 8}, data={"size": 48})
    synthesis = MetaSynthesis(Ends(large, tmp_path).site(task=1), large.method)
    assert synthesis.shape == (1, 32, 32)
    assert synthesis.look.inputs(torch.zeros(2, *synthesis.shape)).shape == (2, 1, 48, 48)
