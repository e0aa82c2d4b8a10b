"""The server: the global model, what is known about past tasks, and where the run stands."""

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedprotip.federation.average import Average
from fedprotip.federation.client import load_state, moving_state
from fedprotip.files import Tensors
from fedprotip.messages import Message, Spec
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
    barren: int = 0  # rounds in a row without a single usable update
    holds: dict[str, int] = field(default_factory=dict)  # client → last task whose results it has received
    matrix: dict[str, list[list[float]]] = field(default_factory=dict)  # mode → row per evaluation
    routing: dict[str, Any] = field(default_factory=dict)  # of the last evaluation
    failures: dict[str, int] = field(default_factory=dict)  # reason → how often
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
        for index in range(len(self.network.labels), task + 1):
            self.network.add_head(self.stream.tasks[index].classes, self.settings.run.seed, index)
        moving = self.method.trainable(self.network, self.knowledge, task)
        for name, parameter in self.network.named_parameters():
            parameter.requires_grad_(name in moving)

    def choose(self, present: list[int], task: int, round_: int) -> list[int]:
        """The clients of a round: a share of all active ones, drawn from those that have data."""
        active = len(self.stream.clients(task))
        wanted = max(int(self.settings.clients.fraction * active), 1)
        rng = numpy_stream(self.settings.run.seed, "clients", task, round_)
        return sorted(np.array(present)[rng.permutation(len(present))[:wanted]].tolist())

    def parcel(self, client: int, task: int) -> list[Message]:
        """What a client must receive to have the current model: what moves in this task, or all it missed."""
        if self.progress.holds.get(str(client), -2) >= task - 1:
            return [self._model(moving_state(self.network, self.settings, task))]
        self.progress.holds[str(client)] = task - 1
        messages = [self._model(dict(self.network.state_dict()))]
        shared = {name: tensor for name, tensor in self.knowledge.items() if not name.startswith("references/")}
        return [*messages, Message("knowledge", shared)] if shared else messages

    def expected(self, task: int) -> dict[str, Spec]:
        """What a client's model message must look like."""
        state = moving_state(self.network, self.settings, task)
        return {name: Spec(tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}

    def weight(self, update: Message) -> float:
        """p_k of Eq. 6, up to normalisation."""
        return float(update.meta["samples"]) if self.settings.train.average == "weighted" else 1.0

    def apply(self, average: Average, task: int) -> None:
        """W^(t,e) ← the average, after the method's own server step."""
        tensors = average.result()
        self.method.aggregate(self.network, tensors, self.knowledge, task)
        load_state(self.network, tensors)

    def tensors(self) -> dict[str, Tensors]:
        """Groups of tensors for a checkpoint: the model, and each file of the knowledge."""
        groups: dict[str, Tensors] = {"model": dict(self.network.state_dict())}
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
        for index in range(len(heads)):
            self.network.add_head(self.stream.tasks[index].classes, self.settings.run.seed, index)
        load_state(self.network, groups["model"])

    def _model(self, state: dict[str, Tensor]) -> Message:
        return Message("model", {name: tensor.detach().cpu() for name, tensor in state.items()})


def device_of(name: str) -> torch.device:
    """The device a setting `run.device` stands for."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)
