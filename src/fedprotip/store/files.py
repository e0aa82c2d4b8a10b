"""Files that are whole or absent: atomic writes and immutable objects named by their SHA-256."""

import hashlib
import os
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import load_file
from safetensors.torch import save as save_tensors
from torch import Tensor

from fedprotip.errors import RunError
from fedprotip.store.memory import hand_back_memory

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


class ObjectFolder:
    """Immutable groups of tensors, each in a file named by its hash; a second copy on demand."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mirror = path.with_name(path.name + "-copy")

    def create(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        self._mirror.mkdir(exist_ok=True)

    def write(self, tensors: Mapping[str, Tensor]) -> str:
        """Store the tensors; their name. What is there already is not written again."""
        data = serialise(tensors)
        name = hash_of(data)
        if not self.has(name):
            write_atomic(self.path / name, data)
        return name

    def has(self, name: str) -> bool:
        return (self.path / name).exists()

    def read(self, name: str) -> Tensors:
        return load_file(self._good(name))

    def duplicate(self, names: Iterable[str]) -> None:
        """Keep a second copy: for objects that more than one checkpoint relies on."""
        for name in names:
            if not (self._mirror / name).exists():
                write_atomic(self._mirror / name, self._good(name).read_bytes())

    def verify(self, names: Iterable[str]) -> None:
        for name in names:
            self._good(name)

    def keep_only(self, names: set[str]) -> None:
        for folder in (self.path, self._mirror):
            for path in folder.iterdir():
                if path.name not in names:
                    path.unlink()

    def _good(self, name: str) -> Path:
        """A copy whose content has the hash that it is named by. Reads in chunks: large objects cost no memory."""
        for folder in (self.path, self._mirror):
            path = folder / name
            if path.is_file() and hash_of_file(path) == name:
                if folder == self._mirror:  # the first copy was damaged: mend it, if the disk lets us
                    with suppress(OSError):
                        write_atomic(self.path / name, path.read_bytes())
                return path
        raise RunError(f"the object {name[:12]} is missing or does not have its hash")


MOVED_OUT = 2**25
"""Bytes of client state that go to disk before freed memory is handed back to the system."""


class StoreError(OSError):
    """The store cannot write: a problem of this machine, not of the client whose state it is."""


class ClientStore:
    """State of clients that lasts between rounds: one group of tensors per (client, name).

    Entries within the memory budget stay in memory, the others live on disk, so the memory of a simulation
    does not grow with the number of clients. What goes in and what comes out are copies.
    """

    def __init__(self, objects: ObjectFolder, budget_bytes: int) -> None:
        self._objects = objects
        self._budget = budget_bytes
        self._cache: OrderedDict[str, Tensors] = OrderedDict()
        self._index: dict[str, str] = {}  # "client/name" → object, for entries that are on disk
        self.cached_bytes = 0
        self._moved_out = 0  # bytes, since freed memory was handed back last

    def put(self, client: int, name: str, tensors: Tensors) -> None:
        key = f"{client}/{name}"
        self._drop(key)
        self._index.pop(key, None)
        self._remember(key, {name: own_copy(tensor) for name, tensor in tensors.items()})

    def get(self, client: int, name: str) -> Tensors | None:
        key = f"{client}/{name}"
        if key in self._cache:
            self._cache.move_to_end(key)
            return {name: own_copy(tensor) for name, tensor in self._cache[key].items()}
        if key not in self._index:
            return None
        tensors = self._objects.read(self._index[key])
        self._remember(key, {name: own_copy(tensor) for name, tensor in tensors.items()})
        return tensors

    def flush(self) -> dict[str, str]:
        """Write what is not on disk yet; the index of every entry."""
        for key in self._cache:
            self._persist(key)
        return dict(sorted(self._index.items()))

    def restore(self, index: Mapping[str, str]) -> None:
        self._cache.clear()
        self.cached_bytes = 0
        self._index = dict(index)

    def _remember(self, key: str, tensors: Tensors) -> None:
        self._cache[key] = tensors
        self.cached_bytes += size_of(tensors)
        while self.cached_bytes > self._budget:
            oldest = next(iter(self._cache))
            self._persist(oldest)
            self._moved_out += size_of(self._cache[oldest])
            self._drop(oldest)
        if self._moved_out > MOVED_OUT:  # what so many clients leave behind is scattered over the heap
            self._moved_out = 0
            hand_back_memory()

    def _persist(self, key: str) -> None:
        if key not in self._index:
            try:
                self._index[key] = self._objects.write(self._cache[key])
            except OSError as error:
                raise StoreError(error.errno, error.strerror) from error

    def _drop(self, key: str) -> None:
        if key in self._cache:
            self.cached_bytes -= size_of(self._cache.pop(key))
