"""All modes in one pass, against plain loops over single samples."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st
from torch import nn

from fedprotip.evaluation.evaluate import Evaluation, evaluate, hear
from fedprotip.evaluation.portions import draw_groups
from fedprotip.evaluation.sweeps import SIZES
from fedprotip.inference import Router
from fedprotip.inference.answers import Inference, Way
from fedprotip.inference.candidates import Candidates
from fedprotip.inference.experts import HEADS, HeadExpert
from fedprotip.inference.predictor import Predictor
from fedprotip.inference.route import CosineRouter
from fedprotip.inference.routers import Vote
from fedprotip.models import Network
from fedprotip.settings import load
from fedprotip.stream import build_stream
from fedprotip.stream.plan import Answering
from tests.stream.samples import made_dataset
from tests.subspace.reference import random_basis

WIDTH = 6


class Fixed(Router):
    """Routes as it is told: every decision is the same task."""

    def __init__(self, task, tasks):
        self.scores = torch.eye(tasks)[task]

    def evidence(self, seen):
        return self.scores.expand(len(seen.features), -1)


def told(network, stream, router, seen):
    """Answers by the heads, with this router; without one the task is never predicted."""
    ways = {"told": Way(router, HEADS)} if router else {}
    candidates = Candidates.of([task.classes for task in stream.tasks[: seen + 1]])
    inference = Inference(candidates, {HEADS: HeadExpert(network, seen + 1)}, ways, "told")
    return Predictor(network, inference, stream.plan(Answering(), network.shared_head, seen + 1))


def by_cosine(network, stream, seed, seen):
    return told(network, stream, Vote(random_router(seed, seen + 1)), seen)


def world(seed=0, counts=(7, 5, 3, 6, 4, 9), group=4, draws=3, batch=5, shared=False, **stream):
    """Settings, a stream of random images and a random network with all its heads."""
    raw = {
        "stream": {"tasks": 3} | stream,
        "evaluate": {"group": group, "draws": draws, "batch": batch},
        "run": {"seed": seed},
    }
    settings = load(raw)
    found = build_stream(settings, made_dataset(counts, counts))
    torch.manual_seed(seed)
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(16, WIDTH), nn.ReLU(), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5))
    network = Network(backbone, WIDTH, shared)
    for task in found.tasks:
        network.add_head(task.classes, seed, task.index)
    return settings, found, network


def random_router(seed, tasks, clients=3):
    rng = np.random.default_rng(seed)
    bases = [torch.tensor(random_basis(rng, WIDTH, int(rng.integers(1, 3)))).float() for _ in range(tasks)]
    return CosineRouter(bases, torch.tensor(rng.uniform(0, 1, (clients, tasks, tasks))).float())


def plain(network, stream, router, settings, seen):
    """Every mode by a loop over single samples."""
    network.eval()
    modes = {mode: [] for mode in ("aware", "agnostic", "single", "batch64")}
    routing, confusion = {"single": [], "batch64": []}, {"single": [], "batch64": []}
    for task in range(seen + 1):
        samples = []
        for index in stream.tasks[task].test:
            image, label = stream.test_batch(task, np.array([index]))
            with torch.no_grad():
                feature = network.backbone(image)
                logits = [head(feature)[0].tolist() for head in network.heads]
            by_head = [network.labels[h][int(np.argmax(z))] for h, z in enumerate(logits)]
            _, best = max((max(z), h) for h, z in enumerate(logits))
            samples.append((int(label), by_head, by_head[best], feature))
        modes["aware"].append(np.mean([by_head[network.head_of(task)] == y for y, by_head, _, _ in samples]))
        modes["agnostic"].append(np.mean([said == y for y, _, said, _ in samples]))
        groups = {"single": [[i] for i in range(len(samples))]}
        groups["batch64"] = [group.tolist() for group in draw_groups(task, len(samples), settings)]
        for mode, members in groups.items():
            right, routed, counts = [], [], [0] * (seen + 1)
            for group in members:
                energy = [
                    np.sqrt(np.mean([(samples[i][3] @ basis).square().sum().item() for i in group]))
                    for basis in router.bases
                ]
                decision = int(router.route(torch.tensor([energy]).float()))
                counts[decision] += 1
                for i in group:
                    label, by_head = samples[i][:2]
                    right.append(by_head[network.head_of(decision)] == label)
                    holds = label in stream.tasks[decision].classes
                    routed.append(holds if settings.stream.scenario == "class" else decision == task)
            modes[mode].append(np.mean(right))
            routing[mode].append(np.mean(routed))
            confusion[mode].append(counts)
    return {mode: [100 * value for value in values] for mode, values in modes.items()}, routing, confusion


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "stream",
    [
        {},
        {"overlap": 1, "task_size": 2},
        {"tasks": 1},
        {"scenario": "domain", "domains": "permute"},
        {"scenario": "domain", "domains": "rotate", "shared": True},
    ],
    ids=repr,
)
def test_all_modes_are_those_of_a_plain_loop(seed, stream):
    settings, found, network = world(seed, **stream)
    seen = len(found.tasks) - 1
    router = random_router(seed, seen + 1)
    network.train()
    result = evaluate(told(network, found, Vote(router), seen), found, seen, settings)
    accuracy, routing, confusion = plain(network, found, router, settings, seen)
    for mode, values in accuracy.items():
        assert result.accuracy[mode] == pytest.approx(values), mode
    assert result.routing == {mode: pytest.approx(values) for mode, values in routing.items()}
    assert result.confusion == confusion
    assert (result.chosen, result.found()) == ("told", {"told": result.routing})


def test_the_batch_size_of_the_forward_pass_changes_nothing():
    results = []
    for batch in (1, 7, 1000):
        settings, found, network = world(batch=batch)
        results.append(evaluate(by_cosine(network, found, 0, 2), found, 2, settings))
    errors = [result.confidence.pop("ece") for result in results]
    counts = [[line["count"] for line in result.confidence.pop("bins")] for result in results]
    inside = [result.inside.pop("energy") for result in results]
    assert errors == pytest.approx([errors[0]] * 3)
    assert inside[1] == pytest.approx(inside[0])
    assert inside[2] == pytest.approx(inside[0])
    assert counts[0] == counts[1] == counts[2]
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("portion", [1, 100, 400])
def test_tasks_evaluated_together_are_those_evaluated_one_by_one(monkeypatch, portion):
    """Portions of one task, of some and of all."""
    settings, found, network = world(counts=(7, 5, 3, 6, 4, 9, 2, 8), tasks=4)
    predictor = by_cosine(network, found, 0, 3)
    whole = evaluate(predictor, found, 3, settings)
    monkeypatch.setattr("fedprotip.evaluation.portions.PORTION", portion)
    monkeypatch.setattr("fedprotip.evaluation.evaluate.TOGETHER", 3)
    parts = evaluate(predictor, found, 3, settings)
    assert parts.confidence.pop("ece") == pytest.approx(whole.confidence.pop("ece"))
    assert parts.confidence.pop("bins")[-1]["count"] == whole.confidence.pop("bins")[-1]["count"]
    assert parts.inside.pop("energy") == pytest.approx(whole.inside.pop("energy"))
    assert parts == whole


def test_only_the_tasks_seen_so_far_are_evaluated():
    settings, found, network = world()
    result = evaluate(by_cosine(network, found, 0, 1), found, 1, settings)
    assert {len(values) for values in result.accuracy.values()} == {2}
    assert [len(row) for row in result.confusion["single"]] == [2, 2]


def test_without_a_router_there_are_two_modes():
    settings, found, network = world()
    result = evaluate(told(network, found, None, 2), found, 2, settings)
    assert result.accuracy.keys() == {"aware", "agnostic"}
    assert result.routing == result.confusion == result.found() == {}
    assert result.chosen == ""


@pytest.mark.parametrize("task", [0, 1])
def test_with_overlap_every_task_that_holds_the_label_is_right(task):
    """Classes 0 1 2 | 2 3 4: a sample of class 2 may go to either task."""
    settings, found, network = world(counts=(4,) * 5, tasks=2, task_size=3, overlap=1)
    with torch.no_grad():  # both heads always answer class 2
        for head, place in zip(network.heads, (2, 0), strict=True):
            head.weight.zero_()
            head.bias.copy_(torch.eye(3)[place])
    result = evaluate(told(network, found, Fixed(task, 2), 1), found, 1, settings)
    third = pytest.approx(100 / 3)
    assert result.accuracy["single"] == [third, third]  # class 2 is right by either head
    assert result.accuracy["aware"] == result.accuracy["agnostic"] == [third, third]
    expected = [1.0, 1 / 3] if task == 0 else [1 / 3, 1.0]
    assert result.routing["single"] == pytest.approx(expected)
    assert result.confusion["single"] == [[12 * (task == 0), 12 * (task == 1)]] * 2


def test_in_domains_only_the_own_task_is_right():
    settings, found, network = world(scenario="domain", domains="permute")
    result = evaluate(told(network, found, Fixed(1, 3), 2), found, 2, settings)
    assert result.routing["single"] == result.routing["batch64"] == [0.0, 1.0, 0.0]


def test_agnostic_takes_the_largest_logit_of_all_heads():
    _, found, network = world()
    with torch.no_grad():
        for number, head in enumerate(network.heads):
            head.weight.zero_()
            head.bias.copy_(torch.tensor([0.0, float(number == 1)]))
    predictor = told(network, found, None, 2)
    heard, labels = hear(predictor, found.test_batches(0, [found.tasks[0].test]))
    assert set(predictor.inference.agnostic(heard).tolist()) == {3}  # head 1 holds classes 2 and 3
    assert heard.evidence == {}
    assert len(heard) == len(labels) == len(found.tasks[0].test)


# Groups


def groups_of(n, size, draws, task=0, seed=0):
    settings = load({"evaluate": {"group": size, "draws": draws}, "run": {"seed": seed}})
    return [group.tolist() for group in draw_groups(task, n, settings)]


@given(st.integers(1, 300), st.integers(1, 70), st.integers(1, 25))
def test_every_draw_has_each_sample_in_one_group(n, size, draws):
    groups = groups_of(n, size, draws)
    each = -(-n // size)  # groups of a draw
    assert draws <= len(groups) < draws + each
    assert len(groups) % each == 0
    for start in range(0, len(groups), each):
        draw = groups[start : start + each]
        assert sorted(i for group in draw for i in group) == list(range(n))
        assert all(len(group) == size for group in draw[:-1])
        assert 1 <= len(draw[-1]) <= size


def test_the_defaults_give_at_least_twenty_groups_of_64():
    sizes = {n: [len(group) for group in groups_of(n, 64, 20)] for n in (10, 64, 90, 1279, 1280, 1300)}
    assert sizes[10] == [10] * 20  # all there is, and that at each draw
    assert sizes[64] == sizes[1280] == [64] * 20
    assert sizes[90] == [64, 26] * 10
    assert sizes[1279] == [64] * 19 + [63]
    assert sizes[1300] == [64] * 20 + [20]


@given(st.integers(1, 300), st.integers(1, 35))
def test_small_groups_are_parts_of_large_ones(n, size):
    """So what is said about group sizes is about the same samples in the same company."""
    small, large = groups_of(n, size, 1), groups_of(n, 2 * size, 1)
    assert [[i for group in small[at : at + 2] for i in group] for at in range(0, len(small), 2)] == large


def test_groups_belong_to_the_seed_and_the_task():
    assert groups_of(90, 64, 20) == groups_of(90, 64, 20)
    assert groups_of(90, 64, 20) != groups_of(90, 64, 20, task=1)
    assert groups_of(90, 64, 20) != groups_of(90, 64, 20, seed=1)
    assert groups_of(90, 64, 20)[0] != groups_of(90, 64, 20)[2]


class Oracle(Router):
    """Always finds the task: it is told the task of every test sample, in the order of the pass."""

    def __init__(self, stream, seen):
        sizes = torch.tensor([len(task.test) for task in stream.tasks[: seen + 1]])
        self.right, self.done = torch.eye(seen + 1)[torch.repeat_interleave(sizes)], 0

    def evidence(self, seen):
        self.done += len(seen.features)
        return self.right[self.done - len(seen.features) : self.done]


@pytest.mark.parametrize("stream", [{}, {"overlap": 1, "task_size": 2}, {"scenario": "domain", "domains": "permute"}])
@given(
    counts=st.lists(st.integers(1, 40), min_size=6, max_size=6),
    group=st.integers(1, 70),
    draws=st.integers(1, 25),
    seed=st.integers(0, 5),
)
@settings_of_hypothesis(max_examples=15)
def test_who_always_finds_the_task_is_as_right_as_if_it_were_given(stream, counts, group, draws, seed):
    settings, found, network = world(seed, counts, group, draws, **stream)
    seen = len(found.tasks) - 1
    result = evaluate(told(network, found, Oracle(found, seen), seen), found, seen, settings)
    assert result.accuracy["batch64"] == result.accuracy["single"] == result.accuracy["aware"]
    assert result.routing["batch64"] == [1.0] * (seen + 1)
    aware = sum(result.accuracy["aware"]) / (seen + 1)
    assert result.sweeps["size"]["told"] == [aware] * len(SIZES)


def test_the_sweep_over_sizes_is_of_the_groups_of_the_modes():
    settings, found, network = world(counts=(30, 21, 70, 9, 80, 44), group=16, draws=20)
    result = evaluate(by_cosine(network, found, 1, 2), found, 2, settings)
    by_size = dict(zip(SIZES, result.sweeps["size"]["told"], strict=True))
    assert by_size[1] == sum(result.accuracy["single"]) / 3
    assert by_size[16] == sum(result.accuracy["batch64"]) / 3
    assert by_size[16] != by_size[1]


def test_results_enter_the_matrix_and_replace_the_routing():
    matrix, routing = {}, {}
    Evaluation({"aware": [50.0]}, {"single": [0.5]}, {"single": [[3]]}).enter(matrix, routing)
    second = Evaluation({"aware": [40.0, 80.0]}, {"single": [0.1, 0.9]}, {"single": [[1, 2], [0, 3]]})
    second.enter(matrix, routing)
    assert matrix == {"aware": [[50.0], [40.0, 80.0]]}
    assert routing["by_task"] == {"single": [0.1, 0.9]}
    assert routing["confusion"] == {"single": [[1, 2], [0, 3]]}
    assert second.means() == {"aware": 60.0}
