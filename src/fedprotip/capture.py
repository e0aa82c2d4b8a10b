"""Sampled inputs of every Linear and Conv2d of any module, found by hooks.

A column is the vector that a row of the weight is multiplied with: W.flatten(1) @ column is the layer's
output, before the bias, at one position. Only the sampled patches are gathered, so a layer costs m_s·d
numbers and never its full unfolding.
"""

from collections.abc import Callable, Iterable, Sized
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedprotip.seeds import torch_stream

T = TypeVar("T", bound=Sized)


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
    names = {id(dict(module.named_parameters())[name]): name for name in layers}
    samplers = {name: _Sampler(columns, torch_stream(*seed, name)) for name in layers}
    with torch.no_grad(), ExitStack() as hooks:
        for part in module.modules():
            name = names.get(id(getattr(part, "weight", None)))
            if name and isinstance(part, nn.Linear | nn.Conv2d):
                handle = part.register_forward_pre_hook(samplers[name].see)
                hooks.callback(handle.remove)
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
        fresh = _gather(module, inputs[0], new.to(inputs[0].device))
        self.data = fresh if self.data is None else torch.cat([self.data[old.to(fresh.device)], fresh])
        self.keys = torch.cat([self.keys[old], keys[new]])
        self.numbers = torch.cat([self.numbers[old], self.seen + new])
        self.seen += total


def all_columns(module: nn.Module, inputs: Tensor) -> Tensor:
    """Every column of one call (d, n), output position by output position; not for grouped convolutions."""
    if isinstance(module, nn.Linear):
        return inputs.reshape(-1, inputs.shape[-1]).T
    assert isinstance(module, nn.Conv2d)
    sources = _sources(module, inputs).double()[None, None]
    places = F.unfold(sources + 1, module.kernel_size, module.dilation, stride=module.stride).long()
    pixels = F.pad(inputs.flatten(2).permute(1, 2, 0), (0, 0, 1, 0))  # (channels, pixels, images), padding comes first
    return pixels.index_select(1, places.flatten()).view(places.shape[1] * len(pixels), -1)


def all_outputs(module: nn.Module, outputs: Tensor) -> Tensor:
    """What a layer made of every column of one call, or gradients of it: (out, n), numbered as in `all_columns`."""
    if isinstance(module, nn.Linear):
        return outputs.reshape(-1, outputs.shape[-1]).T
    return outputs.permute(1, 2, 3, 0).flatten(1)


def count_columns(module: nn.Module, inputs: Tensor) -> int:
    """Columns of one call: rows of a Linear's input, output positions of a convolution."""
    if isinstance(module, nn.Linear):
        return inputs.numel() // inputs.shape[-1]
    assert isinstance(module, nn.Conv2d)
    rows, cols = _map_size(module, _sources(module, inputs))
    return len(inputs) * rows * cols


def _gather(module: nn.Module, inputs: Tensor, chosen: Tensor) -> Tensor:
    """The chosen columns of one call, (n, groups, d), numbered image by image, row by row."""
    if isinstance(module, nn.Linear):
        return inputs.reshape(-1, inputs.shape[-1])[chosen][:, None]
    assert isinstance(module, nn.Conv2d)
    sources = _sources(module, inputs)
    rows, cols = _map_size(module, sources)
    image, row, col = chosen // (rows * cols), chosen // cols % rows, chosen % cols
    y = _window(row, module.stride[0], module.dilation[0], module.kernel_size[0])
    x = _window(col, module.stride[1], module.dilation[1], module.kernel_size[1])
    source = sources[y[:, :, None], x[:, None, :]].flatten(1)  # (n, kernel positions)
    pixels = torch.cat([inputs.movedim(1, -1).flatten(0, 2), inputs.new_zeros(1, inputs.shape[1])])
    map_size = inputs.shape[-2] * inputs.shape[-1]
    places = torch.where(source < 0, len(pixels) - 1, image[:, None] * map_size + source)  # padding is the last row
    patches = pixels.index_select(0, places.flatten()).view(*places.shape, -1)  # (n, kernel positions, channels)
    return patches.transpose(1, 2).reshape(len(chosen), module.groups, -1)


def _window(position: Tensor, stride: int, dilation: int, size: int) -> Tensor:
    """Input coordinates (n, size) that a kernel reads at output positions (n,)."""
    return position[:, None] * stride + torch.arange(size, device=position.device) * dilation


def _sources(module: nn.Conv2d, inputs: Tensor) -> Tensor:
    """Where each pixel of the padded input comes from: its number in the input's map, −1 where padding is zero."""
    height, width = inputs.shape[-2:]
    numbers = torch.arange(1, height * width + 1, dtype=torch.float64, device=inputs.device)
    return _padded(module, numbers.view(1, 1, height, width))[0, 0].long() - 1


def _padded(module: nn.Conv2d, inputs: Tensor) -> Tensor:
    """Inputs as the convolution reads them, for every padding mode and 'same' / 'valid'."""
    sides = module._reversed_padding_repeated_twice  # as torch itself pads: (left, right, top, bottom)
    if not any(sides):
        return inputs
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return F.pad(inputs, sides, mode=mode)


def _map_size(module: nn.Conv2d, padded: Tensor) -> tuple[int, int]:
    """Output positions of a convolution along both axes."""
    rows, cols = (
        (padded.shape[axis - 2] - module.dilation[axis] * (module.kernel_size[axis] - 1) - 1) // module.stride[axis] + 1
        for axis in (0, 1)
    )
    return rows, cols
