"""Which samples a run learns from and is tested on, so that a change is noticed when it goes on months later.

Every sample that a task uses has a hash of its content: of its pixels, or of its file. The manifest holds a hash per
task (`Fingerprint.summary`), `data.safetensors` the table of samples behind it, which tells what changed. Names of
files and folders do not count: data may move. A file that has the size and the time of change that the table says is
not read again.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedprotip.errors import UsageError
from fedprotip.store.files import Tensors
from fedprotip.stream.images import FileImages
from fedprotip.stream.plan import TaskPlan
from fedprotip.stream.stream import Stream

PARTS = ("train", "test")
COLUMNS = ("hashes", "labels", "clients", "tasks")
WHOLE = 1 << 20
"""Bytes up to which a file is hashed as a whole; of a larger one its size and pieces from all over it."""
PIECE, PIECES = 1 << 16, 16
LONG = 1 << 30
"""Bytes of files that take a while to read; then the user is told."""

Note = Callable[[str], None]
Mark = tuple[str, int, int]
"""Name of a file below the folder that all share, its size, and its time of change (ns)."""


@dataclass(frozen=True)
class Samples:
    """Samples of one part, each once."""

    hashes: np.ndarray  # (n,) int64, of the content
    labels: np.ndarray  # (n,) int32
    clients: np.ndarray  # (n,) int32, as the data says; −1: the settings share the samples out
    tasks: np.ndarray  # (n,) int32, the last that uses it
    files: list[Mark]  # empty: pixels in memory

    def __getitem__(self, rows: np.ndarray) -> "Samples":
        files = [self.files[row] for row in rows] if self.files else []
        return Samples(self.hashes[rows], self.labels[rows], self.clients[rows], self.tasks[rows], files)


@dataclass(frozen=True)
class Inventory:
    """The samples of a run by part, and the names of all classes of its dataset."""

    classes: list[str]
    parts: dict[str, Samples]

    def tensors(self) -> Tensors:
        """As `data.safetensors` holds them."""
        found = {"classes": _packed(self.classes)}
        for part, samples in self.parts.items():
            found |= {f"{part}/{key}": torch.from_numpy(getattr(samples, key)) for key in COLUMNS}
            found[f"{part}/names"] = _packed([name for name, *_ in samples.files])
            found[f"{part}/marks"] = torch.tensor([mark for _, *mark in samples.files], dtype=torch.int64)
        return found

    @classmethod
    def recall(cls, tensors: Tensors) -> "Inventory | None":
        """The table of a run folder; None where there is none, or none that can be read."""
        try:
            return cls.of(tensors) if tensors else None
        except (KeyError, IndexError, TypeError, ValueError, RuntimeError):
            return None

    @classmethod
    def of(cls, tensors: Tensors) -> "Inventory":
        parts, classes = {}, _unpacked(tensors["classes"])
        for part in PARTS:
            names, marks = _unpacked(tensors[f"{part}/names"]), tensors[f"{part}/marks"].tolist()
            files = [(name, size, time) for name, (size, time) in zip(names, marks, strict=True)]
            hashes, labels, clients, tasks = (tensors[f"{part}/{key}"].numpy() for key in COLUMNS)
            if {column.shape for column in (hashes, labels, clients, tasks)} != {(len(hashes),)}:
                raise ValueError(f"the columns of {part} do not belong together")
            if len(labels) and not 0 <= labels.min() <= labels.max() < len(classes):
                raise ValueError(f"a sample of {part} has no class")
            parts[part] = Samples(hashes, labels, clients, tasks, files)
        return cls(classes, parts)


def names_in(tensors: Tensors) -> list[str]:
    """The classes of a table, of whichever version; none where it does not say them."""
    return _unpacked(tensors["classes"]) if "classes" in tensors else []


@dataclass(frozen=True)
class Fingerprint:
    """The data of a run as it is now."""

    shape: tuple[int, int, int]
    table: Inventory
    domains: list[str]
    clients: list[str]
    tasks: list[TaskPlan]
    rows: dict[str, list[np.ndarray]]  # part → task → its samples in the table, in the order of the stream

    def summary(self) -> dict[str, Any]:
        """What a run has settled (`Settled`), and of every task a hash of its training and of its test samples.

        Order counts within a task, because it decides who gets which sample; it does not between tasks. A part without
        samples has no hash.
        """
        numbers = np.frombuffer(b"".join(_hash(name.encode(), 8) for name in self.table.classes), "<i8")
        tasks = []
        for place, task in enumerate(self.tasks):
            hashes = {}
            for part in PARTS:
                samples = self.table.parts[part][self.rows[part][place]]
                columns = samples.hashes, numbers[samples.labels], samples.clients
                joined = b"".join(column.astype("<i8").tobytes() for column in columns)
                hashes[part] = _hash(joined).hex() if joined else ""
            tasks.append({"name": task.name, "labels": list(task.classes), **hashes})
        names = {"classes": self.table.classes, "domains": self.domains, "clients": self.clients}
        return {
            "hash": _hash(repr((self.shape, tasks)).encode()).hex(),
            "shape": list(self.shape),
            **names,
            "tasks": tasks,
        }

    def of_tasks(self, part: str, wanted: list[int], tasks: int) -> Samples:
        """The samples whose last use in the first so many tasks is in one of the wanted."""
        last = last_use(self.rows[part][:tasks], len(self.table.parts[part].labels))
        return self.table.parts[part][np.flatnonzero(np.isin(last, wanted))]


def last_use(rows: Sequence[np.ndarray], count: int) -> np.ndarray:
    """The last task that uses each of so many samples; −1: none does."""
    last = np.full(count, -1, np.int32)
    for task, used in enumerate(rows):
        last[used] = task
    return last


def take(stream: Stream, known: Inventory | None = None, note: Note = lambda text: None) -> Fingerprint:
    """The fingerprint of a stream. `known`: an earlier table of its files; `note`: told if much must be read."""
    dataset = stream.dataset
    every = {part: getattr(dataset, f"{part}_images") for part in PARTS}
    paths = {
        part: images.paths if isinstance(images, FileImages) else getattr(dataset, f"{part}_files")
        for part, images in every.items()
    }
    alike = os.path.commonprefix([path for part in PARTS for path in paths[part]])  # noqa: RUF071
    root = alike.rpartition("/")[0] + "/"  # whole folders of it; commonpath refuses relative beside absolute paths
    read: dict[Mark, int] = {}
    for samples in known.parts.values() if known else ():
        read |= dict(zip(samples.files, samples.hashes.tolist(), strict=False))
    parts, rows = {}, {}
    for part in PARTS:
        chosen = [getattr(task, part) for task in stream.tasks]
        used = np.unique(np.concatenate(chosen))
        rows[part] = [np.searchsorted(used, samples) for samples in chosen]
        files = [paths[part][i] for i in used] if paths[part] else []
        marks = [_mark(path, root) for path in files]
        hashes = _of_files(files, marks, read, note) if paths[part] else _of_pixels(every[part], used)
        labels = getattr(dataset, f"{part}_labels").numpy()[used].astype(np.int32)
        owners = stream.owners[used] if part == "train" and stream.owners is not None else np.full(len(used), -1)
        parts[part] = Samples(hashes, labels, owners.astype(np.int32), last_use(rows[part], len(used)), marks)
    tasks = [TaskPlan(name=task.name, classes=task.classes) for task in stream.tasks]
    table, named = Inventory(list(dataset.classes), parts), (list(dataset.domains), list(dataset.clients))
    return Fingerprint(dataset.image_shape, table, *named, tasks, rows)


def _of_pixels(images: Tensor, used: np.ndarray) -> np.ndarray:
    pixels = images.numpy()
    return _numbers([_hash(np.ascontiguousarray(pixels[i]).data, 8) for i in used])


def _of_files(paths: Sequence[str], marks: Sequence[Mark], read: dict[Mark, int], note: Note) -> np.ndarray:
    """Hashes of the files; those that look as they did when they were read are not read again."""
    hashes = np.array([read.get(mark, 0) for mark in marks], np.int64)
    unread = [place for place, mark in enumerate(marks) if mark not in read]
    size = sum(marks[place][1] for place in unread)
    if size > LONG:
        note(f"{len(unread):,} image files ({size / 1e9:.1f} GB) are read once, to know them again later.")
    with ThreadPoolExecutor(4) as pool:
        hashes[unread] = _numbers(list(pool.map(_content, [paths[place] for place in unread])))
    return hashes


def _content(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size <= WHOLE:
                return _hash(file.read(), 8)
            digest = blake2b(size.to_bytes(8, "little"), digest_size=8)
            for piece in range(PIECES):
                file.seek((size - PIECE) * piece // (PIECES - 1))
                digest.update(file.read(PIECE))
            return digest.digest()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}.") from None


def _mark(path: str, root: str) -> Mark:
    try:
        found = os.stat(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}.") from None
    return path.removeprefix(root), found.st_size, found.st_mtime_ns


def _hash(data: bytes | memoryview, size: int = 16) -> bytes:
    return blake2b(data, digest_size=size).digest()


def _numbers(hashes: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(hashes), "<i8").astype(np.int64)


def _packed(names: list[str]) -> Tensor:
    """Names as bytes, with a character between them that no file name can have."""
    return torch.from_numpy(np.frombuffer(os.fsencode("\0".join(names)), np.uint8).copy())


def _unpacked(names: Tensor) -> list[str]:
    return os.fsdecode(names.numpy().tobytes()).split("\0") if len(names) else []
