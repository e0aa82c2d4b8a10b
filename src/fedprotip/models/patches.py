"""Columns A (d, n) of a layer's inputs: W.flatten(1) @ A is its output before the bias, one column per position."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def all_columns(module: nn.Module, inputs: Tensor) -> Tensor:
    """Every column of one call (d, n), output position by output position; not for grouped convolutions."""
    if isinstance(module, nn.Linear):
        return inputs.reshape(-1, inputs.shape[-1]).T
    assert isinstance(module, nn.Conv2d)
    places = _places(module, inputs)
    pixels = F.pad(inputs.flatten(2).permute(1, 2, 0), (0, 0, 1, 0))  # (channels, pixels, images), padding comes first
    return pixels.index_select(1, places.flatten()).view(len(places) * len(pixels), -1)


def inputs_of(module: nn.Module, columns: Tensor, inputs: Tensor) -> Tensor:
    """The transpose of `all_columns`: each entry of such inputs is the sum of what columns (d, n) have in its place."""
    if isinstance(module, nn.Linear):
        return columns.T.reshape(inputs.shape)
    assert isinstance(module, nn.Conv2d)
    images, channels, height, width = inputs.shape
    pixels = columns.new_zeros(channels, 1 + height * width, images)
    places = _places(module, inputs).flatten()
    pixels.index_add_(1, places, columns.view(channels, len(places), images))
    return pixels[:, 1:].permute(2, 0, 1).reshape(inputs.shape)


def by_taps(module: nn.Conv2d, basis: Tensor) -> Tensor:
    """A basis (d, r) as `coordinates` reads it, (taps, r, channels): products with it are faster than with its rows."""
    channels, taps = module.in_channels, module.kernel_size[0] * module.kernel_size[1]
    return basis.view(channels, taps, basis.shape[1]).permute(1, 2, 0).contiguous()


def coordinates(module: nn.Conv2d, inputs: Tensor, kernels: Tensor) -> Tensor:
    """Φᵀ·A (r, n) for a basis `by_taps` and all columns A of one call, tap by tap: zero padding costs nothing."""
    positions, rank = _places(module, inputs).shape[1], kernels.shape[1]
    pixels = inputs.flatten(2).permute(1, 2, 0).contiguous()
    found = kernels.new_zeros(rank, positions, len(inputs))
    for kernel, (places, read) in zip(kernels, _reads_on(*_geometry(module, inputs)), strict=True):
        part = kernel @ pixels.index_select(1, read).flatten(1)
        found.index_add_(1, places, part.view(rank, len(places), len(inputs)))
    return found.flatten(1)


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
    rows, cols = _map_size(module, inputs)
    return len(inputs) * rows * cols


def some_columns(module: nn.Module, inputs: Tensor, chosen: Tensor) -> Tensor:
    """The chosen columns of one call, (n, groups, d), numbered image by image, row by row."""
    if isinstance(module, nn.Linear):
        return inputs.reshape(-1, inputs.shape[-1])[chosen][:, None]
    assert isinstance(module, nn.Conv2d)
    sources = _sources(module, inputs)
    rows, cols = _map_size(module, inputs)
    image, row, col = chosen // (rows * cols), chosen // cols % rows, chosen % cols
    y = _window(row, module.stride[0], module.dilation[0], module.kernel_size[0])
    x = _window(col, module.stride[1], module.dilation[1], module.kernel_size[1])
    source = sources[y[:, :, None], x[:, None, :]].flatten(1)  # (n, kernel positions)
    pixels = torch.cat([inputs.movedim(1, -1).flatten(0, 2), inputs.new_zeros(1, inputs.shape[1])])
    map_size = inputs.shape[-2] * inputs.shape[-1]
    places = torch.where(source < 0, len(pixels) - 1, image[:, None] * map_size + source)  # padding is the last row
    patches = pixels.index_select(0, places.flatten()).view(*places.shape, -1)  # (n, kernel positions, channels)
    return patches.transpose(1, 2).reshape(len(chosen), module.groups, -1)


_Geometry = tuple[tuple[int, ...], tuple[int, ...], str, tuple[Any, Any, Any], torch.device]


def _geometry(module: nn.Conv2d, inputs: Tensor) -> _Geometry:
    """All that decides which pixels a kernel reads: size of the map, padding, kernel, device."""
    kernel = (module.kernel_size, module.dilation, module.stride)
    sides = tuple(module._reversed_padding_repeated_twice)
    return tuple(inputs.shape[-2:]), sides, module.padding_mode, kernel, inputs.device


def _places(module: nn.Conv2d, inputs: Tensor) -> Tensor:
    """Which pixel of the input map a kernel reads (taps, positions): its number from 1 on, 0 for padding."""
    return _places_on(*_geometry(module, inputs))


@lru_cache(maxsize=128)
@torch.inference_mode(False)
def _places_on(
    size: tuple[int, ...], sides: tuple[int, ...], mode: str, kernel: tuple[Any, Any, Any], device: torch.device
) -> Tensor:
    read, dilation, stride = kernel
    sources = _padded(_numbered(size, device), sides, mode)
    return F.unfold(sources, read, dilation, stride=stride)[0].long()


@lru_cache(maxsize=128)
@torch.inference_mode(False)
def _reads_on(*key: Any) -> list[tuple[Tensor, Tensor]]:
    """For every tap of a kernel: the positions where it reads a pixel, and the number of that pixel from 0 on."""
    return [(read.nonzero().flatten(), read[read > 0] - 1) for read in _places_on(*key)]


def _window(position: Tensor, stride: int, dilation: int, size: int) -> Tensor:
    """Input coordinates (n, size) that a kernel reads at output positions (n,)."""
    return position[:, None] * stride + torch.arange(size, device=position.device) * dilation


def _sources(module: nn.Conv2d, inputs: Tensor) -> Tensor:
    """Where each pixel of the padded input comes from: its number in the input's map, −1 where padding is zero."""
    sides = tuple(module._reversed_padding_repeated_twice)
    return _padded(_numbered(inputs.shape[-2:], inputs.device), sides, module.padding_mode)[0, 0].long() - 1


def _numbered(size: Sequence[int], device: torch.device) -> Tensor:
    """A map (1, 1, height, width) whose pixels are numbered from 1 on."""
    height, width = size
    return torch.arange(1, height * width + 1, dtype=torch.float64, device=device).view(1, 1, height, width)


def _padded(inputs: Tensor, sides: tuple[int, ...], mode: str) -> Tensor:
    """Inputs as a convolution reads them, for every padding mode; sides: left, right, top, bottom."""
    if not any(sides):
        return inputs
    return F.pad(inputs, sides, mode="constant" if mode == "zeros" else mode)


def _map_size(module: nn.Conv2d, inputs: Tensor) -> tuple[int, int]:
    """Output positions of a convolution along both axes."""
    left, right, top, bottom = module._reversed_padding_repeated_twice
    sizes = (inputs.shape[-2] + top + bottom, inputs.shape[-1] + left + right)
    read = (module.dilation[axis] * (module.kernel_size[axis] - 1) + 1 for axis in (0, 1))
    rows, cols = ((size - taps) // step + 1 for size, taps, step in zip(sizes, read, module.stride, strict=True))
    return rows, cols
