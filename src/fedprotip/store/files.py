"""Files that are whole or absent: atomic writes, and tensors as bytes."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from fedprotip.errors import RunError
from fedprotip.store.plain import PlainFolder

Tensors = dict[str, Tensor]


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write a whole file or nothing."""
    PlainFolder(path.parent).write(path.name, data)


def serialise(tensors: Mapping[str, Tensor]) -> bytes:
    """The same tensors always give the same bytes."""
    return save_tensors({name: own_copy(tensors[name]) for name in sorted(tensors)})


def parsed(data: bytes, where: str) -> Tensors:
    """The tensors of `serialise`; RunError where they are none."""
    try:
        return parse_tensors(data)
    except (SafetensorError, KeyError, ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise RunError(f"{where} is damaged: it holds no tensors ({type(error).__name__}).") from None


def own_copy(tensor: Tensor) -> Tensor:
    """On the CPU, with memory of its own: safetensors refuses tensors that share memory."""
    return tensor.detach().cpu().contiguous().clone()


def hash_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def size_of(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


Marks = list[tuple[str, int, int, torch.Size, torch.dtype]]


def marks(tensors: Mapping[str, Tensor]) -> Marks:
    """Recognises tensors without reading them: the same as before while they live and nobody writes to them."""
    return [(name, t.data_ptr(), t._version, t.shape, t.dtype) for name, t in sorted(tensors.items())]
