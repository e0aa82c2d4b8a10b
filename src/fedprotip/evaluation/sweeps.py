"""How accuracy depends on the samples that come together: how many, and whether they are of one task."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedprotip.evaluation.metrics import mean
from fedprotip.evaluation.portions import Portion
from fedprotip.inference.answers import Heard, Inference, Opinion, Way
from fedprotip.seeds import numpy_stream
from fedprotip.settings import Settings
from fedprotip.store.records import Number

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
PURITIES = (1.0, 0.75, 0.5)
GROUP = 64
AT_ONCE = 2**20
"""Numbers of evidence that are looked at together."""


@dataclass(frozen=True)
class _Question:
    """One way and what it needs to know about all samples."""

    inference: Inference
    way: Way
    evidence: Tensor  # (n, E)
    opinion: Opinion
    labels: Tensor  # (n,)

    def accuracy(self, groups: Tensor, rule: str) -> float:
        """Percent of all samples in groups (g, size) that get their label."""
        at_once = max(1, AT_ONCE // self.evidence[groups[0]].numel())
        return 100 * float(torch.cat([self._right(part, rule) for part in groups.split(at_once)]).double().mean())

    def _right(self, groups: Tensor, rule: str) -> Tensor:
        """Whether each sample of these groups gets its label."""
        samples, tasks = groups.flatten(), self._tasks(self.evidence[groups], rule)
        group = torch.arange(len(samples)) // (len(samples) // len(tasks))
        answers = self.inference.labels(tasks, group, self.opinion, samples, self.way.hard and rule != "mixture")
        return answers == self.labels[samples]

    def _tasks(self, evidence: Tensor, rule: str) -> Tensor:
        """log p(task) of every group (g, T), or of every sample of every group (g·size, T)."""
        groups, size, _ = evidence.shape
        if rule == "mixture":
            return self.inference.mixed(evidence).flatten(0, 1)
        if rule == "alone":
            return self.inference.decide(self.way, evidence.flatten(0, 1), torch.ones(groups * size))
        return self.inference.decide(self.way, evidence.mean(1), torch.full((groups,), float(size)))


class Sweep:
    """Asks each way about groups of test samples, which are of one task or of several.

    pooled: one decision for the whole group. alone: every sample for itself. mixture: one task or several, as the group
    itself tells (only for ways whose evidence is a likelihood).
    """

    SAMPLES: ClassVar[int] = 512
    """Of each task, that mixed groups are drawn from."""

    def __init__(self, inference: Inference, settings: Settings) -> None:
        self._inference, self._settings = inference, settings
        self._by_size: dict[str, list[list[Number]]] = {name: [[] for _ in SIZES] for name in inference.ways}
        self._parts: list[tuple[Heard, Tensor]] = []

    def add(self, heard: Heard, labels: Tensor, portion: Portion) -> None:
        """The test samples of the next tasks."""
        for place, size in enumerate(SIZES):
            groups = portion.groups(self._settings, size) if size > 1 else None
            for name, by_size in self._by_size.items():
                routed = self._inference.route(heard, name, groups)
                by_size[place] += portion.percent(routed.labels == labels[routed.samples], routed.samples)
        for task, start, size in zip(portion.tasks, portion.starts, portion.sizes, strict=True):
            order = numpy_stream(self._settings.run.seed, "sweep", task).permutation(int(size))[: Sweep.SAMPLES]
            some = start + torch.from_numpy(np.sort(order))
            self._parts.append((heard.some(some), labels[some]))

    def result(self) -> dict[str, Any]:
        """Accuracy (%): `size` by way and group size, `purity` by rule and purity, for the chosen way and cosine."""
        heard = Heard.joined([part for part, _ in self._parts])
        labels = torch.cat([labels for _, labels in self._parts])
        tasks = torch.repeat_interleave(torch.tensor([len(labels) for _, labels in self._parts]))
        by_size = {name: [mean(by_task) for by_task in rows] for name, rows in self._by_size.items()}
        by_purity = {}
        mixed = [self._groups(tasks, GROUP, share) for share in PURITIES]
        for name, way in self._inference.ways.items():
            if name in (self._inference.chosen, "cosine"):
                ask = _Question(self._inference, way, heard.evidence[name], heard.opinion(way.expert), labels)
                rules = ("pooled", "alone", "mixture") if way.router.adds else ("pooled", "alone")
                by_purity[name] = {rule: [ask.accuracy(groups, rule) for groups in mixed] for rule in rules}
        return {"sizes": list(SIZES), "size": by_size, "purities": list(PURITIES), "purity": by_purity}

    def _groups(self, tasks: Tensor, size: int, purity: float) -> Tensor:
        """Seeded groups (g, size), as many for every task; the rest of a mixed one comes from all other tasks."""
        rng = numpy_stream(self._settings.run.seed, "sweep-groups", size, round(100 * purity))
        draws = max(self._settings.evaluate.draws, Sweep.SAMPLES // size)
        groups, numbers = [], np.arange(len(tasks))
        for task in tasks.unique().tolist():
            own, others = numbers[tasks.numpy() == task], numbers[tasks.numpy() != task]
            count = round(size * purity) if len(others) else size
            for _ in range(draws):
                mine = rng.choice(own, count, replace=len(own) < count)
                more = size - count
                rest = rng.choice(others, more, replace=len(others) < more) if more else mine[:0]
                groups.append(torch.from_numpy(np.concatenate([mine, rest])))
        return torch.stack(groups)
