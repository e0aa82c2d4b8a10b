"""Runs of the benchmarks: the CIFAR-100 row of `fedprotip reproduce table1 --scale cpu`, one task and one more."""

import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

from safetensors.torch import load_file
from torch import Tensor

from fedprotip import api
from fedprotip.bench import inputs
from fedprotip.paper.protocols import layered, protocol
from fedprotip.settings import Settings, load
from fedprotip.store.events import Event
from fedprotip.store.folder import is_run
from fedprotip.store.records import read_ledger

ROUNDING = 1e-5
CLASSES = 10
"""Classes of a task, as in CIFAR-100 in ten tasks."""


def cpu_scale(
    method: str, folder: Path, images: tuple[int, int], rounds: int, overrides: Iterable[str] = ()
) -> Settings:
    """Settings of the row with α = 0.5 for a run of one task that will be extended by another.

    Args:
        images: per class for training and testing, made up; with data.name in `overrides` that data is taken.
    """
    row = protocol("table1").row(f"cifar100-a0.5-{method}").at("cpu")
    wanted = layered(row, {"train": {"rounds": rounds}})
    wanted["stream"] |= {"tasks": 1, "task_size": CLASSES}
    if not any(change.startswith("data.name") for change in overrides):
        source = inputs.write_dataset(folder, 2 * CLASSES, *images, side=32)
        wanted["data"] = {"name": "own", "source": str(source)}
    return load(wanted, overrides)


def first_task(settings: Settings, path: Path) -> Path:
    """The run folder with the first task learned; made once."""
    if not is_run(path):
        api.run(settings, out=path)
    return path


@dataclass
class Watch:
    """An observer that notes the seconds of a task: as a whole, of its phases and of its rounds."""

    task: int
    start: float = 0.0
    total: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    rounds: list[float] = field(default_factory=list)

    def __call__(self, event: Event) -> None:
        if event["event"] == "start":
            self.start = perf_counter()
        elif event["event"] == "round" and event["task"] == self.task:
            self.rounds.append(event["seconds"])
        elif event["event"] == "task" and event["task"] == self.task:
            self.total, self.phases = perf_counter() - self.start, event["seconds"]


def next_task(base: Path, path: Path) -> tuple[Watch, Path]:
    """Extend a copy of a run by its second task."""
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(base, path)
    watch = Watch(task=1)
    api.extend(path, 1, observers=[watch])
    return watch, path


def sizes(run: Path, kind: str, task: int, directions: tuple[str, ...] = ("up", "down")) -> list[int]:
    """Bytes of every message of a kind in a task."""
    found = (line for line in read_ledger(run / "ledger.jsonl") if (line.kind, line.task) == (kind, task))
    return [line.bytes for line in found if line.direction in directions]


def bases_of(run: Path) -> dict[str, Tensor]:
    """Φ of every layer, from a run folder."""
    tensors = load_file(run / "subspaces.safetensors")
    return {name.removeprefix("layers/"): basis for name, basis in tensors.items() if name.startswith("layers/")}


def change(model: Path, other: Path, start: Path) -> float:
    """How far two models are apart, relative to how far the second one moved from where both began.

    A move of less than ROUNDING of the weights counts as that much: where Φ is full nothing can move.
    """
    ours, theirs, begin = (load_file(path) for path in (model, other, start))
    moved = _norm(theirs[name] - begin[name] for name in begin)
    return _norm(ours[name] - theirs[name] for name in begin) / max(moved, ROUNDING * _norm(begin.values()))


def _norm(tensors: Iterable[Tensor]) -> float:
    return sum(float(tensor.double().square().sum()) for tensor in tensors) ** 0.5
