"""Inputs of the benchmarks: seeded, made on the spot, of the shapes that CIFAR-100 has."""

from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedprotip.federation.client import release
from fedprotip.models import Network, build_network
from fedprotip.models.capture import Layer, find_layers
from fedprotip.models.freeze import frozen_prefixes
from fedprotip.seeds import torch_stream
from fedprotip.settings import Settings, load

SEED = 0
RESNET = ("model.name=resnet18", "model.freeze=layer2", "model.freeze_from=start", "model.norm=frozen")
"""ResNet-18 as the paper trains it after the first task, with the 3×3 stem."""
COARSE = 6
"""Side of the random grid that an image is interpolated from: neighbouring pixels are alike, as in photographs."""


def smooth_images(count: int, side: int, channels: int = 3, name: str = "images") -> Tensor:
    """Images of low-frequency noise (n, c, side, side) in 0…1."""
    grid = torch.randn(count, channels, COARSE, COARSE, generator=torch_stream(SEED, name))
    return (0.5 + 0.2 * F.interpolate(grid, (side, side), mode="bicubic", align_corners=False)).clamp(0, 1)


def write_dataset(folder: Path, classes: int, train: int, test: int, side: int, channels: int = 3) -> Path:
    """An .npz for `data.name = own`: every class is a smooth picture of its own, its samples are noisy copies of it."""
    path = folder / f"images-{classes}-{train}-{test}-{side}-{channels}.npz"
    if not path.exists():
        means = smooth_images(classes, side, channels, "classes")

        def samples(part: str, count: int) -> tuple[np.ndarray, np.ndarray]:
            labels = torch.arange(classes).repeat_interleave(count)
            noise = smooth_images(len(labels), side, channels, part) - 0.5
            return (means[labels] + noise).clamp(0, 1).mul(255).byte().numpy(), labels.numpy()

        (x_train, y_train), (x_test, y_test) = samples("train", train), samples("test", test)
        np.savez(path, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)
    return path


def backbone(model: Iterable[str], side: int) -> tuple[Network, Settings]:
    """A network in its second task: random weights, a frozen prefix, heads of ten classes for two tasks."""
    settings = load({"method": {"name": "fedprotip"}}, model)
    network = build_network(settings, (3, side, side), routes=True)
    for task in range(2):
        network.add_head(range(10 * task, 10 * task + 10), SEED, task)
    frozen = frozen_prefixes(settings.model, task=1)
    weights = [name for name in find_layers(network.backbone) if not name.startswith(frozen)]
    release(network, {f"backbone.{name}" for name in weights} | {"heads.1.weight", "heads.1.bias"})
    return network.eval(), settings


def suffix_layers(network: Network) -> dict[str, list[Layer]]:
    """The layers behind the frozen prefix: those that are trained, captured and protected."""
    return find_layers(network.backbone)


def positions(network: Network, names: Iterable[str], images: Tensor) -> dict[str, int]:
    """Input columns that one image gives to the layers with these weights: output positions of a convolution."""
    counts: dict[str, int] = {}

    def remember(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            counts[name] = output[0, 0].numel() if isinstance(module, nn.Conv2d) else output[0, ..., 0].numel()

        return hook

    names = list(names)
    modules = [network.backbone.get_submodule(name.removesuffix(".weight")) for name in names]
    handles = [module.register_forward_hook(remember(name)) for name, module in zip(names, modules, strict=True)]
    with torch.no_grad():
        network.backbone(images[:1])
    for handle in handles:
        handle.remove()
    return counts


@lru_cache(maxsize=8)
def orthonormal(d: int, r: int) -> Tensor:
    """A random orthonormal basis (d, r)."""
    return torch.linalg.qr(torch.randn(d, r, generator=torch_stream(SEED, "basis", d)))[0].contiguous()
