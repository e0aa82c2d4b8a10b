"""clients: memory and time from a few clients to a thousand, with the state of clients on disk."""

import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from fedprotip import api
from fedprotip.bench import federated, inputs, textbook
from fedprotip.bench.base import Agreement, Benchmark, Case, Machine, Measured, Row, Side, Size, Target, row
from fedprotip.federation.client import full_state
from fedprotip.models import build_network
from fedprotip.settings import Settings, load
from fedprotip.stream import build_stream

GROWTH = Target("times the peak memory of the fewest clients", "lower", 1.05)
PLAIN = Target("times less peak memory than the textbook")


@dataclass(frozen=True)
class ClientsSize(Size):
    repeats: int = 1
    clients: tuple[int, ...] = (10, 100, 1000)
    width: int = 512  # one model of 512 units is 1.2 MB, one client's moment 2 MB
    samples: int = 1500  # training images of a task
    rounds: int = 1


def cases(size: ClientsSize) -> list[Case]:
    return [
        Case(
            f"{n} clients", partial(_sides, size, n), partial(_same_model, n), prepare=partial(_data, size), apart=True
        )
        for n in size.clients
    ]


def rows(measured: list[Measured], machine: Machine, size: ClientsSize) -> list[Row]:
    few = measured[0].peaks.get("ours")
    found = []
    for case in measured:
        if few and {"ours", "textbook"} <= case.peaks.keys():
            found.append(row(case, GROWTH, case.peaks["ours"] / few))
            found.append(row(case, PLAIN, case.peaks["textbook"] / case.peaks["ours"]))
        found.append(row(case))
    return found


BENCHMARK = Benchmark(
    "clients",
    "From ten to a thousand clients: two tasks, a perceptron, one process each",
    ClientsSize(),
    ClientsSize(clients=(10, 100), width=256, samples=400),
    cases,
    rows,
)


def _data(size: ClientsSize, folder: Path) -> Path:
    return inputs.write_dataset(folder, classes=4, train=size.samples // 2, test=20, side=8, channels=1)


def _settings(size: ClientsSize, clients: int, folder: Path) -> Settings:
    wanted = {
        "data": {"name": "own", "source": str(_data(size, folder))},
        "stream": {"tasks": 2, "task_size": 2},
        "clients": {"count": clients, "partition": "iid"},
        "model": {"name": "mlp", "width": size.width, "depth": 2},
        "train": {"rounds": size.rounds, "epochs": 1, "batch": 32, "lr": 0.05},
        "method": {"name": "fedprotip", "threshold": 0.9, "rank_rule": "energy"},
        "run": {"state_mb": 1},
    }
    return load(wanted)


def _sides(size: ClientsSize, clients: int, folder: Path) -> dict[str, Side]:
    settings = _settings(size, clients, folder)
    return {"ours": partial(_ours, settings, folder), "textbook": partial(_plain, settings, folder)}


def _ours(settings: Settings, folder: Path) -> dict[str, Any]:
    run = folder / f"clients-{settings.clients.count}"
    shutil.rmtree(run, ignore_errors=True)
    summary = api.run(settings, out=run)
    return {"seconds": summary["seconds"]["total"], "folder": str(folder)}


def _plain(settings: Settings, folder: Path) -> dict[str, Any]:
    stream, count = build_stream(settings), settings.clients.count
    network = build_network(settings, stream.dataset.image_shape, routes=True)
    save_file(full_state(network), folder / f"start-{count}.safetensors")
    seconds = textbook.run_tasks(network, stream, settings, folder / f"textbook-kept-{count}.safetensors")
    save_file(full_state(network), folder / f"textbook-{count}.safetensors")
    return {"seconds": sum(seconds)}


def _same_model(clients: int, results: dict[str, Any]) -> Agreement:
    folder = Path(results["ours"]["folder"])
    ours = folder / f"clients-{clients}" / "model.safetensors"
    plain, start = (folder / f"{name}-{clients}.safetensors" for name in ("textbook", "start"))
    return Agreement("relative difference of the models' changes", federated.change(ours, plain, start), 1e-2)
