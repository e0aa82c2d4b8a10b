"""Learning the small networks of Fed+PEC, those of a client side by side; and stacks of them with their labels."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fedprotip.inference.students import Size, outputs
from fedprotip.methods.state import Form
from fedprotip.store.files import Tensors

FORMS = {
    "labels": Form("c", torch.int64),
    "kernel": Form("c w i 3 3"),
    "gain": Form("c w"),
    "shift": Form("c w"),
    "weight": Form("c m d"),
    "bias": Form("c m"),
}
"""A stack as it is kept: with the labels of its networks."""
BETAS, TINY = (0.9, 0.999), 1e-8
"""Of Adam."""


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
