"""round: one round of all clients after the first task, and the bytes of the models in it."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from safetensors.torch import load_file, save_file

from fedprotip.bench import federated, textbook
from fedprotip.bench.base import Agreement, Benchmark, Case, Machine, Measured, Row, RunSize, Side, Target, row
from fedprotip.federation.client import full_state, load_state, prepare
from fedprotip.models import build_network
from fedprotip.settings import Settings, load
from fedprotip.stream import build_stream

ROUNDS = 2
"""The second one is measured: in the first the outputs of the frozen prefix are computed."""
COST = Target("times a round of FedAvg", "lower")
BYTES = Target("times FedAvg's model bytes per round", "lower", 0.85)


@dataclass(frozen=True)
class RoundSize(RunSize):
    train: int = 200  # images per class, ten classes a task
    method: str = "fedprotip"  # row of table1


def cases(size: RoundSize) -> list[Case]:
    return [
        Case(
            "second task, second round",
            partial(_sides, size),
            _same_model,
            prepare=partial(_prepare, size),
            apart=True,
        )
    ]


def rows(measured: list[Measured], machine: Machine, size: RoundSize) -> list[Row]:
    (case,) = measured
    sent = {side: case.results[side]["bytes"] for side in ("ours", "fedavg")}
    return [
        row(case),
        row(case, COST, case.ratio("ours", "fedavg")),
        row(case, BYTES, sent["ours"] / sent["fedavg"]),
    ]


BENCHMARK = Benchmark(
    "round",
    "A round of the second task, ResNet-18 at scale cpu",
    RoundSize(),
    RoundSize(repeats=1, train=8),
    cases,
    rows,
)


def _settings(size: RoundSize, method: str, folder: Path) -> Settings:
    return federated.cpu_scale(method, folder, (size.train, 5), ROUNDS, size.overrides)


def _prepare(size: RoundSize, folder: Path) -> None:
    for method in (size.method, "fedavg"):
        federated.first_task(_settings(size, method, folder), folder / f"base-{method}")


def _sides(size: RoundSize, folder: Path) -> dict[str, Side]:
    return {
        "ours": partial(_extend, folder, size.method, "ours"),
        "textbook": partial(_plain, size, folder),
        "fedavg": partial(_extend, folder, "fedavg", "fedavg"),
    }


def _extend(folder: Path, method: str, side: str) -> dict[str, Any]:
    watch, run = federated.next_task(folder / f"base-{method}", folder / side)
    sent = sum(federated.sizes(run, "model", task=1)) / ROUNDS
    return {"seconds": watch.rounds[-1], "bytes": sent, "folder": str(folder)}


def _plain(size: RoundSize, folder: Path) -> dict[str, Any]:
    """The same rounds from the same model, batches and bases."""
    settings = load(_settings(size, size.method, folder), ["stream.tasks=2"])
    stream, base = build_stream(settings), folder / f"base-{size.method}"
    network = build_network(settings, stream.dataset.image_shape, routes=True)
    prepare(network, stream, settings.run.seed, task=1)
    load_state(network, load_file(base / "model.safetensors"))
    bases, seconds = federated.bases_of(base), 0.0
    for round_ in range(ROUNDS):
        start = perf_counter()
        textbook.load(network, textbook.train_round(network, stream, settings, bases, 1, round_))
        seconds = perf_counter() - start
    save_file(full_state(network), folder / "textbook.safetensors")
    return {"seconds": seconds}


def _same_model(results: dict[str, Any]) -> Agreement:
    folder = Path(results["ours"]["folder"])
    ours, plain = folder / "ours" / "model.safetensors", folder / "textbook.safetensors"
    start = next(folder.glob("base-*fedprotip")) / "model.safetensors"
    return Agreement("relative difference of the models' changes", federated.change(ours, plain, start), 1e-2)
