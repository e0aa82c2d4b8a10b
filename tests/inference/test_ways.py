"""Experts, routers and ways, against plain loops over samples and classes."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedprotip.inference.calibration import Calibration
from fedprotip.inference.route import energies
from fedprotip.inference.statistics import FeatureMap, Gaussians, Sums
from fedprotip.inference.ways import (
    HEADS,
    STATISTICS,
    ClassEvidence,
    Columns,
    HeadExpert,
    Inference,
    LargestOutput,
    LinearExpert,
    RelevanceGaussians,
    Router,
    Seen,
    StatisticsExpert,
    Way,
)
from fedprotip.models import Network
from tests.subspace.reference import random_basis

seeds = st.integers(0, 5000)
CLASSES = ((3, 1), (0, 5, 4), (2,))
OVERLAP = ((0, 1), (1, 2), (2, 0))


def scores_of(seed, n=7, columns=6):
    return torch.tensor(np.random.default_rng(seed).standard_normal((n, columns)) * 3)


class Told(Router):
    """Evidence as it is given."""

    def evidence(self, seen):
        return seen.features


def by(way, classes=CLASSES, **fields):
    return Inference(Columns.of(classes), {}, {"told": way}, "told", **fields)


def test_columns_are_the_classes_of_every_task_one_after_another():
    columns = Columns.of(CLASSES)
    assert columns.labels.tolist() == [3, 1, 0, 5, 4, 2]
    assert columns.tasks.tolist() == [0, 0, 1, 1, 1, 2]


@settings(max_examples=25)
@given(seeds)
def test_scores_are_taken_together_by_task(seed):
    scores, columns = scores_of(seed), Columns.of(CLASSES)
    parts = [scores[:, :2].numpy(), scores[:, 2:5].numpy(), scores[:, 5:].numpy()]
    pooled = np.stack([np.log(np.exp(part).sum(1)) for part in parts], 1)
    assert columns.by_task(scores).numpy() == pytest.approx(pooled)
    assert columns.largest(scores).numpy() == pytest.approx(np.stack([part.max(1) for part in parts], 1))
    within = np.concatenate([np.exp(part) / np.exp(part).sum(1, keepdims=True) for part in parts], 1)
    assert columns.within_task(scores).exp().numpy() == pytest.approx(within)


def test_a_task_without_any_score_has_no_probability_and_no_nan():
    scores = scores_of(0)
    scores[:, 2:5] = -torch.inf
    scores[:, 0] = -torch.inf
    found = Columns.of(CLASSES).within_task(scores)
    assert not found.isnan().any()
    assert found.exp().tolist() == [[0.0, 1.0, 0.0, 0.0, 0.0, 1.0]] * 7


def test_labels_of_several_tasks_add_up():
    sums = Sums(torch.arange(1.0, 7).double(), torch.arange(12.0).view(6, 2).double(), torch.eye(2).double())
    found, rows = Columns.of(OVERLAP).by_label(sums)
    assert rows.tolist() == [0, 1, 1, 2, 2, 0]
    assert found.counts.tolist() == [7, 5, 9]
    assert found.sums.tolist() == [[10, 12], [6, 8], [14, 16]]
    assert torch.equal(found.moment, sums.moment)


# Experts


def test_heads_answer_in_the_order_of_columns_and_a_shared_head_for_every_task():
    features = torch.randn(4, 3)
    own, shared = Network(torch.nn.Linear(3, 3), 3, False), Network(torch.nn.Linear(3, 3), 3, True)
    for task, classes in enumerate(CLASSES):
        own.add_head(classes, 0, task)
        shared.add_head((0, 1), 0, task)
    found = HeadExpert(own, 3)(features)
    torch.testing.assert_close(found, torch.cat([head(features) for head in own.heads], 1))
    torch.testing.assert_close(HeadExpert(shared, 2)(features), shared.heads[0](features).repeat(1, 2))


def test_a_linear_expert_sees_mapped_features():
    features, change = torch.randn(4, 3), FeatureMap(3, 10, 0)
    weights, bias = torch.randn(6, 10), torch.randn(6)
    torch.testing.assert_close(LinearExpert(weights, bias, change)(features), change(features) @ weights.T + bias)


def filled(seed, d=4, unseen=()):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 6, 200)
    labels = labels[~np.isin(labels, unseen)]
    features = torch.tensor(3 * rng.standard_normal((6, d))[labels] + rng.standard_normal((len(labels), d))).float()
    sums = Sums.zeros(6, d)
    sums.add(features, torch.tensor(labels))
    return sums, features, labels


@settings(max_examples=25)
@given(seeds)
def test_soft_statistics_give_the_posterior_with_equal_tasks(seed):
    """p(label) ∝ p(task) / C_t · N(a; μ, Σ), every task as likely as any other."""
    sums, features, _ = filled(seed)
    columns = Columns.of(CLASSES)
    expert = StatisticsExpert.of(sums, columns, FeatureMap(4, 0, 0), pooled=False)
    ways = {"statistics": Way(ClassEvidence(columns), STATISTICS, hard=False)}
    inference = Inference(columns, {STATISTICS: expert}, ways, "statistics")
    seen = inference.see(features[:20])
    evidence = {"statistics": ways["statistics"].router.evidence(seen)}
    labels, sure = inference.single(evidence, seen.scores)
    density = Gaussians.of(sums).log_densities(features[:20]).double().exp().numpy()
    joint = density / np.array([2, 2, 3, 3, 3, 1])
    joint /= joint.sum(1, keepdims=True)
    best = joint.argmax(1)
    gap = np.sort(joint, 1)[:, -1] - np.sort(joint, 1)[:, -2]
    clear = gap > 1e-3
    assert (labels.numpy() == columns.labels.numpy()[best])[clear].all()
    assert sure.numpy() == pytest.approx(joint.max(1), rel=1e-3, abs=1e-3)


@settings(max_examples=25)
@given(seeds, st.sampled_from([(0,), (0, 1), (2, 3, 4), (0, 1, 5)]), st.sampled_from([True, False]))
def test_classes_without_statistics_are_never_answered_and_nothing_is_nan(seed, unseen, hard):
    sums, features, _ = filled(seed, unseen=unseen)
    columns = Columns.of(CLASSES)
    expert = StatisticsExpert.of(sums, columns, FeatureMap(4, 0, 0), pooled=True)
    way = Way(ClassEvidence(columns), STATISTICS, hard)
    inference = Inference(columns, {STATISTICS: expert}, {"statistics": way}, "statistics")
    seen = inference.see(features)
    evidence = way.router.evidence(seen)
    assert evidence.isfinite().all()
    answers, sure = inference.single({"statistics": evidence}, seen.scores)
    never = set(columns.labels[list(unseen)].tolist())
    assert not never & set(answers.tolist())
    assert sure.isfinite().all()
    groups = list(torch.arange(len(features)).split(64))
    routed = inference.route(way, evidence, inference.opinions(seen.scores)[STATISTICS], groups)
    assert not never & set(routed.labels.tolist())
    assert not routed.decisions.isnan().any()
    assert not any(value.isnan().any() for value in inference.unusual(seen.scores).values())


def test_when_nobody_tells_about_any_class_probabilities_are_still_numbers():
    columns = Columns.of(CLASSES)
    expert = StatisticsExpert.of(Sums.zeros(6, 4), columns, FeatureMap(4, 0, 0), pooled=True)
    way = Way(ClassEvidence(columns), STATISTICS, hard=False)
    inference = Inference(columns, {STATISTICS: expert}, {"statistics": way}, "statistics")
    seen = inference.see(torch.randn(5, 4))
    _, sure = inference.single({"statistics": way.router.evidence(seen)}, seen.scores)
    assert sure.isfinite().all()


# Routers


@settings(max_examples=25)
@given(seeds)
def test_the_evidence_of_classes_is_their_mean_density(seed):
    scores = scores_of(seed)
    found = ClassEvidence(Columns.of(CLASSES)).evidence(Seen(torch.zeros(7, 1), {STATISTICS: scores}))
    parts = [scores[:, :2], scores[:, 2:5], scores[:, 5:]]
    assert found.exp().numpy() == pytest.approx(np.stack([part.exp().mean(1).numpy() for part in parts], 1))


@settings(max_examples=25)
@given(seeds)
def test_the_largest_output_decides(seed):
    scores, columns = scores_of(seed), Columns.of(CLASSES)
    way = Way(LargestOutput(columns, HEADS), HEADS)
    evidence = way.router.evidence(Seen(torch.zeros(7, 1), {HEADS: scores}))
    answers, _ = by(way).single({"told": evidence}, {HEADS: scores})
    assert answers.tolist() == columns.labels[scores.argmax(1)].tolist()


def test_relevance_gaussians_are_log_normal_densities():
    """Energies drawn from log-normals with the given means and variances score highest where they come from."""
    rng = np.random.default_rng(0)
    bases = [torch.tensor(random_basis(rng, 6, 2)).float() for _ in range(3)]
    means = torch.tensor(rng.uniform(0.5, 4, (3, 3)))
    variances = torch.tensor(rng.uniform(0.1, 2, (3, 3)))
    features = torch.tensor(rng.standard_normal((9, 6))).float()
    found = RelevanceGaussians(bases, means, variances).evidence(Seen(features, {}))
    logs = energies(features, bases).double().log().numpy()
    for task in range(3):
        spread = np.log1p(variances[task].numpy() / means[task].numpy() ** 2)
        centre = np.log(means[task].numpy()) - spread / 2
        expected = (-0.5 * (logs - centre) ** 2 / spread - 0.5 * np.log(spread)).sum(1)
        assert found[:, task].numpy() == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_an_energy_of_zero_is_no_reason_for_infinity():
    router = RelevanceGaussians([torch.eye(4, 1)] * 2, torch.tensor([[1.0, 0.0], [0.0, 0.0]]), torch.zeros(2, 2))
    assert router.evidence(Seen(torch.zeros(3, 4), {})).isfinite().all()


# Ways


@settings(max_examples=25)
@given(seeds)
def test_a_hard_way_asks_the_best_task_alone_and_a_soft_one_all(seed):
    scores = {HEADS: scores_of(seed)}
    evidence = scores_of(seed + 1, columns=3)
    columns = Columns.of(CLASSES)
    within = columns.within_task(scores[HEADS]).numpy()
    hard, sure = by(Way(Told(), HEADS)).single({"told": evidence}, scores)
    soft, _ = by(Way(Told(), HEADS, hard=False)).single({"told": evidence}, scores)
    for sample in range(7):
        task = evidence[sample].argmax().item()
        own = np.where(columns.tasks.numpy() == task, within[sample], -np.inf)
        assert hard[sample] == columns.labels[int(own.argmax())]
        assert sure[sample].item() == pytest.approx(np.exp(own.max()))
        joint = within[sample] + evidence[sample].numpy()[columns.tasks.numpy()]
        assert soft[sample] == columns.labels[int(joint.argmax())]


def test_a_label_of_several_tasks_collects_its_probability():
    """Label 1 has 0.3 + 0.3 in two tasks and beats label 0 with 0.4 in one."""
    tasks = torch.log(torch.tensor([[0.5, 0.5]]))
    classes = torch.log(torch.tensor([[0.8, 0.2, 0.6, 0.4]]))
    answers, sure = by(Way(Told(), HEADS), ((0, 1), (1, 2))).answer(tasks, classes)
    assert answers.tolist() == [0]  # 0.4, and label 1 has 0.1 + 0.3
    assert sure.item() == pytest.approx(0.4)
    classes = torch.log(torch.tensor([[0.8, 0.2, 0.7, 0.3]]))
    answers, sure = by(Way(Told(), HEADS), ((0, 1), (1, 2))).answer(tasks, classes)
    assert answers.tolist() == [1]
    assert sure.item() == pytest.approx(0.45)


@settings(max_examples=25)
@given(seeds, st.sampled_from([0.25, 4.0]))
def test_a_temperature_changes_how_sure_not_what(seed, temperature):
    scores, evidence = {HEADS: scores_of(seed)}, {"told": scores_of(seed + 1, columns=3)}
    way = Way(Told(), HEADS, hard=False)
    before, sure = by(way).single(evidence, scores)
    after, other = by(way, calibration=Calibration(temperature)).single(evidence, scores)
    assert before.tolist() == after.tolist()
    assert ((other > sure) if temperature < 1 else (other < sure)).all()


@settings(max_examples=25)
@given(seeds, st.integers(1, 7))
def test_a_group_adds_up_its_evidence(seed, size):
    scores, evidence = {HEADS: scores_of(seed)}, scores_of(seed + 1, columns=3)
    groups = list(torch.tensor(np.random.default_rng(seed).permutation(7)).split(size))
    inference = by(Way(Told(), HEADS, hard=False))
    routed = inference.route(inference.ways["told"], evidence, inference.opinions(scores)[HEADS], groups)
    assert routed.samples.tolist() == torch.cat(groups).tolist()
    assert routed.groups.tolist() == [number for number, group in enumerate(groups) for _ in group]
    expected = [evidence[group].sum(0).tolist() for group in groups]
    assert routed.decisions.numpy() == pytest.approx(np.array(expected))


@settings(max_examples=25)
@given(seeds, st.sampled_from([True, False]))
def test_groups_of_one_are_single_samples(seed, hard):
    scores, evidence = {HEADS: scores_of(seed)}, scores_of(seed + 1, columns=3)
    inference = by(Way(Told(), HEADS, hard))
    way = inference.ways["told"]
    opinion = inference.opinions(scores)[HEADS]
    alone, groups = (inference.route(way, evidence, opinion, parts) for parts in (None, torch.arange(7).split(1)))
    assert all(torch.equal(value, vars(groups)[name]) for name, value in vars(alone).items())
    assert torch.equal(alone.labels, inference.single({"told": evidence}, scores)[0])


@settings(max_examples=50)
@given(seeds, st.sampled_from([True, False]), st.sampled_from([CLASSES, ((0, 1), (1, 2), (1, 3))]), st.booleans())
def test_labels_found_quickly_are_those_of_the_whole_posterior(seed, hard, classes, withheld):
    """A task's best class is enough where it is hard or no label stands in two tasks; else all is summed."""
    inference = by(Way(Told(), HEADS, hard), classes)
    scores, tasks = scores_of(seed, columns=len(inference.columns.labels)), scores_of(seed + 1, columns=3)
    if withheld:  # classes that nobody tells about: one, and all of a task
        scores[:, [0, *range(2, 4)]] = -torch.inf
    if hard:
        tasks = torch.where(tasks == tasks.amax(1, keepdim=True), 0.0, -torch.inf)
    opinion, samples = inference.opinions({HEADS: scores})[HEADS], torch.tensor([3, 3, 0, 6])
    expected, _ = inference.answer(tasks[samples], opinion.classes[samples])
    assert inference.labels(tasks, samples, opinion, samples, hard).tolist() == expected.tolist()


def test_unusual_samples_are_far_from_every_class_and_of_low_energy():
    sums, features, labels = filled(0)
    expert = StatisticsExpert.of(sums, Columns.of(CLASSES), FeatureMap(4, 0, 0), pooled=False)
    far = torch.full((1, 4), 100.0)
    scores = {STATISTICS: expert(torch.cat([features, far])), HEADS: torch.zeros(len(labels) + 1, 6)}
    scores[HEADS][:-1, 0] = 5.0
    found = by(Way(Told(), HEADS)).unusual(scores)
    assert found.keys() == {"mahalanobis", "energy"}
    for value in found.values():
        assert value[-1] > value[:-1].max()
    assert found["mahalanobis"][:-1].mean().item() == pytest.approx(4.0, rel=0.3)  # d of them, less by the choice
