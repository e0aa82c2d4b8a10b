"""evaluate: all modes on all tasks so far."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fedprotip.bench import inputs, textbook
from fedprotip.bench.base import BOTH, Agreement, Benchmark, Case, Machine, Measured, Row, Side, Size, Target, row
from fedprotip.evaluation.evaluate import evaluate
from fedprotip.inference.answers import Inference, Way
from fedprotip.inference.candidates import Candidates
from fedprotip.inference.experts import HEADS, HeadExpert
from fedprotip.inference.predictor import Predictor
from fedprotip.inference.route import CosineRouter
from fedprotip.inference.routers import Vote
from fedprotip.models import Network
from fedprotip.models.prefix import PrefixCache
from fedprotip.seeds import torch_stream
from fedprotip.settings import load
from fedprotip.stream import build_stream
from fedprotip.stream.plan import Answering

FRESH = Target("times faster than the textbook, nothing cached")
CACHED = Target("times faster than the textbook, behind the cached prefix")


@dataclass(frozen=True)
class EvaluateSize(Size):
    tasks: int = 5
    images: int = 50  # test images per class, ten classes a task
    side: int = 32
    model: tuple[str, ...] = (*inputs.RESNET, "model.stem=stride1")
    clients: int = 5
    directions: int = 20  # of every routing basis


def cases(size: EvaluateSize) -> list[Case]:
    name = f"{size.tasks} tasks, {10 * size.images} images each"
    prepare = partial(_write, size)
    return [Case(name, partial(_sides, size), _same_accuracies, prepare=prepare, memory=BOTH, least=0.0)]


def rows(measured: list[Measured], machine: Machine, size: EvaluateSize) -> list[Row]:
    return [
        line for case in measured for line in (row(case, FRESH), row(case, CACHED, case.ratio("textbook", "cached")))
    ]


BENCHMARK = Benchmark(
    "evaluate",
    "All modes of evaluation, ResNet-18 (stem stride1)",
    EvaluateSize(),
    EvaluateSize(repeats=3, tasks=3, images=10),
    cases,
    rows,
)


def _write(size: EvaluateSize, folder: Path) -> Path:
    return inputs.write_dataset(folder, 10 * size.tasks, 2, size.images, size.side)


def _sides(size: EvaluateSize, folder: Path) -> dict[str, Side]:
    network, settings = inputs.backbone(size.model, size.side)
    data = {"data": {"name": "own", "source": str(_write(size, folder))}}
    settings = load(settings.model_dump() | data | {"stream": {"tasks": size.tasks, "task_size": 10}})
    uncached = load(settings, ["run.cache_mb=0"])
    stream, last = build_stream(settings), size.tasks - 1
    for task in range(len(network.labels), size.tasks):
        network.add_head(stream.tasks[task].classes, inputs.SEED, task)
    router = _router(network, size)
    cache = PrefixCache(stream, settings, folder)
    candidates, ways = Candidates.of([task.classes for task in stream.tasks]), {"cosine": Way(Vote(router), HEADS)}
    inference = Inference(candidates, {HEADS: HeadExpert(network, size.tasks)}, ways, "cosine")
    predictor = Predictor(network, inference, stream.plan(Answering(), False, size.tasks))
    return {
        "ours": lambda: evaluate(predictor, stream, last, uncached).accuracy,
        "textbook": lambda: textbook.evaluate(network, stream, router, last, settings),
        "cached": lambda: evaluate(predictor, stream, last, settings, cache).accuracy,
    }


def _router(network: Network, size: EvaluateSize) -> CosineRouter:
    """Routing bases side by side, and references that lean towards the own task."""
    bases = inputs.orthonormal(network.features, size.directions * size.tasks).split(size.directions, dim=1)
    noise = torch.rand(size.clients, size.tasks, size.tasks, generator=torch_stream(inputs.SEED, "references"))
    return CosineRouter(bases, noise + torch.eye(size.tasks))


def _same_accuracies(results: dict[str, Any]) -> Agreement:
    plain = results["textbook"]
    pairs = [(results[side][mode], plain[mode]) for side in ("ours", "cached") for mode in plain]
    worst = max(abs(a - b) for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True))
    return Agreement("largest difference of an accuracy, points", worst, 0.5)
