"""The server: the global model, what is known about past tasks, and where the run stands."""

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedprotip.federation.average import Average
from fedprotip.federation.client import full_state, load_state, moving_state, prepare, release
from fedprotip.files import Tensors
from fedprotip.messages import BadMessage, Message, Spec
from fedprotip.methods.base import Knowledge, Method
from fedprotip.models import Network
from fedprotip.seeds import numpy_stream
from fedprotip.settings import Settings
from fedprotip.stream import Stream


@dataclass
class Progress:
    """Where a run stands and what it has measured: plain numbers, saved with every checkpoint."""

    task: int = 0  # the task that comes next or is under way
    round: int = 0  # its rounds that are done
    version: int = 0  # how often the global model has changed
    moved: list[list[str]] = field(default_factory=list)  # task → names of the tensors that moved in it
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

    def __init__(self, settings: Settings, method: Method, network: Network, stream: Stream) -> None:
        self.settings, self.method, self.network, self.stream = settings, method, network, stream
        self.knowledge: Knowledge = {}
        self.progress = Progress()

    def begin_task(self, task: int) -> None:
        """W^(t,0) ← W^(t−1), with the head of the new task."""
        prepare(self.network, self.stream, self.settings.run.seed, task)
        release(self.network, self.method.trainable(self.network, self.knowledge, task))
        if len(self.progress.moved) == task:
            self.progress.moved.append(sorted(moving_state(self.network, self.settings, task)))
            self.method.begin_task(self.network, self.knowledge, task)
            for last in self.progress.sent.values():  # clients with the final model lack nothing of earlier tasks
                last[0] = task if last[1] == self.progress.version else last[0]

    def choose(self, present: list[int], task: int, round_: int) -> list[int]:
        """The clients of a round: a share of all active ones, drawn from those that have data."""
        active = len(self.stream.clients(task))
        wanted = max(int(self.settings.clients.fraction * active), 1)
        rng = numpy_stream(self.settings.run.seed, "clients", task, round_)
        return sorted(np.array(present)[rng.permutation(len(present))[:wanted]].tolist())

    def parcel(self, client: int, task: int) -> list[Message]:
        """What a client lacks of the current model and knowledge; nothing when it has all of it.

        Only tensors that moved since it last received the model travel: no frozen layers, no old heads.
        """
        messages = []
        last, version = self.progress.sent.get(str(client), [None, None])
        if version != self.progress.version:
            state = full_state(self.network)
            names = set(state) if last is None else set().union(*self.progress.moved[last : task + 1])
            messages.append(_model({name: state[name] for name in state if name in names}))
            self.progress.sent[str(client)] = [task, self.progress.version]
        if task and self.progress.knows.get(str(client), -1) < task - 1:
            shared = {name: tensor for name, tensor in self.knowledge.items() if name.startswith("subspaces/")}
            messages += [Message("knowledge", shared)] if shared else []
            self.progress.knows[str(client)] = task - 1
        return messages

    def check_update(self, message: Message, task: int) -> None:
        """Raise BadMessage unless this is a usable model from a client."""
        state = full_state(self.network)
        specs = {name: Spec(tuple(state[name].shape), state[name].dtype) for name in self.progress.moved[task]}
        message.check("model", specs)
        message.check_numbers("samples", "loss")
        if message.meta["samples"] <= 0:
            raise BadMessage(f"samples = {message.meta['samples']} is not a positive number")

    def weight(self, update: Message) -> float:
        """p_k of Eq. 6, up to normalisation."""
        return float(update.meta["samples"]) if self.settings.train.average == "weighted" else 1.0

    def apply(self, average: Average, task: int) -> None:
        """W^(t,e) ← the average, after the method's own server step."""
        tensors = average.result()
        self.method.aggregate(self.network, tensors, self.knowledge, task)
        load_state(self.network, tensors)
        self.progress.version += 1

    def tensors(self) -> dict[str, Tensors]:
        """Groups of tensors for a checkpoint: the model, and each file of the knowledge."""
        groups: dict[str, Tensors] = {"model": full_state(self.network)}
        for name, tensor in self.knowledge.items():
            groups.setdefault(name.partition("/")[0], {})[name] = tensor
        return groups

    def state(self) -> dict[str, Any]:
        return asdict(self.progress)

    def restore(self, state: dict[str, Any], groups: dict[str, Tensors]) -> None:
        """Exactly the server that made the checkpoint."""
        self.progress = Progress(**state)
        for name in groups:
            if name not in ("model", "geometry"):
                self.knowledge.update(groups[name])
        heads = {name.split(".")[1] for name in groups["model"] if name.startswith("heads.")}
        if heads:
            prepare(self.network, self.stream, self.settings.run.seed, len(heads) - 1)
        load_state(self.network, groups["model"])


def _model(state: dict[str, Tensor]) -> Message:
    return Message("model", {name: tensor.detach().cpu() for name, tensor in state.items()})


def device_of(name: str) -> torch.device:
    """The device a setting `run.device` stands for."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)
