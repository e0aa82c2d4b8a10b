"""Which way to answer, how sure to be, and how unusual an input is: all from sums over held-back samples.

Clients try every way on samples they did not train on and send sums only: how often each was right, its loss at every
temperature of a fixed grid, and how many samples lie in each bin of the distance. Sums of clients and tasks add up like
class statistics.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedprotip.store.files import Tensors
from fedprotip.stream.plan import Answering

TEMPERATURES = torch.logspace(-1, 2, 25)
"""0.1 to 100: below 1 answers become surer, above 1 less sure."""
NAT = 1.0
"""A loss that is larger by this over all samples is no evidence: the likelihoods differ by a factor of e."""
MOST_LOSS = 50
"""−log p(right answer) of one sample is cut here; it is also that of a model that has diverged and says nothing."""
MEASURES = ("odd", "new")
"""What tells whether a sample looks like anything learned (`inference/statistics.py::Backdrop`)."""
BINS, FINE, WIDEST = 2048, 8.0, 16.0
"""Bins of each of them: even steps of asinh(8·figure) from −16 to 16."""


def losses(log_probabilities: Tensor, right: Tensor) -> Tensor:
    """Σ −log p(right answer) at every temperature of the grid.

    Args:
        log_probabilities: (n, C), up to a constant of each row; right: (n, C), the answers that are right.
    """
    found = []
    for temperature in TEMPERATURES:
        scores = (log_probabilities / temperature).log_softmax(1)
        chance = scores.masked_fill(~right, -torch.inf).logsumexp(1).nan_to_num(-MOST_LOSS)
        found.append(-chance.clamp(-MOST_LOSS, 0).double().sum())  # several right answers: rounding may exceed 1
    return torch.stack(found)


def bin_of(figures: Tensor) -> Tensor:
    """The bin (n,) of a figure that is about 1 for usual samples: finest around 0, the first and last without end."""
    place = ((FINE * figures.double()).asinh() / WIDEST + 1) * (BINS / 2)
    return place.clamp(0, BINS - 1).long()


def count_bins(strange: dict[str, Tensor]) -> Tensor:
    """How many samples lie in each bin of each of the `MEASURES`, (2, BINS)."""
    return torch.stack([torch.bincount(bin_of(strange[name]), minlength=BINS) for name in MEASURES])


def best_way(answering: Answering, knowledge: Tensors) -> str:
    """The way that answers: the one that was right most often; without evidence the chosen one.

    Ties go to the simpler way, and it is a tie where it was wrong n times and is behind by no more than √n.
    """
    right = knowledge.get("calibration/right")
    if not answering.auto or right is None or not right.any():
        return answering.chosen
    wrong = (knowledge["calibration/distances"][0].sum() - right).clamp_min(0)
    level = right + wrong.sqrt() >= right.max()
    return answering.tried[int(level.int().argmax())]


@dataclass(frozen=True)
class Calibration:
    """A temperature, and the distances of held-back samples."""

    temperature: float = 1.0
    held_back: Tensor | None = None  # (measures, BINS) how many samples lie in each bin

    @classmethod
    def of(cls, loss: Tensor, held_back: Tensor) -> "Calibration":
        """The highest temperature that the samples do not speak against; without any samples it stays at 1.

        Where few samples were scored and all answers right, the least loss would be that of boundless sureness.
        """
        if not held_back.sum():
            return cls()
        likely = loss <= loss.min() + NAT
        return cls(float(TEMPERATURES[likely].max()), held_back)

    @classmethod
    def recall(cls, knowledge: Tensors, answering: Answering, chosen: str) -> "Calibration":
        """Of the chosen way, as far as clients have told; neutral before, and for a way that they do not try."""
        if "calibration/loss" not in knowledge:
            return cls()
        loss, distances = knowledge["calibration/loss"], knowledge["calibration/distances"]
        if chosen not in answering.tried:
            return cls(1.0, distances if distances.sum() else None)
        return cls.of(loss[answering.tried.index(chosen)], distances)

    def unusual(self, strange: dict[str, Tensor]) -> Tensor:
        """The share of held-back samples that look less strange than this one: 0.99 is stranger than 99 of 100.

        A sample may be strange in one measure or in another; being the strangest in either is half as rare as in one.
        Without held-back samples 1 − exp(−figure) of the larger figure: the order means something, the scale nothing.
        """
        if self.held_back is None:
            return 1 - (-torch.stack([strange[name] for name in MEASURES]).amax(0).clamp_min(0)).exp()
        counts = self.held_back.double()
        below = (counts.cumsum(1) - counts / 2) / counts.sum(1, keepdim=True)
        found = torch.stack([row[bin_of(strange[name])] for row, name in zip(below, MEASURES, strict=True)])
        return (1 - len(MEASURES) * (1 - found.amax(0))).clamp_min(0).float()
