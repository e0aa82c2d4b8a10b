"""The closed-form start: before the first round, the new head begins as the discriminant of summed statistics."""

from typing import Any

from fedprotip.inference.statistics import Gaussians
from fedprotip.messages import Message
from fedprotip.methods.exchange import Exchange, Sender
from fedprotip.methods.local import Local
from fedprotip.methods.parts import statistics
from fedprotip.methods.site import Site
from fedprotip.settings import Settings
from fedprotip.store.events import Event


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
        statistics.check(message, self.name, classes, site.network.features, rank)
        statistics.check_signs(message, site.positive_features())

    def check_sender(self, message: Message, site: Site, sender: Sender) -> None:
        statistics.check_counts(message, sender, site.settings.statistics.minimum)

    def sizes(self, message: Message, site: Site) -> dict[str, float]:
        return statistics.sizes(message)

    def remark(self, message: Message, task: int, client: int) -> Event | None:
        return statistics.withheld(message, task, client)

    def digest(self, combined: Any, site: Site) -> Message | None:
        """The head as the linear discriminant of its statistics."""
        sums = statistics.summed(combined, self._settings.train)
        if not sums.seen.any():
            return None
        weight, bias = Gaussians.of(sums).head()
        name = f"heads.{site.network.head_of(site.task)}"
        return Message(self.name, site.wire.pack({f"{name}.weight": weight, f"{name}.bias": bias}))

    def receive(self, message: Message, site: Site) -> None:
        site.hear(message.tensors)  # as clients get it, rounded or not
