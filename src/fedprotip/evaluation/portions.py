"""Test samples of several tasks at once, and the groups of one task that mode batch64 decides together."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from fedprotip.inference.answers import Routed
from fedprotip.seeds import numpy_stream
from fedprotip.settings import Settings
from fedprotip.store.records import Number, finite
from fedprotip.stream import Stream

PORTION = 2**21
"""Scores of test samples that are evaluated at once, as far as single tasks allow."""


@dataclass(frozen=True)
class Portion:
    """The test samples of some tasks in a row, evaluated together."""

    tasks: range
    sizes: Tensor  # samples of each task

    @cached_property
    def starts(self) -> Tensor:
        return self.sizes.cumsum(0) - self.sizes

    @cached_property
    def owners(self) -> Tensor:
        """The task of every sample (n,)."""
        return torch.repeat_interleave(torch.tensor(self.tasks), self.sizes)

    def mean(self, values: Tensor, samples: Tensor | None = None) -> list[Number]:
        """The mean by task of values (m,) that belong to these samples (m,); by default to all of them in order.

        A task without samples has none.
        """
        owners = (self.owners if samples is None else self.owners[samples]) - self.tasks.start
        counts = torch.bincount(owners, minlength=len(self.tasks))
        means: Tensor = torch.bincount(owners, values.double(), len(self.tasks)) / counts
        return [finite(mean) for mean in means.tolist()]

    def groups(self, settings: Settings, size: int = 0) -> list[Tensor]:
        """`draw_groups` of every task, each of the samples of this portion."""
        drawn = [draw_groups(task, int(n), settings, size) for task, n in zip(self.tasks, self.sizes, strict=True)]
        return [start + group for start, found in zip(self.starts, drawn, strict=True) for group in found]

    def percent(self, right: Tensor, samples: Tensor | None = None) -> list[Number]:
        return [None if share is None else 100 * share for share in self.mean(right, samples)]

    def confusion(self, routed: Routed) -> list[list[int]]:
        """How often groups of each task were sent to every task."""
        groups, tasks = routed.decisions.shape
        owners = torch.zeros(groups, dtype=torch.int64).scatter(0, routed.groups, self.owners[routed.samples])
        pairs = (owners - self.tasks.start) * tasks + routed.decisions.argmax(1)
        counts: list[list[int]] = torch.bincount(pairs, minlength=len(self.tasks) * tasks).view(-1, tasks).tolist()
        return counts


def portions(stream: Stream, candidates: int, seen: int, settings: Settings) -> Iterator[range]:
    """Tasks 0…seen in parts of about PORTION scores, `candidates` a sample: small tasks together, large ones alone."""
    drawn, first, held = settings.evaluate.group * settings.evaluate.draws, 0, 0
    for task in range(seen + 1):
        samples = len(stream.tasks[task].test)
        size = max(samples, drawn) * candidates if samples else 0
        if held and held + size > PORTION:
            yield range(first, task)
            first, held = task, 0
        held += size
    yield range(first, seen + 1)


def draw_groups(task: int, samples: int, settings: Settings, size: int = 0) -> list[Tensor]:
    """Groups of one task, `evaluate.group` samples each or `size`, for one decision each.

    A draw puts every sample into exactly one group, so whoever always finds the task is as right as if it were given;
    the last group takes what is left. There are as many draws as `evaluate.draws` decisions need: further ones add
    decisions, and count no sample more often than another.
    """
    return _drawn(task, samples, settings.run.seed, size or settings.evaluate.group, settings.evaluate.draws)


@lru_cache(1024)
def _drawn(task: int, samples: int, seed: int, size: int, decisions: int) -> list[Tensor]:
    rng = numpy_stream(seed, "groups", task)
    draws = math.ceil(decisions / math.ceil(samples / size)) if samples else 0
    return [group for _ in range(draws) for group in torch.from_numpy(rng.permutation(samples)).split(size)]
