"""The path from features to labels, against plain loops over samples and classes."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedprotip.inference.answers import Inference, Way
from fedprotip.inference.calibration import Calibration
from fedprotip.inference.candidates import Candidates
from fedprotip.inference.experts import HEADS, STATISTICS, StatisticsExpert
from fedprotip.inference.routers import ClassEvidence
from fedprotip.inference.statistics import FeatureMap, Gaussians, Sums
from tests.inference.samples import CLASSES, Told, alone, by, features_of, filled, scores_of, seeds, told


@settings(max_examples=25)
@given(seeds)
def test_soft_statistics_give_the_posterior_with_equal_tasks(seed):
    """p(label) ∝ p(task) / C_t · N(a; μ, Σ), every task as likely as any other."""
    sums, features, _ = filled(seed)
    candidates = Candidates.of(CLASSES)
    expert = StatisticsExpert.of(sums, candidates, FeatureMap(4, 0, 0), pooled=False)
    ways = {"statistics": Way(ClassEvidence(candidates), STATISTICS, hard=False)}
    inference = Inference(candidates, {STATISTICS: expert}, ways, "statistics")
    labels, sure = alone(inference, inference.hear(features_of(features[:20])))
    density = Gaussians.of(sums).log_densities(features[:20]).double().exp().numpy()
    joint = density / np.array([2, 2, 3, 3, 3, 1])
    joint /= joint.sum(1, keepdims=True)
    best = joint.argmax(1)
    gap = np.sort(joint, 1)[:, -1] - np.sort(joint, 1)[:, -2]
    clear = gap > 1e-3
    assert (labels.numpy() == candidates.labels.numpy()[best])[clear].all()
    assert sure.numpy() == pytest.approx(joint.max(1), rel=1e-3, abs=1e-3)


@settings(max_examples=25)
@given(seeds, st.sampled_from([(0,), (0, 1), (2, 3, 4), (0, 1, 5)]), st.sampled_from([True, False]))
def test_classes_without_statistics_are_never_answered_and_nothing_is_nan(seed, unseen, hard):
    sums, features, _ = filled(seed, unseen=unseen)
    candidates = Candidates.of(CLASSES)
    expert = StatisticsExpert.of(sums, candidates, FeatureMap(4, 0, 0), pooled=True)
    way = Way(ClassEvidence(candidates), STATISTICS, hard)
    inference = Inference(candidates, {STATISTICS: expert}, {"statistics": way}, "statistics")
    heard = inference.hear(features_of(features))
    assert heard.evidence["statistics"].isfinite().all()
    answers, sure = alone(inference, heard)
    never = set(candidates.labels[list(unseen)].tolist())
    assert not never & set(answers.tolist())
    assert sure.isfinite().all()
    groups = list(torch.arange(len(features)).split(64))
    routed = inference.route(heard, "statistics", groups)
    assert not never & set(routed.labels.tolist())
    assert not routed.decisions.isnan().any()
    assert not any(value.isnan().any() for value in heard.strange.values())


def test_when_nobody_tells_about_any_class_probabilities_are_still_numbers():
    candidates = Candidates.of(CLASSES)
    expert = StatisticsExpert.of(Sums.zeros(6, 4), candidates, FeatureMap(4, 0, 0), pooled=True)
    way = Way(ClassEvidence(candidates), STATISTICS, hard=False)
    inference = Inference(candidates, {STATISTICS: expert}, {"statistics": way}, "statistics")
    heard = inference.hear(features_of(torch.randn(5, 4)))
    _, sure = alone(inference, heard)
    assert sure.isfinite().all()
    assert inference.aware(heard, torch.zeros(5, dtype=torch.int64)).tolist() == [-1] * 5  # no answer, and no guess


@settings(max_examples=25)
@given(seeds)
def test_a_hard_way_asks_the_best_task_alone_and_a_soft_one_all(seed):
    scores = {HEADS: scores_of(seed)}
    evidence = scores_of(seed + 1, width=3)
    candidates = Candidates.of(CLASSES)
    within = candidates.within_task(scores[HEADS]).numpy()
    firm, open_ = by(Way(Told(), HEADS)), by(Way(Told(), HEADS, hard=False))
    hard, sure = alone(firm, told(firm, scores, evidence))
    soft, _ = alone(open_, told(open_, scores, evidence))
    for sample in range(7):
        task = evidence[sample].argmax().item()
        own = np.where(candidates.tasks.numpy() == task, within[sample], -np.inf)
        assert hard[sample] == candidates.labels[int(own.argmax())]
        assert sure[sample].item() == pytest.approx(np.exp(own.max()))
        joint = within[sample] + evidence[sample].numpy()[candidates.tasks.numpy()]
        assert soft[sample] == candidates.labels[int(joint.argmax())]


def test_a_task_is_never_surer_than_sure():
    """Softmax over a few classes may add up to 1.0000001 in float32."""
    inference = by(Way(Told(), HEADS), ((0, 1, 2, 3, 4, 5, 6),))
    heard = told(inference, {HEADS: scores_of(0, 500, 7).float()}, torch.zeros(500, 1))
    routed = inference.route(heard, "told")
    by_label = inference.by_label(heard, routed)
    assert by_label.sum(1).max() > 1
    assert inference.tasks(by_label, routed).max() == 1


def test_a_label_of_several_tasks_collects_its_probability():
    """Label 1 has 0.3 + 0.3 in two tasks and beats label 0 with 0.4 in one."""
    tasks = torch.log(torch.tensor([[0.5, 0.5]]))
    classes = torch.log(torch.tensor([[0.8, 0.2, 0.6, 0.4]]))
    inference = by(Way(Told(), HEADS, hard=False), ((0, 1), (1, 2)))
    labels, sure = alone(inference, told(inference, {HEADS: classes}, tasks))
    assert labels.tolist() == [0]  # 0.4, and label 1 has 0.1 + 0.3
    assert sure.item() == pytest.approx(0.4)
    classes = torch.log(torch.tensor([[0.8, 0.2, 0.7, 0.3]]))
    inference = by(Way(Told(), HEADS, hard=False), ((0, 1), (1, 2)))
    labels, sure = alone(inference, told(inference, {HEADS: classes}, tasks))
    assert labels.tolist() == [1]
    assert sure.item() == pytest.approx(0.45)


@settings(max_examples=25)
@given(seeds, st.sampled_from([0.25, 4.0]))
def test_a_temperature_changes_how_sure_not_what(seed, temperature):
    way = Way(Told(), HEADS, hard=False)
    heard = told(by(way), {HEADS: scores_of(seed)}, scores_of(seed + 1, width=3))
    before, sure = alone(by(way), heard)
    after, other = alone(by(way, calibration=Calibration(temperature)), heard)
    assert before.tolist() == after.tolist()
    assert ((other > sure) if temperature < 1 else (other < sure)).all()


@settings(max_examples=25)
@given(seeds, st.integers(1, 7))
def test_a_group_adds_up_its_evidence(seed, size):
    scores, evidence = {HEADS: scores_of(seed)}, scores_of(seed + 1, width=3)
    groups = list(torch.tensor(np.random.default_rng(seed).permutation(7)).split(size))
    inference = by(Way(Told(), HEADS, hard=False))
    routed = inference.route(told(inference, scores, evidence), "told", groups)
    assert routed.samples.tolist() == torch.cat(groups).tolist()
    assert routed.groups.tolist() == [number for number, group in enumerate(groups) for _ in group]
    expected = [evidence[group].sum(0).tolist() for group in groups]
    assert routed.decisions.numpy() == pytest.approx(np.array(expected))


@settings(max_examples=25)
@given(seeds, st.sampled_from([True, False]))
def test_groups_of_one_are_single_samples(seed, hard):
    scores, evidence = {HEADS: scores_of(seed)}, scores_of(seed + 1, width=3)
    inference = by(Way(Told(), HEADS, hard))
    heard = told(inference, scores, evidence)
    one, other = (vars(inference.route(heard, "told", parts)) for parts in (None, torch.arange(7).split(1)))
    assert one.pop("expert") == other.pop("expert") == HEADS
    assert all(torch.equal(value, other[name]) for name, value in one.items())


@settings(max_examples=50)
@given(seeds, st.sampled_from([True, False]), st.sampled_from([CLASSES, ((0, 1), (1, 2), (1, 3))]), st.booleans())
def test_labels_found_quickly_are_those_of_the_whole_posterior(seed, hard, classes, withheld):
    """A task's best class is enough where it is hard or no label stands in two tasks; else all is summed."""
    inference = by(Way(Told(), HEADS, hard), classes)
    scores, tasks = scores_of(seed, width=len(inference.candidates)), scores_of(seed + 1, width=3)
    if withheld:  # classes that nobody tells about: one, and all of a task
        scores[:, [0, *range(2, 4)]] = -torch.inf
    if hard:
        tasks = torch.where(tasks == tasks.amax(1, keepdim=True), 0.0, -torch.inf)
    opinion, samples = told(inference, {HEADS: scores}, tasks).opinion(HEADS), torch.tensor([3, 3, 0, 6])
    joint = tasks[samples][:, inference.candidates.tasks] + opinion.classes[samples]
    expected = inference.candidates.known[0][inference.posterior(joint).argmax(1)]
    assert inference.labels(tasks, samples, opinion, samples, hard).tolist() == expected.tolist()


def test_unusual_samples_are_far_from_everything_and_of_low_energy():
    sums, features, _ = filled(0)
    candidates = Candidates.of(CLASSES)
    expert = StatisticsExpert.of(sums, candidates, FeatureMap(4, 0, 0), pooled=False)

    def heads(given):
        return torch.where(given.final.abs().amax(1, keepdim=True) < 50, torch.eye(6)[0] * 5, torch.zeros(6))

    inference = Inference(candidates, {HEADS: heads, STATISTICS: expert})
    found = inference.hear(features_of(torch.cat([features, torch.full((1, 4), 100.0)]))).strange
    assert found.keys() == {"odd", "new", "energy"}
    for name in ("odd", "energy"):
        assert found[name][-1] > found[name][:-1].max()
    assert found["odd"][:-1].mean().item() == pytest.approx(1.0, rel=0.1)
