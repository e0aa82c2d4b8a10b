"""The closed-form start: before the first round, the new head begins as the discriminant of summed statistics."""

from typing import Any

import torch
from torch import Tensor

from fedprotip.inference.statistics import FeatureMap, Gaussians, Sums
from fedprotip.messages import Message
from fedprotip.methods.exchange import Exchange, Sender
from fedprotip.methods.local import Local
from fedprotip.methods.parts import statistics
from fedprotip.methods.parts.consensus import Consensus
from fedprotip.methods.site import Site
from fedprotip.models.norms import fresh_norms
from fedprotip.settings import Settings
from fedprotip.store.events import Event
from fedprotip.store.files import Tensors

SPREAD = 1.0
"""Standard deviation of a new head's outputs over samples and classes: sure enough to be right, not so sure that
training has nothing left to say."""

STEEPEST = 4.0
"""η·‖W‖²·E‖f‖² of a new head W at most, where steps of η train features f through it: the loss curves by half of
‖W‖²·E‖f‖² there at most, and a step of more than 2 over that makes it larger."""

LEAST = 0.1
"""Share of the mean variance of features that every feature is taken to have at least: a head that leans on features
which hardly vary has huge weights, and training the backbone through them diverges."""


class ClosedStart(Exchange):
    """Statistics of features as they are; the head that follows travels like a round's result."""

    name, when, needed = "start", "begin", False
    slack, fraction = statistics.SLACK, 24

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.combine = statistics.combination(settings)

    def due(self, site: Site) -> bool:
        """A head that all tasks share is new once, and only a task that trains its head needs one.

        Norm layers that have not seen a batch yet will make other features of the same images as soon as they do: a
        head that was made for those of now would begin far off.
        """
        trained = f"heads.{site.network.head_of(site.task)}.weight" in site.network.moving
        first = site.task == 0 or not site.network.shared_head
        fresh = fresh_norms(site.network.backbone, site.settings.model, site.task)
        return trained and bool(site.method.rounds(site.task)) and first and not fresh

    def heads(self, site: Site) -> list[int]:
        """The heads that begin, whose classes are in the statistics one after another."""
        return [site.network.head_of(site.task)]

    def answer(self, local: Local) -> Message:
        return statistics.gather(local, self.name, FeatureMap(local.network.features, final=True))

    def check(self, message: Message, site: Site) -> None:
        classes, rank = sum(self._sizes(site)), self._settings.statistics.rank
        statistics.check(message, self.name, classes, FeatureMap(site.network.features), rank)
        statistics.check_signs(message, site.positive_features())

    def check_sender(self, message: Message, site: Site, sender: Sender) -> None:
        statistics.check_counts(message, sender, statistics.least(site.settings))

    def sizes(self, message: Message, site: Site) -> dict[str, float]:
        return statistics.sizes(message)

    def consensus(self, site: Site) -> Consensus | None:
        return statistics.consensus(site, self.heads(site))

    def weight(self, message: Message, site: Site) -> float:
        return statistics.weight(message, site.most)

    def remark(self, message: Message, task: int, client: int) -> Event | None:
        return statistics.withheld(message, task, client)

    def digest(self, combined: Any, site: Site) -> Message | None:
        """Heads as the linear discriminant of their statistics."""
        omega = FeatureMap(site.network.features).omega
        sums = statistics.summed(combined, self._settings.train, omega, site.most)
        if not sums.seen.any():
            return None
        train = site.settings.train
        whole = scaled(*Gaussians.of(sums, least=LEAST).head(), sums, train.lr / (1 - train.momentum))
        parts = (part.split(self._sizes(site)) for part in whole)
        made: Tensors = {}
        for head, weight, bias in zip(self.heads(site), *parts, strict=True):
            made |= {f"heads.{head}.weight": weight, f"heads.{head}.bias": bias}
        return Message(self.name, site.wire.pack(made))

    def _sizes(self, site: Site) -> list[int]:
        return [len(site.network.labels[head]) for head in self.heads(site)]

    def receive(self, message: Message, site: Site) -> None:
        site.hear(message.tensors)  # as clients get it, rounded or not


def scaled(weight: Tensor, bias: Tensor, sums: Sums, step: float) -> tuple[Tensor, Tensor]:
    """The same decisions with outputs of the spread `SPREAD` over the samples that were summed, or less if too steep.

    Args:
        step: how far training goes for a gradient of 1.
    """
    rows, biases = (weight - weight.mean(0)).double(), (bias - bias.mean()).double()
    moment = sums.moment / sums.counts.sum()
    squares = ((rows @ moment) * rows).sum(1)
    squares = squares + 2 * biases * (rows @ (sums.sums.sum(0) / sums.counts.sum())) + biases.square()
    spread = squares.mean().item()
    steep = step * (torch.linalg.matrix_norm(rows, 2).square() * moment.diagonal().sum()).item()
    factor = min((most / found for most, found in ((SPREAD**2, spread), (STEEPEST, steep)) if found > 0), default=1.0)
    return weight * factor**0.5, bias * factor**0.5
