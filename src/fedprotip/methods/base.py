"""What a method can decide. The defaults are FedAvg; a method overrides the few hooks it needs.

@register
class Mine(Method):
    name = "mine"

    class Options(MethodSettings):
        name: str = "mine"
        strength: float = Field(1.0, gt=0, description="Weight of the extra term.")

    def loss(self, local, inputs, labels):
        return super().loss(local, inputs, labels) + ...
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from fedprotip.errors import UsageError
from fedprotip.methods.constraint import Constraint
from fedprotip.methods.exchange import Exchange
from fedprotip.methods.local import Local
from fedprotip.methods.parts.presence import Presence
from fedprotip.methods.parts.private import refuse_open
from fedprotip.methods.parts.start import ClosedStart
from fedprotip.methods.parts.stored import RAW, STORED
from fedprotip.methods.parts.training import Training, falling
from fedprotip.methods.site import Site
from fedprotip.methods.state import Kept, Knowledge, declared
from fedprotip.methods.wire import TaskView
from fedprotip.models.freeze import frozen_prefixes
from fedprotip.models.prefix import InputBatch
from fedprotip.models.steps import Inputs
from fedprotip.settings import MethodSettings, Settings, declare
from fedprotip.stream.plan import Answering

RESERVED = ("ask", "plan", "knowledge", "lost", "secure")
"""Kinds of messages that are no exchange (`federation/parcels.py`)."""


@dataclass(frozen=True)
class About:
    """A method in a line each, for `fedprotip methods` and the report."""

    idea: str
    stores: str = "nothing"
    """What clients keep of past tasks."""
    sends: str = "the model, every round"
    """What travels."""
    needs: str = "nothing more"
    """What it cannot run without."""


class Method:
    """Hooks of a method; every one has FedAvg's behaviour here."""

    name: ClassVar[str] = ""
    about: ClassVar[About] = About("a method of your own")
    scenarios: ClassVar[tuple[str, ...]] = ("class", "domain")
    routes: ClassVar[bool] = False
    """Whether it predicts the task of a sample (modes single and batch64); then with domains every one has a head."""
    sees_images: ClassVar[bool] = False
    """Whether `loss` needs the images themselves; then a frozen prefix runs every time."""
    remembers: ClassVar[bool] = False
    """Whether clients need the model of the last task beside the current one (`local.before`)."""
    remembers_birth: bool = False
    """Whether the backbone as it was before any training is kept beside the one that learns (`network.newborn`)."""
    protects: ClassVar[bool] = False
    """Whether it keeps updates out of subspaces (`TaskView.projectors`), so that their geometry can be measured."""
    state: tuple[Kept, ...] = ()
    """What it keeps, and where that belongs."""
    Options: ClassVar[type[MethodSettings]] = MethodSettings

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        declared(self.state)
        self.check()
        start = [ClosedStart(settings)] if settings.train.head_start == "closed" else []
        self.exchanges = (Presence(), *start, *self.at_begin(), *self.in_round(), *self.at_end())
        for exchange in self.exchanges:
            exchange.check_words()
        names = [exchange.name for exchange in self.exchanges]
        if len({*names, *RESERVED}) < len(names) + len(RESERVED):
            raise ValueError(f"{self.name}: exchanges need names of their own, none of {', '.join(RESERVED)}: {names}")
        if any(one.name == Training.name and not isinstance(one, Training) for one in self.exchanges):
            raise ValueError(f"{self.name}: {Training.name!r} is for what derives from Training")
        if settings.method.secure_noise and not settings.method.secure:
            raise UsageError("method.secure_noise is noise on secure sums; it needs method.secure = true.")
        if settings.method.secure:
            refuse_open(self.name, self.exchanges, settings, trains=self.rounds(0) > 0)

    def check(self) -> None:
        """Refuse settings this method cannot run with, before any work."""
        if self.settings.stream.scenario not in self.scenarios:
            raise UsageError(
                f"stream.scenario = {self.settings.stream.scenario!r} is not possible with method.name = "
                f"{self.name!r}; it supports: {', '.join(self.scenarios)}."
            )

    def cautions(self) -> Sequence[str]:
        """What whoever reads the results should know before the run begins, a sentence each."""
        return ()

    def rounds(self, task: int) -> int:
        """Rounds of training in a task."""
        return self.settings.train.rounds

    def at_begin(self) -> Sequence[Exchange]:
        """Further exchanges before the first round of a task."""
        return ()

    def in_round(self) -> Sequence[Exchange]:
        """Exchanges of a round; one of them `trains`."""
        return (Training(),)

    def at_end(self) -> Sequence[Exchange]:
        """Exchanges at the end of a task, in this order."""
        return ()

    def exchange(self, name: str) -> Exchange:
        """The exchange of this name; KeyError where there is none."""
        return {exchange.name: exchange for exchange in self.exchanges}[name]

    # Both sides

    def networks(self, site: Site) -> dict[str, nn.Module]:
        """Networks of its own beside backbone and heads, `network.extras[NAME]`: they learn and travel alike.

        Both ends make them, with weights from the run's seed whatever the initialiser, and without buffers. Answers do
        not need them: `fedprotip.load` leaves them out.
        """
        return {}

    def trainable(self, site: Site) -> set[str]:
        """Names of the parameters that move in a task: the backbone but its frozen part, its own head, extras."""
        own = f"heads.{site.network.head_of(site.task)}."
        frozen = tuple(f"backbone.{prefix}" for prefix in frozen_prefixes(self.settings.model, site.task))
        moving = (name for name, _ in site.network.named_parameters() if name.startswith(("backbone.", "extras.", own)))
        return {name for name in moving if not name.startswith(frozen)}

    def view(self, site: Site) -> TaskView:
        """What is worked out once for the task that the site begins; `site.view` is still that of the task before."""
        return TaskView()

    def check_known(self, site: Site) -> None:
        """Raise ValueError where `site.known`, from a checkpoint that may be a stranger's, cannot be of this run.

        Forms have been checked; what is left is sizes that follow from the run.
        """

    # Client

    def count(self, local: Local) -> int:
        """Samples that a client trains on in this task: its weight in averages; without any it is not asked."""
        return len(local.samples)

    def begin_round(self, local: Local) -> None:
        """The received model is loaded and no step has been made; `local.scratch` lasts until `end_round`."""

    def end_round(self, local: Local) -> None:
        """The last step has been made; the model is the client's own until it has answered."""

    def batches(self, local: Local, own: Iterator[InputBatch]) -> Iterator[InputBatch]:
        """The batches of a round; where replayed or synthetic samples join the client's own."""
        return own

    def pass_length(self, local: Local) -> int:
        """Samples of one pass over what `batches` gives; by it the learning rate falls within a round."""
        return self.count(local)

    def loss(self, local: Local, inputs: Inputs, labels: Tensor) -> Tensor:
        """Cross-entropy over the current head only: old heads get no negative gradient.

        `inputs` are images, or what a frozen prefix made of them; `network.embed` takes both.
        """
        network = local.network
        logits = network.logits(network.embed(inputs), local.task)
        return F.cross_entropy(logits, network.targets(labels, local.task))

    def rate(self, task: int, done: float) -> float:
        """The learning rate of a step before which so many rounds of a task are done, and parts of one."""
        return falling(self.settings.train, done / self.rounds(task))

    def constraint(self, local: Local) -> Constraint | None:
        """What keeps a client's steps within bounds during one round."""
        return None

    # Answers

    def answering(self) -> Answering:
        """How samples are answered: experts and routers by name. By default the heads, and no task is predicted."""
        return Answering()

    def ranks(self, known: Knowledge) -> tuple[dict[str, int], dict[str, int]]:
        """For the report: (layer → rank so far, layer → d)."""
        return {}, {}

    def samples(self, known: Knowledge) -> dict[str, int]:
        """For the report: samples of the past that are kept for learning, "raw" at clients and "synthetic" ones."""
        return {RAW: int(known[kept])} if (kept := f"{STORED}/{RAW}") in known else {}


_methods: dict[str, type[Method]] = {}


def register(cls: type[Method]) -> type[Method]:
    """Make a method available as `method.name = NAME`, with its own settings."""
    _methods[cls.name] = cls
    declare("method.name", cls.name, cls.Options)
    return cls


def described() -> dict[str, dict[str, Any]]:
    """All methods that are known now, by name: what they say about themselves."""
    return {
        name: {**asdict(method.about), "scenarios": list(method.scenarios), "routes": method.routes}
        for name, method in sorted(_methods.items())
    }


def create_method(settings: Settings) -> Method:
    return _methods[settings.method.name](settings)
