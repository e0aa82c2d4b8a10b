"""evaluate: all modes on all tasks so far."""

from typing import Any

import torch

from benchmarks import inputs, inside, textbook
from benchmarks.harness import Agreement, Bench
from fedprotip.inference.route import CosineRouter
from fedprotip.seeds import torch_stream
from fedprotip.settings import load


def evaluate(
    bench: Bench,
    tasks: int = 5,
    images: int = 50,  # for testing, per class, ten classes a task
    side: int = 32,
    model: tuple[str, ...] = (*inputs.RESNET, "model.stem=stride1"),
    clients: int = 5,
    directions: int = 20,  # of every routing basis
) -> None:
    """All modes of evaluation, ResNet-18 (stem stride1)."""
    network, settings = inputs.backbone(model, side)
    data = {"data": inputs.write_dataset(bench.folder, 10 * tasks, 2, images, side)}
    settings = load(settings.model_dump() | data | {"stream": {"tasks": tasks, "task_size": 10}})
    stream = inside.build_stream(settings)
    for task in range(len(network.labels), tasks):
        network.add_head(stream.tasks[task].classes, inputs.SEED, task)
    bases = inputs.orthonormal(network.features, directions * tasks).split(directions, dim=1)
    noise = torch.rand(clients, tasks, tasks, generator=torch_stream(inputs.SEED, "references"))
    router = CosineRouter(bases, noise + torch.eye(tasks))  # references lean towards the own task
    sides = {
        "ours": inside.evaluation(network, stream, router, load(settings, ["run.cache_mb=0"])),
        "textbook": lambda: textbook.evaluate(network, stream, router, tasks - 1, settings),
        "cached": inside.evaluation(network, stream, router, settings),
    }
    case = bench.measure(f"{tasks} tasks, {10 * images} images each", sides, _same_accuracies, memory=True, least=0.0)
    bench.figure(case, "times faster than the textbook, nothing cached", case.ratio())
    bench.figure(case, "times faster than the textbook, behind the cached prefix", case.ratio("textbook", "cached"))


def _same_accuracies(results: dict[str, Any]) -> Agreement:
    plain = results["textbook"]
    pairs = [(results[side][mode], plain[mode]) for side in ("ours", "cached") for mode in plain]
    worst = max(abs(a - b) for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True))
    return "largest difference of an accuracy, points", worst, 0.5
