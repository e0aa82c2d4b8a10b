"""The server: the global model, what is known about past tasks, and where the run stands."""

import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Any, Literal

import numpy as np
from pydantic import TypeAdapter

from fedprotip.federation.line import FEWEST
from fedprotip.federation.parcels import KNOWLEDGE, MODEL, PLAN, START, Ask, Request
from fedprotip.inference.predictor import Predictor
from fedprotip.inference.soundness import check_knowledge
from fedprotip.messages import Message, Parcel
from fedprotip.methods.base import Method
from fedprotip.methods.exchange import Exchange, Sender, When
from fedprotip.methods.parts.presence import most_samples
from fedprotip.methods.site import Site
from fedprotip.models import Network
from fedprotip.models.prefix import PrefixCache
from fedprotip.models.state import full_state, load_state
from fedprotip.seeds import numpy_stream
from fedprotip.settings import DataSettings, RunSettings, Settings, to_toml
from fedprotip.store.files import Tensors, marks
from fedprotip.store.records import Number
from fedprotip.stream import Stream
from fedprotip.stream.plan import Plan

VOID = ""
"""Instead of the name of an exchange: what it told has been replaced, and is not sent any more."""
EXPLODED = 3.0
"""Training has diverged where its loss is this many times that of the first round, of guessing, and 1."""
Direction = Literal["up", "down"]
Log = list[tuple[Direction, str, int]]
"""What crossed for a question, but for the reply: way, kind and bytes, without the messages themselves."""


@dataclass
class Progress:
    """Where a run stands and what it has measured: plain numbers, saved with every checkpoint."""

    run: str = ""  # its name, drawn by chance: for signatures of secure sums, and for folders of sites
    task: int = 0  # the task that comes next or is under way
    round: int = 0  # its rounds that are done
    present: dict[str, int] = field(default_factory=dict)  # client → its samples of the task under way
    version: int = 0  # how often the global model has changed
    step: int = 0  # questions so far
    steps: list[int] = field(default_factory=lambda: [0, 0])  # that many at the last two checkpoints
    moved: list[list[str]] = field(default_factory=list)  # finished task → names of the tensors that moved in it
    digests: list[int] = field(default_factory=list)  # finished task → how many digests clients were told
    planned: dict[str, int] = field(default_factory=dict)  # client → tasks of the plan it got
    asked: dict[str, int] = field(default_factory=dict)  # client → the last question it was asked
    lives: dict[str, str] = field(default_factory=dict)  # client → the life of the server in which that was
    sent: dict[str, list[int]] = field(default_factory=dict)  # client → [task, version] of the last model it got
    knows: dict[str, list[int]] = field(default_factory=dict)  # client → [task, digests of it] that it got
    line: dict[str, dict[str, list[float]]] = field(default_factory=dict)  # exchange → sizes that were in line
    told: list[list[Any]] = field(default_factory=list)  # digests of the task under way: [exchange, metadata]
    barren: int = 0  # rounds in a row without a single usable update
    failing: list[int] = field(default_factory=list)  # clients that were asked in them
    loss: float | None = None  # of the first round of the task under way, by the middle client
    begun: int = 0  # version of the model with which its rounds began, or began anew
    failures: dict[str, int] = field(default_factory=dict)  # reason → how often
    last_failure: str = "no client has data"
    matrix: dict[str, list[list[Number]]] = field(default_factory=dict)  # mode → row per evaluation
    routing: dict[str, Any] = field(default_factory=dict)  # of the last evaluation
    bytes: dict[str, dict[str, int]] = field(default_factory=lambda: {"up": {}, "down": {}})
    seconds: dict[str, float] = field(default_factory=lambda: {"train": 0.0, "task_end": 0.0, "evaluate": 0.0})
    before: dict[str, float] = field(default_factory=dict)  # those up to the beginning of the task under way
    cpu_seconds: dict[str, float] = field(default_factory=dict)  # phase → processor time of this process
    geometry: dict[str, Any] = field(default_factory=dict)
    peak_rss_mb: float = 0.0
    memory: dict[str, dict[str, list[Number]]] = field(default_factory=dict)  # rss, gpu → phase → peak in each task

    @classmethod
    def of(cls, state: dict[str, Any], tasks: int) -> "Progress":
        """As a checkpoint has it, of a run of so many tasks; a ValueError or TypeError where it cannot be."""
        TypeAdapter(cls).validate_python(state)
        progress = cls(**state)
        if not 0 <= progress.task <= tasks or progress.round < 0 or len(progress.steps) != 2:
            raise ValueError(f"task {progress.task}, round {progress.round} of {tasks} tasks")
        if len(progress.digests) != progress.task or len(progress.moved) - progress.task not in (0, 1):
            raise ValueError(f"it has learned {len(progress.digests)} tasks, not {progress.task}")
        return progress


class Server:
    """Holds the global state and takes the server's steps of Algorithm 1."""

    def __init__(
        self, settings: Settings, method: Method, network: Network, stream: Stream, cache: PrefixCache | None = None
    ) -> None:
        self.settings, self.method, self.stream = settings, method, stream
        self.cache = cache or PrefixCache(stream, settings)
        classes = [task.classes for task in stream.tasks]
        self.site = Site(settings, method, network, classes, stream.dataset.image_shape, stream.look)
        self.progress = Progress(run=token_hex(16) if settings.method.secure else "")
        self._life = token_hex(4)
        self._told: list[Tensors] = []  # tensors of progress.told
        self._first: Tensors = {}  # the model with which the rounds of the task began, as it travels

    @property
    def network(self) -> Network:
        return self.site.network

    def begin_task(self, task: int) -> None:
        """W^(t,0) ← W^(t−1), with the head of the new task."""
        if self.site.task != task:  # a restored server has begun it
            self.site.begin_task(task)
        self.progress.routing.pop("answers", None)  # of an earlier end: long, and made anew at the next one
        if not self.site.news:
            for last in self.progress.sent.values():  # clients with the final model lack nothing of earlier tasks
                last[0] = task if last[1] == self.progress.version else last[0]

    def due(self, when: When) -> Iterator[Exchange]:
        """The exchanges that take place then; one may decide by what came of those before it."""
        return (one for one in self.method.exchanges if one.when == when and one.due(self.site))

    def note_presence(self, replies: dict[int, dict[str, Any]], absent: Callable[[int, list[int]], None]) -> None:
        """Who has samples of the task; those that have none are named once."""
        self.progress.present = {str(client): meta["samples"] for client, meta in replies.items() if meta["samples"]}
        self._weigh()
        missing = [client for client, meta in replies.items() if not meta["samples"]]
        if missing:
            absent(self.site.task, missing)

    def _weigh(self) -> None:
        """How many samples anybody counts for in this task."""
        self.site.most = most_samples(self.progress.present.values(), self.settings.train.heaviest)

    def too_many(self) -> dict[int, int]:
        """Clients that state more samples than anybody counts for."""
        return {int(client): samples for client, samples in self.progress.present.items() if samples > self.site.most}

    def sender(self, client: int) -> Sender:
        """What is known about a client."""
        return Sender(client, self.progress.present.get(str(client)))

    def clients(self, exchange: Exchange, round_: int | None) -> list[int]:
        """Whom an exchange asks."""
        active, task = self.stream.clients(self.site.task), self.site.task
        if exchange.who == "everyone":
            return active
        present = [client for client in active if str(client) in self.progress.present]
        return present if round_ is None else self.choose(present, task, round_)

    def choose(self, present: list[int], task: int, round_: int) -> list[int]:
        """The clients of a round: a share of all active ones, drawn from those that have data."""
        active = len(self.stream.clients(task))
        wanted = self.settings.clients.drawn(active)
        rng = numpy_stream(self.settings.run.seed, "clients", task, round_)
        return sorted(np.array(present)[rng.permutation(len(present))[:wanted]].tolist())

    def count_barren(self, delivered: bool, round_: int) -> None:
        """Note a round without usable updates, and who was asked in it."""
        progress = self.progress
        if delivered:
            progress.barren, progress.failing = 0, []
        else:
            training = [exchange for exchange in self.method.exchanges if exchange.trains]
            asked = {client for exchange in training for client in self.clients(exchange, round_)}
            progress.barren, progress.failing = progress.barren + 1, sorted({*progress.failing, *asked})

    def begin_rounds(self) -> None:
        """Remember the model of now, to come back to it should training diverge."""
        packed = self.site.wire.pack(self.site.moving())
        self._first = {name: tensor.detach().cpu().clone() for name, tensor in packed.items()}
        self.progress.loss, self.progress.begun = None, self.progress.version

    def diverged(self, losses: list[float]) -> bool:
        """Whether the middle one of these losses is far above that of the first round and that of guessing.

        The middle of two would be one client's word.
        """
        if len(losses) <= FEWEST:
            return False
        middle = statistics.median_low(losses)
        if self.progress.loss is None:
            self.progress.loss = middle
        classes = len(self.network.labels[self.network.head_of(self.site.task)])
        return middle > EXPLODED * max(self.progress.loss, math.log(classes), 1.0)

    def begin_anew(self) -> bool:
        """Back to the model with which the rounds of the task began; False where it has not changed since."""
        if self.progress.version == self.progress.begun or not self._first:
            return False
        self.site.hear({name: tensor.clone() for name, tensor in self._first.items()})
        self.progress.version += 1
        self.progress.begun, self.progress.line = self.progress.version, {}
        self.progress.barren, self.progress.failing = 0, []
        return True

    # What goes to clients

    def request(
        self,
        client: int,
        exchange: Exchange,
        round_: int | None,
        log: Log,
        phase: str = "",
        beside: Sequence[Message] = (),
    ) -> Request:
        """A question with whatever the client lacks to answer it; should it have lost what it was told, all of it.

        log: gets what crosses; phase, beside: of a secure sum, and what that needs.
        """

        def parcel() -> Parcel:
            messages = [*self._parcel(str(client), exchange, round_, phase), *beside]
            log.extend(("down", message.kind, message.nbytes) for message in messages)
            return messages

        def anew(lost: Message) -> Parcel:
            log.append(("up", lost.kind, lost.nbytes))
            crossed.append(len(log))
            for told, was in zip(self._told_to(), before, strict=True):
                told.pop(str(client), None)
                was.clear()
            return parcel()

        def unsent() -> None:
            del log[crossed[-1] :]
            for told, was in zip(self._told_to(), before, strict=True):
                told.pop(str(client), None)
                told.update(was)

        before = [{str(client): told[str(client)]} if str(client) in told else {} for told in self._told_to()]
        crossed = [0]  # so much of the log was there before the parcel that may not leave
        return Request(client, parcel(), anew, unsent)

    def _told_to(self) -> tuple[dict[str, Any], ...]:
        """Client → what it was told, of several kinds."""
        progress = self.progress
        return progress.planned, progress.asked, progress.lives, progress.sent, progress.knows

    def _parcel(self, client: str, exchange: Exchange, round_: int | None, phase: str) -> Parcel:
        progress = self.progress
        since = progress.asked.get(client)
        place, then = (exchange.name, self.site.task, round_), progress.lives.get(client, "")
        ask = Ask(*place, progress.step, since, progress.steps[0], phase, self._life, then)
        messages = [ask.message()]
        progress.asked[client], progress.lives[client] = progress.step, self._life
        if progress.planned.get(client) != len(self.site.classes):
            messages.append(self._plan())
            progress.planned[client] = len(self.site.classes)
        if exchange.needs_model and not ask.bare:
            knowledge, digests = self._knowledge_for(client)
            messages += [*knowledge, *(self._model_for(client) if exchange.needs_weights else ()), *digests]
        return messages

    def _plan(self) -> Message:
        """What a client is told once: the settings but for the data, which are its own, and the classes of tasks."""
        model = self.settings.model.model_copy(update={"weights": ""})  # they arrive with the model
        run = RunSettings(seed=self.settings.run.seed, device=self.settings.run.device)  # the rest is this machine's
        told = self.settings.model_copy(update={"data": DataSettings(), "model": model, "run": run})
        classes = [list(known) for known in self.site.classes]
        meta = {"settings": to_toml(told), "image": list(self.site.image_shape), "classes": classes}
        return Message(PLAN, meta=meta | ({"run": self.progress.run} if self.settings.method.secure else {}))

    def _knowledge_for(self, client: str) -> tuple[Parcel, Parcel]:
        """All shared knowledge, for a client that lacks some of earlier tasks; else what it lacks of this task's."""
        progress, task = self.progress, self.site.task
        known, count = progress.knows.get(client, [-1, 0])
        complete = known == task or task == 0 or (known == task - 1 and count == progress.digests[known])
        progress.knows[client] = [task, len(progress.told)]
        if not complete:
            shared = self.site.known.shared()
            return ([Message(KNOWLEDGE, shared)] if shared else []), []
        new = range(count if known == task else 0, len(progress.told))
        return [], [
            Message(progress.told[i][0], self._told[i], progress.told[i][1]) for i in new if progress.told[i][0]
        ]

    def _model_for(self, client: str) -> Parcel:
        """What a client lacks of the model; nothing when it has all of it.

        That is what it missed of earlier tasks, under start/…, so that it holds W^(t,0): only tensors that moved since,
        no frozen layers, no old heads. And what has moved in this task.
        """
        last, version = self.progress.sent.get(client, [None, None])
        if version == self.progress.version:
            return []
        missed = set(full_state(self.network)) if last is None else set().union(*self.progress.moved[last:])
        before = {name: self.site.before_news(name) for name in sorted(missed)}
        tensors = {START + name: tensor for name, tensor in before.items() if tensor is not None} | self.site.news
        self.progress.sent[client] = [self.site.task, self.progress.version]
        return [Message(MODEL, {name: tensor.detach().cpu() for name, tensor in tensors.items()})]

    # What comes of answers

    def digest(self, exchange: Exchange, combined: Any) -> None:
        """Take in what follows from the replies; clients are told of it with their next question."""
        shared = self.site.known.shared()
        before = marks(shared)
        message = exchange.digest(combined, self.site)
        if marks(self.site.known.shared()) != before:
            raise ValueError(
                f"the digest of {exchange.name!r} writes what clients share, and nobody would tell them of it: "
                "that is for receive"
            )
        if message is None:
            return
        message = Message(message.kind, message.tensors, json.loads(json.dumps(message.meta)))  # as clients hear it
        if exchange.when == "end" and exchange.settles:
            self.settle()
        heard = self.site.version
        exchange.receive(message, self.site)
        if self.site.version > heard:  # it was a model, of which clients get the newest
            self.progress.version += 1
        else:
            for index, (name, _) in enumerate(self.progress.told):
                if exchange.replaces and name == exchange.name:
                    self.progress.told[index], self._told[index] = [VOID, {}], {}
            self.progress.told.append([exchange.name, message.meta])
            self._told.append(message.tensors)

    def settle(self) -> None:
        """The last round is over: note what moved in this task."""
        if len(self.progress.moved) == self.site.task:
            self.progress.moved.append(sorted(self.site.news))
        self.site.settle()

    def finish_task(self) -> None:
        """All exchanges are over."""
        self.settle()
        self.progress.digests.append(len(self.progress.told))
        self.progress.told, self._told, self._first, self.progress.line = [], [], {}, {}

    def predictor(self, task: int) -> Predictor:
        """What answers for samples of tasks 0…task."""
        return Predictor(self.network, self.site.inference(self.method.answering(), task), self.plan(task))

    def plan(self, task: int) -> Plan:
        """What the run folder says about tasks 0…task beside its tensors."""
        return self.stream.plan(self.method.answering(), self.network.shared_head, task + 1)

    # Checkpoints

    def tensors(self) -> dict[str, Tensors]:
        """Groups of tensors for a checkpoint: the model, what moved in this task, what is known, what was told."""
        before = {name: self.site.before_news(name) for name in full_state(self.network)}
        model = {name: tensor for name, tensor in before.items() if tensor is not None}
        groups: dict[str, Tensors] = {"model": model} | ({"news": self.site.news} if self.site.news else {})
        groups |= {"first": self._first} if self._first else {}
        groups |= {f"known-{group}": entries for group, entries in self.site.known.groups().items()}
        return groups | {f"told-{index}": tensors for index, tensors in enumerate(self._told)}

    def state(self) -> dict[str, Any]:
        return dict(vars(self.progress))

    def about_to_save(self) -> None:
        """After this checkpoint the server goes back to the one before it at most."""
        self.progress.steps = [self.progress.steps[1], self.progress.step]

    def restore(self, state: dict[str, Any], groups: dict[str, Tensors]) -> None:
        """Exactly the server that made the checkpoint; an error of any kind where it was made by no such server."""
        self.progress, site = Progress.of(state, len(self.stream.tasks)), self.site
        for name, tensors in groups.items():
            if name.startswith("known-"):
                site.known.update(tensors)
        if self.progress.task:
            check_knowledge(site.known, self.plan(self.progress.task - 1), self.network)
        self.method.check_known(site)
        self._told = [groups[f"told-{index}"] for index in range(len(self.progress.told))]
        model, site.news, self._first = groups["model"], groups.get("news", {}), groups.get("first", {})
        heads = {name.split(".")[1] for name in [*model, *site.news] if name.startswith("heads.")}
        if heads:
            site.grow(len(heads) - 1)
        own = full_state(self.network)
        if not own.keys() - site.news.keys() <= model.keys() <= own.keys():
            raise ValueError("the model has other tensors")
        if wrong := [name for name, tensor in model.items() if own[name].shape != tensor.shape]:
            raise ValueError(f"{wrong[0]} has another shape")
        load_state(self.network, model)
        if site.news:
            site.start.update({name: model[name].to(site.device) for name in site.news if name in model})
            site.begin_task(self.progress.task)
            for tensors in (site.news, self._first):
                Message(MODEL, tensors).check(MODEL, {name: site.specs[name] for name in tensors})
            load_state(self.network, site.wire.unpack(site.news))
        self._weigh()
