"""Every mode in one pass over the test samples of the tasks seen so far.

aware: the true task is given. agnostic: argmax over all heads, the paper's (-t). single: the task of each
sample is predicted from that sample alone. batch64: the paper's protocol, one decision for a group of 64
test samples of one task. All ways to predict the task are scored on the same pass.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedprotip.evaluation.confidence import auroc
from fedprotip.evaluation.confidence import summary as confidence_summary
from fedprotip.evaluation.drift import Drift
from fedprotip.evaluation.portions import Portion, draw_groups, portions
from fedprotip.evaluation.sweeps import Sweep
from fedprotip.inference.ways import Inference, Routed
from fedprotip.models import Network
from fedprotip.models.batches import pieces
from fedprotip.models.prefix import InputBatch, PrefixCache
from fedprotip.seeds import numpy_stream
from fedprotip.settings import Settings
from fedprotip.stream import Stream

ROUTED = ("single", "batch64")
QUANTILES = 500
TOGETHER = 256
"""Samples that are scored at once, of however many tasks."""


@dataclass
class Evaluation:
    """Results after one task: per mode the accuracy (%) of every task seen, and how routing did."""

    accuracy: dict[str, list[float]]
    routing: dict[str, list[float]]  # mode → share of samples sent to a right task, by task
    confusion: dict[str, list[list[int]]]  # mode → decisions, rows = true task, columns = predicted
    ways: dict[str, dict[str, list[float]]] = field(default_factory=dict)  # way → mode and routing_mode → by task
    drift: list[float] = field(default_factory=list)  # by task: how far class means are from their statistics
    confidence: dict[str, Any] = field(default_factory=dict)  # of mode single
    inside: dict[str, list[float]] = field(default_factory=dict)  # how unusual known samples look: quantiles
    sweeps: dict[str, Any] = field(default_factory=dict)  # after the last task

    def means(self) -> dict[str, float]:
        return {mode: float(np.mean(values)) for mode, values in self.accuracy.items()}

    def enter(self, matrix: dict[str, list[list[float]]], routing: dict[str, Any]) -> None:
        """Append a row to the accuracy matrices; keep the newest routing, and every row of the drift."""
        for mode, values in self.accuracy.items():
            matrix.setdefault(mode, []).append(values)
        routing.update({"by_task": self.routing, "confusion": self.confusion, "ways": self.ways})
        routing.update({"confidence": self.confidence, "sweeps": self.sweeps, "inside": self.inside})
        if self.drift:
            routing.setdefault("drift", []).append(self.drift)


@dataclass(frozen=True)
class Answers:
    """What the model says about some test samples: all that any mode needs."""

    labels: Tensor  # (n,) true global labels
    scores: dict[str, Tensor]  # expert → (n, C)
    evidence: dict[str, Tensor]  # way → (n, E)

    def __len__(self) -> int:
        return len(self.labels)

    def some(self, chosen: Tensor) -> "Answers":
        scores = {name: values[chosen] for name, values in self.scores.items()}
        return Answers(self.labels[chosen], scores, {name: values[chosen] for name, values in self.evidence.items()})


@torch.no_grad()
def answer(
    network: Network,
    batches: Iterable[InputBatch],
    inference: Inference,
    watch: Callable[[Tensor, Tensor], None] | None = None,
) -> Answers:
    """One forward pass over test samples; `watch` is shown their features and labels, in order."""
    network.eval()
    device = next(network.parameters()).device
    labels, scores, evidence = [], [], []
    for features, known in _together((network.embed(inputs.to(device)), known) for inputs, known in batches):
        seen = inference.see(features)
        if watch:
            watch(features, known)
        labels.append(known)
        scores.append(seen.scores)
        evidence.append({name: way.router.evidence(seen) for name, way in inference.ways.items()})
    return Answers(torch.cat(labels), _joined(scores), _joined(evidence))


def evaluate(
    network: Network,
    stream: Stream,
    inference: Inference,
    seen: int,
    settings: Settings,
    cache: PrefixCache | None = None,
) -> Evaluation:
    """Evaluate on tasks 0…seen, after learning task `seen`."""
    cache, last = cache or PrefixCache(stream, settings), len(stream.tasks) - 1
    modes = ("aware", "agnostic", *(ROUTED if inference.ways else ()))
    result = Evaluation({mode: [] for mode in modes}, {}, {})
    if inference.ways:
        result.confusion = {mode: [] for mode in ROUTED}
        keys = [key for mode in ROUTED for key in (mode, f"routing_{mode}")]
        result.ways = {name: {key: [] for key in keys} for name in inference.ways}
    right = _right_tasks(stream, seen, settings)
    sweep, known, drift = Sweep(inference, settings), _Confidence(inference), Drift(inference)
    for tasks in portions(stream, len(inference.columns.labels), seen, settings):
        batches = (_test_batches(network, stream, task, seen, settings, cache) for task in tasks)
        portion = Portion(tasks, torch.tensor([len(stream.tasks[task].test) for task in tasks]))
        said = answer(network, chain.from_iterable(batches), inference, drift.watch(portion.owners))
        opinions, (own, scores) = inference.opinions(said.scores), next(iter(said.scores.items()))
        owner = portion.owners[:, None]
        aware = opinions[own].labels.gather(1, owner) == said.labels[:, None]
        aware &= opinions[own].best.gather(1, owner) > -torch.inf  # no answer is a wrong one
        agnostic = inference.columns.labels[scores.argmax(1)]
        result.accuracy["aware"] += portion.percent(aware[:, 0])
        result.accuracy["agnostic"] += portion.percent(agnostic == said.labels)
        if not inference.ways:
            continue
        allowed = right(said.labels, portion.owners)
        drawn = [draw_groups(task, int(size), settings) for task, size in zip(tasks, portion.sizes, strict=True)]
        groups = [start + group for start, found in zip(portion.starts, drawn, strict=True) for group in found]
        for name, way in inference.ways.items():
            for mode, members in {"single": None, "batch64": groups}.items():
                routed = inference.route(way, said.evidence[name], opinions[way.expert], members)
                _enter_routed(result, mode, name, routed, said, allowed, portion)
                if name == inference.chosen:
                    result.confusion[mode] += portion.confusion(routed)
        known.add(said)
        if seen == last:
            for task, start, size in zip(tasks, portion.starts, portion.sizes, strict=True):
                order = numpy_stream(settings.run.seed, "sweep", task).permutation(int(size))[: Sweep.SAMPLES]
                some = said.some(start + torch.from_numpy(np.sort(order)))
                sweep.add(some.evidence, some.scores, some.labels)
    result.drift = drift.by_task(seen)
    if inference.ways:
        for mode in ROUTED:
            result.accuracy[mode] = list(result.ways[inference.chosen][mode])
            result.routing[mode] = list(result.ways[inference.chosen][f"routing_{mode}"])
        result.confidence, result.inside = known.summary(), known.quantiles()
        result.sweeps = sweep.result() if seen == last else {}
    return result


def _together(parts: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Features and labels in batches of at least TOGETHER samples, but for the last."""
    waiting: list[tuple[Tensor, Tensor]] = []
    for part in parts:
        waiting.append(part)
        if sum(len(labels) for _, labels in waiting) >= TOGETHER:
            yield torch.cat([features for features, _ in waiting]), torch.cat([labels for _, labels in waiting])
            waiting = []
    if waiting:
        yield torch.cat([features for features, _ in waiting]), torch.cat([labels for _, labels in waiting])


def evaluate_unknown(
    network: Network,
    stream: Stream,
    inference: Inference,
    task: int,
    settings: Settings,
    cache: PrefixCache,
    inside: dict[str, list[float]],
) -> dict[str, float]:
    """AUROC of every score of unusualness for the samples of a task that begins: they are of no known task.

    Rows of what stands still during the task are kept, for the evaluation at its end.
    """
    said = answer(network, _test_batches(network, stream, task, task, settings, cache), inference)
    return {name: auroc(torch.tensor(inside[name]), score) for name, score in inference.unusual(said.scores).items()}


def _test_batches(
    network: Network, stream: Stream, task: int, seen: int, settings: Settings, cache: PrefixCache
) -> Iterable[InputBatch]:
    """The test samples of a task in batches, for a network whose newest task is `seen`."""
    return cache.test_batches(network, task, seen, pieces(stream.tasks[task].test, settings.evaluate.batch))


def _enter_routed(
    result: Evaluation, mode: str, name: str, routed: Routed, said: Answers, allowed: Tensor, portion: Portion
) -> None:
    """Score what one way found for the groups of a portion."""
    samples, found = routed.samples, routed.decisions.argmax(1)
    result.ways[name][mode] += portion.percent(routed.labels == said.labels[samples], samples)
    result.ways[name][f"routing_{mode}"] += portion.mean(allowed[samples, found[routed.groups]], samples)


class _Confidence:
    """Probabilities of mode single, and how unusual samples look, over all tasks."""

    def __init__(self, inference: Inference) -> None:
        self._inference = inference
        self._sure: list[Tensor] = []
        self._right: list[Tensor] = []
        self._inside: dict[str, list[Tensor]] = {}

    def add(self, said: Answers) -> None:
        answers, sure = self._inference.single(said.evidence, said.scores)
        self._sure.append(sure)
        self._right.append(answers == said.labels)
        for name, score in self._inference.unusual(said.scores).items():
            self._inside.setdefault(name, []).append(score)

    def summary(self) -> dict[str, Any]:
        temperature = self._inference.calibration.temperature
        return confidence_summary(torch.cat(self._sure), torch.cat(self._right)) | {"temperature": temperature}

    def quantiles(self) -> dict[str, list[float]]:
        """How unusual known samples look, as so many evenly spaced quantiles: enough to compare others with."""
        places = (torch.arange(QUANTILES) + 0.5) / QUANTILES
        found = {name: torch.cat(parts).sort().values for name, parts in self._inside.items()}
        return {name: scores[(places * len(scores)).long()].tolist() for name, scores in found.items()}


def _right_tasks(stream: Stream, seen: int, settings: Settings) -> Callable[[Tensor, Tensor], Tensor]:
    """From labels and tasks of samples (n,) to the tasks that are a right answer for them (n, T).

    With class overlap several tasks hold a label.
    """
    if settings.stream.scenario == "domain":
        return lambda labels, tasks: tasks[:, None] == torch.arange(seen + 1)
    holds = torch.zeros(len(stream.dataset.classes), seen + 1, dtype=torch.bool)
    for task in range(seen + 1):
        holds[list(stream.tasks[task].classes), task] = True
    return lambda labels, tasks: holds[labels]


def _joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
