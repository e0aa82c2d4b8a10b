"""Inputs of the benchmarks: seeded, made on the spot, of the shapes that CIFAR-100 has; and how results compare."""

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from fedprotip.models import Network, build_network
from fedprotip.models.capture import Layer, find_layers
from fedprotip.models.freeze import frozen_prefixes
from fedprotip.seeds import torch_stream
from fedprotip.settings import Settings, load
from fedprotip.subspace.bank import SubspaceBank

SEED = 0
RESNET = ("model.name=resnet18", "model.freeze=layer2", "model.freeze_from=start", "model.norm=frozen")
"""ResNet-18 as the paper trains it after the first task, with the 3×3 stem."""
COARSE = 6
"""Side of the random grid that an image is interpolated from: neighbouring pixels are alike, as in photographs."""
ROUNDING = 1e-5


def smooth_images(count: int, side: int, channels: int = 3, name: str = "images") -> Tensor:
    """Images of low-frequency noise (n, c, side, side) in 0…1."""
    grid = torch.randn(count, channels, COARSE, COARSE, generator=torch_stream(SEED, name))
    return (0.5 + 0.2 * F.interpolate(grid, (side, side), mode="bicubic", align_corners=False)).clamp(0, 1)


def write_dataset(folder: Path, classes: int, train: int, test: int, side: int, channels: int = 3) -> dict[str, str]:
    """Section `data` of settings, with images: every class is a smooth picture, its samples are noisy copies of it."""
    path = folder / f"images-{classes}-{train}-{test}-{side}-{channels}.npz"
    if not path.exists():
        means, parts = smooth_images(classes, side, channels, "classes"), dict[str, np.ndarray]()
        for part, count in (("train", train), ("test", test)):
            labels = torch.arange(classes).repeat_interleave(count)
            noise = smooth_images(len(labels), side, channels, part) - 0.5
            parts[f"x_{part}"] = (means[labels] + noise).clamp(0, 1).mul(255).byte().numpy()
            parts[f"y_{part}"] = labels.numpy()
        np.savez(path, **parts)  # type: ignore[arg-type]
    return {"name": "own", "source": str(path)}


def backbone(model: Iterable[str], side: int) -> tuple[Network, Settings]:
    """A network in its second task: random weights, a frozen prefix, heads of ten classes for two tasks."""
    settings = load({"method": {"name": "fedprotip"}}, model)
    network = build_network(settings, (3, side, side), routes=True)
    for task in range(2):
        network.add_head(range(10 * task, 10 * task + 10), SEED, task)
    frozen = frozen_prefixes(settings.model, task=1)
    moving = {f"backbone.{name}" for name in find_layers(network.backbone) if not name.startswith(frozen)}
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(name in moving or name.startswith("heads.1."))
    return network.eval(), settings


def suffix_layers(network: Network) -> list[Layer]:
    """The layers behind the frozen prefix: those that are trained, captured and protected."""
    return [layer for group in find_layers(network.backbone).values() for layer in group]


def rank(layer: Layer, share: float) -> int:
    return max(round(share * layer.d), 1)


def bases(network: Network, share: float) -> SubspaceBank:
    """What a first task might have left: Φ of every such layer with this r/d, and a direction for routing."""
    bank = SubspaceBank(routing=[orthonormal(network.features, 1)])
    for layer in suffix_layers(network):
        bank.extend(layer.name, orthonormal(layer.d, rank(layer, share)), task=0)
    return bank


@lru_cache(maxsize=8)
def orthonormal(d: int, r: int) -> Tensor:
    """A random orthonormal basis (d, r)."""
    return torch.linalg.qr(torch.randn(d, r, generator=torch_stream(SEED, "basis", d)))[0].contiguous()


def angle(u: Tensor, v: Tensor) -> float:
    """The largest principal angle between two spans, from its sine; a right angle where their sizes differ."""
    if u.shape != v.shape:
        return torch.pi / 2
    u, v = u.double(), v.double()
    sine = torch.linalg.matrix_norm(v - u @ (u.T @ v), 2) if v.shape[1] else torch.zeros(())
    return float(torch.asin(sine.clamp(max=1.0)))


def same_models(model: Path, other: Path, start: Path, tolerance: float = 1e-2) -> tuple[str, float, float]:
    """How far two models are apart, relative to how far the second one moved from where both began; files or runs.

    A move of less than ROUNDING of the weights counts as that much: where Φ is full nothing can move.
    """
    files = [path / "model.safetensors" if path.is_dir() else path for path in (model, other, start)]
    ours, theirs, begin = (load_file(path) for path in files)
    moved = max(_norm(theirs[name] - begin[name] for name in begin), ROUNDING * _norm(begin.values()))
    return "relative difference of the models' changes", _norm(ours[n] - theirs[n] for n in begin) / moved, tolerance


def _norm(tensors: Iterable[Tensor]) -> float:
    return sum(float(tensor.double().square().sum()) for tensor in tensors) ** 0.5
