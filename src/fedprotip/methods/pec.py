"""Fed+PEC: prediction-error classification (Zając, Tuytelaars and van de Ven 2024) in a federation.

A frozen random network, the teacher, is the same everywhere: its seed is known, and it is never sent. Every class has a
small student, which learns to say what the teacher says, on images of that class alone. A sample is of the class whose
student is least wrong about it. A new class adds a student and touches no other.
"""

import math
from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor

from fedprotip.errors import UsageError
from fedprotip.inference.students import STUDENTS, Size, born, check_stack, new_teacher, outputs_in_parts
from fedprotip.messages import SAMPLES, BadMessage, Message, Spec
from fedprotip.methods.base import About, Method, register
from fedprotip.methods.exchange import Exchange, Sender
from fedprotip.methods.local import Local
from fedprotip.methods.parts.presence import check_samples
from fedprotip.methods.parts.students import FORMS, chosen, empty, filled, fit, merged
from fedprotip.methods.parts.training import SHORT
from fedprotip.methods.site import Site
from fedprotip.methods.state import Form, Kept, Knowledge
from fedprotip.settings import MethodSettings
from fedprotip.store.files import Tensors
from fedprotip.stream.plan import Answering

CURRENT, TARGETS = "current", "targets"
"""Students of the task under way, everywhere; what the teacher says, at a client. All students, STUDENTS, are at the
server."""
UPDATE = "update of a student"


class PECOptions(MethodSettings):
    name: str = Field("pec", description="Method; its own settings follow.")
    width: int = Field(40, ge=1, le=4096, description="Maps of a student's convolution.")
    outputs: int = Field(172, ge=1, le=4096, description="Outputs of students and teacher, which are compared.")
    teacher: int = Field(100, ge=1, le=10**4, description="How many times as wide as a student the teacher is.")
    lr: float = Field(1e-3, gt=0, description="Learning rate of Adam; it falls linearly to 0 within a task.")
    batch: int = Field(1, ge=1, description="Samples of one step of a student.")
    rounds: int = Field(
        0, ge=0, description="Rounds of a task; 0: train.rounds. What was published is one pass in all."
    )
    epochs: int = Field(1, ge=1, description="Passes of a client over its samples in one round.")


def options_of(site: Site) -> PECOptions:
    options = site.settings.method
    assert isinstance(options, PECOptions)
    return options


def student_size(site: Site) -> Size:
    options = options_of(site)
    return Size(site.image_shape[0], options.width, options.outputs)


def new_student(site: Site) -> Tensors:
    """Every student begins as this one."""
    return born(student_size(site), site.settings.run.seed, "student")


def recalled(known: Knowledge | Tensors, group: str) -> Tensors:
    """The students of a group, with their labels."""
    return {name: known[f"{group}/{name}"] for name in FORMS}


def remember(known: Knowledge, group: str, stack: Tensors) -> None:
    known.update({f"{group}/{name}": tensor for name, tensor in stack.items()})


class Handing(Exchange):
    """Before the first round: students of classes of the task that have been learned before, as with domains."""

    name, when, who = "handout", "begin", "nobody"

    def digest(self, combined: None, site: Site) -> Message:
        if f"{STUDENTS}/labels" not in site.known:
            remember(site.known, STUDENTS, empty(student_size(site)))
        known = chosen(recalled(site.known, STUDENTS), torch.tensor(site.classes[site.task]))
        return Message(self.name, known)

    def receive(self, message: Message, site: Site) -> None:
        remember(site.known, CURRENT, message.tensors)


class Students(Exchange):
    """A round: clients train students of their classes; each becomes the mean over those that hold its class."""

    name, when, combine, trains, needs_weights, replaces = STUDENTS, "round", "sum", True, False, True

    def answer(self, local: Local) -> Message:
        site, options = local.site, options_of(local.site)
        images, labels = everything(local)
        classes = torch.tensor(site.classes[local.task])
        held = torch.isin(classes, labels).nonzero()[:, 0]
        chance, batches, rates = local.chance("students"), [], []
        for label in classes[held]:
            own = (labels == label).nonzero()[:, 0]
            orders = [own[torch.randperm(len(own), generator=chance)] for _ in range(options.epochs)]
            steps = [part for order in orders for part in order.split(options.batch)]
            done = (local.round or 0) + torch.arange(len(steps), dtype=torch.float64) / len(steps)
            batches.append(steps)
            rates.append(options.lr * (1 - done / site.method.rounds(local.task)))
        start = filled(new_student(site), recalled(site.known, CURRENT), classes[held])
        start = {name: tensor.to(site.device) for name, tensor in start.items()}
        learned, error = fit(start, images, taught(local, images).to(site.device), batches, rates)
        weights = (labels[:, None] == classes).sum(0)
        if local.settings.train.average == "uniform":
            weights = (weights > 0).long()
        tensors = {"weights": weights}
        for name, shape in student_size(site).shapes(len(classes)).items():
            tensors[name] = torch.zeros(shape)
            tensors[name][held] = _times(learned[name].cpu(), weights[held])
        return Message(self.name, tensors, {"samples": len(labels), "loss": error})

    def check(self, message: Message, site: Site) -> None:
        count = len(site.classes[site.task])
        specs = {name: Spec(shape) for name, shape in student_size(site).shapes(count).items()}
        message.check(self.name, {"weights": Spec((count,), torch.int64), **specs})
        message.check_meta("samples", "loss")
        message.check_numbers("loss")
        check_samples(message)
        weights = message.tensors["weights"]
        if not 0 <= weights.min() <= weights.max() <= SAMPLES:
            raise BadMessage("a weight is negative or impossible")
        if any(message.tensors[name][weights == 0].any() for name in specs):
            raise BadMessage("there is a student of a class without samples")

    def check_sender(self, message: Message, site: Site, sender: Sender) -> None:
        samples, weights = message.meta["samples"], message.tensors["weights"]
        if samples != sender.samples:
            raise BadMessage(f"{samples} samples are stated, before it were {sender.samples}")
        if site.settings.train.average == "uniform":
            if weights.max() != 1 or weights.sum() > samples:
                raise BadMessage("a weight is not that of one client, or there are more classes than samples")
        elif weights.sum() != samples:
            raise BadMessage(f"its weights add up to {int(weights.sum())}, but it has {samples} samples")

    def sizes(self, message: Message, site: Site) -> dict[str, float]:
        """How far the student that moved most is from what was sent."""
        held, start = self._sent(message, site)
        weights, moves = message.tensors["weights"][held].double(), torch.zeros(len(held), dtype=torch.float64)
        for name, tensor in start.items():
            moved = _times(message.tensors[name][held].double(), 1 / weights) - tensor
            moves += moved.square().flatten(1).sum(1)
        return {UPDATE: moves.max().sqrt().item()}

    def least(self, message: Message, site: Site) -> dict[str, float]:
        parts = [tensor.double().square().flatten(1).sum(1) for tensor in self._sent(message, site)[1].values()]
        return {UPDATE: SHORT * torch.stack(parts).sum(0).max().sqrt().item()}

    def _sent(self, message: Message, site: Site) -> tuple[Tensor, Tensors]:
        """Which classes of the task a reply has students of, and those students as they were sent."""
        held = (message.tensors["weights"] > 0).nonzero()[:, 0]
        labels = torch.tensor(site.classes[site.task])[held]
        return held, filled(new_student(site), recalled(site.known, CURRENT), labels)

    def effort(self, message: Message, site: Site, sender: Sender) -> float:
        """Steps of a student that had all samples."""
        options, samples = options_of(site), min(message.meta["samples"], site.most)
        return options.epochs * math.ceil(samples / options.batch)

    def weight(self, message: Message, site: Site) -> float:
        """1, or less where a client states more samples than it counts for."""
        counted = site.settings.train.average == "weighted"
        return min(site.most / message.meta["samples"], 1.0) if counted else 1.0

    def digest(self, combined: Message, site: Site) -> Message | None:
        weights = combined.tensors["weights"]
        held = (weights > 0).nonzero()[:, 0]
        new: Tensors = {"labels": torch.tensor(site.classes[site.task])[held]}
        for name in FORMS.keys() - {"labels"}:
            new[name] = _times(combined.tensors[name][held].double(), 1 / weights[held].double()).float()
        remember(site.known, STUDENTS, merged(recalled(site.known, STUDENTS), new))
        return Message(self.name, merged(recalled(site.known, CURRENT), new))

    def receive(self, message: Message, site: Site) -> None:
        remember(site.known, CURRENT, message.tensors)


def _times(stack: Tensor, factors: Tensor) -> Tensor:
    """Every network of a stack (c, …) times its factor (c,)."""
    return stack * factors.to(stack.dtype).view(-1, *[1] * (stack.dim() - 1))


def everything(local: Local) -> tuple[Tensor, Tensor]:
    """All training images of a client (n, i, h, w), and their labels (n,)."""
    parts = list(local.labelled(local.settings.evaluate.batch))
    images = [images for images, _ in parts if isinstance(images, Tensor)]
    assert len(images) == len(parts), "the method says `sees_images`"
    return torch.cat(images), torch.cat([labels for _, labels in parts])


def taught(local: Local, images: Tensor) -> Tensor:
    """What the teacher says about all training images of a client (n, m): worked out once in a task."""
    kept, options = local.own.get(TARGETS), options_of(local.site)
    if kept is None or int(kept["task"]) != local.task or len(kept["values"]) != len(images):
        width, seed = options.width * options.teacher, local.settings.run.seed
        teacher = new_teacher(local.site.image_shape[0], width, options.outputs, seed)
        teacher = {name: tensor.to(images.device) for name, tensor in teacher.items()}
        kept = {"values": outputs_in_parts(teacher, images)[:, 0].cpu(), "task": torch.tensor(local.task)}
        local.own.put(TARGETS, kept)
    return kept["values"]


@register
class PEC(Method):
    name = "pec"
    about = About(
        "the class whose student imitates a random teacher best",
        stores="what the teacher says about samples of the task under way; the server a student per class",
        sends="students of the task's classes, every round",
    )
    sees_images = True
    state = (
        Kept(STUDENTS, "server", FORMS, artefact=True),
        Kept(CURRENT, "shared", FORMS),
        Kept(TARGETS, "private", {"values": Form("n m"), "task": Form("", torch.int64)}),
    )
    Options = PECOptions

    def check(self) -> None:
        super().check()
        if (how := self.settings.train.aggregate) != "mean":
            raise UsageError(
                f"train.aggregate = {how!r} is not possible with method.name = 'pec', whose students are summed class "
                "by class; the nearest valid choice is 'mean'."
            )

    def check_known(self, site: Site) -> None:
        for group in (STUDENTS, CURRENT):
            if f"{group}/labels" in site.known:
                check_stack(recalled(site.known, group), student_size(site))

    def at_begin(self) -> Sequence[Exchange]:
        return (Handing(),)

    def in_round(self) -> Sequence[Exchange]:
        return (Students(),)

    def rounds(self, task: int) -> int:
        assert isinstance(self.settings.method, PECOptions)
        return self.settings.method.rounds or super().rounds(task)

    def trainable(self, site: Site) -> set[str]:
        """Nothing of the model: students stand in its place."""
        return set()

    def answering(self) -> Answering:
        options = self.settings.method
        assert isinstance(options, PECOptions)
        return Answering(experts={STUDENTS: {"width": options.width * options.teacher, "seed": self.settings.run.seed}})
