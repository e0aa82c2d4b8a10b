"""Who has data of a task: asked once at its beginning."""

import math
from collections.abc import Iterable

from fedprotip.messages import SAMPLES, BadMessage, Message
from fedprotip.methods.exchange import Exchange
from fedprotip.methods.local import Local
from fedprotip.methods.site import Site

FEW = 100
"""Numbers of samples below this are not told apart: one client may well be the only one with data of a task."""


class Presence(Exchange):
    name, when, who = "presence", "begin", "everyone"
    needed, needs_model, counts = False, False, True
    slack = 1e5  # small sites beside a very large one are honest; 10¹² samples are not

    def answer(self, local: Local) -> Message:
        return Message(self.name, meta={"samples": local.site.method.count(local)})

    def check(self, message: Message, site: Site) -> None:
        message.check(self.name, {})
        message.check_meta("samples")
        check_samples(message, at_least=0)

    def sizes(self, message: Message, site: Site) -> dict[str, float]:
        return {"number of samples": message.meta["samples"]}

    def least(self, message: Message, site: Site) -> dict[str, float]:
        return {"number of samples": FEW}


def most_samples(stated: Iterable[int], heaviest: float) -> float:
    """Samples that a client counts for at most: `train.heaviest` times the most of any but the largest."""
    others = sorted(stated)[:-1]
    return heaviest * max([FEW, *others[-1:]]) if others else math.inf


def check_samples(message: Message, at_least: int = 1) -> None:
    """BadMessage unless it states a possible number of samples."""
    samples = message.meta["samples"]
    if type(samples) is not int or not at_least <= samples <= SAMPLES:
        raise BadMessage(f"samples = {samples!r} is not a number of samples")
