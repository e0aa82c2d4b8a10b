"""masks: one sketch with and without `method.secure`, on CIFAR-100 at scale cpu: what masks cost in answers and bytes.

python -m benchmarks masks --data ~/data --set model.weights=resnet18.safetensors --json masks.json
"""

from pathlib import Path
from time import perf_counter, process_time
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import fedprotip
from benchmarks import inputs, runs
from benchmarks.harness import Agreement, Bench
from fedprotip.methods.local import Local
from fedprotip.paper.protocols import protocol
from fedprotip.seeds import torch_stream
from fedprotip.settings import layered

MODES = ("aware", "agnostic", "single", "batch64")
MB = 10**6
WITHIN = 0.2
"""Points of accuracy by which sums in fixed point may differ from others."""


def masks(
    bench: Bench,
    tasks: int = 2,
    columns: int = 128,
    overrides: tuple[str, ...] = (),
    images: tuple[int, int] = (500, 100),  # for training and tests, per class, where `overrides` names no data
) -> None:
    """The same sketch plain and in secret, a row of Table 19 at scale cpu: accuracy, seconds, bytes of a client."""
    row = layered(
        protocol("table19").row(f"cifar100-a0.5-s{columns}-fedprotip").at("cpu"),
        {"stream": {"tasks": tasks, "task_size": 10}, "run": {"threads": 1}},
    )
    if not any(change.startswith("data.name") for change in overrides):
        row = layered(row, {"data": inputs.write_dataset(bench.folder, 10 * tasks, *images, side=32)})
    sides = {
        name: (twin, row, list(overrides), secure, str(bench.folder / name))
        for name, secure in (("plain", False), ("secure", True))
    }
    case = bench.measure_apart(f"{tasks} tasks, sketch {columns}", sides, _as_aware)
    for name, found in case.results.items():
        for mode in MODES:
            bench.figure(case, f"% {mode}, {name}", found["accuracy"][mode])
        for what in ("sent", "received"):
            bench.figure(case, f"MB that a client has {what} in a task, {name}", found[what] / MB, "≤")


def _as_aware(results: dict[str, Any]) -> Agreement:
    apart = abs(results["plain"]["accuracy"]["aware"] - results["secure"]["accuracy"]["aware"])
    return "points of aware", apart, WITHIN


def twin(row: dict[str, Any], overrides: list[str], secure: bool, path: str) -> dict[str, Any]:
    """One of two runs whose Gaussians follow from the seed: with `secure` they would be a client's secret."""
    since, worked = perf_counter(), process_time()
    with patch("fedprotip.methods.parts.sketches.gaussian", seeded):
        summary = fedprotip.run(row, [*overrides, f"method.secure={str(secure).lower()}"], Path(path))
    crossed = {"up": 0, "down": 0}
    for line in runs.records(path, "ledger.jsonl"):
        crossed[line["direction"]] += line["bytes"]
    shares = summary["clients"] * summary["tasks"]
    return {
        "seconds": perf_counter() - since,
        "cpu": process_time() - worked,
        "accuracy": summary["accuracy"],
        "sent": crossed["up"] / shares,
        "received": crossed["down"] / shares,
    }


def seeded(local: Local, purpose: str, name: str, rows: int, columns: int) -> Tensor:
    """Gaussians as they are without `secure`."""
    chance = torch_stream(local.settings.run.seed, purpose, local.task, local.client, name)
    return torch.randn(rows, columns, generator=chance)
