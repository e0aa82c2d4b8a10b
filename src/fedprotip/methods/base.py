"""What a method can decide. The defaults are FedAvg; a method overrides the few hooks it needs.

@register
class Mine(Method):
    name = "mine"

    class Options(MethodSettings):
        name: str = "mine"
        strength: float = Field(1.0, gt=0, description="Weight of the extra term.")

    def loss(self, network, inputs, labels, task):
        return super().loss(network, inputs, labels, task) + ...
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedprotip.errors import UsageError
from fedprotip.messages import Message
from fedprotip.models import Network
from fedprotip.models.batches import pieces
from fedprotip.models.capture import Layer
from fedprotip.models.freeze import frozen_prefixes
from fedprotip.models.prefix import PrefixCache
from fedprotip.models.steps import Inputs
from fedprotip.seeds import numpy_stream
from fedprotip.settings import MethodSettings, Settings, declare
from fedprotip.store.files import ClientStore
from fedprotip.stream import Stream
from fedprotip.stream.plan import Answering
from fedprotip.subspace.coordinates import Complement
from fedprotip.subspace.project import Projector

Knowledge = dict[str, Tensor]
"""What is known about past tasks, as named tensors, all of them in checkpoints: `Method.shared` reaches every client,
subspaces/…, references/…, statistics/… and calibration/… become files of the run folder, start/… is W^(t,0) of the
task under way."""
START = "start/"
"""Prefix of W^(t,0), there for tensors that travel as a change since then."""


@dataclass(frozen=True)
class ClientTask:
    """One client at the end of one task: what its summaries can be made of."""

    client: int
    task: int
    network: Network
    knowledge: Knowledge
    stream: Stream
    store: ClientStore
    seed: int
    cache: PrefixCache

    def batches(self, images: int, batch: int, after: int = 0) -> Iterator[Inputs]:
        """Up to `images` randomly chosen training images of this client, in batches for `network.embed`.

        Args:
            after: leave out so many of them, the first ones.
        """
        rng = numpy_stream(self.seed, "summary", self.task, self.client)
        for inputs, _ in self._deliver(rng.permutation(self._samples())[after:images], batch):
            yield inputs

    def labelled(self, batch: int) -> Iterator[tuple[Inputs, Tensor]]:
        """All training images of this client with their labels, in batches for `network.embed`."""
        return self._deliver(np.sort(self._samples()), batch)

    def held_back(self, batch: int) -> Iterator[tuple[Inputs, Tensor]]:
        """The images of this client that it did not train on, with their labels."""
        return self._deliver(np.sort(self.stream.held_back(self.task, self.client)), batch)

    def labels(self) -> Tensor:
        """The labels of all training images of this client (n,)."""
        return self.stream.dataset.train_labels[torch.from_numpy(self._samples())]

    def _samples(self) -> np.ndarray:
        return self.stream.client_samples(self.task, self.client)

    def _deliver(self, samples: np.ndarray, batch: int) -> Iterator[tuple[Inputs, Tensor]]:
        device = next(self.network.parameters()).device
        for inputs, labels in self.cache.train_batches(self.network, self.task, pieces(samples, batch)):
            yield inputs.to(device), labels


@dataclass(frozen=True)
class Exchange:
    """One exchange at the end of a task: every client sends a message, the server digests them all."""

    kind: str
    everyone: bool = False
    """Ask every active client; else only those that have data of the task."""


class Constraint:
    """Runs around every optimiser step of a client, and is a context for one round; where projection lives."""

    def __enter__(self) -> "Constraint":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """After the last step, or when a step failed."""

    def before_step(self) -> None:
        """Gradients are there."""

    def after_step(self) -> None:
        """Weights have moved."""


class Method:
    """Hooks of a method; every one has FedAvg's behaviour here."""

    name: ClassVar[str] = ""
    scenarios: ClassVar[tuple[str, ...]] = ("class", "domain")
    routes: ClassVar[bool] = False
    """Whether it predicts the task of a sample (modes single and batch64); then with domains every one has a head."""
    sees_images: ClassVar[bool] = False
    """Whether `loss` needs the images themselves; then a frozen prefix runs every time."""
    shared: tuple[str, ...] = ("subspaces/",)
    """The parts of the knowledge that clients need too."""
    protects: ClassVar[bool] = False
    """Whether it keeps updates out of subspaces (`projectors`), so that their geometry can be measured."""
    task_end: tuple["Exchange", ...] = ()
    """What clients send at the end of a task, in this order."""
    Options: ClassVar[type[MethodSettings]] = MethodSettings

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.check()

    def check(self) -> None:
        """Refuse settings this method cannot run with, before any work."""
        if self.settings.stream.scenario not in self.scenarios:
            raise UsageError(
                f"stream.scenario = {self.settings.stream.scenario!r} is not possible with method.name = "
                f"{self.name!r}; it supports: {', '.join(self.scenarios)}."
            )

    def rounds(self, task: int) -> int:
        """Rounds of training in a task."""
        return self.settings.train.rounds

    # Both sides

    def trainable(self, network: Network, knowledge: Knowledge, task: int) -> set[str]:
        """Names of the parameters that move in a task: the backbone but its frozen part, and the task's own head."""
        own = f"heads.{network.head_of(task)}."
        frozen = tuple(f"backbone.{prefix}" for prefix in frozen_prefixes(self.settings.model, task))
        moving = (name for name, _ in network.named_parameters() if name.startswith(("backbone.", own)))
        return {name for name in moving if not name.startswith(frozen)}

    def receive(self, knowledge: Knowledge, message: Message, task: int) -> None:
        """Add what the server broadcasts at the end of a task to one's knowledge, in place."""

    def projectors(self, network: Network, knowledge: Knowledge, task: int) -> list[tuple[Layer, Projector]]:
        """The layers whose updates are kept out of a subspace during a task."""
        return []

    def complements(self, network: Network, knowledge: Knowledge, task: int) -> list[tuple[Layer, Complement]]:
        """The layers that travel as coordinates outside a subspace, because nothing inside it may change."""
        return []

    # Client

    def loss(self, network: Network, inputs: Inputs, labels: Tensor, task: int) -> Tensor:
        """Cross-entropy over the current head only: old heads get no negative gradient.

        `inputs` are images, or what a frozen prefix made of them; `network.embed` takes both.
        """
        logits = network.logits(network.embed(inputs), task)
        return F.cross_entropy(logits, network.targets(labels, task))

    def constraint(self, network: Network, knowledge: Knowledge, task: int) -> Constraint | None:
        """What keeps a client's steps within bounds during one round."""
        return None

    def summarise(self, kind: str, local: ClientTask) -> Message:
        """A client's message of this kind at the end of a task."""
        raise NotImplementedError(f"{self.name} announces {kind!r} in task_end but does not make it")

    # Server

    def validate(self, message: Message, network: Network, knowledge: Knowledge, task: int) -> None:
        """Raise BadMessage when a client's message at the end of a task must not be used."""

    def digest(
        self,
        kind: str,
        replies: Iterable[tuple[int, Message]],
        network: Network,
        knowledge: Knowledge,
        task: int,
    ) -> Message | None:
        """Merge the clients' messages (valid, in client order) into what all clients receive; None: nothing."""
        raise NotImplementedError(f"{self.name} announces {kind!r} in task_end but does not digest it")

    def answering(self) -> Answering:
        """How samples are answered: experts and routers by name. By default the heads, and no task is predicted."""
        return Answering()

    def ranks(self, knowledge: Knowledge) -> tuple[dict[str, int], dict[str, int]]:
        """For the report: (layer → rank so far, layer → d)."""
        return {}, {}


_methods: dict[str, type[Method]] = {}


def register(cls: type[Method]) -> type[Method]:
    """Make a method available as `method.name = NAME`, with its own settings."""
    _methods[cls.name] = cls
    declare("method.name", cls.name, cls.Options)
    return cls


def create_method(settings: Settings) -> Method:
    return _methods[settings.method.name](settings)
