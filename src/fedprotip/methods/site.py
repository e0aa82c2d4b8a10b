"""What the server and every client hold alike: the model, what is known about past tasks, the task under way."""

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedprotip.inference.answers import Inference
from fedprotip.inference.assemble import assemble
from fedprotip.messages import Spec
from fedprotip.methods.state import Knowledge
from fedprotip.methods.wire import TaskView, Wire
from fedprotip.models import Network
from fedprotip.models.freeze import frozen_prefixes
from fedprotip.models.state import load_state, moving_state, release, tensor_of
from fedprotip.seeds import ambient_stream, torch_stream
from fedprotip.settings import Settings
from fedprotip.store.files import Tensors
from fedprotip.stream.look import Look
from fedprotip.stream.plan import Answering

if TYPE_CHECKING:
    from fedprotip.methods.base import Method

OnProgress = Callable[[str, int, int], None]


class Site:
    """One end of the federation."""

    def __init__(
        self,
        settings: Settings,
        method: "Method",
        network: Network,
        classes: Sequence[Sequence[int]],
        image_shape: tuple[int, int, int],
        look: Look | None = None,
    ) -> None:
        """`classes`: of every task of the plan, by global label; `image_shape`: (channels, height, width).

        look: for methods that make images of their own.
        """
        self.settings, self.method, self.network = settings, method, network
        self.classes, self.image_shape = classes, image_shape
        self._look = look
        self.known = Knowledge(method.state)
        with ambient_stream(settings.run.seed, "extras"):
            network.add_extras(method.networks(self))
        if method.remembers_birth:
            network.remember_birth(frozen_prefixes(settings.model, task=0))
        self.task = -1
        self.view = TaskView()
        self.start: Tensors = {}  # W^(t,0) of what travels as a change since then, or is remembered
        self.news: Tensors = {}  # what has moved in this task, in the form in which it travels
        self.version = 0  # how often a model was heard here
        self.most = math.inf  # at the server: samples of this task that any client counts for at most
        self.on_progress: OnProgress = lambda what, done, total: None  # told how far a long step of the server is
        self._before: Network | None = None
        self._positive: dict[bool, tuple[int, bool]] = {}

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device

    @property
    def look(self) -> Look:
        """How images look to the model, and what classes are called."""
        if self._look is None:
            raise ValueError("this site was not told how images look")
        return self._look

    def chance(self, purpose: str, *place: int | str) -> torch.Generator:
        """A random stream of this task, and of a place in it: for `digest`, and for `receive`, the same at both ends.

        A client that answers has its own, `Local.chance`, which knows the round as well.
        """
        return torch_stream(self.settings.run.seed, purpose, self.task, *place)

    def grow(self, task: int) -> None:
        """The heads of all tasks up to this one; the same on every machine, so new heads need not travel."""
        for index in range(len(self.network.labels), task + 1):
            self.network.add_head(self.classes[index], self.settings.run.seed, index)

    def heads(self) -> set[str]:
        """The parameters of all heads, for methods that move old ones too."""
        return {name for name, _ in self.network.named_parameters() if name.startswith("heads.")}

    def begin_task(self, task: int) -> None:
        """W^(t,0) ← W^(t−1), with the head of the new task; only what it may move requires gradients.

        A task may be under way already, in a process that is gone: then `start` and `news` are those of that process.
        """
        self.grow(task)
        self.task = task
        self.view = self.method.view(self)
        release(self.network, self.method.trainable(self))
        state = self.moving()
        self.wire = Wire(self.settings.train.wire, self.view, self.start)
        begins = {n: tensor for n, tensor in state.items() if n not in self.news and n not in self.start}
        self.wire.begin(begins, everything=self.method.remembers)
        self.specs: dict[str, Spec] = self.wire.specs(state)

    def follow(self, other: "Site") -> None:
        """Stand at the task of another site of this process, with what it worked out for it."""
        self.start, self.view, self.wire, self.specs = other.start, other.view, other.wire, other.specs
        self.grow(other.task)
        self.task = other.task
        release(self.network, set(other.network.moving))
        self._before = None

    def moving(self) -> Tensors:
        """The tensors of the model that can change in this task."""
        return moving_state(self.network, self.settings.model, self.task)

    def changeable(self) -> Tensors:
        """What an answer may change of the model: what can move, and buffers of any layer, which are put back."""
        return {f"backbone.{name}": buffer for name, buffer in self.network.backbone.named_buffers()} | self.moving()

    def hear(self, news: Tensors) -> None:
        """Hold the model that was sent: what has moved since W^(t,0)."""
        self.news = {name: self.news.get(name, tensor).copy_(tensor) for name, tensor in news.items()}
        load_state(self.network, self.wire.unpack(self.news))
        self.version += 1

    def sent(self, name: str) -> Tensor | None:
        """A tensor of the model that clients were sent, in the form in which it travels; None: it has not changed."""
        if name in self.news or self.wire.is_change(name):
            return self.news.get(name)
        return tensor_of(self.network, name).detach().cpu()

    def positive_features(self, born: bool = False) -> bool:
        """Whether no feature can be negative, as after a ReLU: found by a few images of noise, once in a task."""
        if self._positive.get(born, (-1,))[0] != self.task:
            noise = torch.randn(16, *self.image_shape, generator=torch.Generator().manual_seed(0)).to(self.device)
            mode = self.network.training
            with torch.no_grad():
                network = self.network.eval()
                features = network.look_at_birth(noise) if born else network.look(noise).stacked
            self.network.train(mode)
            self._positive[born] = self.task, bool((features >= 0).all())
        return self._positive[born][1]

    def settle(self) -> None:
        """The last round is over: what moved travels as it is from now on, for its coordinates end with its bases."""
        self.news = {}
        self.start.clear()
        self._before = None

    def before(self) -> Network:
        """The model of the last task, W^(t,0), as a network of its own; for methods that say `remembers`."""
        if self._before is None:
            self._before = deepcopy(self.network).requires_grad_(False).eval()
            load_state(self._before, self.start)
        return self._before

    def before_news(self, name: str) -> Tensor | None:
        """A tensor that has not moved in this task, or W^(t,0) of one that has; None where the news replace it."""
        start = self.start.get(name)
        return tensor_of(self.network, name).detach() if start is None and name not in self.news else start

    def inference(self, answering: Answering, task: int, known: Tensors | None = None) -> Inference:
        """How samples of tasks 0…task are answered, with what is known here, or with other knowledge."""
        return assemble(answering, self.network, known or self.known, self.classes[: task + 1])
