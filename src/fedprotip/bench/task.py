"""task: the second task of CIFAR-100 at scale cpu, with its end and its evaluation, beside FedAvg."""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from fedprotip.bench import federated, inputs
from fedprotip.bench.base import Agreement, Benchmark, Case, Machine, Measured, Row, RunSize, Side, Target, row
from fedprotip.bench.project import operations
from fedprotip.federation.client import local_batches
from fedprotip.models import build_network
from fedprotip.models.capture import find_layers
from fedprotip.paper.anchors import find
from fedprotip.seeds import numpy_stream
from fedprotip.settings import Settings, load
from fedprotip.stream import Stream, build_stream

UNCACHED = Target("times FedAvg with the same frozen layers and no cache", "lower", 1.0)
BOUND = Target("times (FedAvg with the same cache + arithmetic bound of projection)", "lower", 1.25, 1.1)
END = Target("% of the training time for the task end", "lower", 8, 2)
MEMORY = Target("times FedAvg's peak memory (no cache)", "lower", 1.2)
SHARE = Target("mean r/d of the layers during the task", "lower")


@dataclass(frozen=True)
class TaskSize(RunSize):
    train: int = 500  # images per class, ten classes a task
    test: int = 100
    rounds: int = 3
    method: str = "fedprotip"  # row of table1


def cases(size: TaskSize) -> list[Case]:
    return [
        Case(
            "second task",
            partial(_sides, size),
            _same_fedavg,
            prepare=partial(_prepare, size),
            apart=True,
        )
    ]


def rows(measured: list[Measured], machine: Machine, size: TaskSize) -> list[Row]:
    (case,) = measured
    ours = case.results["ours"]
    found = [
        row(case, UNCACHED, case.ratio("ours", "textbook")),
        row(case, BOUND, case.seconds["ours"] / (case.seconds["fedavg"] + ours["operations"] / machine.flops)),
        row(case, END, 100 * ours["task_end"] / ours["train"]),
    ]
    if {"ours", "textbook"} <= case.peaks.keys():
        found.append(row(case, MEMORY, case.peaks["ours"] / case.peaks["textbook"]))
    return [*found, *_bases(case), row(case, SHARE, ours["share"])]


def _bases(case: Measured) -> list[Row]:
    """What a client sends of bases: falling from task to task under the energy rule, and beside the paper's row."""
    sent = case.results["ours"]["basis_mib"]
    paper = [record.value for record in find(table=9, method="fedprotip", kind="basis", task=(1, 2))]
    falling = 1.0 if case.results["ours"]["rank_rule"] == "energy" else None
    found = [row(case, Target("times the first task's basis bytes", "lower", falling), sent[1] / sent[0])]
    for place, (ours, published) in enumerate(zip(sent, paper, strict=True), 1):
        target = Target(f"MiB of bases a client sends in task {place}; goal: the paper's", "lower", None, published)
        found.append(row(case, target, ours))
    return found


BENCHMARK = Benchmark(
    "task",
    "A whole task after the first, FedProTIP against FedAvg, ResNet-18 at scale cpu",
    TaskSize(),
    TaskSize(repeats=1, train=8, test=5, rounds=1),
    cases,
    rows,
)


def _settings(size: TaskSize, side: str, folder: Path) -> Settings:
    method = size.method if side == "ours" else "fedavg"
    settings = federated.cpu_scale(method, folder, (size.train, size.test), size.rounds, size.overrides)
    return load(settings, ["run.cache_mb=0"]) if side == "textbook" else settings


def _prepare(size: TaskSize, folder: Path) -> None:
    for side in ("ours", "textbook", "fedavg"):
        federated.first_task(_settings(size, side, folder), folder / f"base-{side}")
    facts = _projection(load(_settings(size, "ours", folder), ["stream.tasks=2"]), folder / "base-ours")
    (folder / "projection.json").write_text(json.dumps(facts))


def _projection(settings: Settings, base: Path) -> dict[str, Any]:
    """Operations that projection needs at least in the second task, all steps of all clients; and the mean r/d."""
    stream = build_stream(settings)
    network = build_network(settings, stream.dataset.image_shape, routes=True)
    images, _ = stream.train_batch(1, stream.tasks[1].train[:2])
    ranks = {name: phi.shape[1] for name, phi in federated.bases_of(base).items()}
    layers = [layer for group in find_layers(network.backbone, only_trainable=False).values() for layer in group]
    layers = [layer for layer in layers if layer.name in ranks]
    columns = inputs.positions(network, {layer.parameter for layer in layers}, images)
    batch, rounds = settings.train.batch, settings.train.rounds
    step = sum(operations(layer, ranks[layer.name], batch * columns[layer.parameter]) for layer in layers)
    steps = rounds * sum(_steps(stream, settings, client) for client in stream.clients(1))
    share = sum(ranks[layer.name] / layer.d for layer in layers) / len(layers)
    rule = settings.method.model_dump()["rank_rule"]
    return {"operations": step * steps, "share": share, "rank_rule": rule}


def _steps(stream: Stream, settings: Settings, client: int) -> int:
    """Steps of a client in one round."""
    samples = stream.client_samples(1, client)
    return len(list(local_batches(samples, settings.train, numpy_stream(0, "steps")))) if len(samples) else 0


def _sides(size: TaskSize, folder: Path) -> dict[str, Side]:
    return {side: partial(_extend, folder, side) for side in ("ours", "textbook", "fedavg")}


def _extend(folder: Path, side: str) -> dict[str, Any]:
    watch, run = federated.next_task(folder / f"base-{side}", folder / side)
    return {
        "seconds": watch.total,
        **watch.phases,
        **json.loads((folder / "projection.json").read_text()),
        "basis_mib": [_mean_mib(federated.sizes(run, "basis", task, ("up",))) for task in range(2)],
        "folder": str(folder),
    }


def _mean_mib(sizes: list[int]) -> float:
    return mean(sizes) / 2**20 if sizes else 0.0


def _same_fedavg(results: dict[str, Any]) -> Agreement:
    """The cache must change nothing: FedAvg with it and without it end with the same model."""
    folder = Path(results["ours"]["folder"])
    paths = [folder / side / "model.safetensors" for side in ("fedavg", "textbook", "base-textbook")]
    return Agreement("relative difference of FedAvg with and without the cache", federated.change(*paths), 1e-2)
