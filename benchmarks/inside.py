"""The one file of the benchmarks that knows the inside of the product: what no public function gives.

Everything else here uses `fedprotip.run` and `fedprotip.extend`, run folders, settings, the paper's protocols, and the
pure functions of `subspace/`, `models/` and `inference/`.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedprotip.evaluation.evaluate import evaluate
from fedprotip.evaluation.portions import draw_groups
from fedprotip.federation.aggregate import Average
from fedprotip.federation.client import Workspace, build_optimizer, local_batches
from fedprotip.inference.route import CosineRouter
from fedprotip.inference.ways import with_cosine
from fedprotip.methods import create_method
from fedprotip.methods.base import ClientTask
from fedprotip.methods.fedprotip import FedProTIP
from fedprotip.models import Network, build_network
from fedprotip.models.prefix import PrefixCache
from fedprotip.models.steps import Hidden
from fedprotip.seeds import numpy_stream
from fedprotip.settings import Settings
from fedprotip.store.files import ClientStore, ObjectFolder
from fedprotip.store.folder import RunFolder
from fedprotip.store.memory import hand_back_memory
from fedprotip.stream import Stream, build_stream

__all__ = ["Stream", "build_stream", "draw_groups", "hand_back_memory"]

Tensors = dict[str, Tensor]


def network_of(settings: Settings, stream: Stream, task: int = -1) -> Network:
    """A network as a run begins with it, with the heads of all tasks up to this one."""
    network = build_network(settings, stream.dataset.image_shape, routes=True)
    for index in range(task + 1):
        network.add_head(stream.tasks[index].classes, settings.run.seed, index)
    return network


def optimizer_of(network: Network, settings: Settings) -> torch.optim.Optimizer:
    return build_optimizer(settings.train, [p for p in network.parameters() if p.requires_grad])


def batches(stream: Stream, settings: Settings, task: int, round_: int, client: int) -> Iterator[np.ndarray]:
    """The samples of every step of a client in one round."""
    rng = numpy_stream(settings.run.seed, "batches", task, round_, client)
    return local_batches(stream.client_samples(task, client), settings.train, rng)


def average(models: list[Tensors], weights: list[float]) -> Tensors:
    """Eq. 6 as the server does it, one model after another."""
    mean = Average()
    for model, weight in zip(models, weights, strict=True):
        mean.add(model, weight)
    return mean.result()


def training_step(network: Network, settings: Settings, bases: Tensors | None) -> Callable[[Hidden, Tensor], None]:
    """A step of the second task as a client makes it; without bases (of a bank) nothing is projected."""
    optimizer = optimizer_of(network, settings)
    constraint = create_method(settings).constraint(network, bases, 1) if bases else None
    if constraint:
        constraint.__enter__()  # a round that is never left: the network goes with it

    def step(inputs: Hidden, labels: Tensor) -> None:
        loss = F.cross_entropy(network.logits(network.embed(inputs), 1), labels)
        optimizer.zero_grad()
        loss.backward()
        with torch.no_grad():
            if constraint:
                constraint.before_step()
            optimizer.step()
            if constraint:
                constraint.after_step()

    return step


class Extraction:
    """The only client of the second task at its end."""

    def __init__(self, network: Network, settings: Settings, bases: Tensors, folder: Path) -> None:
        stream, store = build_stream(settings), ClientStore(ObjectFolder(folder), budget_bytes=2**30)
        workspace = Workspace(settings, create_method(settings), network, stream, store)
        workspace.knowledge = bases
        workspace.begin_task(1)
        assert isinstance(workspace.method, FedProTIP)
        self._method = workspace.method
        self._task = ClientTask(0, 1, network, bases, stream, store, settings.run.seed, workspace.cache)
        self.images: Tensor = stream.train_batch(1, stream.tasks[1].train)[0]

    @torch.no_grad()
    def columns(self) -> Tensors:
        """The sampled input columns of every layer (d, m_s)."""
        return self._method.sample_columns(self._task)

    @torch.no_grad()
    def bases(self) -> Tensors:
        """Eq. 7–9: a core basis of every layer."""
        return {name: core.basis for name, core in self._method.layer_cores(self._task).items()}


def evaluation(
    network: Network, stream: Stream, router: CosineRouter, settings: Settings
) -> Callable[[], dict[str, list[float]]]:
    """Accuracies of all modes after the last task; outputs of the frozen prefix are kept as `run.cache_mb` allows."""
    inference, cache = with_cosine(network, router, [t.classes for t in stream.tasks]), PrefixCache(stream, settings)
    return lambda: evaluate(network, stream, inference, len(stream.tasks) - 1, settings, cache).accuracy


class Checkpoints:
    """The checkpoints of a run that was stopped in the middle of a task: numbers, and groups of tensors."""

    def __init__(self, path: Path) -> None:
        self._run = RunFolder.open(path)
        self._store = self._run.store(budget_mb=256)
        saved = self._run.restore(self._store, warn=lambda text: None)
        assert saved is not None, "the run was stopped after a checkpoint"
        self.numbers, self.groups = saved

    def write(self) -> None:
        self._run.checkpoint(self.numbers, self.groups, self._store)


def move(groups: dict[str, Tensors]) -> None:
    """After a round nothing that moves in this task is what it was."""
    for tensor in (groups.get("news") or groups["model"]).values():
        tensor.view(-1)[:1] += 1
