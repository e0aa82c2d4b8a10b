"""Immutable groups of tensors, each in a file named by its SHA-256."""

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from fedprotip.errors import RunError
from fedprotip.store.files import Marks, Tensors, hash_of, hash_of_file, marks, serialise, write_atomic


class ObjectFolder:
    """Immutable groups of tensors, each in a file named by its hash; a second copy on demand."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mirror = path.with_name(path.name + "-copy")
        self._saved: dict[str, tuple[Marks, Tensors, str]] = {}  # group → as it was last saved, and its object

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

    def write_group(self, group: str, tensors: Tensors) -> str:
        """The same for tensors that are saved again and again: if nobody has written to them they are not even read."""
        now, saved = marks(tensors), self._saved.get(group)
        if saved and saved[0] == now and self.has(saved[2]):
            return saved[2]
        name = self.write(tensors)
        self._saved[group] = now, tensors, name  # as long as they are held here, nothing else gets their memory
        return name

    def has(self, name: str) -> bool:
        return (self.path / name).exists()

    def read(self, name: str) -> Tensors:
        """Copies: what is read in place is not aligned like other tensors, which changes how products are rounded."""
        return {key: tensor.clone() for key, tensor in load_file(self._good(name)).items()}

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


def sealed(index: Mapping[str, Any]) -> str:
    """JSON of the index below its own hash: a torn or edited file is recognised."""
    body = json.dumps(index, ensure_ascii=False)
    return hash_of(body.encode()) + "\n" + body


def unsealed(data: bytes) -> dict[str, Any]:
    seal, _, body = data.partition(b"\n")
    if hash_of(body).encode() != seal:
        raise RunError("its hash does not fit")
    return json.loads(body)
