"""Small networks, one for every class, and the random one that they imitate: a stack of them runs in one pass.

A stack is named tensors whose first size is the number c of networks: a 3 × 3 convolution (`kernel`), a norm of every
map of every image by itself (`gain`, `shift`), ReLU, the mean over a grid of 4 × 4, a linear layer (`weight`, `bias`).
The convolution has no bias, which the norm would take away again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fedprotip.methods.state import Form
from fedprotip.seeds import torch_stream
from fedprotip.store.files import Tensors

GRID = 4
FORMS = {
    "labels": Form("c", torch.int64),
    "kernel": Form("c w i 3 3"),
    "gain": Form("c w"),
    "shift": Form("c w"),
    "weight": Form("c m d"),
    "bias": Form("c m"),
}
"""A stack as it is kept: with the labels of its networks."""
FEW, AT_ONCE = 4, 2**20
"""Images that pass together, and numbers of their maps: larger ones leave the processor's cache and take six times as
long."""
TOGETHER = 256
"""Images whose outputs are held at once."""
MOST = 2**28
"""Weights that a network has at most: a plan of a stranger may ask for any."""
BETAS, TINY = (0.9, 0.999), 1e-8
"""Of Adam."""


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


def outputs(stack: Tensors, images: Tensor) -> Tensor:
    """(n, c, m) for images (n, i, h, w) that all c networks see, or (n, c, i, h, w): each sees its own."""
    kernel, count = stack["kernel"].flatten(0, 1), len(stack["kernel"])
    own = images.dim() == 5
    maps = F.conv2d(images.flatten(1, 2) if own else images, kernel, padding=1, groups=count if own else 1)
    maps = F.group_norm(maps, len(kernel), stack["gain"].flatten(), stack["shift"].flatten()).relu_()
    pooled = F.adaptive_avg_pool2d(maps, GRID).view(len(images), count, -1)
    return torch.einsum("ncd,cmd->ncm", pooled, stack["weight"]) + stack["bias"]


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


def fit(
    stack: Tensors, images: Tensor, targets: Tensor, batches: Sequence[Sequence[Tensor]], rates: Sequence[Tensor]
) -> tuple[Tensors, float]:
    """Adam steps of every student on samples of its own, all students side by side; and their mean error.

    Args:
        images, targets: of all samples, (n, i, h, w) and (n, m).
        batches: student → step → samples (indices); rates: student → learning rates (steps,).
    """
    order = sorted(range(len(batches)), key=lambda c: -len(batches[c]))  # those with fewer steps stop earlier
    weights = torch.cat([tensor[order].flatten(1) for tensor in stack.values()], 1)  # (c, weights of a student)
    first, second = torch.zeros_like(weights), torch.zeros_like(weights)
    errors, samples = torch.zeros((), device=images.device), 0
    for step in range(len(batches[order[0]])):
        at_work = [c for c in order if len(batches[c]) > step]
        now = slice(len(at_work))
        parts = [batches[c][step] for c in at_work]
        real = pad_sequence([torch.ones(len(part)) for part in parts]).to(images)  # (b, c)
        places = pad_sequence(parts).to(images.device)
        with torch.enable_grad():
            learning = weights[now].detach().requires_grad_()
            error = (outputs(_shaped(learning, stack), images[places]) - targets[places]).square().mean(2) * real
            (gradient,) = torch.autograd.grad((error.sum(0) / real.sum(0)).sum(), learning)
        errors, samples = errors + error.detach().sum(), samples + sum(map(len, parts))
        first[now].lerp_(gradient, 1 - BETAS[0])
        second[now].mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        spread = (second[now] / (1 - BETAS[1] ** (step + 1))).sqrt_().add_(TINY)
        rate = torch.stack([rates[c][step] for c in at_work]).to(images) / (1 - BETAS[0] ** (step + 1))
        weights[now] -= rate[:, None] * first[now] / spread
    return _shaped(weights[torch.tensor(order).argsort()], stack), float(errors / samples)


def _shaped(weights: Tensor, like: Tensors) -> Tensors:
    """Rows of weights (c, …), one for every network, as a stack."""
    parts = weights.split([tensor[0].numel() for tensor in like.values()], 1)
    return {name: part.unflatten(1, like[name].shape[1:]) for name, part in zip(like, parts, strict=True)}


def merged(old: Tensors, new: Tensors) -> Tensors:
    """Two stacks with their labels as one; of a label that both have the new network."""
    stays = ~torch.isin(old["labels"], new["labels"])
    return {name: torch.cat([old[name][stays], new[name].to(old[name])]) for name in new}


def chosen(stack: Tensors, labels: Tensor) -> Tensors:
    """Those networks of a stack that have one of these labels."""
    found = torch.isin(stack["labels"], labels)
    return {name: tensor[found] for name, tensor in stack.items()}


def empty(size: Size) -> Tensors:
    """A stack of none, with its labels."""
    nothing = {name: torch.zeros(shape) for name, shape in size.shapes(0).items()}
    return {"labels": torch.zeros(0, dtype=torch.int64), **nothing}


def filled(start: Tensors, learned: Tensors, labels: Tensor) -> Tensors:
    """Networks for these labels (k,), without the labels: the learned one, where there is none `start`."""
    match = labels[:, None] == learned["labels"]  # (k, c)
    known, rows = match.any(1), match.int().argmax(1) if match.shape[1] else labels.new_zeros(len(labels))
    stack = {name: tensor.expand(len(labels), *tensor.shape[1:]).clone() for name, tensor in start.items()}
    for name, tensor in stack.items():
        tensor[known] = learned[name][rows[known]]
    return stack
