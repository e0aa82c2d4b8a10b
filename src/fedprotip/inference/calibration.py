"""Which way to answer, how sure to be, and how unusual an input is: all from sums over held-back samples.

Clients try every way on samples they did not train on and send sums only: how often each was right, how often one of
two was and the other was not, its loss at every temperature of a fixed grid, how often it was right when it was so
sure, and how many samples lie in each bin of the distance. Sums of clients and tasks add up like class statistics.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedprotip.inference.experts import BIRTH, STATISTICS, network_of
from fedprotip.inference.statistics import COUNTS
from fedprotip.store.files import Tensors
from fedprotip.stream.plan import Answering

TEMPERATURES = torch.logspace(-1, 2, 25)
"""0.1 to 100: below 1 answers become surer, above 1 less sure."""
NAT = 1.0
"""A loss that is larger by this over all samples is no evidence: the likelihoods differ by a factor of e."""
WITHOUT_STATISTICS = "cosine"
"""The way that needs no class statistics."""
MOST_LOSS = 50
"""−log p(right answer) of one sample is cut here; it is also that of a model that has diverged and says nothing."""
MEASURES = ("odd", "new")
"""What tells whether a sample looks like anything learned (`inference/backdrop.py::Backdrop`)."""
SHARES = torch.tensor([[0.2], [0.8]], dtype=torch.float64)
"""Of all false alarms, those that each of them may raise: what is odd is far out, and needs few."""
SURE = 16
"""Bins of how sure an answer was: even steps of 1 − √(1 − p), so that they are finest where answers are sure."""
PRIOR = 5.0
"""Samples in each of them for which sureness is taken to be right, before any was seen."""
FADING = 0.5
"""What samples of older tasks count at every new one: they were asked while there were fewer classes to choose from."""
WIDE, HALVINGS = 5.0, 20
"""A row's own temperature is sought between e⁻⁵ and e⁵."""
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


def hits(probabilities: Tensor, right: Tensor) -> Tensor:
    """How many answers there were in each bin of sureness (n,), and how many of them were right: (2, SURE)."""
    places = _place(probabilities).long().clamp(0, SURE - 1)
    return torch.stack([torch.bincount(chosen, minlength=SURE) for chosen in (places, places[right])])


def _place(probabilities: Tensor) -> Tensor:
    return SURE * (1 - (1 - probabilities).clamp_min(0).sqrt())


def rising(values: Tensor, weights: Tensor) -> Tensor:
    """The values (n,) that never fall and lie nearest to these, by weighted squares (isotonic regression)."""
    sums, weight = (torch.cat([torch.zeros(1), part.cumsum(0)]).double() for part in (values * weights, weights))
    starts, stops = torch.arange(len(values))[:, None], torch.arange(1, len(values) + 1)[None]
    means = (sums[stops] - sums[starts]) / (weight[stops] - weight[starts])
    ahead = (
        means.masked_fill(stops <= starts, torch.inf).flip(1).cummin(1).values.flip(1)
    )  # least mean of start … ≥ stop
    return ahead.masked_fill(stops <= starts, -torch.inf).amax(0).to(values)


def bin_of(figures: Tensor) -> Tensor:
    """The bin (n,) of a figure that is about 1 for usual samples: finest around 0, the first and last without end."""
    place = ((FINE * figures.double()).asinh() / WIDEST + 1) * (BINS / 2)
    return place.clamp(0, BINS - 1).long()


def count_bins(strange: dict[str, Tensor]) -> Tensor:
    """How many samples lie in each bin of each of the `MEASURES`, (2, BINS)."""
    return torch.stack([torch.bincount(bin_of(strange[name]), minlength=BINS) for name in MEASURES])


def networks(answering: Answering) -> list[str]:
    """Networks whose class statistics tell how strange samples look, in the order of their histograms."""
    return [name for name in (STATISTICS, BIRTH) if name in answering.experts]


def best_way(answering: Answering, knowledge: Tensors, classes: Sequence[Sequence[int]] = ()) -> str:
    """The way that answers: the one that was right most often; without evidence the simplest one that could be tried.

    Ties go to the simpler way. It is a tie where one of the two alone was right n times, and the simpler one is behind
    by no more than 1 + √n: McNemar's test, with Edwards's correction for counts that are small.

    Clients leave classes of which they have few samples out of their sums. Where statistics say nothing about half of
    the tasks or more, heads answer, and subspaces say which.

    Args:
        classes: of every task.
    """
    if not answering.auto or not answering.tried:
        return answering.chosen
    if WITHOUT_STATISTICS in answering.ways and _say_little(knowledge, classes):
        return WITHOUT_STATISTICS
    right = knowledge.get("calibration/right")
    if right is None:
        return answering.tried[0]
    if "calibration/apart" in knowledge:
        apart = knowledge["calibration/apart"][int(right.argmax())]
    else:  # of older versions, which counted wrong answers of the simpler way instead
        asked = knowledge.get("calibration/asked", knowledge["calibration/distances"][0].sum())
        apart = asked - right
    level = right + 1 + apart.clamp_min(0).sqrt() >= right.max()
    return answering.tried[int(level.int().argmax())]


def _say_little(knowledge: Tensors, classes: Sequence[Sequence[int]]) -> bool:
    """Whether class statistics have no class of at least half of the tasks."""
    counts, labels = knowledge.get(COUNTS), [label for known in classes for label in known]
    if counts is None or len(counts) != len(labels):
        return False
    told = {label for label, count in zip(labels, counts.tolist(), strict=True) if count > 0}
    return 2 * sum(told.isdisjoint(known) for known in classes) >= len(classes) > 0


def _truth(counts: Tensor, right: Tensor) -> Tensor:
    """The share of right answers in every bin of sureness, rising; bins of few samples stay near what they say."""
    said = 1 - (1 - (torch.arange(SURE, dtype=torch.float64) + 0.5) / SURE).square()
    return rising((right + PRIOR * said) / (counts + PRIOR), counts + PRIOR).float()


@dataclass(frozen=True)
class Calibration:
    """A temperature, how often answers are right that are so sure, and the distances of held-back samples."""

    temperature: float = 1.0
    held_back: Tensor | None = None  # (measures, BINS) how many samples lie in each bin
    truth: Tensor | None = None  # (SURE,) the share of right answers in the middle of every bin of sureness

    @classmethod
    def of(cls, loss: Tensor, held_back: Tensor, counts: Tensor | None = None) -> "Calibration":
        """The highest temperature that the samples do not speak against; without any samples it stays at 1.

        Where few samples were scored and all answers right, the least loss would be that of boundless sureness.

        Args:
            counts: (temperatures, 2, SURE), `hits` at every temperature.
        """
        if not held_back.sum():
            return cls()
        place = int((loss <= loss.min() + NAT).nonzero().max())
        return cls(float(TEMPERATURES[place]), held_back, None if counts is None else _truth(*counts[place]))

    @classmethod
    def recall(cls, knowledge: Tensors, answering: Answering, chosen: str) -> "Calibration":
        """Of the chosen way, as far as clients have told; neutral before, and for a way that they do not try."""
        if "calibration/loss" not in knowledge:
            return cls()
        place = len(MEASURES) * networks(answering).index(network_of(answering.ways[chosen].expert))
        loss, distances = knowledge["calibration/loss"], knowledge["calibration/distances"][place:][: len(MEASURES)]
        if chosen not in answering.tried:
            return cls(1.0, distances if distances.sum() else None)
        way, counts = answering.tried.index(chosen), knowledge.get("calibration/hits")
        return cls.of(loss[way], distances, None if counts is None else counts[way])

    def honest(self, probabilities: Tensor) -> Tensor:
        """Probabilities (n, L) after which answers are right as often as they are sure; their order stays.

        Each row gets a temperature of its own, at which its largest probability is the share of right answers there.
        """
        if self.truth is None or not len(probabilities):
            return probabilities
        logs, sure = probabilities.log(), probabilities.amax(1)
        places, truth = (_place(sure) - 0.5).clamp(0, SURE - 1), self.truth.to(sure)
        below = places.long().clamp_max(SURE - 2)
        wanted = truth[below].lerp(truth[below + 1], places - below)
        low, high = torch.full_like(wanted, -WIDE), torch.full_like(wanted, WIDE)
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            surer = (logs * middle.exp()[:, None]).softmax(1).amax(1) > wanted
            low, high = torch.where(surer, low, middle), torch.where(surer, middle, high)
        return (logs * low.exp()[:, None]).softmax(1)

    def unusual(self, strange: dict[str, Tensor]) -> Tensor:
        """The share of held-back samples that look less strange than this one: 0.99 is stranger than 99 of 100.

        A sample may be strange in one measure or in another: each has its share of all that are so strange (Šidák).
        Without held-back samples 1 − exp(−figure) of the larger figure: the order means something, the scale nothing.
        """
        if self.held_back is None:
            return 1 - (-torch.stack([strange[name] for name in MEASURES]).amax(0).clamp_min(0)).exp()
        counts = self.held_back.double()
        below = (counts.cumsum(1) - counts / 2) / counts.sum(1, keepdim=True)
        found = torch.stack([row[bin_of(strange[name])] for row, name in zip(below, MEASURES, strict=True)])
        return found.pow(1 / SHARES).amax(0).float()
