"""Whether features have moved away from the class statistics that were taken when their task was learned."""

from collections.abc import Callable

import torch
from torch import Tensor

from fedprotip.inference.answers import Inference
from fedprotip.inference.experts import STATISTICS, StatisticsExpert
from fedprotip.models.heads import Features
from fedprotip.store.records import Number, finite


class Drift:
    """How far the mean of each class lies from its statistics, in standard deviations of a sample.

    The mean of n samples lies √(d/n) away by chance alone, which is taken off.
    """

    def __init__(self, inference: Inference) -> None:
        expert, self._candidates = inference.experts.get(STATISTICS), inference.candidates
        self._expert = expert if isinstance(expert, StatisticsExpert) else None
        if self._expert:
            width = self._expert.gaussians.centres.shape[1]
            self._sums, self._counts = (torch.zeros(len(self._candidates), *size) for size in ((width,), ()))

    def watch(self, tasks: Tensor) -> Callable[[Features, Tensor], None]:
        """Takes features and labels of samples of these tasks (n,), part by part in their order."""
        start = 0

        def add(features: Features, labels: Tensor) -> None:
            nonlocal start
            if self._expert:
                places = self._candidates.find(labels, tasks[start : start + len(labels)])
                self._sums.index_add_(0, places, self._expert.whiten(features))
                self._counts += torch.bincount(places, minlength=len(self._counts))
            start += len(labels)

        return add

    def by_task(self, seen: int) -> list[Number]:
        """For each of the tasks 0…seen, None where it has no test samples, or features without bounds.

        Empty without class statistics.
        """
        if self._expert is None:
            return []
        gaussians, rows = self._expert.gaussians, self._expert.rows
        apart = self._sums / self._counts[:, None] - gaussians.centres[rows]
        beyond = (apart.square().sum(1) - apart.shape[1] / self._counts).clamp_min(0).sqrt()
        known = gaussians.seen[rows] & (self._counts > 0)
        found: list[Number] = []
        for task in range(seen + 1):
            own = self._candidates.tasks == task
            values = beyond[known & own]
            found.append((finite(float(values.mean())) if len(values) else 0.0) if self._counts[own].any() else None)
        return found
