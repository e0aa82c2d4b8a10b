"""Synthetic images: what is asked of them, against plain computations, and what comes out."""

import math
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedprotip.methods import create_method
from fedprotip.methods.lander import TextSynthesis
from fedprotip.methods.parts.distillation import distillation, earlier, soft_cross_entropy
from fedprotip.methods.parts.generator import Decoder, NormMatch, disagreement, endless
from fedprotip.methods.target import MetaSynthesis
from fedprotip.models.state import full_state
from tests.small import small
from tests.teachers import learned_site


@pytest.mark.parametrize(("shape", "doublings"), [((1, 8, 8), 2), ((3, 32, 32), 2), ((1, 7, 10), 2), ((3, 72, 66), 4)])
def test_a_decoder_makes_images_of_any_shape(shape, doublings):
    images = Decoder(5, shape, width=4, doublings=doublings)(torch.randn(3, 5))
    assert images.shape == (3, *shape)
    assert 0 <= images.min() < images.max() <= 1


def test_the_norm_loss_is_the_distance_of_statistics():
    torch.manual_seed(0)
    first, second = nn.BatchNorm2d(3), nn.BatchNorm1d(3)
    network = nn.Sequential(first, nn.AdaptiveAvgPool2d(1), nn.Flatten(), second).eval()
    for norm in (first, second):
        norm.running_mean, norm.running_var = torch.randn(3), torch.rand(3)
    match, x, y = NormMatch(network), torch.randn(6, 3, 4, 4), torch.randn(6, 3, 4, 4)

    def statistics(images):
        inside = first(images).mean((2, 3))
        return [images.mean((0, 2, 3)), images.var((0, 2, 3), unbiased=False), inside.mean(0), inside.var(0, False)]

    held = [first.running_mean, first.running_var, second.running_mean, second.running_var]
    expected = statistics(x)
    network(x)
    assert match.loss().item() == pytest.approx(sum((a - b).norm().item() for a, b in zip(held, expected, strict=True)))
    match.remember()
    blended = [0.9 * a + 0.1 * b for a, b in zip(expected, statistics(y), strict=True)]
    network(y)
    assert match.loss().item() == pytest.approx(sum((a - b).norm().item() for a, b in zip(held, blended, strict=True)))


def test_without_norms_there_is_no_norm_loss():
    network = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.BatchNorm1d(2, track_running_stats=False))
    match = NormMatch(network)
    network(torch.randn(4, 2))
    assert match.loss() == 0


def test_disagreement_counts_only_where_both_name_the_same_class():
    student, teacher = torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([[1.0, 0.5], [3.0, 0.0]])
    p = teacher[0].softmax(0)
    apart = (p * (p.log() - student[0].log_softmax(0))).sum()
    assert disagreement(student, teacher) == pytest.approx(apart.item() / 2)


def test_soft_cross_entropy_has_the_gradient_of_distillation_without_its_factor():
    teacher, student = torch.randn(5, 4), torch.randn(5, 4, requires_grad=True)
    (one,) = torch.autograd.grad(soft_cross_entropy(student, teacher, 2.0), student)
    (other,) = torch.autograd.grad(distillation(student, teacher, 2.0), student)
    torch.testing.assert_close(4 * one, other)
    assert soft_cross_entropy(teacher, teacher, 1.0) == pytest.approx(
        F.cross_entropy(teacher, teacher.softmax(1)).item()
    )


def test_endless_batches_see_every_image_of_a_pass():
    images = torch.arange(7)
    batches = endless(images, 3, torch.Generator().manual_seed(0))
    first = torch.cat([next(batches), next(batches)])
    assert len(set(first.tolist())) == 6
    assert sorted(next(endless(images, 20, torch.Generator())).tolist()) == images.tolist()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    return learned_site(tmp_path_factory.mktemp("target"), "target", generator_steps=40, noise=256, pool=150)


@pytest.fixture(scope="module")
def made(site):
    """The synthesis after it has run, the pool, its targets, and the norm loss after every round."""
    synthesis, losses = MetaSynthesis(site, site.method.options), []
    remember = synthesis.match.remember

    def noted():
        losses.append(synthesis.match.loss().item())
        remember()

    synthesis.match.remember = noted
    before = {name: tensor.clone() for name, tensor in full_state(site.network).items()}
    pool, targets = synthesis.run()
    return synthesis, pool, targets, losses, before


def test_the_teacher_sees_what_was_wanted(site, made):
    _, pool, targets, _, _ = made
    assert pool.dtype == torch.uint8
    assert pool.shape == (site.method.options.pool, 1, 8, 8)
    with torch.no_grad():
        said = earlier(site.network, site.network.embed(site.look.batch(pool)), 2)
    assert (said.argmax(1) == targets).float().mean() > 0.9


@pytest.mark.parametrize("against", [False, True])
def test_the_loss_of_images_is_the_published_sum(site, against):
    synthesis = MetaSynthesis(site, site.method.options)
    images, targets = torch.rand(6, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 4
    state = synthesis.chance.get_state()
    with torch.no_grad():
        found = synthesis._score(targets, against)(images)
        synthesis.chance.set_state(state)
        inputs = site.look.inputs(site.look.shaken(images, synthesis.chance))
        said, student = (
            torch.cat([head(network.embed(inputs)) for head in network.heads[:2]], 1)
            for network in (site.network, synthesis.student)
        )
        expected = 0.5 * F.cross_entropy(said, targets) + 10 * synthesis.match.loss()
        expected = expected - against * disagreement(student, said)
    torch.testing.assert_close(found, expected)


def course(synthesis, monkeypatch):
    """Of every round whether the student takes part; and the size of the pool in its lessons."""
    against, lessons = [], []
    monkeypatch.setattr(synthesis, "_score", lambda targets, against: against)
    monkeypatch.setattr(synthesis, "_teach", lambda pool: lessons.append(len(pool)))

    def make(targets, score):
        against.append(score)
        return torch.zeros(len(targets), 1, 8, 8)

    monkeypatch.setattr(synthesis, "make", make)
    synthesis.run()
    return against, lessons


def test_the_student_learns_and_takes_part_after_the_warm_up(site, monkeypatch):
    options = site.method.options.model_copy(update={"warmup": 2, "synthesis_rounds": 4, "synthesis_batch": 10})
    against, lessons = course(MetaSynthesis(site, options), monkeypatch)
    assert against == [False, False, True, True]
    assert lessons == [30, 40]


@pytest.mark.parametrize(("name", "enough"), [("target", 5), ("lode", 5), ("lander", 3)])
def test_a_run_whose_student_never_takes_part_says_so(name, enough):
    """And how many rounds would be enough; without L_adv it has no part to take."""

    def said(rounds, *more):
        chosen = small("method.warmup=4", f"method.synthesis_rounds={rounds}", *more, method={"name": name})
        return [sentence for sentence in create_method(chosen).cautions() if "against the student" in sentence]

    (sentence,) = said(enough - 1)
    assert f"choose method.synthesis_rounds of {enough} or more" in sentence
    assert not said(enough)
    assert not said(1, "method.adversarial=0")


def test_all_classes_are_there_those_of_the_oldest_task_too(made):
    counts = torch.bincount(made[2], minlength=4)
    assert counts.sum() == 150
    assert counts.min() > 20  # 37 or 38 are expected
    assert counts.max() < 60


def test_the_norm_loss_falls(made):
    losses = made[3]
    assert losses[-1] < 0.9 * losses[0]


def test_nothing_of_the_model_changes(site, made):
    before = made[4]
    after = full_state(site.network)
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert all(parameter.grad is None for parameter in made[0].teacher.parameters())


def test_the_student_learns_with_all_of_its_weights(site, made):
    student, new = made[0].student, MetaSynthesis(site, site.method.options).student
    for (name, moved), born in zip(student.named_parameters(), new.parameters(), strict=True):
        assert not torch.equal(moved, born), name
    assert len(student.heads) == 2


@pytest.mark.parametrize(("name", "kind"), [("target", MetaSynthesis), ("lander", TextSynthesis)])
def test_the_images_of_the_lowest_loss_are_kept(tmp_path, name, kind):
    course, shown = iter([3.0, 1.0, 2.0]), []
    here = learned_site(tmp_path, name, model="mlp", generator_steps=3)
    synthesis = kind(here, here.method.options)

    def score(images):
        shown.append(images.detach().clone())
        return images.sum() * 0.01 + next(course) - images.detach().sum() * 0.01

    kept = synthesis.make(synthesis.targets(), score)
    assert torch.equal(kept, shown[1])
    assert not torch.equal(kept, shown[2])


def test_a_lesson_is_steps_of_sgd_towards_what_the_teacher_says_of_shaken_images(site):
    """In training mode, with momentum, at a rate that falls by a cosine over 200 rounds."""
    options = site.method.options.model_copy(update={"student_steps": 1, "synthesis_batch": 6})
    synthesis, pool = MetaSynthesis(site, options), torch.randint(256, (6, 1, 8, 8), dtype=torch.uint8)
    student, state = deepcopy(synthesis.student).train().requires_grad_(True), synthesis.chance.get_state()
    rates = [0.005 * (1 + math.cos(math.pi * round_ / 200)) / 2 for round_ in range(3)]
    for rate in rates[:2]:
        assert synthesis._lessons.param_groups[0]["lr"] == pytest.approx(rate, rel=1e-9)
        synthesis._teach(pool)
        assert not any(parameter.requires_grad for parameter in synthesis.student.parameters())
        assert not synthesis.student.training
    assert synthesis._lessons.param_groups[0]["lr"] == pytest.approx(rates[2], rel=1e-9)
    synthesis.chance.set_state(state)
    optimizer = torch.optim.SGD(student.parameters(), 0.005, momentum=0.9, weight_decay=2e-4)
    for rate in rates[:2]:
        images = pool[torch.randperm(6, generator=synthesis.chance)] / 255
        inputs = site.look.inputs(site.look.shaken(images, synthesis.chance))
        with torch.no_grad():
            told = torch.cat([head(site.network.embed(inputs)) for head in site.network.heads[:2]], 1) / 20
        features = student.embed(inputs)
        said = torch.cat([head(features) for head in student.heads], 1) / 20
        loss = 400 * (told.softmax(1) * (told.log_softmax(1) - said.log_softmax(1))).sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
    for name, tensor in full_state(student).items():
        torch.testing.assert_close(full_state(synthesis.student)[name], tensor, atol=1e-5, rtol=1e-5)
