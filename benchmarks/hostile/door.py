"""The engine that lets one hostile client in among honest ones, and what attacks are made of.

The run is honest but for that client, which knows what every client knows: the question, the model and the knowledge it
was sent, its own data and its own past. What it says reaches the server as bytes.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import save
from torch import Tensor

from fedprotip import api
from fedprotip.federation.engines import build_engine
from fedprotip.federation.engines.base import Engine, answered
from fedprotip.federation.parcels import LOST, Ask, Reply, Request, answering, answers
from fedprotip.federation.server import Server
from fedprotip.inference.experts import BIRTH
from fedprotip.messages import Message
from fedprotip.methods.site import Site
from fedprotip.seeds import torch_stream
from fedprotip.store.files import Tensors

MODEL, STATISTICS, BASIS, REFERENCE, CALIBRATION, PRESENCE = (
    *("model", "statistics", "basis", "reference", "calibration", "presence"),
)
EVERY = (MODEL, STATISTICS, BASIS, REFERENCE, CALIBRATION)
"""Exchanges in which a client that is present says something; who lies about presence too is asked nothing more."""
ALIKE = {"start": STATISTICS, BIRTH: STATISTICS}
"""Questions that are attacked like another one."""
LONG = 100_000
"""Letters of a name that is to fill the logs."""


@dataclass
class Scene:
    """What a hostile client knows as it answers."""

    ask: Ask
    site: Site  # the model and the knowledge that it was sent
    past: dict[str, list[Message]]  # exchange → its honest replies so far, this one last
    seen: list[Tensors]  # the models that it was sent in this task, the present one last
    chance: torch.Generator

    @cached_property
    def received(self) -> Tensors:
        """The model it was sent, in the form in which its own travels."""
        return self.site.wire.pack(self.site.moving())

    @property
    def last_round(self) -> bool:
        """Of the whole run."""
        settings = self.site.settings
        return (self.ask.task, self.ask.round) == (settings.stream.tasks - 1, settings.train.rounds - 1)

    def noise(self, like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=self.chance)


Said = Message | bytes
Change = Callable[[Message, Scene], Said]
Poison = Callable[[Server], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Attack:
    """What a client says instead of its honest reply to some questions."""

    name: str
    about: str
    on: tuple[str, ...]
    change: Change = lambda message, scene: message
    poison: Poison = lambda server: nullcontext()  # around its honest work: other data
    refused: bool = False
    """No honest client could have said it: it is left out and named, every time."""
    needs_robust: bool = False
    """Looks like an honest client with other data: only a robust aggregate limits it."""


ATTACKS: dict[str, Attack] = {}


def attack(*on: str, refused: bool = False, needs_robust: bool = False) -> Callable[[Change], Change]:
    """Enter a function as an attack on these exchanges, under its name and with its first line."""

    def enter(change: Change) -> Change:
        name = change.__name__
        ATTACKS[name] = Attack(
            name, str(change.__doc__).splitlines()[0], on, change, refused=refused, needs_robust=needs_robust
        )
        return change

    return enter


def several(
    on: tuple[str, ...], about: str, variants: dict[str, Change], refused: bool = False, needs_robust: bool = False
) -> None:
    """Attacks that differ in a number or so."""
    for name, change in variants.items():
        text = f"{about}: {name.replace('_', ' ')}."
        ATTACKS[name] = Attack(name, text, on, change, refused=refused, needs_robust=needs_robust)


HONEST = Attack("honest", "What the door itself changes: nothing.", EVERY)
ATTACKS[HONEST.name] = HONEST


# The door


class Infiltrated:
    """An engine whose clients are honest but for one."""

    def __init__(self, inner: Engine, server: Server, attack: Attack, client: int) -> None:
        self._inner, self._server, self._attack, self._client = inner, server, attack, client
        self._past: dict[str, list[Message]] = {}
        self._seen: list[Tensors] = []

    def ask(self, requests: Iterable[Request]) -> Iterator[Reply]:
        for request in requests:
            if request.client == self._client:
                yield answered(request.client, partial(self._answer, request))
            else:
                yield from self._inner.ask([request])

    def close(self) -> None:
        self._inner.close()

    def _answer(self, request: Request) -> Message:
        ask, poisons = Ask.of(request.parcel[0]), self._attack.poison
        attacked = ALIKE.get(ask.exchange, ask.exchange) in self._attack.on
        with poisons(self._server) if attacked else nullcontext():
            (reply,) = self._inner.ask([request])
        if reply.message is None:
            raise RuntimeError(reply.error)
        honest = answers(reply.message, ask.step)
        self._past.setdefault(ask.exchange, []).append(honest)
        if not attacked:
            return reply.message
        made = self._say(honest, ask)
        if made.kind == LOST and ask.since is not None:  # as an engine with real clients does
            request.anew(made)
            made = self._say(honest, ask)
        return made

    def _say(self, honest: Message, ask: Ask) -> Message:
        site = self._server.site
        chance = torch_stream(site.settings.run.seed, "hostile", ask.step)
        scene = Scene(ask, site, self._past, self._seen, chance)
        if ask.exchange == MODEL:
            if ask.round == 0:
                self._seen.clear()
            self._seen.append({name: tensor.clone() for name, tensor in scene.received.items()})
        said = self._attack.change(honest, scene)
        if isinstance(said, bytes):
            return Message.from_bytes(said)
        return Message.from_bytes(answering(said, ask).to_bytes())  # it knows which question it answers


@contextmanager
def among(name: str, client: int = 1) -> Iterator[None]:
    """Runs of this process have a client that attacks."""

    def infiltrated(server: Server, store: Any, folder: Path) -> Engine:
        return Infiltrated(build_engine(server, store, folder), server, ATTACKS[name], client)

    with patch.object(api, "build_engine", infiltrated):
        yield


# Helpers


def with_tensors(message: Message, tensors: Tensors, **meta: Any) -> Message:
    return Message(message.kind, tensors, message.meta | meta)


def each(message: Message, change: Callable[[Tensor], Tensor], **meta: Any) -> Message:
    """Every tensor of floats changed."""
    changed = {n: change(t) if t.is_floating_point() and t.numel() else t for n, t in message.tensors.items()}
    return with_tensors(message, changed, **meta)


def times(factor: float, **meta: Any) -> Change:
    """What travels, multiplied."""
    return lambda message, scene: each(message, lambda t: t * factor, **meta)


def moved(message: Message, scene: Scene, step: Callable[[Tensor, str], Tensor], **meta: Any) -> Message:
    """The received model and a step made of the honest one."""
    received = scene.received
    changed = {
        name: received[name] + step(tensor - received[name], name) if tensor.is_floating_point() else tensor
        for name, tensor in message.tensors.items()
    }
    return with_tensors(message, changed, **meta)


def update_times(factor: float) -> Change:
    return lambda message, scene: moved(message, scene, lambda step, _: factor * step)


def told(meta: dict[str, Any]) -> Change:
    return lambda message, scene: with_tensors(message, message.tensors, **meta)


def called(kind: str) -> Change:
    return lambda message, scene: Message(kind, message.tensors, message.meta)


def raw(message: Message, meta: str) -> bytes:
    """A message whose metadata is any text."""
    tensors = {name: tensor.clone() for name, tensor in message.tensors.items()}
    return save(tensors, metadata={"kind": message.kind, "meta": meta})
