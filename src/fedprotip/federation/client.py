"""A client: trains on its own samples, and summarises them at the end of a task."""

from collections.abc import Iterator
from inspect import signature
from itertools import chain, count, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedprotip.errors import UsageError, nearest
from fedprotip.federation.wire import Wire
from fedprotip.messages import Message
from fedprotip.methods.base import ClientTask, Constraint, Knowledge, Method
from fedprotip.methods.parts import statistics
from fedprotip.models import Network
from fedprotip.models.batches import pieces
from fedprotip.models.norms import moving_norms, training_mode
from fedprotip.models.prefix import PrefixCache, still_prefix
from fedprotip.models.products import by_products
from fedprotip.models.steps import channels_last
from fedprotip.seeds import ambient_stream, numpy_stream, torch_stream
from fedprotip.settings import Settings, TrainSettings
from fedprotip.store.files import ClientStore
from fedprotip.stream import Stream


class Workspace:
    """What one machine holds for the clients that live on it: a model, what is known, and their state."""

    def __init__(
        self,
        settings: Settings,
        method: Method,
        network: Network,
        stream: Stream,
        store: ClientStore,
        cache: PrefixCache | None = None,
    ) -> None:
        self.settings, self.method, self.network = settings, method, network
        self.stream, self.store = stream, store
        self.cache = cache or PrefixCache(stream, settings, enabled=not method.sees_images)
        self.knowledge: Knowledge = {}
        self.task = -1

    def begin_task(self, task: int) -> None:
        """Add the new head; from here on only what this task may move requires gradients."""
        prepare(self.network, self.stream, self.settings.run.seed, task)
        release(self.network, self.method.trainable(self.network, self.knowledge, task))
        self.task = task

    def copy_from(self, network: Network) -> None:
        """Hold the same model as another network; what cannot move in this task is the same already."""
        load_state(self.network, moving_state(network, self.settings, self.task))

    def samples(self, client: int) -> int:
        return len(self.stream.client_samples(self.task, client))

    def train(self, client: int, round_: int) -> Message:
        """PGD of Algorithm 1: local steps from the received model, each projected by the method (Eq. 4–5)."""
        network, train, device = self.network, self.settings.train, next(self.network.parameters()).device
        samples = self.stream.client_samples(self.task, client)
        rng = numpy_stream(self.settings.run.seed, "batches", self.task, round_, client)
        chance = torch_stream(self.settings.run.seed, "augment", self.task, round_, client)
        optimizer = build_optimizer(train, [network.get_parameter(name) for name in network.moving])
        constraint = self.method.constraint(network, self.knowledge, self.task) or Constraint()
        losses: list[Tensor] = []
        ambient = ambient_stream(self.settings.run.seed, "train", self.task, round_, client)
        with ambient, constraint, by_products(network.backbone, constraint.columns):
            still = still_prefix(network, self.settings, self.task)
            training_mode(network.backbone, self.settings.model, self.task, still)
            batches = local_batches(samples, train, rng)
            for inputs, labels in self.cache.train_batches(network, self.task, batches, chance):
                inputs = inputs.to(device)
                if train.channels_last:
                    inputs = channels_last(inputs)
                with torch.autocast(device.type, torch.bfloat16, enabled=train.autocast == "bf16"):
                    loss = self.method.loss(network, inputs, labels.to(device), self.task)
                optimizer.zero_grad()
                loss.backward()
                with torch.no_grad():
                    constraint.before_step()
                    optimizer.step()
                    constraint.after_step()
                losses.append(loss.detach())
        network.backbone.eval()
        wire = Wire(self.settings, self.method, network, self.knowledge, self.task)
        meta = {"samples": len(samples), "loss": torch.stack(losses).mean().item()}
        return Message("model", wire.pack(moving_state(network, self.settings, self.task)), meta)

    def summarise(self, client: int, kind: str) -> Message:
        """ExtractBases and UpdateReference of Algorithm 1, or whatever else the method sends at a task's end."""
        self.network.backbone.eval()
        local = ClientTask(
            client, self.task, self.network, self.knowledge, self.stream, self.store, self.settings.run.seed, self.cache
        )
        with torch.no_grad():
            if kind == statistics.START:
                return statistics.gather(local, self.settings, mapped=False)
            return self.method.summarise(kind, local)


def local_batches(samples: np.ndarray, train: TrainSettings, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Shuffled batches of `epochs` passes, or of as many passes as `steps` needs."""
    passes = count() if train.steps and len(samples) else range(train.epochs)
    epochs = (pieces(rng.permutation(samples), train.batch) for _ in passes)
    batches = chain.from_iterable(epochs)
    return islice(batches, train.steps) if train.steps else batches


def prepare(network: Network, stream: Stream, seed: int, task: int) -> None:
    """Grow the heads of all tasks up to this one; the same on every machine, so new heads need not travel."""
    for index in range(len(network.labels), task + 1):
        network.add_head(stream.tasks[index].classes, seed, index)


def release(network: Network, moving: set[str]) -> None:
    """Only these parameters require gradients from here on."""
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(name in moving)
    network.moving = [name for name, parameter in network.named_parameters() if parameter.requires_grad]


def full_state(network: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer, tied ones once."""
    return {n: t.detach() for n, t in chain(network.named_parameters(), network.named_buffers())}


def moving_state(network: Network, settings: Settings, task: int) -> dict[str, Tensor]:
    """What can change during a task, and so has to travel: trainable parameters and moving statistics."""
    state = {name: tensor_of(network, name) for name in network.moving}
    for norm in moving_norms(network.backbone, settings.model, task):
        state |= {f"backbone.{norm}.{n}": b for n, b in network.backbone.get_submodule(norm).named_buffers()}
    return state


def load_state(network: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Overwrite parameters and buffers by name, in place."""
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor_of(network, name).copy_(tensor)


def tensor_of(network: nn.Module, name: str) -> Tensor:
    """A parameter or buffer by its name, without a look at all the heads there are."""
    owner, _, last = name.rpartition(".")
    found: Tensor = getattr(network.get_submodule(owner), last)
    return found


def build_optimizer(train: TrainSettings, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Any optimiser of torch.optim; a new one every round, as in the paper. Impossible settings: UsageError."""
    known = {n: c for n, c in vars(torch.optim).items() if isinstance(c, type) and issubclass(c, torch.optim.Optimizer)}
    for unfit in ("Optimizer", "LBFGS", "SparseAdam", "Muon"):  # base class; closure; sparse; matrices only
        known.pop(unfit, None)
    if train.optimizer not in known:
        raise UsageError(f"train.optimizer = {train.optimizer!r} is unknown; {nearest(train.optimizer, known)}.")
    cls = known[train.optimizer]
    accepted = signature(cls).parameters
    arguments: dict[str, Any] = {"lr": train.lr}
    for name in ("momentum", "weight_decay"):
        value = getattr(train, name)
        if name in accepted:
            arguments[name] = value
        elif value:
            raise UsageError(f"train.{name} = {value}: {train.optimizer} has none; the nearest valid value is 0.")
    options = {
        key: tuple(value) if isinstance(value, list) else value for key, value in train.optimizer_options.items()
    }
    try:
        return cls(parameters, **arguments | options)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"train.optimizer_options = {train.optimizer_options}: {train.optimizer} says: {error}."
        ) from None
