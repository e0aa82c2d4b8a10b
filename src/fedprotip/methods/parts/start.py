"""The closed-form start: before the first round, the new head begins as the discriminant of summed statistics."""

from typing import Any

from torch import Tensor

from fedprotip.inference.statistics import FeatureMap, Gaussians, Sums
from fedprotip.messages import Message
from fedprotip.methods.exchange import Exchange, Sender
from fedprotip.methods.local import Local
from fedprotip.methods.parts import statistics
from fedprotip.methods.site import Site
from fedprotip.settings import Settings
from fedprotip.store.events import Event

SPREAD = 1.0
"""Standard deviation of a new head's outputs over samples and classes: sure enough to be right, not so sure that
training has nothing left to say."""

LEAST = 0.1
"""Share of the mean variance of features that every feature is taken to have at least: a head that leans on features
which hardly vary has huge weights, and training the backbone through them diverges."""


class ClosedStart(Exchange):
    """Statistics of features as they are; the head that follows travels like a round's result."""

    name, when, needed = "start", "begin", False
    slack = statistics.SLACK

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.combine = statistics.combination(settings)

    def due(self, site: Site) -> bool:
        """A head that all tasks share is new once, and only a task that trains needs one."""
        return bool(site.method.rounds(site.task)) and (site.task == 0 or not site.network.shared_head)

    def answer(self, local: Local) -> Message:
        return statistics.gather(local, self.name, mapped=False)

    def check(self, message: Message, site: Site) -> None:
        classes, rank = statistics.classes_of(site), self._settings.statistics.rank
        statistics.check(message, self.name, classes, FeatureMap(site.network.features), rank)
        statistics.check_signs(message, site.positive_features())

    def check_sender(self, message: Message, site: Site, sender: Sender) -> None:
        statistics.check_counts(message, sender, site.settings.statistics.minimum)

    def sizes(self, message: Message, site: Site) -> dict[str, float]:
        return statistics.sizes(message)

    def weight(self, message: Message, site: Site) -> float:
        return statistics.weight(message, site.most)

    def remark(self, message: Message, task: int, client: int) -> Event | None:
        return statistics.withheld(message, task, client)

    def digest(self, combined: Any, site: Site) -> Message | None:
        """The head as the linear discriminant of its statistics."""
        omega = FeatureMap(site.network.features).omega
        sums = statistics.summed(combined, self._settings.train, omega, site.most)
        if not sums.seen.any():
            return None
        weight, bias = scaled(*Gaussians.of(sums, least=LEAST).head(), sums)
        name = f"heads.{site.network.head_of(site.task)}"
        return Message(self.name, site.wire.pack({f"{name}.weight": weight, f"{name}.bias": bias}))

    def receive(self, message: Message, site: Site) -> None:
        site.hear(message.tensors)  # as clients get it, rounded or not


def scaled(weight: Tensor, bias: Tensor, sums: Sums) -> tuple[Tensor, Tensor]:
    """The same decisions with outputs of the spread `SPREAD`, over the samples that were summed."""
    rows, biases = (weight - weight.mean(0)).double(), (bias - bias.mean()).double()
    count = sums.counts.sum()
    squares = ((rows @ (sums.moment / count)) * rows).sum(1)
    squares = squares + 2 * biases * (rows @ (sums.sums.sum(0) / count)) + biases.square()
    spread = squares.mean().clamp_min(0).sqrt()
    factor = (SPREAD / spread).float() if spread > 0 else 1.0
    return weight * factor, bias * factor
