"""average: the mean of the clients' models (Eq. 6)."""

from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedprotip.bench import inputs, textbook
from fedprotip.bench.base import BOTH, Agreement, Benchmark, Case, Machine, Measured, Row, Side, Size, row
from fedprotip.federation.aggregate import Average
from fedprotip.seeds import torch_stream

DIFFERENT = 4
"""Models that the replies of all clients are taken from in turn: they come one after another, as in a run."""


@dataclass(frozen=True)
class AverageSize(Size):
    clients: tuple[int, ...] = (5, 20, 50)
    model: tuple[str, ...] = inputs.RESNET


def cases(size: AverageSize) -> list[Case]:
    most = max(size.clients)
    return [
        Case(f"{n} clients", partial(_sides, size, n), _same_model, memory=BOTH if n == most else ())
        for n in size.clients
    ]


def rows(measured: list[Measured], machine: Machine, size: AverageSize) -> list[Row]:
    return [row(case) for case in measured]


BENCHMARK = Benchmark(
    "average", "Average of ResNet-18 models", AverageSize(), AverageSize(repeats=3, clients=(5, 20)), cases, rows
)


def _sides(size: AverageSize, clients: int, folder: Path) -> dict[str, Side]:
    network, _ = inputs.backbone(size.model, side=32)
    chance = torch_stream(inputs.SEED, "replies")
    start = {name: tensor.detach() for name, tensor in network.named_parameters()}
    replies = [
        {name: tensor + 0.01 * torch.randn(tensor.shape, generator=chance) for name, tensor in start.items()}
        for _ in range(DIFFERENT)
    ]
    weights = [float(1 + client) for client in range(clients)]

    def ours() -> dict[str, Tensor]:
        average = Average()
        for client, weight in enumerate(weights):
            average.add(replies[client % DIFFERENT], weight)
        return average.result()

    def plain() -> dict[str, Tensor]:
        models = [deepcopy(replies[client % DIFFERENT]) for client in range(clients)]
        return textbook.average(models, weights)

    return {"ours": ours, "textbook": plain}


def _same_model(results: dict[str, Any]) -> Agreement:
    ours, plain = results["ours"], results["textbook"]
    worst = max(float((ours[name] - plain[name]).abs().max()) for name in plain)
    return Agreement("largest difference of a weight", worst, 1e-6)
