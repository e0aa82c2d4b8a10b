"""From the gradient of a small encoder back to the image it was taken at (Zhu et al. 2019): labels, then pixels.

All prototypes are reconstructed side by side: gradients are rows (p, P), one per image.
"""

from collections.abc import Callable, Iterator
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedprotip.seeds import ambient_stream

CHANNELS, SPREAD = 12, 0.5
HISTORY = 20
"""Pairs of steps and changes of the gradient that L-BFGS remembers."""
OnStep = Callable[[int], None]


def new_encoder(shape: tuple[int, int, int], outputs: int, seed: int) -> nn.Sequential:
    """LeNet with sigmoids, whose second derivatives never vanish; weights from U(−½, ½), the same at both ends."""
    channels, height, width = shape
    features = CHANNELS * -(-height // 4) * -(-width // 4)
    with ambient_stream(seed, "encoder", outputs):
        encoder = nn.Sequential(
            *(nn.Conv2d(channels, CHANNELS, 5, stride=2, padding=2), nn.Sigmoid()),
            *(nn.Conv2d(CHANNELS, CHANNELS, 5, stride=2, padding=2), nn.Sigmoid()),
            *(nn.Conv2d(CHANNELS, CHANNELS, 5, padding=2), nn.Sigmoid()),
            *(nn.Flatten(), nn.Linear(features, outputs)),
        )
        for parameter in encoder.parameters():
            nn.init.uniform_(parameter, -SPREAD, SPREAD)
    return encoder.requires_grad_(False)


def size_of(encoder: nn.Sequential) -> int:
    """P: the numbers of a gradient."""
    return sum(parameter.numel() for parameter in encoder.parameters())


def last_layer(encoder: nn.Sequential, gradients: Tensor) -> tuple[Tensor, Tensor]:
    """Of gradients (p, P) the part of the last layer: (p, C, features) and (p, C)."""
    weight = cast(nn.Linear, encoder[-1]).weight
    biases = gradients[:, -len(weight) :]
    weights = gradients[:, -len(weight) - weight.numel() : -len(weight)]
    return weights.view(-1, *weight.shape), biases


def gradients_of(encoder: nn.Sequential, images: Tensor, labels: Tensor) -> Tensor:
    """∇ of the cross-entropy of every image by itself (p, P), differentiable in the images."""

    def loss(weights: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(encoder, weights, (image[None],)), label[None])

    found = vmap(grad(loss), in_dims=(None, 0, 0))(dict(encoder.named_parameters()), images, labels)
    return torch.cat([part.flatten(1) for part in found.values()], 1)


def recovered(encoder: nn.Sequential, gradients: Tensor) -> Tensor:
    """The labels (p,): only the row of the true class has a negative sum, for the layer's inputs are positive."""
    return last_layer(encoder, gradients)[0].sum(2).argmin(1)


def distances(encoder: nn.Sequential, images: Tensor, labels: Tensor, gradients: Tensor) -> Tensor:
    """‖∇ − ∇*‖² of every image (p,)."""
    return (gradients_of(encoder, images, labels) - gradients).square().sum(1)


def reconstruct(
    encoder: nn.Sequential,
    gradients: Tensor,
    start: Tensor,
    solver: Literal["lbfgs", "adam"],
    steps: int,
    rate: float,
    iterates: int,
    on_step: OnStep = lambda done: None,
) -> tuple[Tensor, Tensor]:
    """Images (n, c, h, w) whose gradients come near the given ones, the last `iterates` of each, and labels (n,)."""
    labels = recovered(encoder, gradients)
    kept: list[Tensor] = []
    solve = {"lbfgs": _lbfgs, "adam": _adam}[solver]
    for done, images in enumerate(solve(lambda x: distances(encoder, x, labels, gradients), start, steps, rate), 1):
        kept = [*kept, images][-iterates:]
        on_step(done)
    near = kept[-1].flatten(1).isfinite().all(1)
    return torch.cat([images[near] for images in kept]), labels[near].repeat(len(kept))


def _slope(value: Callable[[Tensor], Tensor], images: Tensor) -> tuple[Tensor, Tensor]:
    """The value of every image (p,) and its gradient, flat (p, n)."""
    with torch.enable_grad():
        images = images.detach().requires_grad_()
        values = value(images)
        (slope,) = torch.autograd.grad(values.sum(), images)
    return values.detach(), slope.flatten(1)


def _adam(value: Callable[[Tensor], Tensor], start: Tensor, steps: int, rate: float) -> Iterator[Tensor]:
    images = start.clone()
    optimizer = torch.optim.Adam([images], lr=rate)
    for _ in range(steps):
        images.grad = _slope(value, images)[1].view_as(images)
        optimizer.step()
        yield images.clone()


def _lbfgs(value: Callable[[Tensor], Tensor], start: Tensor, steps: int, rate: float) -> Iterator[Tensor]:
    """L-BFGS for every image by itself: a step that makes its value worse is taken back, and the next is shorter."""
    images, (values, slopes) = start.flatten(1), _slope(value, start)
    lengths = torch.full_like(values, rate)
    history: list[tuple[Tensor, Tensor, Tensor]] = []
    for _ in range(steps):
        towards = -_newton(slopes, history)
        uphill = (towards * slopes).sum(1) >= 0
        towards[uphill] = -slopes[uphill]
        if not history:
            towards = towards / slopes.abs().sum(1, keepdim=True).clamp_min(1)
        tried = images + lengths[:, None] * towards
        found, slope = _slope(value, tried.view_as(start))
        better = found < values
        step, change = tried - images, slope - slopes
        curved = (step * change).sum(1)
        use = better & (curved > torch.finfo(curved.dtype).tiny)
        history = [*history, (step, change, torch.where(use, 1 / curved, 0.0))][-HISTORY:]
        images, slopes = (torch.where(better[:, None], new, old) for new, old in ((tried, images), (slope, slopes)))
        values = torch.where(better, found, values)
        lengths = torch.where(better, (lengths * 1.5).clamp_max(1), lengths / 4)
        yield images.view_as(start)


def _newton(slopes: Tensor, history: list[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """H⁻¹·slope of every row by the two loops of L-BFGS; pairs with weight 0 do not count."""
    found, shares = slopes.clone(), []
    for step, change, weight in reversed(history):
        share = weight * (step * found).sum(1)
        found = found - share[:, None] * change
        shares.append(share)
    if history:
        scale = torch.ones_like(slopes[:, 0])
        for _, change, weight in history:
            scale = torch.where(weight > 0, 1 / (weight * change.square().sum(1)), scale)
        found = found * scale[:, None]
    for (step, change, weight), share in zip(history, reversed(shares), strict=True):
        found = found + (share - weight * (change * found).sum(1))[:, None] * step
    return found
