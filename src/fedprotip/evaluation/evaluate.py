"""Every mode in one pass over the test samples of the tasks seen so far.

aware: the true task is given. agnostic: argmax over all heads, the paper's (-t). single: the task of each
sample is predicted from that sample alone. batch64: the paper's protocol, one decision for a group of 64
test samples of one task; every sample is in as many groups as any other. All ways to predict the task are scored
on the same pass.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from fedprotip.evaluation.by_class import ByClass
from fedprotip.evaluation.confidence import auroc
from fedprotip.evaluation.confidence import summary as confidence_summary
from fedprotip.evaluation.drift import Drift
from fedprotip.evaluation.metrics import mean
from fedprotip.evaluation.portions import Portion, portions
from fedprotip.evaluation.sweeps import Sweep
from fedprotip.inference.answers import Heard, Inference, Routed
from fedprotip.inference.predictor import Predictor
from fedprotip.models.batches import pieces
from fedprotip.models.heads import Features
from fedprotip.models.prefix import InputBatch, PrefixCache
from fedprotip.settings import Settings
from fedprotip.store.records import Number
from fedprotip.stream import Stream

ROUTED = ("single", "batch64")
QUANTILES = 500
TOGETHER = 256
"""Samples that are scored at once, of however many tasks."""


@dataclass
class Evaluation:
    """Results after one task: per mode the accuracy (%) of every task seen, and how routing did.

    A task of which no test samples are left has None everywhere.
    """

    accuracy: dict[str, list[Number]]
    routing: dict[str, list[Number]]  # mode → share of samples sent to a right task, by task
    confusion: dict[str, list[list[int]]]  # mode → decisions, rows = true task, columns = predicted
    ways: dict[str, dict[str, list[Number]]] = field(default_factory=dict)  # way → mode and routing_mode → by task
    chosen: str = ""  # the configured way
    drift: list[Number] = field(default_factory=list)  # by task: how far class means are from their statistics
    confidence: dict[str, Any] = field(default_factory=dict)  # of mode single
    inside: dict[str, list[float]] = field(default_factory=dict)  # how unusual known samples look: quantiles
    sweeps: dict[str, Any] = field(default_factory=dict)  # after the last task
    answers: dict[str, Any] = field(default_factory=dict)  # after the last task: by class and by site

    def means(self) -> dict[str, float]:
        return {mode: mean(values) for mode, values in self.accuracy.items()}

    def found(self) -> dict[str, dict[str, list[Number]]]:
        """Way → mode → share of samples sent to a right task, by task."""
        return {way: {mode: figures[f"routing_{mode}"] for mode in ROUTED} for way, figures in self.ways.items()}

    def enter(self, matrix: dict[str, list[list[Number]]], routing: dict[str, Any]) -> None:
        """Append a row to the accuracy matrices; keep the newest routing, and every row of the drift."""
        for mode, values in self.accuracy.items():
            matrix.setdefault(mode, []).append(values)
        routing.update({"by_task": self.routing, "confusion": self.confusion, "ways": self.ways})
        routing.update({"confidence": self.confidence, "sweeps": self.sweeps, "inside": self.inside})
        routing["answers"] = self.answers
        if self.drift:
            routing.setdefault("drift", []).append(self.drift)


@torch.no_grad()
def hear(
    predictor: Predictor, batches: Iterable[InputBatch], watch: Callable[[Features, Tensor], None] | None = None
) -> tuple[Heard, Tensor]:
    """One forward pass over test samples, and their labels (n,); `watch` is shown features and labels, in order."""
    network = predictor.network.eval()
    device = next(network.parameters()).device
    parts, labels = [], []
    for features, known in _together((predictor.look(inputs.to(device)), known) for inputs, known in batches):
        parts.append(predictor.inference.hear(features))
        if watch:
            watch(features, known)
        labels.append(known)
    return Heard.joined(parts), torch.cat(labels)


def evaluate(
    predictor: Predictor, stream: Stream, seen: int, settings: Settings, cache: PrefixCache | None = None
) -> Evaluation:
    """Evaluate on tasks 0…seen, after learning task `seen`."""
    cache, last, inference = cache or PrefixCache(stream, settings), len(stream.tasks) - 1, predictor.inference
    modes = ("aware", "agnostic", *(ROUTED if inference.ways else ()))
    result = Evaluation({mode: [] for mode in modes}, {}, {}, chosen=inference.chosen if inference.ways else "")
    if inference.ways:
        result.confusion = {mode: [] for mode in ROUTED}
        keys = [key for mode in ROUTED for key in (mode, f"routing_{mode}")]
        result.ways = {name: {key: [] for key in keys} for name in inference.ways}
    right = _right_tasks(stream, seen, settings)
    sweep, sure, drift = Sweep(inference, settings), _Confidence(inference), Drift(inference)
    by_class = ByClass(stream, settings)
    for tasks in portions(stream, len(inference.candidates), seen, settings):
        batches = (_test_batches(predictor, stream, task, seen, settings, cache) for task in tasks)
        portion = Portion(tasks, torch.tensor([len(stream.tasks[task].test) for task in tasks]))
        heard, labels = hear(predictor, chain.from_iterable(batches), drift.watch(portion.owners))
        result.accuracy["aware"] += portion.percent(inference.aware(heard, portion.owners) == labels)
        said = inference.agnostic(heard)
        result.accuracy["agnostic"] += portion.percent(said == labels)
        if not inference.ways:
            by_class.add(portion, labels, said)
            continue
        allowed = right(labels, portion.owners)
        groups = {"single": None, "batch64": portion.groups(settings)}
        for name in inference.ways:
            for mode, members in groups.items():
                routed = inference.route(heard, name, members)
                _enter_routed(result, mode, name, routed, labels, allowed, portion)
                if name == inference.chosen:
                    result.confusion[mode] += portion.confusion(routed)
                    if mode == "single":
                        sure.add(heard, routed, labels)
                        by_class.add(portion, labels, routed.labels)
        if seen == last:
            sweep.add(heard, labels, portion)
    result.drift = drift.by_task(seen)
    result.answers = by_class.result() if seen == last else {}
    if inference.ways:
        for mode in ROUTED:
            result.accuracy[mode] = list(result.ways[inference.chosen][mode])
            result.routing[mode] = list(result.ways[inference.chosen][f"routing_{mode}"])
        result.confidence, result.inside = sure.summary(), sure.quantiles()
        result.sweeps = sweep.result() if seen == last else {}
    return result


def _together(parts: Iterable[tuple[Features, Tensor]]) -> Iterator[tuple[Features, Tensor]]:
    """Features and labels in batches of at least TOGETHER samples, but for the last."""
    waiting: list[tuple[Features, Tensor]] = []
    for part in parts:
        waiting.append(part)
        if sum(len(labels) for _, labels in waiting) >= TOGETHER:
            yield Features.joined([features for features, _ in waiting]), torch.cat([labels for _, labels in waiting])
            waiting = []
    if waiting:
        yield Features.joined([features for features, _ in waiting]), torch.cat([labels for _, labels in waiting])


def evaluate_unknown(
    predictor: Predictor,
    stream: Stream,
    task: int,
    settings: Settings,
    cache: PrefixCache,
    inside: dict[str, list[float]],
) -> dict[str, float]:
    """AUROC of every score of unusualness for the samples of a task that begins: they are of no known task.

    Rows of what stands still during the task are kept, for the evaluation at its end.
    """
    heard, _ = hear(predictor, _test_batches(predictor, stream, task, task, settings, cache))
    return {name: auroc(torch.tensor(inside[name]), score) for name, score in heard.strange.items()}


def _test_batches(
    predictor: Predictor, stream: Stream, task: int, seen: int, settings: Settings, cache: PrefixCache
) -> Iterable[InputBatch]:
    """The test samples of a task in batches, for a network whose newest task is `seen`."""
    return cache.test_batches(predictor.network, task, seen, pieces(stream.tasks[task].test, settings.evaluate.batch))


def _enter_routed(
    result: Evaluation, mode: str, name: str, routed: Routed, labels: Tensor, allowed: Tensor, portion: Portion
) -> None:
    """Score what one way found for the groups of a portion."""
    samples, found = routed.samples, routed.decisions.argmax(1)
    result.ways[name][mode] += portion.percent(routed.labels == labels[samples], samples)
    result.ways[name][f"routing_{mode}"] += portion.mean(allowed[samples, found[routed.groups]], samples)


class _Confidence:
    """Probabilities of mode single, and how unusual samples look, over all tasks."""

    def __init__(self, inference: Inference) -> None:
        self._inference = inference
        self._sure: list[Tensor] = []
        self._right: list[Tensor] = []
        self._inside: dict[str, list[Tensor]] = {}

    def add(self, heard: Heard, routed: Routed, labels: Tensor) -> None:
        """Samples that the chosen way has decided each alone, and their true labels."""
        self._sure.append(self._inference.sureness(self._inference.by_label(heard, routed), routed))
        self._right.append(routed.labels == labels)
        for name, score in heard.strange.items():
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
