"""Sampled inputs of every Linear and Conv2d of any module, found by hooks.

A column is the vector that a row of the weight is multiplied with: W.flatten(1) @ column is the layer's
output, before the bias, at one position. Only the sampled patches are gathered, so a layer costs m_s·d
numbers and never its full unfolding.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor, nn

from fedprotip.models.patches import count_columns, some_columns
from fedprotip.seeds import torch_stream

T = TypeVar("T", bound=Sized)
See = Callable[[nn.Module, tuple[Tensor, ...]], None]
"""Told of every call of a layer: the layer, and what it is given."""


@dataclass(frozen=True)
class Layer:
    """A weight with an input subspace: some rows of a parameter, seen as a matrix (out, d).

    A grouped convolution is several layers, as each of its groups has inputs of its own.
    """

    name: str
    parameter: str
    rows: slice
    d: int

    def weight(self, tensors: dict[str, Tensor]) -> Tensor:
        """A view (out, d) of this layer in a dictionary of parameters."""
        tensor = tensors[self.parameter]
        return tensor.view(len(tensor), -1)[self.rows]


def find_layers(module: nn.Module, only_trainable: bool = True) -> dict[str, list[Layer]]:
    """Parameter name → its layers, for every Linear and Conv2d weight; tied weights count once."""
    layers: dict[str, list[Layer]] = {}
    for name, parameter in module.named_parameters():
        owner = module.get_submodule(name.rpartition(".")[0])
        if name.rpartition(".")[2] != "weight" or not isinstance(owner, nn.Linear | nn.Conv2d):
            continue
        if only_trainable and not parameter.requires_grad:
            continue
        groups = owner.groups if isinstance(owner, nn.Conv2d) else 1
        out, d = len(parameter) // groups, parameter[0].numel()
        layers[name] = [
            Layer(name if groups == 1 else f"{name}[{g}]", name, slice(g * out, (g + 1) * out), d)
            for g in range(groups)
        ]
    return layers


@contextmanager
def watched(module: nn.Module, sees: Mapping[str, See]) -> Iterator[None]:
    """In between, every call of a Linear or Conv2d is shown to the entry of its weight's name."""
    names = {id(parameter): name for name, parameter in module.named_parameters() if name in sees}
    with ExitStack() as hooks:
        for part in module.modules():
            name = names.get(id(getattr(part, "weight", None)))
            if name and isinstance(part, nn.Linear | nn.Conv2d):
                hooks.callback(part.register_forward_pre_hook(sees[name]).remove)
        yield


def capture(
    module: nn.Module,
    batches: Iterable[T],
    columns: int,
    seed: tuple[int, str, *tuple[int | str, ...]],
    layers: dict[str, list[Layer]] | None = None,
    forward: Callable[[T], object] | None = None,
    per_image: int = 0,
) -> dict[str, Tensor]:
    """Input columns of every layer that ran, drawn uniformly: layer name → (d, m), m ≤ columns.

    Args:
        module: the backbone; runs in the mode it is in, without gradients.
        batches: batches of inputs.
        columns: m_s, columns to keep of each layer; all of them when there are fewer.
        seed: arguments of `seeds.torch_stream`; each layer draws from its own stream.
        layers: those of `find_layers` to capture; all trainable ones by default.
        forward: runs the module on a batch; by default the module itself.
        per_image: stop once every layer has seen so many images that m_s columns are no more than this per image
            (or all that its map has); 0: see all batches.
    """
    layers = find_layers(module) if layers is None else layers
    samplers = {name: _Sampler(columns, torch_stream(*seed, name)) for name in layers}
    with torch.no_grad(), watched(module, {name: sampler.see for name, sampler in samplers.items()}):
        images = 0
        for batch in batches:
            (forward or module)(batch)
            images += len(batch)
            if per_image and all(min(per_image * images, sampler.seen) >= columns for sampler in samplers.values()):
                break
    captured = {}
    for name, sampler in samplers.items():
        if sampler.data is not None:
            for group, layer in enumerate(layers[name]):
                captured[layer.name] = sampler.data[:, group].T
    return captured


@dataclass
class _Sampler:
    """A uniform sample of all columns that pass, whatever their number: those with the smallest random keys."""

    wanted: int
    generator: torch.Generator
    seen: int = 0
    keys: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))
    numbers: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    data: Tensor | None = None  # (kept, groups, d), in the order of `numbers`

    def see(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Forward pre-hook: offer every column of this call."""
        total = count_columns(module, inputs[0])
        keys = torch.rand(total, generator=self.generator, dtype=torch.float64)
        kept = len(self.keys)
        both = torch.cat([self.keys, keys])
        smallest = both.topk(min(self.wanted, len(both)), largest=False, sorted=False).indices.sort().values
        old, new = smallest[smallest < kept], smallest[smallest >= kept] - kept
        fresh = some_columns(module, inputs[0], new.to(inputs[0].device))
        self.data = fresh if self.data is None else torch.cat([self.data[old.to(fresh.device)], fresh])
        self.keys = torch.cat([self.keys[old], keys[new]])
        self.numbers = torch.cat([self.numbers[old], self.seen + new])
        self.seen += total
