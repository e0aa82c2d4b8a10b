"""Attacks on the round of training: the model a client sends, its number of samples, its loss."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.hostile.door import (
    ATTACKS,
    EVERY,
    LONG,
    MODEL,
    STATISTICS,
    Attack,
    Said,
    Scene,
    attack,
    each,
    moved,
    raw,
    several,
    times,
    told,
    update_times,
    with_tensors,
)
from fedprotip.federation.server import Server
from fedprotip.messages import Message
from fedprotip.models.prefix import InputBatch, PrefixCache
from fedprotip.seeds import torch_stream
from fedprotip.stream.holdings import Holding

several(
    (MODEL,),
    "The model that travels, multiplied",
    {
        "weights_times_100": times(100),
        "weights_times_1e6": times(1e6),
        "weights_times_minus_3": times(-3),
    },
)
several(
    (MODEL,),
    "The model that travels, taken back to nothing",
    {"zero_weights": times(0), "negative_zeros": times(-0.0), "denormal_weights": times(1e-42)},
    needs_robust=True,
)
several(
    (MODEL,),
    "Numbers that are none",
    {"weights_nan": times(torch.nan), "weights_inf": times(1e39)},
    refused=True,
)
several(
    (MODEL,),
    "The step from the received model, multiplied",
    {f"update_times_{factor}": update_times(float(factor)) for factor in ("100", "1e6")}
    | {"update_times_minus_10": update_times(-10)},
)
several(
    (MODEL,),
    "The step from the received model, turned round or made up at honest size",
    {
        "sign_flip": update_times(-1),
        "free_rider": update_times(0),
        "update_times_3": update_times(3),
        "update_times_minus_2": update_times(-2),
        "update_times_minus_3": update_times(-3),
    },
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
    },
)
several(
    (MODEL,),
    "Something else in the place of a number",
    {
        "samples_negative": told({"samples": -5}),
        "samples_text": told({"samples": "many"}),
        "samples_list": told({"samples": [1]}),
        "samples_huge_integer": lambda m, s: raw(m, '{"samples": 1' + 400 * "0" + ', "loss": 1}'),
        "samples_true": told({"samples": True}),
        "loss_nan": lambda m, s: raw(m, '{"samples": 10, "loss": NaN}'),
        "loss_text": told({"loss": "x" * LONG}),
        "loss_missing": lambda m, s: Message(m.kind, m.tensors, {"samples": 10}),
    },
    refused=True,
)
several(
    (MODEL,),
    "A loss that is not its own",
    {"loss_1e308": told({"loss": 1e308}), "loss_minus_1e308": told({"loss": -1e308})},
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
    refused=True,
)


@attack(MODEL, needs_robust=True)
def random_update(message: Message, scene: Scene) -> Said:
    """A random step of the honest norm."""

    def step(honest: Tensor, name: str) -> Tensor:
        noise = scene.noise(honest)
        return noise * (honest.norm() / noise.norm())

    return moved(message, scene, step)


@attack(MODEL, needs_robust=True)
def random_model(message: Message, scene: Scene) -> Said:
    """A random model of the honest norm."""
    return each(message, lambda t: (noise := scene.noise(t)) * (t.norm() / noise.norm()))


@attack(MODEL, needs_robust=True)
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


@attack(MODEL, needs_robust=True)
def longer_every_round(message: Message, scene: Scene) -> Said:
    """Against its step, and twice as far with every round, so that its own past excuses it."""
    return moved(message, scene, lambda step, _: -(2.0 ** (scene.ask.round or 0)) * step)


@attack(MODEL, needs_robust=True)
def only_head_turned(message: Message, scene: Scene) -> Said:
    """The step of the new head negated and three times as long, that of the backbone as it is."""
    return moved(message, scene, lambda step, name: -3 * step if name.startswith("heads.") else step)


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


@attack(MODEL)
def norms_of_negative_variance(message: Message, scene: Scene) -> Said:
    """Running variances of norm layers below zero, and counters at their end; a model without norm layers is honest."""
    changed = {name: -100 * tensor.abs() for name, tensor in message.tensors.items() if name.endswith("running_var")}
    ends = {
        name: torch.full_like(tensor, 2**63 - 1)
        for name, tensor in message.tensors.items()
        if tensor.dtype == torch.int64
    }
    return with_tensors(message, message.tensors | changed | ends)


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
