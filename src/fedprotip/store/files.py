"""Files that are whole or absent: atomic writes, and tensors as bytes."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save as save_tensors
from torch import Tensor

Tensors = dict[str, Tensor]


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write a whole file or nothing: temporary file, fsync, rename, fsync of the folder."""
    payload = data.encode() if isinstance(data, str) else data
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(payload)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def serialise(tensors: Mapping[str, Tensor]) -> bytes:
    """The same tensors always give the same bytes."""
    return save_tensors({name: own_copy(tensors[name]) for name in sorted(tensors)})


def own_copy(tensor: Tensor) -> Tensor:
    """On the CPU, with memory of its own: safetensors refuses tensors that share memory."""
    return tensor.detach().cpu().contiguous().clone()


def hash_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def hash_of_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def size_of(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


Marks = list[tuple[str, int, int, torch.Size, torch.dtype]]


def marks(tensors: Mapping[str, Tensor]) -> Marks:
    """Recognises tensors without reading them: the same as before while they live and nobody writes to them."""
    return [(name, t.data_ptr(), t._version, t.shape, t.dtype) for name, t in sorted(tensors.items())]
