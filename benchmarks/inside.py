"""The one file of the benchmarks that knows the inside of the product: what no public function gives.

Everything else here uses `fedprotip.run` and `fedprotip.extend`, run folders, settings, the paper's protocols, and the
pure functions of `subspace/`, `models/` and `inference/`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedprotip.evaluation.evaluate import evaluate
from fedprotip.evaluation.portions import draw_groups
from fedprotip.federation.aggregate import Average
from fedprotip.inference.answers import Inference, Way
from fedprotip.inference.candidates import Candidates
from fedprotip.inference.experts import HEADS, HeadExpert
from fedprotip.inference.parts import Expert
from fedprotip.inference.predictor import Predictor
from fedprotip.inference.route import CosineRouter
from fedprotip.inference.routers import Vote
from fedprotip.methods import create_method
from fedprotip.methods.constraint import Constraint
from fedprotip.methods.local import Belongings, Local
from fedprotip.methods.parts.bases import Bases
from fedprotip.methods.parts.projection import ProjectUpdate, linear_decay
from fedprotip.methods.parts.protection import protection
from fedprotip.methods.parts.training import build_optimizer, local_batches
from fedprotip.methods.site import Site
from fedprotip.models import Network, build_network
from fedprotip.models.prefix import PrefixCache
from fedprotip.models.products import by_products
from fedprotip.models.steps import Hidden
from fedprotip.seeds import numpy_stream
from fedprotip.settings import Settings
from fedprotip.store.clients import ClientStore
from fedprotip.store.folder import RunFolder
from fedprotip.store.memory import hand_back_memory
from fedprotip.store.objects import ObjectFolder
from fedprotip.stream import Stream, build_stream
from fedprotip.stream.holdings import Holding
from fedprotip.stream.plan import Answering

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


def second_task(network: Network, settings: Settings, bases: Tensors, classes: Sequence[Sequence[int]]) -> Site:
    """One end of the federation at the beginning of the second task, with bases (of a bank) that the first one left."""
    site = Site(settings, create_method(settings), network, classes, image_shape=(0, 0, 0))  # nobody makes images
    site.known.update(bases)
    site.begin_task(1)
    return site


class TrainingStep:
    """Steps of the second task as a client makes them; without bases nothing is projected."""

    def __init__(self, network: Network, settings: Settings, bases: Tensors | None) -> None:
        self._network, self._constraint = network, Constraint()
        if bases:
            view = protection(second_task(network, settings, bases, network.labels))
            decay = linear_decay(settings.train)
            self._constraint = ProjectUpdate(network.backbone, view.projectors, decay, view.anchors)
        self._optimizer = optimizer_of(network, settings)
        self._round = ExitStack()  # that is never left: the network goes with it
        self._round.enter_context(self._constraint)
        self._round.enter_context(by_products(network.backbone, self._constraint.columns))

    def __call__(self, inputs: Hidden, labels: Tensor) -> None:
        loss = F.cross_entropy(self._network.logits(self._network.embed(inputs), 1), labels)
        self._optimizer.zero_grad()
        loss.backward()
        with torch.no_grad():
            self._constraint.before_step()
            self._optimizer.step()
            self._constraint.after_step()


class Extraction:
    """The only client of the second task at its end."""

    def __init__(self, network: Network, settings: Settings, bases: Tensors, folder: Path) -> None:
        stream = build_stream(settings)
        site = second_task(network, settings, bases, [task.classes for task in stream.tasks])
        own = Belongings(ClientStore(ObjectFolder(folder), budget_bytes=2**30), 0, site.method.state)
        exchange = site.method.exchange("basis")
        assert isinstance(exchange, Bases)
        self._exchange = exchange
        self._local = Local(site, Holding(stream, 0), PrefixCache(stream, settings), own, task=1)
        self.images: Tensor = stream.train_batch(1, stream.tasks[1].train)[0]

    @torch.no_grad()
    def columns(self) -> Tensors:
        """The sampled input columns of every layer (d, m_s)."""
        return self._exchange.sample_columns(self._local)

    @torch.no_grad()
    def bases(self) -> Tensors:
        """Eq. 7–9: a core basis of every layer."""
        return {name: core.basis for name, core in self._exchange.layer_cores(self._local).items()}


def evaluation(
    network: Network, stream: Stream, router: CosineRouter, settings: Settings
) -> Callable[[], dict[str, list[float | None]]]:
    """Accuracies of all modes after the last task; outputs of the frozen prefix are kept as `run.cache_mb` allows."""
    tasks = len(stream.tasks)
    heads: dict[str, Expert] = {HEADS: HeadExpert(network, tasks)}
    ways = {"cosine": Way(Vote(router), HEADS)}
    inference = Inference(Candidates.of([task.classes for task in stream.tasks]), heads, ways, "cosine")
    predictor = Predictor(network, inference, stream.plan(Answering(), network.shared_head, tasks))
    cache = PrefixCache(stream, settings)
    return lambda: evaluate(predictor, stream, tasks - 1, settings, cache).accuracy


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
