"""Immutable groups of tensors, each in a file named by its SHA-256, and the indices that name them."""

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fedprotip.errors import RunError
from fedprotip.store.files import Marks, Tensors, hash_of, marks, serialise
from fedprotip.store.plain import PlainFolder
from fedprotip.store.records import Record, parse_json

ObjectName = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
"""As `hash_of` writes it: nothing that could lead out of a folder."""


class Index(Record):
    """What the state of a run or of a client is made of: plain values, and objects by their names."""

    state: dict[str, Any]
    groups: dict[str, ObjectName]

    @property
    def names(self) -> set[str]:
        return set(self.groups.values())


class ObjectFolder:
    """Immutable groups of tensors, each in a file named by its hash; a second copy on demand."""

    def __init__(self, path: Path, top: Path | None = None) -> None:
        """`top`: the run folder, within which this one lies."""
        self.path = path
        self._files = PlainFolder(path, top)
        self._mirror = PlainFolder(path.with_name(path.name + "-copy"), top)
        self._saved: dict[str, tuple[Marks, Tensors, str]] = {}  # group → as it was last saved, and its object

    def create(self) -> None:
        self._files.make()
        self._mirror.make()

    def write(self, tensors: Mapping[str, Tensor]) -> str:
        """Store the tensors; their name. What is there already is not written again."""
        data = serialise(tensors)
        name = hash_of(data)
        if not self.has(name):
            self._files.write(name, data)
        return name

    def write_group(self, group: str, tensors: Tensors) -> str:
        """The same for tensors that are saved again and again: if nobody has written to them they are not even read."""
        now, saved = marks(tensors), self._saved.get(group)
        if saved and saved[0] == now and self.has(saved[2]):
            return saved[2]
        name = self.write(tensors)
        # Held one by one, as whoever owns the dict may clear it: as long as they are, nothing else gets their memory.
        self._saved[group] = now, dict(tensors), name
        return name

    def has(self, name: str) -> bool:
        return self._files.has(name)

    def read(self, name: str) -> Tensors:
        """Copies: what is read in place is not aligned like other tensors, which changes how products are rounded."""
        try:
            return {key: tensor.clone() for key, tensor in load_file(self._good(name).path / name).items()}
        except (SafetensorError, KeyError, ValueError, TypeError, RuntimeError) as error:
            raise RunError(f"the object {name[:12]} holds no tensors ({type(error).__name__})") from None

    def duplicate(self, names: Iterable[str]) -> None:
        """Keep a second copy: for objects that more than one checkpoint relies on."""
        for name in names:
            if not self._mirror.has(name):
                self._mirror.write(name, self._good(name).read(name))

    def verify(self, names: Iterable[str], mend: bool = True) -> None:
        """Raise RunError unless there is a good copy of each; `mend`: a damaged one is replaced by the other."""
        for name in names:
            self._good(name, mend)

    def keep_only(self, names: set[str], twice: set[str] | None = None) -> None:
        """Remove all other objects; `twice`: those whose second copy stays, by default all."""
        for folder, kept in ((self._files, names), (self._mirror, names if twice is None else twice)):
            for name in folder.names():
                if name not in kept:
                    folder.remove(name)

    def _good(self, name: str, mend: bool = True) -> PlainFolder:
        """Where a copy is whose content has the hash that it is named by. Reads in chunks, which costs no memory."""
        for folder in (self._files, self._mirror):
            if folder.has(name) and folder.hash(name) == name:
                if folder is self._mirror and mend:  # the first copy was damaged: mend it, if the disk lets us
                    with suppress(OSError):
                        self._files.write(name, folder.read(name))
                return folder
        raise RunError(f"the object {name[:12]} is missing or does not have its hash")


def sealed(index: Mapping[str, Any]) -> str:
    """JSON of the index below its own hash: a torn or edited file is recognised."""
    body = json.dumps(index, ensure_ascii=False)
    return hash_of(body.encode()) + "\n" + body


def unsealed(data: bytes) -> Any:
    seal, _, body = data.partition(b"\n")
    if hash_of(body).encode() != seal:
        raise RunError("its hash does not fit")
    return parse_json(body)
