"""All answers there are: a class of a task each."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedprotip.inference.statistics import Sums


@dataclass(frozen=True)
class Candidates:
    """All answers there are, a class of a task each, in the order in which every expert scores them."""

    labels: Tensor  # (C,) global labels; with overlap or domains a label stands in several tasks
    tasks: Tensor  # (C,)

    @classmethod
    def of(cls, classes: Sequence[Sequence[int]]) -> "Candidates":
        """From the classes of every task."""
        labels = torch.tensor([label for known in classes for label in known])
        return cls(labels, torch.repeat_interleave(torch.tensor([len(known) for known in classes])))

    def __len__(self) -> int:
        return len(self.labels)

    def by_task(self, scores: Tensor) -> Tensor:
        """log Σ exp of the scores (n, C) of every task's classes, (n, T)."""
        return self._spread(scores).logsumexp(2)

    def largest(self, scores: Tensor) -> Tensor:
        """The largest score of every task's classes, (n, T)."""
        return self._spread(scores).amax(2)

    def within_task(self, scores: Tensor) -> Tensor:
        """log p(class | task), (n, C): what an expert says once the task is known."""
        spread = self._spread(scores).log_softmax(2)
        return spread[:, self.tasks, self._table[1]].nan_to_num(-torch.inf)

    def best(self, within: Tensor) -> tuple[Tensor, Tensor]:
        """The largest log p(class | task) (n, C) of every task's classes, and its label: (n, T) each."""
        largest = self._spread(within).max(2)
        places = self._table[0].gather(1, largest.indices.T).T
        return largest.values, self.labels[places.clamp_max(len(self) - 1)]

    def find(self, labels: Tensor, tasks: Tensor) -> Tensor:
        """The place of each label of a task among the candidates, (n,)."""
        return ((labels[:, None] == self.labels) & (tasks[:, None] == self.tasks)).int().argmax(1)

    @cached_property
    def known(self) -> tuple[Tensor, Tensor]:
        """All labels, each once, and the place of every candidate's label among them (C,)."""
        labels, places = self.labels.unique(return_inverse=True)
        return labels, places

    def probabilities(self, joint: Tensor, temperature: float = 1.0) -> Tensor:
        """p(label) of every label there is (n, L), from log p(task, class) (n, C) up to a constant of each row."""
        joint = joint.masked_fill((joint == -torch.inf).all(1, keepdim=True), 0.0)  # nobody knows: all alike
        joint, (known, places) = (joint / temperature).softmax(1), self.known
        return joint.new_zeros(joint.shape[0], len(known)).index_add_(1, places, joint)

    @cached_property
    def commonest(self) -> Tensor:
        """The label that stands in most tasks: the answer where nobody knows and all candidates are alike."""
        known, places = self.known
        return known[torch.bincount(places).argmax()]

    @property
    def distinct(self) -> bool:
        """Whether every label stands in one task only."""
        return len(self.known[0]) == len(self)

    def by_label(self, sums: Sums) -> tuple[Sums, Tensor]:
        """Sums of every label, of whatever tasks, and the row of each candidate among them (C,)."""
        known, rows = self.known

        def added(part: Tensor) -> Tensor:
            return part.new_zeros(len(known), *part.shape[1:]).index_add(0, rows, part)

        return Sums(added(sums.counts), added(sums.sums), sums.moment, added(sums.sketches)), rows

    def _spread(self, scores: Tensor) -> Tensor:
        """Scores (n, C) as (n, T, most classes of a task), −∞ where a task has fewer."""
        return torch.nn.functional.pad(scores, (0, 1), value=-torch.inf)[:, self._table[0]]

    @cached_property
    def _table(self) -> tuple[Tensor, Tensor]:
        """The candidates of every task (T, most), C where it has no more, and the place of each in its row (C,)."""
        sizes = torch.bincount(self.tasks)
        starts = sizes.cumsum(0) - sizes
        offsets = torch.arange(int(sizes.max()))
        places = torch.where(offsets < sizes[:, None], starts[:, None] + offsets, len(self))
        return places, torch.arange(len(self)) - starts[self.tasks]
