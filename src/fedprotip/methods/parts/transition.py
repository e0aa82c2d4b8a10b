"""What GLFC and LGA share at a client: it notices a new task, keeps exemplars of the last, and shows prototypes."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import ClassVar, Literal, cast

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedprotip.messages import Message
from fedprotip.methods.base import Method
from fedprotip.methods.exchange import Exchange
from fedprotip.methods.local import Local
from fedprotip.methods.parts import inversion, memory, proxy, stored
from fedprotip.methods.site import Site
from fedprotip.methods.state import Form, Kept
from fedprotip.models import Network
from fedprotip.models.batches import pieces
from fedprotip.models.prefix import InputBatch
from fedprotip.models.steps import Inputs
from fedprotip.settings import MethodSettings, Settings
from fedprotip.store.files import Tensors

EXEMPLARS = "exemplars"
PRIVATE = (
    Kept(EXEMPLARS, "private", {"images": Form("n c h w"), "labels": Form("n", torch.int64)}),
    Kept(
        proxy.TRANSITION,
        "private",
        {"entropy": Form("", torch.float64), "task": Form("", torch.int64), "gradients": Form("p n")},
    ),
)
"""`transition`: entropy of the last round that a client took part in, the first task that it has chosen no exemplars
of, and gradients it is to send."""
SMALLEST = 1e-5
"""Added to probabilities before their logarithm, as published."""
DECAY = 1e-5
"""Weight decay of a prototype while it is disturbed, as published."""


class TransitionOptions(MethodSettings):
    memory: int = Field(2000, ge=1, description="M: exemplars that a client keeps, in equal parts of its old classes.")
    signal: Literal["oracle", "entropy"] = Field(
        "oracle",
        description="How a client notices a new task. oracle: it is told; entropy: its samples make the global model "
        "less sure than in its last round.",
    )
    threshold: float = Field(
        1.2,
        gt=0,
        description="entropy: the increase (nats) that is a signal; it cannot exceed the logarithm of the number of "
        "classes, so few classes need less.",
    )
    disturb_steps: int = Field(50, ge=1, description="Steps by which a prototype is changed before it is encoded.")
    disturb_rate: float = Field(0.2, gt=0, description="Learning rate of these steps.")
    solver: Literal["lbfgs", "adam"] = Field("lbfgs", description="How the server finds images behind gradients.")
    steps: int = Field(250, ge=1, description="Steps of that search, for all images side by side.")
    rate: float = Field(0.1, gt=0, description="adam: its learning rate; lbfgs: the length of its first steps.")
    iterates: int = Field(20, ge=1, description="Of every image so many last steps judge models.")
    per_class: Literal["sum", "mean"] = Field(
        "sum",
        description="The loss of a sample over all classes. sum: as steep as cross-entropy; mean: as published, for "
        "learning rates about as many times larger as there are classes.",
    )


class Exemplars(Exchange):
    """At the end of a task, where clients are told of it: each chooses exemplars of its classes."""

    name, needed = EXEMPLARS, False

    def answer(self, local: Local) -> Message:
        remember(local)
        return Message(self.name)

    def check(self, message: Message, site: Site) -> None:
        message.check(self.name, {})
        message.check_meta()


class Held(stored.Stored):
    """Where clients are told nothing: exemplars, and all samples of tasks that a client has yet to choose from."""

    def answer(self, local: Local) -> Message:
        exemplars, last = super().answer(local).tensors[stored.RAW], local.own.get(proxy.TRANSITION)
        tasks = range(int(last["task"]), local.task + 1) if last else ()
        return Message(self.name, {stored.RAW: exemplars + sum(len(local.holding.samples(task)) for task in tasks)})


class Transitions(Method):
    """Hooks that both methods share; each adds its loss, and how its server judges models."""

    scenarios = ("class",)
    sees_images = True
    ignored: int = 0
    """Rounds of a task after each of which the newest model counts as the best."""
    Options: ClassVar[type[MethodSettings]] = TransitionOptions

    def __init__(self, settings: Settings) -> None:
        self.options = cast(TransitionOptions, settings.method)
        self.told = self.options.signal == "oracle"
        self.state = (*PRIVATE, *proxy.kept("server" if self.told else "shared"), stored.KEPT)
        super().__init__(settings)

    def at_begin(self) -> Sequence[Exchange]:
        return (proxy.Teacher(),) if self.told else ()

    def at_end(self) -> Sequence[Exchange]:
        kept = (Exemplars(), stored.Stored(EXEMPLARS, self.options.memory)) if self.told else (Held(EXEMPLARS),)
        return (proxy.Prototypes(), proxy.Monitor(), *kept)

    def trainable(self, site: Site) -> set[str]:
        """Old heads move too: their classes are among the exemplars."""
        return super().trainable(site) | site.heads()

    def begin_round(self, local: Local) -> None:
        last = local.own.get(proxy.TRANSITION)
        entropy = 0.0 if self.told else mean_entropy(local)
        since = int(last["task"]) if last else local.task
        if self.told:
            signal = last is None or since != local.task
        else:
            signal = entropy - (float(last["entropy"]) if last else 0.0) > self.options.threshold
            if signal and last:
                for past in range(since, max(since + 1, local.task)):
                    remember(replace(local, task=past, scratch={}))
        keep(local, entropy, torch.zeros(0, 0), local.task if signal else since)
        local.scratch.update(signal=signal, entropy=entropy, teacher=teacher_of(local, signal and not self.told))
        local.scratch["exemplars"] = local.own.get(EXEMPLARS) or nothing(local.site)

    def end_round(self, local: Local) -> None:
        if local.scratch["signal"]:
            keep(local, local.scratch["entropy"], shown(local, self.options), local.task)

    def batches(self, local: Local, own: Iterator[InputBatch]) -> Iterator[InputBatch]:
        exemplars, train = local.scratch["exemplars"], local.settings.train
        if not len(exemplars["labels"]):
            return own
        look = local.site.look if local.site.look.varied else None
        mixed = memory.replayed(own, exemplars, len(local.samples), train.batch, local.chance("replay"), look)
        return islice(mixed, train.steps) if train.steps else mixed

    def pass_length(self, local: Local) -> int:
        return len(local.samples) + len(local.scratch["exemplars"]["labels"])

    def succeeding(self, site: Site) -> None:
        """The best model is about to become the teacher; the server's images are still those of the task before."""

    def performance(self, site: Site) -> float:
        """How good the model of a round is, by the server's images."""
        return proxy.accuracy(site.network, *proxy.monitor_features(site))


def mean_entropy(local: Local) -> float:
    """Of the received model's answers to the client's samples, in nats."""
    total = 0.0
    for inputs, _ in local.labelled(local.settings.evaluate.batch):
        shares = local.network(inputs).softmax(1)
        total -= (shares * (shares + SMALLEST).log()).sum().item()
    return total / len(local.samples)


def teacher_of(local: Local, newest: bool) -> Network | None:
    """The best model of the task before; `newest`: the best so far, which the server has yet to make the teacher."""
    name = proxy.BEST if newest else proxy.TEACHER
    if f"{name}/heads" not in local.known:
        return None
    return proxy.model_of(local.network, local.known[f"{name}/weights"], int(local.known[f"{name}/heads"]))


def keep(local: Local, entropy: float, gradients: Tensor, since: int) -> None:
    found = {"entropy": torch.tensor(entropy), "task": torch.tensor(since), "gradients": gradients}
    local.own.put(proxy.TRANSITION, found)


def remember(local: Local) -> None:
    """Exemplars of the classes that the client has in this task; those of earlier ones become fewer."""
    if not len(local.samples):
        return
    features, labels = embedded(local)
    old = local.own.get(EXEMPLARS) or nothing(local.site)
    options = cast(TransitionOptions, local.settings.method)
    count = memory.room(options.memory, len(torch.cat([old["labels"], labels]).unique()))
    rows = memory.chosen_rows(features, labels, count)
    old = memory.shortened(old, count, without=labels.unique())
    images = torch.cat([old["images"], images_of(local, rows)])
    local.own.put(EXEMPLARS, {"images": images, "labels": torch.cat([old["labels"], labels[rows]])})


def nothing(site: Site) -> Tensors:
    """The exemplars of a client that has none yet."""
    return {"images": torch.zeros(0, *site.image_shape), "labels": torch.zeros(0, dtype=torch.int64)}


def embedded(local: Local) -> tuple[Tensor, Tensor]:
    """Features (n, d) and labels (n,) of a client's samples of a task."""
    parts = [(local.network.embed(inputs), labels) for inputs, labels in local.labelled(local.settings.evaluate.batch)]
    features, labels = zip(*parts, strict=True)
    return torch.cat(features), torch.cat(labels)


def images_of(local: Local, rows: Tensor) -> Tensor:
    """The images of these rows of `embedded`, without augmentation."""
    wanted = pieces(np.sort(local.samples)[rows.numpy()], local.settings.evaluate.batch)
    batches = local.cache.train_batches(local.network, local.task, wanted)
    return torch.cat([torch.zeros(0, *local.site.image_shape), *(cast(Tensor, images) for images, _ in batches)])


def shown(local: Local, options: TransitionOptions) -> Tensor:
    """For each class the encoder's gradient at a disturbed prototype, the sample nearest to the class mean (p, P)."""
    features, labels = embedded(local)
    rows = memory.chosen_rows(features, labels, 1)
    images, labels = images_of(local, rows).to(local.site.device), labels[rows]
    targets = one_hot(local.network, labels)
    disturbed_images = disturbed(local.network, images, targets, options.disturb_steps, options.disturb_rate)
    seen = torch.tensor(proxy.seen_labels(local.network))
    outputs = (labels[:, None] == seen).int().argmax(1).to(images.device)
    encoder = proxy.encoder_of(local.site).to(images.device)
    return inversion.gradients_of(encoder, disturbed_images, outputs).cpu()


def disturbed(network: Network, images: Tensor, targets: Tensor, steps: int, rate: float) -> Tensor:
    """Images after steps down the loss of the client's own model: more like their class, less like themselves."""
    for _ in range(steps):
        with torch.enable_grad():
            images = images.detach().requires_grad_()
            loss = F.binary_cross_entropy_with_logits(network(images), targets, reduction="none").mean(1).sum()
            (slope,) = torch.autograd.grad(loss, images)
        images = images.detach() - rate * (slope + DECAY * images.detach())
    return images


def one_hot(network: Network, labels: Tensor) -> Tensor:
    """Labels (n,) as targets of all outputs (n, C); a class that several heads know is right in each."""
    outputs = torch.tensor([label for head in network.labels for label in head], device=labels.device)
    return (labels[:, None] == outputs).float().to(next(network.parameters()).device)


def tasks_of(network: Network, labels: Tensor) -> Tensor:
    """The task of each label (n,): the last one that has it."""
    tasks = torch.zeros_like(labels)
    for task, known in enumerate(network.labels):
        tasks[torch.isin(labels, torch.tensor(known, device=labels.device))] = task
    return tasks


def errors(logits: Tensor, targets: Tensor) -> Tensor:
    """g: how far the output of the true class is from 1 (n,), without gradient."""
    return 1 - (logits.detach().sigmoid() * targets).amax(1)


def binary_loss(logits: Tensor, targets: Tensor, per_class: str) -> Tensor:
    """Binary cross-entropy of every sample (n,) over all classes."""
    parts = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    return parts.sum(1) if per_class == "sum" else parts.mean(1)


@torch.no_grad()
def softened(teacher: Network, inputs: Inputs, targets: Tensor, task: int) -> Tensor:
    """Targets (n, C) in which what the teacher says stands for the classes of earlier tasks."""
    features = teacher.embed(inputs)
    said = [head(features).sigmoid() for head in teacher.heads[:task]]
    width = sum(part.shape[1] for part in said)
    return torch.cat([*said, targets[:, width:]], 1)
