"""One hostile client among honest ones: attacks that change its replies, and the engine that lets it in.

    with hostile.among("sign_flip", client=1):
        fedprotip.run(settings, out=folder)

The run is honest but for that client, which knows what every client knows: the question, the model and the knowledge it
was sent, its own data and its own past. What it says reaches the server as bytes.
"""

import json
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
from fedprotip.federation.parcels import LOST, Ask, Reply, Request
from fedprotip.federation.server import Server
from fedprotip.inference.statistics import pack, unpack
from fedprotip.messages import SAMPLES, Message
from fedprotip.methods.site import Site
from fedprotip.models.prefix import InputBatch, PrefixCache
from fedprotip.seeds import torch_stream
from fedprotip.store.files import Tensors
from fedprotip.stream.holdings import Holding
from fedprotip.subspace.bank import SubspaceBank
from fedprotip.subspace.basis import orthonormalise, residual

MODEL, STATISTICS, BASIS, REFERENCE, CALIBRATION, PRESENCE = (
    *("model", "statistics", "basis", "reference", "calibration", "presence"),
)
EVERY = (MODEL, STATISTICS, BASIS, REFERENCE, CALIBRATION)
"""Exchanges in which a client that is present says something; who lies about presence too is asked nothing more."""
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
    needs_robust: bool = False
    """Looks like an honest client with other data: only a robust aggregate limits it."""


ATTACKS: dict[str, Attack] = {}


def attack(*on: str, needs_robust: bool = False) -> Callable[[Change], Change]:
    """Enter a function as an attack on these exchanges, under its name and with its first line."""

    def enter(change: Change) -> Change:
        name = change.__name__
        ATTACKS[name] = Attack(name, str(change.__doc__).splitlines()[0], on, change, needs_robust=needs_robust)
        return change

    return enter


def several(on: tuple[str, ...], about: str, variants: dict[str, Change], needs_robust: bool = False) -> None:
    """Attacks that differ in a number or so."""
    for name, change in variants.items():
        ATTACKS[name] = Attack(name, f"{about}: {name.replace('_', ' ')}.", on, change, needs_robust=needs_robust)


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
        with poisons(self._server) if ask.exchange in self._attack.on else nullcontext():
            (reply,) = self._inner.ask([request])
        if reply.message is None:
            raise RuntimeError(reply.error)
        self._past.setdefault(ask.exchange, []).append(reply.message)
        if ask.exchange not in self._attack.on:
            return reply.message
        made = self._say(reply.message, ask)
        if made.kind == LOST and ask.since is not None:  # as an engine with real clients does
            request.anew(made)
            made = self._say(reply.message, ask)
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
        return Message.from_bytes(said if isinstance(said, bytes) else said.to_bytes())


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


def norm(tensors: Iterable[Tensor]) -> Tensor:
    return torch.stack([tensor.double().norm() for tensor in tensors]).norm()


# Updates

several(
    (MODEL,),
    "The model that travels, multiplied",
    {
        "weights_times_100": times(100),
        "weights_times_1e6": times(1e6),
        "weights_times_minus_3": times(-3),
        "zero_weights": times(0),
        "negative_zeros": times(-0.0),
        "denormal_weights": times(1e-42),
        "weights_nan": times(torch.nan),
        "weights_inf": times(1e39),
    },
)
several(
    (MODEL,),
    "The step from the received model, multiplied",
    {f"update_times_{factor}": update_times(float(factor)) for factor in ("100", "1e6")}
    | {"update_times_minus_3": update_times(-3), "update_times_minus_10": update_times(-10)},
)
several(
    (MODEL,),
    "The step from the received model, turned round or made up at honest size",
    {"sign_flip": update_times(-1), "free_rider": update_times(0), "update_times_3": update_times(3)},
    needs_robust=True,
)
several(
    (MODEL,),
    "A number of samples that it does not have",
    {
        "samples_1e12": told({"samples": 10**12}),
        "samples_1e12_zero_weights": times(0, samples=10**12),
        "samples_1e12_negated": times(-1, samples=10**12),
        "samples_5000_update_negated": lambda m, s: moved(m, s, lambda step, _: -step, samples=5000),
        "samples_tiny": told({"samples": 1e-300}),
        "samples_negative": told({"samples": -5}),
        "samples_text": told({"samples": "many"}),
        "samples_list": told({"samples": [1]}),
        "samples_huge_integer": lambda m, s: raw(m, '{"samples": 1' + 400 * "0" + ', "loss": 1}'),
        "samples_true": told({"samples": True}),
    },
)
several(
    (MODEL,),
    "A loss that is not one",
    {
        "loss_1e308": told({"loss": 1e308}),
        "loss_minus_1e308": told({"loss": -1e308}),
        "loss_nan": lambda m, s: raw(m, '{"samples": 10, "loss": NaN}'),
        "loss_text": told({"loss": "x" * LONG}),
        "loss_missing": lambda m, s: Message(m.kind, m.tensors, {"samples": 10}),
    },
)
several(
    (MODEL,),
    "Tensors that do not fit",
    {
        "doubles": lambda m, s: each(m, Tensor.double),
        "halves": lambda m, s: each(m, Tensor.half),
        "integers": lambda m, s: each(m, Tensor.int),
        "complex_numbers": lambda m, s: each(m, lambda t: t.to(torch.complex64)),
        "empty_tensors": lambda m, s: each(m, lambda t: t[:0]),
        "scalars": lambda m, s: each(m, lambda t: t.sum()),
        "flat": lambda m, s: each(m, lambda t: t.reshape(1, -1)),
        "no_tensors": lambda m, s: with_tensors(m, {}),
        "one_missing": lambda m, s: with_tensors(m, dict(list(m.tensors.items())[1:])),
        "many_extra": lambda m, s: with_tensors(m, m.tensors | {f"x{i}": torch.zeros(1) for i in range(3000)}),
        "long_name": lambda m, s: with_tensors(m, m.tensors | {"n" * LONG: torch.zeros(1)}),
        "strange_name": lambda m, s: with_tensors(m, m.tensors | {"\x1b[2J\n😀/../": torch.zeros(1)}),
        "old_head": lambda m, s: with_tensors(m, m.tensors | {"heads.0.weight": torch.zeros(2, 2)}),
    },
)


@attack(MODEL, needs_robust=True)
def random_update(message: Message, scene: Scene) -> Said:
    """A random step of the honest norm."""

    def step(honest: Tensor, name: str) -> Tensor:
        noise = scene.noise(honest)
        return noise * (honest.norm() / noise.norm())

    return moved(message, scene, step)


@attack(MODEL)
def random_model(message: Message, scene: Scene) -> Said:
    """A random model of the honest norm."""
    return each(message, lambda t: (noise := scene.noise(t)) * (t.norm() / noise.norm()))


@attack(MODEL)
def shuffled_units(message: Message, scene: Scene) -> Said:
    """Rows of every tensor in another order: the same norms, another model."""
    return each(message, lambda t: t[torch.randperm(len(t), generator=scene.chance)])


@attack(MODEL)
def only_head_negated(message: Message, scene: Scene) -> Said:
    """The new head negated and multiplied by ten, the backbone as it is."""
    heads = {name: -10 * tensor for name, tensor in message.tensors.items() if name.startswith("heads.")}
    return with_tensors(message, message.tensors | heads)


@attack(MODEL, needs_robust=True)
def against_the_others(message: Message, scene: Scene) -> Said:
    """Back along the way that all went last (inner product manipulation), at three times its length."""
    if len(scene.seen) < 2:
        return moved(message, scene, lambda step, _: -step)
    before = scene.seen[-2]
    return moved(message, scene, lambda step, name: -3 * (scene.received[name] - before[name]))


@attack(MODEL, needs_robust=True)
def back_to_the_start(message: Message, scene: Scene) -> Said:
    """The model with which the task began, again and again."""
    return with_tensors(message, scene.seen[0])


@attack(MODEL)
def last_round_only(message: Message, scene: Scene) -> Said:
    """Honest until the very last round, then the step times −30."""
    return moved(message, scene, lambda step, _: -30 * step) if scene.last_round else message


@attack(MODEL)
def first_round_only(message: Message, scene: Scene) -> Said:
    """The step times −30 in the first round of every task, when the server has seen nothing."""
    return moved(message, scene, lambda step, _: -30 * step) if scene.ask.round == 0 else message


@attack(MODEL, needs_robust=True)
def slow_drift(message: Message, scene: Scene) -> Said:
    """One fixed direction every round, as long as an honest step."""
    task = torch_stream(scene.site.settings.run.seed, "drift", scene.ask.task)

    def step(honest: Tensor, name: str) -> Tensor:
        noise = torch.randn(honest.shape, generator=task)
        return honest + noise * (honest.norm() / noise.norm())

    return moved(message, scene, step)


@attack(MODEL, needs_robust=True)
def a_little_is_enough(message: Message, scene: Scene) -> Said:
    """Every number of its step off by its own spread over the rounds so far, against its mean."""
    steps = [past.tensors for past in scene.past[MODEL] if past.tensors.keys() == message.tensors.keys()]
    steps = [tensors for tensors in steps if all(tensors[n].shape == t.shape for n, t in message.tensors.items())]

    def step(honest: Tensor, name: str) -> Tensor:
        history = torch.stack([tensors[name] for tensors in steps])
        spread = history.std(0) if len(history) > 1 else honest.abs()
        return honest - 1.5 * spread * honest.sign()

    return moved(message, scene, step)


@attack(MODEL)
def model_replacement(message: Message, scene: Scene) -> Said:
    """A head whose classes are swapped, scaled by the number of clients so that the average is it."""
    count = scene.site.settings.clients.count
    swapped = {n: t.flip(0) if n.startswith("heads.") else t for n, t in message.tensors.items()}
    return moved(with_tensors(message, swapped), scene, lambda step, _: count * step)


@attack(MODEL, needs_robust=True)
def swapped_head(message: Message, scene: Scene) -> Said:
    """A head whose classes are swapped, not scaled."""
    return with_tensors(message, {n: t.flip(0) if n.startswith("heads.") else t for n, t in message.tensors.items()})


@attack(MODEL, needs_robust=True)
def stale_model(message: Message, scene: Scene) -> Said:
    """Its first reply of the task in every round."""
    return scene.past[MODEL][-1 - (scene.ask.round or 0)]


@contextmanager
def other_labels(server: Server) -> Iterator[None]:
    """Every label of a task is that of the task's next class, wherever the client looks."""
    classes = server.site.classes[server.site.task]
    following = dict(zip(classes, [*classes[1:], classes[0]], strict=True))
    batches, labels = PrefixCache.train_batches, Holding.labels

    def turned(known: Tensor) -> Tensor:
        return torch.tensor([following[int(label)] for label in known], dtype=known.dtype)

    def lying_batches(self: PrefixCache, *arguments: Any) -> Iterator[InputBatch]:
        for inputs, known in batches(self, *arguments):
            yield inputs, turned(known)

    with (
        patch.object(PrefixCache, "train_batches", lying_batches),
        patch.object(Holding, "labels", lambda self, task: turned(labels(self, task))),
    ):
        yield


for _name, _on, _about in (
    ("labels_flipped", EVERY, "All labels of its data are wrong, in training and in everything it tells."),
    ("labels_flipped_in_training", (MODEL,), "All labels are wrong in training only."),
    ("labels_flipped_in_statistics", (STATISTICS,), "All labels are wrong in class statistics only."),
):
    ATTACKS[_name] = Attack(_name, _about, _on, poison=other_labels, needs_robust=True)


# Class statistics


def statistics(message: Message, counts: Tensor, sums: Tensor, moment: Tensor) -> Message:
    packed = {"counts": counts.long(), "sums": sums.float(), "moment": pack(moment).float()}
    return with_tensors(message, packed)


def parts(message: Message) -> tuple[Tensor, Tensor, Tensor]:
    """Counts (C,), sums (C, d) and second moment (d, d)."""
    sums = message.tensors["sums"].double()
    return message.tensors["counts"], sums, unpack(message.tensors["moment"].double(), sums.shape[1])


def features_times(factor: float) -> Change:
    """As if every feature were so many times as large: nothing contradicts anything."""

    def change(message: Message, scene: Scene) -> Said:
        counts, sums, moment = parts(message)
        return statistics(message, counts, sums * factor, moment * factor**2)

    return change


def weighing(factor: int) -> Change:
    """As if it had so many times as many samples: nothing contradicts anything."""

    def change(message: Message, scene: Scene) -> Said:
        counts, sums, moment = parts(message)
        return statistics(message, counts * factor, sums * factor, moment * factor)

    return change


several(
    (STATISTICS,),
    "Class statistics that no samples have, or none of its own",
    {
        "features_times_1000": features_times(1e3),
        "features_times_1e12": features_times(1e12),
        "features_times_3": features_times(3),
        "features_negated": features_times(-1),
        "features_times_1e_minus_6": features_times(1e-6),
        "thousandfold_statistics": weighing(1000),
        "threefold_statistics": weighing(3),
        "counts_1e9": lambda m, s: with_tensors(
            m, m.tensors | {"counts": torch.where(m.tensors["counts"] > 0, 10**9, 0)}
        ),
        "counts_2_to_40": lambda m, s: with_tensors(
            m, m.tensors | {"counts": torch.full_like(m.tensors["counts"], SAMPLES)}
        ),
        "counts_one": lambda m, s: with_tensors(m, m.tensors | {"counts": m.tensors["counts"].clamp_max(1)}),
        "sums_negated": lambda m, s: with_tensors(m, m.tensors | {"sums": -m.tensors["sums"]}),
        "statistics_zero": lambda m, s: with_tensors(m, {n: torch.zeros_like(t) for n, t in m.tensors.items()}),
        "withheld_text": told({"withheld": "all"}),
        "withheld_1e308": told({"withheld": 1e308}),
        "withheld_list": told({"withheld": [1]}),
        "withheld_negative": told({"withheld": -1}),
        "withheld_huge": lambda m, s: raw(m, '{"withheld": 1' + 4000 * "0" + "}"),
        "withheld_missing": lambda m, s: Message(m.kind, m.tensors),
    },
)


@attack(STATISTICS)
def moment_with_huge_products(message: Message, scene: Scene) -> Said:
    """A moment that is no second moment: its products are larger than its squares allow."""
    counts, sums, moment = parts(message)
    products = torch.full_like(moment, 10 * moment.diagonal().max())
    return statistics(message, counts, sums, products.fill_diagonal_(0) + moment.diagonal().diag())


@attack(STATISTICS)
def moment_of_largest_floats(message: Message, scene: Scene) -> Said:
    """Alternating largest numbers beside the diagonal."""
    counts, sums, moment = parts(message)
    sign = torch.where(torch.arange(moment.numel()).view_as(moment) % 3 == 0, 1.0, -1.0)
    return statistics(message, counts, sums, torch.full_like(moment, 3e38) * (sign + sign.T).sign())


@attack(STATISTICS)
def moment_negative(message: Message, scene: Scene) -> Said:
    """A negative second moment."""
    counts, sums, moment = parts(message)
    return statistics(message, counts, sums, -moment)


@attack(STATISTICS)
def no_scatter(message: Message, scene: Scene) -> Said:
    """Every sample lies exactly on its class mean."""
    counts, sums, _ = parts(message)
    return statistics(message, counts, sums, sums.T @ (sums / counts.clamp_min(1)[:, None]) * (1 + 1e-6))


@attack(STATISTICS)
def huge_scatter(message: Message, scene: Scene) -> Said:
    """Right means, and a scatter a million times as large."""
    counts, sums, moment = parts(message)
    between = sums.T @ (sums / counts.clamp_min(1)[:, None])
    return statistics(message, counts, sums, between + 1e6 * (moment - between))


@attack(STATISTICS)
def scatter_along_one_line(message: Message, scene: Scene) -> Said:
    """A huge scatter just where the classes differ, so that this difference counts for nothing."""
    counts, sums, moment = parts(message)
    means = sums / counts.clamp_min(1)[:, None]
    line = means[0] - means[-1]
    return statistics(message, counts, sums, moment + 1e4 * counts.sum() * torch.outer(line, line))


@attack(STATISTICS)
def means_shifted(message: Message, scene: Scene) -> Said:
    """Every class mean three norms away, and a moment that fits."""
    counts, sums, moment = parts(message)
    shift = scene.noise(sums[0]).double().abs()
    shift = shift * 3 * (sums.sum(0) / counts.sum().clamp_min(1)).norm() / shift.norm()
    whole = sums.sum(0)
    moved_moment = moment + torch.outer(whole, shift) + torch.outer(shift, whole)
    moved_moment = moved_moment + counts.sum() * torch.outer(shift, shift)
    return statistics(message, counts, sums + counts[:, None] * shift, moved_moment)


@attack(STATISTICS, needs_robust=True)
def means_swapped(message: Message, scene: Scene) -> Said:
    """The statistics of the first class under the name of the last, and so on: what other labels would give."""
    counts, sums, moment = parts(message)
    return statistics(message, counts.flip(0), sums.flip(0), moment)


@attack(STATISTICS)
def all_in_one_class(message: Message, scene: Scene) -> Said:
    """Its samples of all classes under the name of one."""
    counts, sums, moment = parts(message)
    one = torch.zeros_like(counts), torch.zeros_like(sums)
    one[0][0], one[1][0] = counts.sum(), sums.sum(0)
    return statistics(message, *one, moment)


@attack(STATISTICS)
def classes_it_does_not_have(message: Message, scene: Scene) -> Said:
    """A thousand samples of every class, all with the mean of its first features."""
    counts, sums, _ = parts(message)
    mean, total = sums.sum(0) / counts.sum().clamp_min(1), 1000 * len(counts)
    means = mean.expand(len(counts), -1)
    return statistics(message, torch.full_like(counts, 1000), 1000 * means, 1.01 * total * torch.outer(mean, mean))


@attack(STATISTICS)
def replayed_statistics(message: Message, scene: Scene) -> Said:
    """What it told about the first task, in every task."""
    return scene.past[STATISTICS][0]


# Bases


def bases(message: Message, make: Callable[[str, Tensor], Tensor]) -> Message:
    return with_tensors(message, {n: t if n.startswith("sigma/") else make(n, t) for n, t in message.tensors.items()})


def earlier_bases(scene: Scene) -> tuple[SubspaceBank, Callable[[str, int], Tensor]]:
    bank = SubspaceBank.from_tensors(scene.site.known)

    def earlier(name: str, d: int) -> Tensor:
        return bank.routed(d) if name == "routing" else bank.basis(name, d)

    return bank, earlier


def of_rank(share: float) -> Change:
    """Random bases of this share of all directions, in every layer."""

    def change(message: Message, scene: Scene) -> Said:
        def made(name: str, basis: Tensor) -> Tensor:
            d = len(basis)
            square = torch.randn(d, d, generator=scene.chance, dtype=torch.float64)
            return torch.linalg.qr(square)[0][:, : max(int(share * d), 1)].to(basis.dtype)

        return bases(message, made)

    return change


def more_directions(count: int) -> Change:
    """The honest bases and so many directions more in every layer."""

    def change(message: Message, scene: Scene) -> Said:
        def made(name: str, basis: Tensor) -> Tensor:
            room = len(basis) - basis.shape[1]
            more = torch.randn(len(basis), min(count, room), generator=scene.chance)
            return torch.cat([basis, orthonormalise(residual(more, basis)).to(basis)], 1)

        return bases(message, made)

    return change


several(
    (BASIS,),
    "Bases that would freeze layers for good",
    {
        "full_rank_basis": of_rank(1),
        "basis_of_60_percent": of_rank(0.6),
        "basis_of_30_percent": of_rank(0.3),
        "basis_8_more_directions": more_directions(8),
        "basis_40_more_directions": more_directions(40),
    },
)
several(
    (BASIS,),
    "Metadata of bases that is none",
    {
        "rest_list": told({"rest": [1, 2]}),
        "rest_text": told({"rest": "all"}),
        "rest_none": told({"rest": None}),
        "rest_of_texts": lambda m, s: with_tensors(m, m.tensors, rest=dict.fromkeys(m.tensors, "text")),
        "rest_of_five": lambda m, s: with_tensors(m, m.tensors, rest=dict.fromkeys(m.tensors, [1.0] * 5)),
        "rest_1e308": lambda m, s: with_tensors(m, m.tensors, rest={key: [1e308, 1e308] for key in m.tensors}),
    },
)


@attack(BASIS)
def basis_beside_the_data(message: Message, scene: Scene) -> Said:
    """Directions that its data do not use, as many as its data use."""
    _, earlier = earlier_bases(scene)

    def made(name: str, basis: Tensor) -> Tensor:
        d = len(basis)
        used = torch.cat([basis.double(), earlier(name, d).double()], 1)
        beside = residual(torch.eye(d, dtype=torch.float64), orthonormalise(used))
        return orthonormalise(beside)[:, : max(basis.shape[1], 1)].to(basis.dtype)

    return bases(message, made)


@attack(BASIS)
def only_routing_full_rank(message: Message, scene: Scene) -> Said:
    """A routing basis of all directions: its task would hold every feature."""
    return bases(message, lambda name, basis: torch.eye(len(basis), dtype=basis.dtype) if name == "routing" else basis)


@attack(BASIS)
def routing_of_another_task(message: Message, scene: Scene) -> Said:
    """The routing basis of the first task, in every task."""
    bank, _ = earlier_bases(scene)
    return bases(message, lambda name, basis: bank.routing[0] if name == "routing" and bank.routing else basis)


@attack(BASIS)
def layers_unprotected(message: Message, scene: Scene) -> Said:
    """Bases without a direction: nothing of its data is to be kept."""
    return bases(message, lambda name, basis: basis if name == "routing" else basis[:, :0])


@attack(BASIS)
def routing_empty(message: Message, scene: Scene) -> Said:
    """A routing basis without a direction."""
    return bases(message, lambda name, basis: basis[:, :0])


@attack(BASIS)
def basis_not_orthonormal(message: Message, scene: Scene) -> Said:
    """The same column again and again."""
    return bases(message, lambda name, basis: basis[:, :1].repeat(1, max(basis.shape[1], 2)))


@attack(BASIS)
def basis_almost_orthonormal(message: Message, scene: Scene) -> Said:
    """Columns that are off by just what is allowed."""
    return bases(message, lambda name, basis: basis * (1 + 4.9e-5))


@attack(BASIS)
def layers_that_are_not_there(message: Message, scene: Scene) -> Said:
    """A basis of one layer more, and of one less."""
    names = [name for name in message.tensors if name != "routing"]
    kept = {name: tensor for name, tensor in message.tensors.items() if name not in names[:1]}
    return with_tensors(message, kept | {"99.weight": torch.eye(3)})


# References, calibration, presence


def table(**change: Callable[[Tensor], Tensor]) -> Change:
    return lambda message, scene: with_tensors(
        message, {name: change[name](tensor) if name in change else tensor for name, tensor in message.tensors.items()}
    )


several(
    (REFERENCE,),
    "References that are none",
    {
        "references_equal": table(values=torch.ones_like, variances=torch.ones_like),
        "references_zero": table(values=torch.zeros_like, variances=torch.zeros_like),
        "references_1e38": table(
            values=lambda t: torch.full_like(t, 3e38), variances=lambda t: torch.full_like(t, 3e38)
        ),
        "references_1e15": table(values=lambda t: torch.full_like(t, 1e15)),
        "references_reversed": table(values=lambda t: t.flip(1)),
        "references_negative": table(values=lambda t: -t),
        "variances_zero": table(variances=torch.zeros_like),
        "variances_1e38": table(variances=lambda t: torch.full_like(t, 3e38)),
        "reference_counts_2_to_40": table(counts=lambda t: torch.full_like(t, SAMPLES), values=lambda t: t.flip(1)),
        "reference_counts_zero": table(counts=torch.zeros_like),
        "reference_counts_negative": table(counts=lambda t: -t),
    },
)
several(
    (CALIBRATION,),
    "A calibration that is none",
    {
        "losses_for_sure_answers": table(loss=lambda t: torch.linspace(0, 1e9, len(t), dtype=t.dtype)),
        "losses_for_unsure_answers": table(loss=lambda t: torch.linspace(1e9, 0, len(t), dtype=t.dtype)),
        "losses_1e308": table(loss=lambda t: torch.full_like(t, 1.7e308)),
        "losses_negative": table(loss=lambda t: -t - 1),
        "distances_2_to_40": table(distances=lambda t: torch.full_like(t, SAMPLES)),
        "distances_far_out": table(
            distances=lambda t: torch.zeros_like(t).index_fill(0, torch.tensor(len(t) - 1), 10**6)
        ),
        "distances_negative": table(distances=lambda t: t - 1),
        "calibration_zero": table(loss=torch.zeros_like, distances=torch.zeros_like),
    },
)
several(
    (PRESENCE,),
    "A number of samples that it does not have, when it joins",
    {
        "presence_zero": told({"samples": 0}),
        "presence_negative": told({"samples": -1}),
        "presence_2_to_40": told({"samples": SAMPLES}),
        "presence_float": told({"samples": 7.0}),
        "presence_text": told({"samples": "x" * LONG}),
        "presence_nested": told({"samples": {"samples": [1]}}),
        "presence_missing": lambda m, s: Message(m.kind),
        "presence_with_tensors": lambda m, s: with_tensors(m, {"model": torch.zeros(1000)}),
        "absent_then_present": lambda m, s: with_tensors(m, {}, samples=0 if s.ask.task % 2 else m.meta["samples"]),
    },
)


@attack(PRESENCE, *EVERY)
def lies_from_the_start(message: Message, scene: Scene) -> Said:
    """A trillion samples as it joins, and in whatever it says later; a negated step."""
    if scene.ask.exchange == MODEL:
        return moved(message, scene, lambda step, _: -step, samples=10**12)
    if scene.ask.exchange == STATISTICS:
        many = weighing(10**12 // max(int(message.tensors["counts"].sum()), 1))
        return many(message, scene)
    return told({"samples": 10**12})(message, scene) if scene.ask.exchange == PRESENCE else message


@attack(PRESENCE, MODEL)
def ten_times_as_many_samples(message: Message, scene: Scene) -> Said:
    """Ten times its samples as it joins and in every round, and a negated step."""
    samples = 10 * message.meta["samples"]
    if scene.ask.exchange == PRESENCE:
        return told({"samples": samples})(message, scene)
    return moved(message, scene, lambda step, _: -step, samples=samples)


# Any question


def nested(depth: int) -> Change:
    """Metadata of lists within lists; the numbers that are asked for are there too."""

    def change(message: Message, scene: Scene) -> Said:
        rest = json.dumps(message.meta)[1:-1]
        return raw(message, "{" + rest + (", " if rest else "") + '"deep": ' + "[" * depth + "]" * depth + "}")

    return change


def raising(text: str) -> Change:
    def change(message: Message, scene: Scene) -> Said:
        raise RuntimeError(text)

    return change


several(
    EVERY,
    "A reply that is none",
    {
        "kind_of_100_kB": called("k" * LONG),
        "kind_empty": called(""),
        "kind_strange": called("\x1b[31m\u202e😀\n" * 100),
        "kind_plan": called("plan"),
        "lost_again_and_again": called(LOST),
        "damaged_bytes": lambda m, s: m.to_bytes()[:-3],
        "no_bytes": lambda m, s: b"",
        "bytes_of_noise": lambda m, s: bytes(range(256)) * 40,
        "meta_10_MB": told({"more": "x" * 10_000_000}),
        "meta_10_000_entries": told({f"key {i}": [i] for i in range(10_000)}),
        "meta_list": lambda m, s: raw(m, "[1, 2]"),
        "meta_nested_400": nested(400),
        "meta_nested_900": nested(900),
        "meta_nested_970": nested(970),
        "meta_nested_100000": nested(100_000),
        "meta_infinity": told(
            {"loss": float("inf"), "samples": float("inf"), "withheld": float("inf"), "rest": float("inf")}
        ),
        "meta_texts": told(dict.fromkeys(("loss", "samples", "withheld", "rest"), "text")),
        "meta_lists": told({key: [[]] for key in ("loss", "samples", "withheld", "rest")}),
        "meta_nothing": told(dict.fromkeys(("loss", "samples", "withheld", "rest"))),
        "raises": raising("the disk of this client is full"),
        "raises_1_MB": raising("e" * 1_000_000),
        "raises_strange_text": raising("\x1b[2J\u202e😀\n\x00" * 1000),
        "everything_zero": lambda m, s: with_tensors(m, {n: torch.zeros_like(t) for n, t in m.tensors.items()}),
        "everything_nan": times(torch.nan),
        "everything_largest": lambda m, s: each(m, lambda t: torch.full_like(t, torch.finfo(t.dtype).max)),
        "integers_largest": lambda m, s: with_tensors(
            m, {n: t if t.is_floating_point() else torch.full_like(t, 2**63 - 1) for n, t in m.tensors.items()}
        ),
    },
)


@attack(*EVERY)
def lost_with_deep_metadata(message: Message, scene: Scene) -> Said:
    """It has lost everything, and says so in lists within lists."""
    return raw(Message(LOST), '{"deep": ' + "[" * 900 + "]" * 900 + "}")


@attack(*EVERY)
def answers_of_other_questions(message: Message, scene: Scene) -> Said:
    """The last reply to another question, as it was."""
    others = [past[-1] for name, past in scene.past.items() if name not in (scene.ask.exchange, PRESENCE)]
    return others[scene.ask.step % len(others)] if others else message


@attack(*EVERY)
def answers_under_another_name(message: Message, scene: Scene) -> Said:
    """The last reply to another question, called what was asked for."""
    others = [past[-1] for name, past in scene.past.items() if name not in (scene.ask.exchange, PRESENCE)]
    other = others[scene.ask.step % len(others)] if others else message
    return Message(message.kind, other.tensors, other.meta)


@attack(*EVERY, needs_robust=True)
def answers_of_the_first_task(message: Message, scene: Scene) -> Said:
    """Its first reply of every kind, again and again."""
    return scene.past[scene.ask.exchange][0]


@attack(MODEL)
def norms_of_negative_variance(message: Message, scene: Scene) -> Said:
    """Running variances of norm layers below zero, and counters at their end; a model without norm layers is honest."""
    changed = {name: -100 * tensor for name, tensor in message.tensors.items() if name.endswith("running_var")}
    ends = {
        name: torch.full_like(tensor, 2**63 - 1)
        for name, tensor in message.tensors.items()
        if tensor.dtype == torch.int64
    }
    return with_tensors(message, message.tensors | changed | ends)


HONEST = Attack("honest", "What the door itself changes: nothing.", EVERY)
ATTACKS[HONEST.name] = HONEST
