"""Joint training, the upper bound: clients forget nothing, because they keep all data and learn all of it again.

In every task clients train on their samples of all tasks so far, over all classes so far, with the network, rounds and
epochs that any other method has. No method of this house may do that; it shows what a perfect memory would be worth.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedprotip.inference.statistics import FeatureMap
from fedprotip.messages import BadMessage, Message
from fedprotip.methods.base import About, Method, register
from fedprotip.methods.exchange import Exchange, Sender
from fedprotip.methods.local import Local
from fedprotip.methods.parts import statistics
from fedprotip.methods.parts.start import ClosedStart
from fedprotip.methods.parts.stored import KEPT, RAW, Stored
from fedprotip.methods.parts.training import local_batches
from fedprotip.methods.site import Site
from fedprotip.models.prefix import InputBatch
from fedprotip.models.steps import Inputs
from fedprotip.settings import MethodSettings, Settings


class JointOptions(MethodSettings):
    name: str = Field("joint", description="Method; its own settings follow.")


class StartOfAll(ClosedStart):
    """All heads begin anew together: one that was made for its own task alone would outvote the others."""

    def heads(self, site: Site) -> list[int]:
        return list(range(len(site.network.heads)))

    def answer(self, local: Local) -> Message:
        tasks = range(local.task + 1)
        return statistics.gather(local, self.name, FeatureMap(local.network.features, final=True), tasks)


class Everything(Stored):
    """What clients keep for later tasks is all they have had."""

    def __init__(self) -> None:
        super().__init__("everything")

    def answer(self, local: Local) -> Message:
        return Message(self.name, {RAW: torch.tensor(sum(map(len, _held(local))))})

    def check_sender(self, message: Message, site: Site, sender: Sender) -> None:
        """Those are the samples that it trains on."""
        if message.tensors[RAW] != (sender.samples or 0):
            raise BadMessage(f"it keeps {int(message.tensors[RAW])} samples, but has {sender.samples}")


@register
class Joint(Method):
    name = "joint"
    about = About(
        "trains on the data of all tasks so far at once: the upper bound",
        stores="all data of all tasks, raw, at each client",
        needs="clients that may keep all samples",
    )
    sees_images = True
    state = (KEPT,)
    Options = JointOptions

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        start = StartOfAll(settings)
        self.exchanges = tuple(start if isinstance(one, ClosedStart) else one for one in self.exchanges)

    def at_end(self) -> Sequence[Exchange]:
        return (Everything(),)

    def trainable(self, site: Site) -> set[str]:
        return super().trainable(site) | site.heads()

    def count(self, local: Local) -> int:
        return sum(map(len, _held(local)))

    def batches(self, local: Local, own: Iterator[InputBatch]) -> Iterator[InputBatch]:
        """Samples of all tasks so far, shuffled together; each as its own task shows it."""
        held = _held(local)
        samples, tasks = np.concatenate(held), np.repeat(np.arange(len(held)), list(map(len, held)))
        places = local_batches(np.arange(len(samples)), local.settings.train, local.draw("batches"))
        chance = local.chance("augment")
        for chosen in places:
            wanted = ((int(task), samples[chosen[tasks[chosen] == task]]) for task in np.unique(tasks[chosen]))
            parts = [
                batch
                for task, some in wanted
                for batch in local.cache.train_batches(local.network, task, [some], chance)
            ]
            images, labels = zip(*parts, strict=True)
            yield torch.cat(images), torch.cat(labels)

    def loss(self, local: Local, inputs: Inputs, labels: Tensor) -> Tensor:
        network = local.network
        features = network.embed(inputs)
        logits = torch.cat([head(features) for head in network.heads], dim=1)
        known = torch.tensor([label for head in network.labels for label in head], device=labels.device)
        return cross_entropy(logits, labels[:, None] == known)


def cross_entropy(logits: Tensor, right: Tensor) -> Tensor:
    """Over all outputs (n, C), of which some are right (n, C): several where heads share a class.

    Each of them is to win against all that are wrong; the loss of a sample is their mean.
    """
    wrong = logits.masked_fill(right, torch.finfo(logits.dtype).min / 2).logsumexp(1, keepdim=True)
    losses = (torch.logaddexp(logits, wrong) - logits).masked_fill(~right, 0.0)
    return (losses.sum(1) / right.sum(1)).mean()


def _held(local: Local) -> list[np.ndarray]:
    """A client's training samples (indices) of every task up to this one."""
    return [local.holding.samples(task) for task in range(local.task + 1)]
