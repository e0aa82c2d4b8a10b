"""Every mode in one pass over the test samples of the tasks seen so far.

aware: the true task is given. agnostic: argmax over all heads, the paper's (-t). single: the task of each
sample is predicted from that sample alone. batch64: the paper's protocol, one decision for a group of 64
test samples of one task. All ways to predict the task are scored on the same pass.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedprotip.evaluation.confidence import auroc
from fedprotip.evaluation.confidence import summary as confidence_summary
from fedprotip.evaluation.sweeps import Sweep
from fedprotip.inference.ways import STATISTICS, Inference, StatisticsExpert, Way
from fedprotip.models import Network
from fedprotip.prefix import InputBatch, PrefixCache
from fedprotip.seeds import numpy_stream
from fedprotip.settings import Settings
from fedprotip.stream import Stream

ROUTED = ("single", "batch64")
QUANTILES = 500


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
    drift: float | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def some(self, chosen: Tensor) -> "Answers":
        scores = {name: values[chosen] for name, values in self.scores.items()}
        return Answers(self.labels[chosen], scores, {name: values[chosen] for name, values in self.evidence.items()})


@torch.no_grad()
def answer(network: Network, batches: Iterable[InputBatch], inference: Inference, task: int | None = None) -> Answers:
    """One forward pass over test samples; with their task also how far its classes have drifted."""
    network.eval()
    device = next(network.parameters()).device
    drift = _Drift(inference, task)
    labels, scores, evidence = [], [], []
    for inputs, known in batches:
        features = network.embed(inputs.to(device))
        seen = inference.see(features)
        drift.add(features, known)
        labels.append(known)
        scores.append(seen.scores)
        evidence.append({name: way.router.evidence(seen) for name, way in inference.ways.items()})
    return Answers(torch.cat(labels), _joined(scores), _joined(evidence), drift.result())


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
        result.routing = {mode: [] for mode in ROUTED}
        result.confusion = {mode: [] for mode in ROUTED}
        keys = [key for mode in ROUTED for key in (mode, f"routing_{mode}")]
        result.ways = {name: {key: [] for key in keys} for name in inference.ways}
    sweep, known = Sweep(inference, settings), _Confidence(inference)
    for task in range(seen + 1):
        said = answer(network, _test_batches(network, stream, task, seen, settings, cache), inference, task)
        own, columns = next(iter(said.scores.values())), inference.columns
        among = own.masked_fill(columns.tasks != task, -torch.inf)
        result.accuracy["aware"].append(_percent(columns.labels[among.argmax(1)] == said.labels))
        result.accuracy["agnostic"].append(_percent(columns.labels[own.argmax(1)] == said.labels))
        if said.drift is not None:
            result.drift.append(said.drift)
        if inference.ways:
            allowed = _right_tasks(stream, said.labels, task, seen, settings)
            groups = {"single": None, "batch64": draw_groups(task, len(said), settings)}
            for name, way in inference.ways.items():
                for mode, members in groups.items():
                    _enter_routed(result, mode, name, way, inference, said, allowed, members)
            known.add(said)
            if seen == last:
                rng = numpy_stream(settings.run.seed, "sweep", task)
                chosen = torch.from_numpy(np.sort(rng.permutation(len(said))[: Sweep.SAMPLES]))
                sweep.add(said.some(chosen).evidence, said.some(chosen).scores, said.labels[chosen])
    if inference.ways:
        result.confidence, result.inside = known.summary(), known.quantiles()
        result.sweeps = sweep.result() if seen == last else {}
    return result


def evaluate_unknown(
    network: Network,
    stream: Stream,
    inference: Inference,
    task: int,
    settings: Settings,
    cache: PrefixCache,
    inside: dict[str, list[float]],
) -> dict[str, float]:
    """AUROC of every score of unusualness for the samples of a task before it is learned: they are of no known task."""
    said = answer(network, _test_batches(network, stream, task, task - 1, settings, cache), inference)
    return {name: auroc(torch.tensor(inside[name]), score) for name, score in inference.unusual(said.scores).items()}


def _test_batches(
    network: Network, stream: Stream, task: int, seen: int, settings: Settings, cache: PrefixCache
) -> Iterable[InputBatch]:
    """The test samples of a task in batches, for a network that has learned tasks 0…seen."""
    test, size = stream.tasks[task].test, settings.evaluate.batch
    return cache.test_batches(network, task, seen, (test[start : start + size] for start in range(0, len(test), size)))


def _enter_routed(
    result: Evaluation,
    mode: str,
    name: str,
    way: Way,
    inference: Inference,
    said: Answers,
    allowed: Tensor,
    groups: Sequence[Tensor] | None,
) -> None:
    """Score one way: every group is decided by its pooled evidence; without groups every sample alone."""
    samples, decisions, answers = inference.route(way, said.evidence[name], said.scores, groups)
    found = decisions.argmax(1)
    sizes = [1] * len(found) if groups is None else [len(group) for group in groups]
    tasks = found.repeat_interleave(torch.tensor(sizes))
    accuracy = _percent(answers == said.labels[samples])
    right = float(allowed[samples, tasks].double().mean())
    result.ways[name][mode].append(accuracy)
    result.ways[name][f"routing_{mode}"].append(right)
    if name == inference.chosen:
        result.accuracy[mode].append(accuracy)
        result.routing[mode].append(right)
        result.confusion[mode].append(torch.bincount(found, minlength=decisions.shape[1]).tolist())


class _Drift:
    """How far the mean of each class lies from its statistics, in standard deviations of a sample.

    The mean of n samples lies √(d/n) away by chance alone, which is taken off.
    """

    def __init__(self, inference: Inference, task: int | None) -> None:
        expert = inference.experts.get(STATISTICS)
        self._expert = expert if task is not None and isinstance(expert, StatisticsExpert) else None
        own = torch.isin(inference.columns.tasks, torch.tensor([] if task is None else [task]))
        self._own = own.nonzero().flatten()
        self._labels = inference.columns.labels[self._own]
        if self._expert:
            width = self._expert.gaussians.centres.shape[1]
            self._sums, self._counts = torch.zeros(len(self._own), width), torch.zeros(len(self._own))

    def add(self, features: Tensor, labels: Tensor) -> None:
        if self._expert:
            rows = (labels[:, None] == self._labels).int().argmax(1)
            self._sums.index_add_(0, rows, self._expert.whiten(features))
            self._counts += torch.bincount(rows, minlength=len(self._counts))

    def result(self) -> float | None:
        if self._expert is None:
            return None
        rows = self._expert.rows[self._own]
        known = self._expert.gaussians.seen[rows] & (self._counts > 0)
        counts = self._counts[known]
        apart = self._sums[known] / counts[:, None] - self._expert.gaussians.centres[rows][known]
        beyond = (apart.square().sum(1) - apart.shape[1] / counts).clamp_min(0).sqrt()
        return float(beyond.mean()) if len(beyond) else 0.0


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


def draw_groups(task: int, samples: int, settings: Settings) -> list[Tensor]:
    """Groups of one task for mode batch64.

    With enough samples for `draws` groups each sample is in exactly one; else seeded draws of a group each
    (with replacement only when the task has fewer samples than a group).
    """
    size, draws = settings.evaluate.group, settings.evaluate.draws
    rng = numpy_stream(settings.run.seed, "groups", task)
    if samples >= size * draws:
        return list(torch.from_numpy(rng.permutation(samples)).split(size))
    return [torch.from_numpy(rng.choice(samples, size, replace=samples < size)) for _ in range(draws)]


def _right_tasks(stream: Stream, labels: Tensor, task: int, seen: int, settings: Settings) -> Tensor:
    """(n, T): tasks that are a right answer for each sample; with class overlap several hold its label."""
    if settings.stream.scenario == "domain":
        return (torch.arange(seen + 1) == task).expand(len(labels), -1)
    held = [torch.isin(labels, torch.tensor(stream.tasks[other].classes)) for other in range(seen + 1)]
    return torch.stack(held, dim=1)


def _joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _percent(correct: Tensor) -> float:
    return 100 * float(correct.double().mean())
