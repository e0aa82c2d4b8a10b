"""The tensors of a network by name: all of them, those that a task may move, and overwriting them."""

from itertools import chain

import torch
from torch import Tensor, nn

from fedprotip.models.heads import Network
from fedprotip.models.norms import moving_norms
from fedprotip.settings import ModelSettings


def release(network: Network, moving: set[str]) -> None:
    """Only these parameters require gradients from here on."""
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(name in moving)
    network.moving = [name for name, parameter in network.named_parameters() if parameter.requires_grad]


def full_state(network: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer, tied ones once."""
    return {n: t.detach() for n, t in chain(network.named_parameters(), network.named_buffers())}


def moving_state(network: Network, settings: ModelSettings, task: int) -> dict[str, Tensor]:
    """What can change during a task, and so has to travel: trainable parameters and moving statistics."""
    state = {name: tensor_of(network, name) for name in network.moving}
    for norm in moving_norms(network.backbone, settings, task):
        state |= {f"backbone.{norm}.{n}": b for n, b in network.backbone.get_submodule(norm).named_buffers()}
    return state


def load_state(network: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Overwrite parameters and buffers by name, in place."""
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor_of(network, name).copy_(tensor)


def tensor_of(network: nn.Module, name: str) -> Tensor:
    """A parameter or buffer by its name, without a look at all the heads there are."""
    owner, _, last = name.rpartition(".")
    found: Tensor = getattr(network.get_submodule(owner), last)
    return found


def device_of(name: str) -> torch.device:
    """The device a setting `run.device` stands for."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)
