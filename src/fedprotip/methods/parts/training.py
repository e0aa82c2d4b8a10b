"""The round of training: local steps from the received model (PGD of Algorithm 1), and their average (Eq. 6)."""

import math
from collections.abc import Iterable, Iterator
from inspect import signature
from itertools import chain, count, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedprotip.errors import UsageError, nearest
from fedprotip.messages import SAMPLES, BadMessage, Message
from fedprotip.methods.constraint import Constraint
from fedprotip.methods.exchange import Exchange, Sender
from fedprotip.methods.local import Local
from fedprotip.methods.parts.presence import check_samples
from fedprotip.methods.site import Site
from fedprotip.models.batches import pieces
from fedprotip.models.norms import training_mode
from fedprotip.models.prefix import InputBatch, still_prefix
from fedprotip.models.products import by_products
from fedprotip.models.state import tensor_of
from fedprotip.models.steps import channels_last
from fedprotip.seeds import ambient_stream
from fedprotip.settings import TrainSettings

MODEL = "model"
PARTS = {"heads": "head", "extras": "method's own networks"}
"""What parts of a model are called whose updates are compared; the rest is the backbone."""
SHORT = 0.1
"""Updates shorter than this share of the model are not told apart."""
UNIT = 64
"""Samples that weigh 1: a power of two, so it changes no mean; it leaves secure sums room for large numbers."""
ROUNDED = 1e-2
"""How far below 0 a variance may lie that was rounded on its way, as a share of the largest."""


class Training(Exchange):
    name, when, combine, trains = MODEL, "round", "mean", True

    def answer(self, local: Local) -> Message:
        said = {"samples": local.site.method.count(local), "loss": train(local)}
        return Message(MODEL, local.site.wire.pack(local.site.moving()), said)

    def check(self, message: Message, site: Site) -> None:
        message.check(MODEL, site.specs)
        message.check_meta("samples", "loss")
        message.check_numbers("loss")
        check_samples(message)
        for name, tensor in message.tensors.items():
            if not tensor.is_floating_point() and not 0 <= tensor.min() <= tensor.max() <= SAMPLES:
                raise BadMessage(f"{name} counts what cannot have been")
            if name.endswith("running_var"):
                variance = site.wire.unpack({name: tensor})[name]
                if (variance < -ROUNDED * variance.abs().max()).any():
                    raise BadMessage(f"{name} has a negative variance")

    def check_sender(self, message: Message, site: Site, sender: Sender) -> None:
        if message.meta["samples"] != sender.samples:
            raise BadMessage(f"{message.meta['samples']} samples are stated, before it were {sender.samples}")

    def sizes(self, message: Message, site: Site) -> dict[str, float]:
        """How far the model has moved from the one that was sent: its parts, and running statistics."""
        changes = ((name, self.change(name, tensor, site)) for name, tensor in message.tensors.items())
        return _lengths(changes, site)

    def least(self, message: Message, site: Site) -> dict[str, float]:
        """`SHORT` of what moves: where training has little left to do, most clients may stand still and one may not."""
        held = ((name, tensor_of(site.network, name)) for name in message.tensors)
        return {what: SHORT * length for what, length in _lengths(held, site).items()}

    def origin(self, name: str, site: Site) -> Tensor | None:
        return site.sent(name)

    def effort(self, message: Message, site: Site, sender: Sender) -> float:
        """Local steps."""
        return steps_of_round(site.settings.train, int(min(message.meta["samples"], site.most)))

    def weight(self, message: Message, site: Site) -> float:
        """p_k of Eq. 6, up to normalisation."""
        weighted = site.settings.train.average == "weighted"
        return min(float(message.meta["samples"]), site.most) / UNIT if weighted else 1.0

    def digest(self, combined: Message, site: Site) -> Message:
        return combined

    def receive(self, message: Message, site: Site) -> None:
        site.hear(message.tensors)


def _lengths(tensors: Iterable[tuple[str, Tensor | None]], site: Site) -> dict[str, float]:
    """The length of each part of a model, called as its updates are; counters have none."""
    lengths, moving = dict[str, list[float]](), set(site.network.moving)
    for name, tensor in tensors:
        if tensor is not None and tensor.is_floating_point():
            what = PARTS.get(name.partition(".")[0], "backbone") if name in moving else "running statistics"
            lengths.setdefault(f"update of the {what}", []).append(tensor.detach().norm(dtype=torch.float64).item())
    return {what: math.hypot(*found) for what, found in lengths.items()}


def train(local: Local) -> float:
    """Local steps from the received model, each kept within bounds by the method (Eq. 4–5); their mean loss."""
    network, settings, method = local.network, local.settings, local.site.method
    options, device = settings.train, local.site.device
    optimizer = build_optimizer(options, [network.get_parameter(name) for name in network.moving])
    if method.remembers:
        _ = local.before  # copied as it is outside training
    method.begin_round(local)
    constraint = method.constraint(local) or Constraint()
    losses: list[Tensor] = []
    count = method.pass_length(local)
    seeded = ambient_stream(settings.run.seed, "train", local.task, local.round or 0, local.client)
    with torch.enable_grad(), seeded, constraint, by_products(network.backbone, constraint.columns):
        still = still_prefix(network, settings, local.task)
        training_mode(network.backbone, settings.model, local.task, still)
        for step, (inputs, labels) in enumerate(method.batches(local, own_batches(local))):
            inputs = inputs.to(device)
            rate = method.rate(local.task, (local.round or 0) + min(step / steps_of_round(options, count), 1))
            for group in optimizer.param_groups:
                group["lr"] = rate
            if options.channels_last:
                inputs = channels_last(inputs)
            with torch.autocast(device.type, torch.bfloat16, enabled=options.autocast == "bf16"):
                loss = method.loss(local, inputs, labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            with torch.no_grad():
                constraint.before_step()
                optimizer.step()
                constraint.after_step()
            losses.append(loss.detach())
    network.backbone.eval()
    method.end_round(local)
    return torch.stack(losses).mean().item()


def steps_of_round(train: TrainSettings, samples: int) -> int:
    """Local steps of a client with so many samples in one round."""
    return train.steps or train.epochs * max(-(-samples // train.batch), 1)


def falling(train: TrainSettings, done: float) -> float:
    """The learning rate when this share of a task, 0 to 1, is done (`train.fall`)."""
    return train.lr * (1 + math.cos(math.pi * done)) / 2 if train.fall == "cosine" else train.lr


def own_batches(local: Local) -> Iterator[InputBatch]:
    """The client's own samples in one round, shuffled and augmented as the settings ask."""
    batches = local_batches(local.samples, local.settings.train, local.draw("batches"))
    return local.cache.train_batches(local.network, local.task, batches, local.chance("augment"))


def local_batches(samples: np.ndarray, train: TrainSettings, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Shuffled batches of `epochs` passes, or of as many passes as `steps` needs."""
    passes = count() if train.steps and len(samples) else range(train.epochs)
    epochs = (pieces(rng.permutation(samples), train.batch) for _ in passes)
    batches = chain.from_iterable(epochs)
    return islice(batches, train.steps) if train.steps else batches


def build_optimizer(train: TrainSettings, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Any optimiser of torch.optim; a new one every round, as in the paper. Impossible settings: UsageError."""
    known = {n: c for n, c in vars(torch.optim).items() if isinstance(c, type) and issubclass(c, torch.optim.Optimizer)}
    for unfit in ("Optimizer", "LBFGS", "SparseAdam", "Muon"):  # base class; closure; sparse; matrices only
        known.pop(unfit, None)
    if train.optimizer not in known:
        raise UsageError(f"train.optimizer = {train.optimizer!r} is unknown; {nearest(train.optimizer, known)}.")
    cls = known[train.optimizer]
    accepted = signature(cls).parameters
    arguments: dict[str, Any] = {"lr": train.lr}
    for name in ("momentum", "weight_decay"):
        value = getattr(train, name)
        if name in accepted:
            arguments[name] = value
        elif value:
            raise UsageError(f"train.{name} = {value}: {train.optimizer} has none; the nearest valid value is 0.")
    if "lr" in train.optimizer_options:
        raise UsageError("train.optimizer_options has lr; the learning rate is train.lr, which every step sets.")
    options = {
        key: tuple(value) if isinstance(value, list) else value for key, value in train.optimizer_options.items()
    }
    try:
        return cls(parameters, **arguments | options)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"train.optimizer_options = {train.optimizer_options}: {train.optimizer} says: {error}."
        ) from None
