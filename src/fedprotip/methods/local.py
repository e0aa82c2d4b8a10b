"""One client at work on one question: all that its answer, its loss and its batches can be made of."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedprotip.methods.site import Site
from fedprotip.methods.state import Kept, Knowledge
from fedprotip.models import Network
from fedprotip.models.batches import pieces
from fedprotip.models.prefix import InputBatch, PrefixCache
from fedprotip.models.steps import Inputs
from fedprotip.seeds import numpy_stream, torch_stream
from fedprotip.settings import Settings
from fedprotip.store.clients import ClientStore
from fedprotip.store.files import Tensors
from fedprotip.stream.holdings import Holding


@dataclass(frozen=True)
class Belongings:
    """A client's private state: groups of tensors that last between rounds, survive a kill and are never sent."""

    store: ClientStore
    client: int
    declared: tuple[Kept, ...]

    def get(self, name: str) -> Tensors | None:
        """What was stored under this name, as a copy; None where nothing was."""
        self._kept(name)
        return self.store.get(self.client, name)

    def put(self, name: str, tensors: Tensors) -> None:
        """Store a group under a declared name, or NAME-… (one group per task, say)."""
        kept = self._kept(name)
        self.store.put(self.client, name, {key: kept.canonical(key, tensor) for key, tensor in tensors.items()})

    def _kept(self, name: str) -> Kept:
        """As what a group is declared: names may have hyphens of their own, so the longest that fits counts."""
        own = (k for k in self.declared if k.where == "private" and f"{name}-".startswith(f"{k.name}-"))
        kept = max(own, key=lambda k: len(k.name), default=None)
        if kept is None or not name.isprintable():
            raise KeyError(f"{name!r} is not declared as private state of the method")
        return kept


@dataclass(frozen=True)
class Local:
    """A client within one exchange."""

    site: Site
    holding: Holding
    cache: PrefixCache
    own: Belongings
    task: int
    round: int | None = None
    scratch: dict[str, Any] = field(default_factory=dict)
    """For hooks of a method: lives as long as this answer."""

    @property
    def client(self) -> int:
        return self.holding.client

    @property
    def network(self) -> Network:
        return self.site.network

    @property
    def known(self) -> Knowledge:
        return self.site.known

    @property
    def settings(self) -> Settings:
        return self.site.settings

    @property
    def before(self) -> Network:
        """The model of the last task, W^(t,0), which must not be changed; for methods that say `remembers`."""
        return self.site.before()

    def chance(self, purpose: str) -> torch.Generator:
        """A random stream of this client, task and round alone."""
        return torch_stream(self.settings.run.seed, purpose, *self._place)

    def draw(self, purpose: str) -> np.random.Generator:
        """The same, for numpy."""
        return numpy_stream(self.settings.run.seed, purpose, *self._place)

    @property
    def _place(self) -> tuple[int, ...]:
        return (self.task, self.client) if self.round is None else (self.task, self.round, self.client)

    @cached_property
    def samples(self) -> np.ndarray:
        """This client's training samples of the task (indices)."""
        return self.holding.samples(self.task)

    def labels(self) -> Tensor:
        """The labels of all training images of this client (n,)."""
        return self.holding.labels(self.task)

    def images(self, count: int, batch: int, after: int = 0) -> Iterator[Inputs]:
        """Up to `count` randomly chosen training images of this client, in batches for `network.embed`.

        Args:
            after: leave out so many of them, the first ones.
        """
        rng = numpy_stream(self.settings.run.seed, "summary", self.task, self.client)
        for inputs, _ in self._deliver(rng.permutation(self.samples)[after:count], batch):
            yield inputs

    def labelled(self, batch: int) -> Iterator[InputBatch]:
        """All training images of this client with their labels, in batches for `network.embed`."""
        return self._deliver(np.sort(self.samples), batch)

    def held_back(self, batch: int) -> Iterator[InputBatch]:
        """The images of this client that it did not train on, with their labels."""
        return self._deliver(np.sort(self.holding.held_back(self.task)), batch)

    def _deliver(self, samples: np.ndarray, batch: int) -> Iterator[InputBatch]:
        for inputs, labels in self.cache.train_batches(self.network, self.task, pieces(samples, batch)):
            yield inputs.to(self.site.device), labels
