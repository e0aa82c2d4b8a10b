"""The expert of Fed+PEC: every class has a small network, and a sample is of the one that errs least.

All imitate a random network, the teacher. A stack of networks is named tensors whose first size is their number c: a
3 × 3 convolution (`kernel`), a norm of every map of every image by itself (`gain`, `shift`), ReLU, the mean over a grid
of 4 × 4, a linear layer (`weight`, `bias`); they run in one pass. The convolution has no bias, which the norm would
take away again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedprotip.inference.parts import Context, Expert, expert
from fedprotip.models.heads import Features
from fedprotip.seeds import torch_stream
from fedprotip.store.files import Tensors

STUDENTS = "students"
GRID = 4
FEW, AT_ONCE = 4, 2**20
"""Images that pass together, and numbers of their maps: larger ones leave the processor's cache and take six times as
long."""
TOGETHER = 256
"""Images whose outputs are held at once."""
MOST = 2**28
"""Weights that a network has at most: a plan of a stranger may ask for any."""


@dataclass(frozen=True)
class Size:
    """Of one network."""

    channels: int  # of images
    width: int  # maps
    outputs: int

    def shapes(self, count: int) -> dict[str, tuple[int, ...]]:
        """Of a stack of so many."""
        return {
            "kernel": (count, self.width, self.channels, 3, 3),
            "gain": (count, self.width),
            "shift": (count, self.width),
            "weight": (count, self.outputs, self.width * GRID**2),
            "bias": (count, self.outputs),
        }


def born(size: Size, seed: int, purpose: str) -> Tensors:
    """A stack of one: the same on every machine, by seed and purpose alone."""
    if size.width * (size.outputs * GRID**2 + 9 * size.channels) > MOST:
        raise ValueError(f"a network of {size} has more than {MOST:,} weights")
    chance = torch_stream(seed, purpose)
    bounds = {"kernel": 9 * size.channels, "weight": size.width * GRID**2, "bias": size.width * GRID**2}
    made = {}
    for name, shape in size.shapes(1).items():
        if name in bounds:
            made[name] = (2 * torch.rand(shape, generator=chance) - 1) * bounds[name] ** -0.5
        else:
            made[name] = torch.full(shape, 1.0 if name == "gain" else 0.0)
    return made


def pooled(maps: Tensor) -> Tensor:
    """(n, k, h, w) → (n, k, GRID, GRID)"""
    return F.adaptive_avg_pool2d(maps, GRID)


def outputs(stack: Tensors, images: Tensor, pool: Callable[[Tensor], Tensor] = pooled) -> Tensor:
    """(n, c, m) for images (n, i, h, w) that all c networks see, or (n, c, i, h, w): each sees its own."""
    kernel, count = stack["kernel"].flatten(0, 1), len(stack["kernel"])
    own = images.dim() == 5
    maps = F.conv2d(images.flatten(1, 2) if own else images, kernel, padding=1, groups=count if own else 1)
    maps = F.group_norm(maps, len(kernel), stack["gain"].flatten(), stack["shift"].flatten()).relu_()
    seen = pool(maps).reshape(-1, count, stack["weight"].shape[2])
    return torch.einsum("ncd,cmd->ncm", seen, stack["weight"]) + stack["bias"]


def outputs_in_parts(stack: Tensors, images: Tensor) -> Tensor:
    """`outputs` for images that all see: some networks and some images at a time, so that maps stay small."""
    maps = stack["gain"][0].numel() * images[0, 0].numel()  # of one network and one image
    networks = max(1, AT_ONCE // (FEW * maps))
    parts = [
        {name: tensor[start : start + networks] for name, tensor in stack.items()}
        for start in range(0, len(stack["gain"]), networks)
    ]
    return torch.cat([torch.cat([outputs(part, some) for part in parts], 1) for some in images.split(FEW)])


def scores(students: Tensors, teacher: Tensors, images: Tensor) -> Tensor:
    """(n, c): minus the mean squared error of every student against the teacher."""
    errors = (outputs_in_parts(students, part) - outputs_in_parts(teacher, part) for part in images.split(TOGETHER))
    return torch.cat([-error.square().mean(2) for error in errors])


def new_teacher(channels: int, width: int, outputs: int, seed: int) -> Tensors:
    return born(Size(channels, width, outputs), seed, "teacher")


@dataclass(frozen=True)
class StudentsExpert:
    """Score of a class: minus the mean squared error of its student; a class that nobody learned never wins."""

    students: Tensors
    teacher: Tensors
    rows: Tensor  # (C,) the student of every candidate
    known: Tensor  # (C,) whether it has one
    on_images: ClassVar[bool] = True

    def __call__(self, features: Features) -> Tensor:
        images = features.images
        assert images is not None, "this expert sees images"
        if not self.known.any():
            return torch.full((len(images), len(self.rows)), -torch.inf)
        students, teacher = (
            {name: tensor.to(images.device) for name, tensor in stack.items()}
            for stack in (self.students, self.teacher)
        )
        found = self.compared(students, teacher, images).cpu()
        return torch.where(self.known, found[:, self.rows], -torch.inf)

    def compared(self, students: Tensors, teacher: Tensors, images: Tensor) -> Tensor:
        return scores(students, teacher, images)


def check_stack(stack: Tensors, size: Size) -> None:
    """ValueError where this is no stack of such students, with their labels."""
    labels = stack["labels"]
    for name, shape in size.shapes(len(labels)).items():
        if stack[name].shape != shape or stack[name].dtype != torch.float32:
            raise ValueError(f"{STUDENTS}/{name} is no stack of {len(labels)} students")
    if labels.dim() != 1 or any(not stack[name].isfinite().all() for name in size.shapes(0)):
        raise ValueError("labels of students are no row, or one has weights that are not finite")


@expert(STUDENTS)
def _students(given: Context) -> Expert:
    labels = given.knowledge[f"{STUDENTS}/labels"]
    students = {name: given.knowledge[f"{STUDENTS}/{name}"] for name in Size(1, 1, 1).shapes(0)}
    _, width, channels, *_ = students["kernel"].shape
    outputs = students["bias"].shape[1]
    check_stack({"labels": labels, **students}, Size(channels, width, outputs))
    match = given.candidates.labels[:, None] == labels
    rows = match.int().argmax(1) if match.shape[1] else torch.zeros(len(match), dtype=torch.int64)
    teacher = new_teacher(channels, int(given.options["width"]), outputs, int(given.options["seed"]))
    return StudentsExpert(students, teacher, rows, match.any(1))
