"""How sure to be: a temperature for probabilities, and how unusual an input is; both from sums over held-back samples.

Clients score samples they did not train on and send sums only: the loss at every temperature of a fixed grid, and how
many samples lie in each bin of the distance. Sums of clients and tasks add up like class statistics.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedprotip.store.files import Tensors

TEMPERATURES = torch.logspace(-1, 2, 25)
"""0.1 to 100: below 1 answers become surer, above 1 less sure."""
MOST_LOSS = 50
"""−log p(right answer) of one sample is cut here."""
BINS = 2048
"""Bins of `unusual`, from 0 to infinity."""


def losses(log_probabilities: Tensor, right: Tensor) -> Tensor:
    """Σ −log p(right answer) at every temperature of the grid.

    Args:
        log_probabilities: (n, C), up to a constant of each row; right: (n, C), the answers that are right.
    """
    found = []
    for temperature in TEMPERATURES:
        scores = (log_probabilities / temperature).log_softmax(1)
        found.append(-scores.masked_fill(~right, -torch.inf).logsumexp(1).clamp_min(-MOST_LOSS).double().sum())
    return torch.stack(found)


def bin_of(distances: Tensor) -> Tensor:
    """The bin (n,) of a squared distance ≥ 0: even steps of log(1 + distance), the last one without end."""
    return (distances.clamp_min(0).log1p() * (BINS / 12)).clamp_max(BINS - 1).long()


@dataclass(frozen=True)
class Calibration:
    """A temperature, and the distances of held-back samples."""

    temperature: float = 1.0
    held_back: Tensor | None = None  # (BINS,) how many samples lie in each bin

    @classmethod
    def of(cls, loss: Tensor, held_back: Tensor) -> "Calibration":
        """The temperature with the least loss; without any samples it stays at 1."""
        if not held_back.sum():
            return cls()
        return cls(float(TEMPERATURES[loss.argmin()]), held_back)

    @classmethod
    def recall(cls, knowledge: Tensors) -> "Calibration":
        """As far as clients have told; neutral before."""
        if "calibration/loss" not in knowledge:
            return cls()
        return cls.of(knowledge["calibration/loss"], knowledge["calibration/distances"])

    def unusual(self, distances: Tensor) -> Tensor:
        """The share of held-back samples that lie nearer than this one: 0.99 is farther out than 99 of 100.

        Without held-back samples 1 − exp(−distance): the order is the same, the scale means nothing.
        """
        if self.held_back is None:
            return 1 - (-distances.clamp_min(0)).exp()
        below = self.held_back.double().cumsum(0) - self.held_back.double() / 2
        return (below / self.held_back.sum())[bin_of(distances)]
