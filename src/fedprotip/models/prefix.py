"""Batches of a stream, taken as far along the backbone as nothing moves: a frozen prefix runs once per image.

What the prefix makes of an image is a row. Rows of the current task's training images and of all test images are
kept: in memory up to `run.cache_mb`, beyond it in files that are mapped only while a batch is read.
"""

import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fedprotip.models import Network
from fedprotip.models.batches import pieces
from fedprotip.models.norms import moving_norms
from fedprotip.models.steps import Hidden, Inputs, advance, still_steps
from fedprotip.settings import Settings
from fedprotip.store.scratch import Scratch

if TYPE_CHECKING:  # a process that only answers has no stream
    from fedprotip.stream import Batch, Stream

InputBatch = tuple[Inputs, Tensor]
"""Images or rows of a prefix, and global labels (n,)."""

PIECE = 32
"""Images that pass the prefix together. Its maps are the largest of a network, and memory for larger ones comes from
the system page by page each time, which takes as long as the convolutions."""


def still_prefix(network: Network, settings: Settings, task: int) -> int:
    """Steps at the beginning of the backbone that stand still in a task: no parameter moves, no statistic."""
    moving = {name for name, parameter in network.backbone.named_parameters() if parameter.requires_grad}
    moving |= {f"{norm}." for norm in moving_norms(network.backbone, settings.model, task)}
    moving |= network.changed_since_birth()  # the network at birth goes on from the same rows
    return still_steps(network.backbone, moving)


@dataclass(frozen=True)
class Source:
    """Images that rows are made of, numbered from 0."""

    key: tuple[str, int]  # what they are, and of which task
    labels: Tensor
    images: Callable[[Iterable[np.ndarray]], "Iterator[Batch]"]  # batches of numbers → batches of images


class PrefixCache:
    """Training and test batches of a stream, images or rows, for `Network.embed`."""

    def __init__(self, stream: "Stream", settings: Settings, folder: Path | None = None, enabled: bool = True) -> None:
        """`folder`: where files go when memory does not suffice; the system's own place by default."""
        self._stream, self._settings, self._folder = stream, settings, folder
        self._budget = settings.run.cache_mb * 2**20 if enabled else 0
        self._steps = 0  # that all rows have passed
        self._rows: dict[tuple[str, int], Rows] = {}
        self._files: Scratch | None = None

    def train_batches(
        self, network: Network, task: int, batches: Iterable[np.ndarray], generator: torch.Generator | None = None
    ) -> Iterator[InputBatch]:
        """Training samples; with a generator they are augmented as `train.augment` and `train.views` ask."""
        stream, samples = self._stream, self._stream.tasks[task].train
        labels = stream.dataset.train_labels[torch.from_numpy(samples)]
        if generator is None or stream.varied is None:
            plain = Source(
                ("train", task), labels, lambda parts: stream.train_batches(task, (samples[part] for part in parts))
            )
            return self._deliver(network, task, plain, (np.searchsorted(samples, batch) for batch in batches))
        if not stream.views:  # every image anew each time: nothing to keep
            return stream.train_batches(task, batches, generator)

        def images(parts: Iterable[np.ndarray]) -> "Iterator[Batch]":
            return stream.view_batches(task, ((samples[part % len(samples)], part // len(samples)) for part in parts))

        def number(batch: np.ndarray) -> np.ndarray:
            view = torch.randint(stream.views, (len(batch),), generator=generator).numpy()
            return np.searchsorted(samples, batch) + len(samples) * view

        views = Source(("views", task), labels.repeat(stream.views), images)
        return self._deliver(network, task, views, map(number, batches))

    def test_batches(
        self, network: Network, task: int, seen: int, batches: Iterable[np.ndarray]
    ) -> Iterator[InputBatch]:
        """Test samples of a task, for a network whose newest task is `seen`."""
        stream, samples = self._stream, self._stream.tasks[task].test
        labels = stream.dataset.test_labels[torch.from_numpy(samples)]
        source = Source(
            ("test", task), labels, lambda parts: stream.test_batches(task, (samples[part] for part in parts))
        )
        return self._deliver(network, seen, source, (np.searchsorted(samples, batch) for batch in batches))

    def close(self) -> None:
        """Forget all rows and remove the files."""
        self._rows.clear()
        if self._files:
            self._files.close()
        self._files = None

    def _deliver(
        self, network: Network, task: int, source: Source, numbers: Iterable[np.ndarray]
    ) -> Iterator[InputBatch]:
        """Batches of the images with these numbers, as rows where a prefix stands still."""
        if not self._enter(network, task):
            yield from source.images(numbers)
            return
        wanted, steps = list(numbers), self._steps
        rows = self._fill(network, source, np.unique(np.concatenate(wanted))) if wanted else None
        if rows:
            for part in wanted:
                yield rows.read(part), source.labels[torch.from_numpy(part)]
        else:  # no place for them
            for images, labels in source.images(wanted):
                yield _advance(network, images, steps), labels

    def _enter(self, network: Network, task: int) -> int:
        """Steps that rows have passed in this task; rows from before are taken along or forgotten."""
        steps = still_prefix(network, self._settings, task) if self._budget else 0
        before, self._steps = self._steps, steps
        for key, rows in list(self._rows.items()):
            kind, of = key
            if steps < before or (kind != "test" and of != task):
                del self._rows[key]
            elif steps > before:
                del self._rows[key]
                for part in self._pieces(np.flatnonzero(rows.filled)):
                    self._keep(key, len(rows.filled), part, _advance(network, rows.read(part), steps))
        return steps

    def _fill(self, network: Network, source: Source, numbers: np.ndarray) -> "Rows | None":
        """All rows of a source, with at least these computed; None where there is no place for them."""
        known = self._rows.get(source.key)
        missing = self._pieces(numbers[~known.filled[numbers]] if known else numbers)
        for part, (images, _) in zip(missing, source.images(missing), strict=True):
            hidden = _advance(network, images, self._steps)
            if not self._keep(source.key, len(source.labels), part, hidden):
                return None
        return self._rows.get(source.key)

    def _keep(self, key: tuple[str, int], count: int, numbers: np.ndarray, hidden: Hidden) -> bool:
        """Store rows; False when neither memory nor disk has the place."""
        if key not in self._rows:
            size = count * hidden.flat().shape[1] * hidden.values.element_size()
            in_memory = size + sum(rows.nbytes for rows in self._rows.values()) <= self._budget
            place = None if in_memory else self._place(key)
            if place and shutil.disk_usage(place.parent).free < 2 * size:
                return False
            self._rows[key] = Rows(count, hidden, place)
        self._rows[key].write(numbers, hidden)
        return True

    def _place(self, key: tuple[str, int]) -> Path:
        if self._files is None:
            self._files = Scratch(self._folder)
        return self._files.path / f"{key[0]}-{key[1]}-{self._steps}"

    def _pieces(self, numbers: np.ndarray) -> list[np.ndarray]:
        return pieces(numbers, min(self._settings.evaluate.batch, PIECE))


class Rows:
    """What a prefix made of images, a row each, filled bit by bit: in memory, or in a file when it has a place."""

    def __init__(self, count: int, like: Hidden, place: Path | None) -> None:
        """For so many images; `like`: what comes of some of them."""
        self.filled = np.zeros(count, bool)
        self._place, self._like = place, like[:1]
        self._shape, self._dtype = (count, self._like.flat().shape[1]), like.values.dtype
        self._held = None if place else torch.empty(self._shape, dtype=self._dtype)
        if place:
            with place.open("wb") as file:
                file.truncate(torch.Size(self._shape).numel() * self._dtype.itemsize)

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return 0 if self._held is None else self._held.nbytes

    def read(self, numbers: np.ndarray) -> Hidden:
        return self._like.filled(self._table()[torch.from_numpy(numbers)])

    def write(self, numbers: np.ndarray, hidden: Hidden) -> None:
        self._table()[torch.from_numpy(numbers)] = hidden.flat()
        self.filled[numbers] = True

    def __del__(self) -> None:
        if self._place:
            self._place.unlink(missing_ok=True)

    def _table(self) -> Tensor:
        """A file is mapped anew each time: pages that were read do not stay in this process's memory."""
        if self._held is not None:
            return self._held
        size = torch.Size(self._shape).numel()
        return torch.from_file(str(self._place), shared=True, size=size, dtype=self._dtype).view(self._shape)


@torch.no_grad()
def _advance(network: Network, inputs: Inputs, steps: int) -> Hidden:
    """As many steps of the backbone, on its device; the result is on the CPU."""
    device = next(network.parameters()).device
    return advance(network.backbone, inputs.to(device), steps, network.taps).to(torch.device("cpu"))
