"""The server: the global model, what is known about past tasks, and where the run stands."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedprotip.federation.aggregate import Average
from fedprotip.federation.client import full_state, load_state, moving_state, prepare, release, tensor_of
from fedprotip.federation.wire import Wire
from fedprotip.inference.assemble import assemble
from fedprotip.inference.predictor import Predictor
from fedprotip.inference.statistics import Gaussians
from fedprotip.messages import BadMessage, Message
from fedprotip.methods.base import START, Knowledge, Method
from fedprotip.methods.parts import statistics
from fedprotip.models import Network
from fedprotip.models.prefix import PrefixCache
from fedprotip.seeds import numpy_stream
from fedprotip.settings import Settings
from fedprotip.store.files import Tensors
from fedprotip.stream import Stream
from fedprotip.stream.plan import Plan


@dataclass
class Progress:
    """Where a run stands and what it has measured: plain numbers, saved with every checkpoint."""

    task: int = 0  # the task that comes next or is under way
    round: int = 0  # its rounds that are done
    version: int = 0  # how often the global model has changed
    moved: list[list[str]] = field(default_factory=list)  # finished task → names of the tensors that moved in it
    sent: dict[str, list[int]] = field(default_factory=dict)  # client → [task, version] of the last model it got
    knows: dict[str, int] = field(default_factory=dict)  # client → last task whose digests it got
    barren: int = 0  # rounds in a row without a single usable update
    failures: dict[str, int] = field(default_factory=dict)  # reason → how often
    last_failure: str = "no client has data"
    matrix: dict[str, list[list[float]]] = field(default_factory=dict)  # mode → row per evaluation
    routing: dict[str, Any] = field(default_factory=dict)  # of the last evaluation
    bytes: dict[str, dict[str, int]] = field(default_factory=lambda: {"up": {}, "down": {}})
    seconds: dict[str, float] = field(default_factory=lambda: {"train": 0.0, "task_end": 0.0, "evaluate": 0.0})
    geometry: dict[str, Any] = field(default_factory=dict)
    peak_rss_mb: float = 0.0


class Server:
    """Holds the global state and takes the server's steps of Algorithm 1."""

    def __init__(
        self, settings: Settings, method: Method, network: Network, stream: Stream, cache: PrefixCache | None = None
    ) -> None:
        self.settings, self.method, self.network, self.stream = settings, method, network, stream
        self.cache = cache or PrefixCache(stream, settings)
        self.knowledge: Knowledge = {}
        self.progress = Progress()
        self.news: Tensors = {}  # what has moved in this task, in the form in which it travels

    def begin_task(self, task: int) -> None:
        """W^(t,0) ← W^(t−1), with the head of the new task."""
        prepare(self.network, self.stream, self.settings.run.seed, task)
        release(self.network, self.method.trainable(self.network, self.knowledge, task))
        state = moving_state(self.network, self.settings, task)
        self.wire = self._wire(task)
        self.wire.begin({name: tensor for name, tensor in state.items() if name not in self.news})
        if not self.news:
            for last in self.progress.sent.values():  # clients with the final model lack nothing of earlier tasks
                last[0] = task if last[1] == self.progress.version else last[0]
        self._specs = self.wire.specs(state)

    def choose(self, present: list[int], task: int, round_: int) -> list[int]:
        """The clients of a round: a share of all active ones, drawn from those that have data."""
        active = len(self.stream.clients(task))
        wanted = max(int(self.settings.clients.fraction * active), 1)
        rng = numpy_stream(self.settings.run.seed, "clients", task, round_)
        return sorted(np.array(present)[rng.permutation(len(present))[:wanted]].tolist())

    def parcel(self, client: int, task: int) -> list[Message]:
        """What a client lacks of the current model and knowledge; nothing when it has all of it.

        Of the model that is what it missed of earlier tasks, under start/…, so that it holds W^(t,0): only tensors
        that moved since, no frozen layers, no old heads. And what has moved in this task.
        """
        messages = []
        if task and self.progress.knows.get(str(client), -1) < task - 1:
            shared = {name: tensor for name, tensor in self.knowledge.items() if name.startswith(self.method.shared)}
            messages += [Message("knowledge", shared)] if shared else []
            self.progress.knows[str(client)] = task - 1
        last, version = self.progress.sent.get(str(client), [None, None])
        if version != self.progress.version:
            missed = set(full_state(self.network)) if last is None else set().union(*self.progress.moved[last:])
            before = {name: self._before_news(name) for name in sorted(missed)}
            tensors = {START + name: tensor for name, tensor in before.items() if tensor is not None} | self.news
            messages.append(Message("model", {name: tensor.detach().cpu() for name, tensor in tensors.items()}))
            self.progress.sent[str(client)] = [task, self.progress.version]
        return messages

    def check_update(self, message: Message) -> None:
        """Raise BadMessage unless this is a usable model from a client."""
        message.check("model", self._specs)
        message.check_numbers("samples", "loss")
        if message.meta["samples"] <= 0:
            raise BadMessage(f"samples = {message.meta['samples']} is not a positive number")

    def weight(self, update: Message) -> float:
        """p_k of Eq. 6, up to normalisation."""
        return float(update.meta["samples"]) if self.settings.train.average == "weighted" else 1.0

    def apply(self, average: Average) -> None:
        """W^(t,e) ← the average of what clients sent."""
        self.news = {name: self.news.get(name, tensor).copy_(tensor) for name, tensor in average.result().items()}
        load_state(self.network, self.wire.unpack(self.news))
        self.progress.version += 1

    def has_new_head(self, task: int) -> bool:
        """Whether this task trains a head of its own; a head that all tasks share is new once."""
        return bool(self.method.rounds(task)) and (task == 0 or not self.network.shared_head)

    def check_start(self, message: Message, task: int) -> None:
        classes, rank = len(self.network.labels[self.network.head_of(task)]), self.settings.statistics.rank
        statistics.check(message, classes, self.network.features, rank)

    def start_head(self, replies: Iterable[tuple[int, Message]], task: int) -> None:
        """The head of a new task as the linear discriminant of its statistics; it travels like a round's result."""
        sums = statistics.added(replies)
        if not sums.seen.any():
            return
        weight, bias = Gaussians.of(sums).head()
        name = f"heads.{self.network.head_of(task)}"
        head = {f"{name}.weight": weight, f"{name}.bias": bias}
        self.news = self.wire.pack(head)
        load_state(self.network, self.wire.unpack(self.news))  # as clients get it, rounded or not
        self.progress.version += 1

    def predictor(self, task: int) -> Predictor:
        """What answers for samples of tasks 0…task."""
        plan = self.plan(task)
        classes = [known.classes for known in plan.tasks]
        return Predictor(self.network, assemble(plan.answering, self.network, self.knowledge, classes), plan)

    def plan(self, task: int) -> Plan:
        """What the run folder says about tasks 0…task beside its tensors."""
        return self.stream.plan(self.method.answering(), self.network.shared_head, task + 1)

    def settle(self) -> None:
        """End a task: what moved in it travels as it is from now on, for its coordinates end with its bases."""
        if len(self.progress.moved) == self.progress.task:
            self.progress.moved.append(sorted(self.news))
        self.news = {}
        for name in [name for name in self.knowledge if name.startswith(START)]:
            del self.knowledge[name]

    def tensors(self) -> dict[str, Tensors]:
        """Groups of tensors for a checkpoint: the model, what moved in this task, each file of the knowledge."""
        before = {name: self._before_news(name) for name in full_state(self.network)}
        model = {name: tensor for name, tensor in before.items() if tensor is not None}
        groups: dict[str, Tensors] = {"model": model} | ({"news": self.news} if self.news else {})
        for name, tensor in self.knowledge.items():
            if not name.startswith(START):
                groups.setdefault(name.partition("/")[0], {})[name] = tensor
        return groups

    def state(self) -> dict[str, Any]:
        return dict(vars(self.progress))

    def restore(self, state: dict[str, Any], groups: dict[str, Tensors]) -> None:
        """Exactly the server that made the checkpoint; copies, as what is read is not aligned like other tensors."""
        self.progress = Progress(**state)
        for name in groups:
            if name not in ("model", "news", "geometry"):
                self.knowledge.update({key: tensor.clone() for key, tensor in groups[name].items()})
        model, self.news = groups["model"], groups.get("news", {})
        heads = {name.split(".")[1] for name in [*model, *self.news] if name.startswith("heads.")}
        if heads:
            prepare(self.network, self.stream, self.settings.run.seed, len(heads) - 1)
        load_state(self.network, model)
        if self.news:
            device = next(self.network.parameters()).device
            start = {START + name: model[name].to(device, copy=True) for name in self.news if name in model}
            self.knowledge.update(start)
            load_state(self.network, self._wire(self.progress.task).unpack(self.news))

    def _wire(self, task: int) -> Wire:
        return Wire(self.settings, self.method, self.network, self.knowledge, task)

    def _before_news(self, name: str) -> Tensor | None:
        """A tensor that has not moved in this task, or W^(t,0) below a change; None where the news replace it."""
        start = self.knowledge.get(START + name)
        return tensor_of(self.network, name).detach() if start is None and name not in self.news else start


def device_of(name: str) -> torch.device:
    """The device a setting `run.device` stands for."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)
