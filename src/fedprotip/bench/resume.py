"""resume: what a checkpoint after every round costs, and that it gives back exactly what was saved."""

import json
import os
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import load_file

from fedprotip import api
from fedprotip.bench import federated, textbook
from fedprotip.bench.base import BOTH, Agreement, Benchmark, Case, Machine, Measured, Row, RunSize, Side, Target, row
from fedprotip.settings import load
from fedprotip.store.events import Event
from fedprotip.store.files import ClientStore, Tensors
from fedprotip.store.folder import RunFolder, is_run

COST = Target("% of a round for its checkpoint", "lower", 3)
Saved = tuple[dict[str, Any], dict[str, Tensors]]
"""The state of a run in the middle of a task: plain numbers, and groups of tensors."""


@dataclass(frozen=True)
class ResumeSize(RunSize):
    train: int = 500  # images per class, ten classes a task
    method: str = "fedprotip"  # row of table1


class Stop(Exception):
    """Ends a run in the middle of a task."""


def cases(size: ResumeSize) -> list[Case]:
    return [
        Case("second task", partial(_sides, size), _same_state, prepare=partial(_prepare, size), memory=BOTH, least=0.0)
    ]


def rows(measured: list[Measured], machine: Machine, size: ResumeSize) -> list[Row]:
    (case,) = measured
    return [row(case, COST, 100 * case.seconds["ours"] / case.results["round"]), row(case)]


BENCHMARK = Benchmark(
    "resume",
    "A checkpoint after every round, ResNet-18 at scale cpu",
    ResumeSize(),
    ResumeSize(repeats=3, train=8),
    cases,
    rows,
)


def _prepare(size: ResumeSize, folder: Path) -> None:
    """A run that was stopped in its second task, and the seconds of its rounds."""
    if is_run(folder / "run"):
        return
    settings = federated.cpu_scale(size.method, folder, (size.train, 5), 3, size.overrides)
    watch = federated.Watch(task=1)

    def stop(event: Event) -> None:
        if event["event"] == "round" and (event["task"], event["round"]) == (1, 2):
            raise Stop

    try:
        api.run(load(settings, ["stream.tasks=2"]), out=folder / "run", observers=[watch, stop])
    except Stop:
        (folder / "round").write_text(str(median(watch.rounds[1:])))  # in the first the prefix cache was filled


def _sides(size: ResumeSize, folder: Path) -> dict[str, Side]:
    run, path, numbers = RunFolder.open(folder / "run"), folder / "state.safetensors", folder / "state.json"
    store = run.store(budget_mb=256)
    state, mine = _restored(run, store)
    theirs = deepcopy(mine)
    seconds = float((folder / "round").read_text())

    def ours() -> Callable[[], Saved]:
        _move(mine)
        run.checkpoint(state, mine, store)
        return lambda: _restored(RunFolder.open(run.path), run.store(budget_mb=0))

    def plain() -> Callable[[], Saved]:
        _move(theirs)
        numbers.write_text(json.dumps(state))
        textbook.save_groups(theirs, path)
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        return lambda: (json.loads(numbers.read_text()), _grouped(load_file(path)))

    return {"ours": ours, "textbook": plain, "round": lambda: seconds}


def _move(groups: dict[str, Tensors]) -> None:
    """After a round nothing that moves in this task is what it was."""
    for tensor in (groups.get("news") or groups["model"]).values():
        tensor.view(-1)[:1] += 1


def _grouped(flat: Tensors) -> dict[str, Tensors]:
    """What `textbook.save_groups` wrote."""
    groups: dict[str, Tensors] = {}
    for name, tensor in flat.items():
        group, _, rest = name.partition("/")
        groups.setdefault(group, {})[rest] = tensor
    return groups


def _restored(run: RunFolder, store: ClientStore) -> Saved:
    saved = run.restore(store, warn=lambda text: None)
    assert saved is not None, "the run was stopped after a checkpoint"
    return saved


def _same_state(results: dict[str, Any]) -> Agreement:
    """Both ways give back the same tensors, bit by bit."""
    (_, ours), (_, plain) = results["ours"](), results["textbook"]()
    pairs = [(ours.get(group, {}).get(name), tensor) for group in plain for name, tensor in plain[group].items()]
    different = sum(a is None or not torch.equal(a, b) for a, b in pairs)
    return Agreement("tensors that are not bit for bit the same", float(different), 0.0)
