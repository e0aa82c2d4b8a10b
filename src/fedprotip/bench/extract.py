"""extract: a client's core bases (Eq. 7–9), from images to one basis per layer, in a later task."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedprotip.bench import inputs, textbook
from fedprotip.bench.base import BOTH, Agreement, Benchmark, Case, Machine, Measured, Row, Side, Size, Target, row
from fedprotip.federation.client import Workspace
from fedprotip.methods import create_method
from fedprotip.methods.base import ClientTask, Knowledge
from fedprotip.methods.fedprotip import FedProTIP
from fedprotip.models import Network
from fedprotip.settings import Settings, load
from fedprotip.store.files import ClientStore, ObjectFolder
from fedprotip.stream import build_stream
from fedprotip.subspace.bank import SubspaceBank

TOLERANCE = 1e-3
TASK = 1
SPEED = Target("times faster than the textbook, from the images", "higher", 20, 100)
MEMORY = Target("times less memory on top of model and images", "higher", 20, 100)
CACHED_SPEED = Target("times faster, from the cached prefix that training left", "higher", 20, 100)
CACHED_MEMORY = Target("times less memory on top of model, images and cache", "higher", 20, 100)


@dataclass(frozen=True)
class ExtractSize(Size):
    images: int = 1000
    side: int = 32
    columns: int = 512  # m_s
    threshold: float = 0.95
    earlier: float = 0.1  # r/d of Φ
    model: tuple[str, ...] = inputs.RESNET


def cases(size: ExtractSize) -> list[Case]:
    return [
        Case(
            f"{size.images} images, m_s {size.columns}",
            partial(_sides, size),
            _same_subspaces,
            prepare=partial(_prepare, size),
            memory=(*BOTH, "cached"),
            least=0.0,
        )
    ]


def rows(measured: list[Measured], machine: Machine, size: ExtractSize) -> list[Row]:
    (case,) = measured
    found = [row(case, SPEED), row(case, CACHED_SPEED, case.ratio("textbook", "cached"))]
    if len(case.peaks) == 3:
        found.insert(1, row(case, MEMORY, case.peaks["textbook"] / case.peaks["ours"]))
        found.append(row(case, CACHED_MEMORY, case.peaks["textbook"] / case.peaks["cached"]))
    return found


BENCHMARK = Benchmark(
    "extract",
    "Core bases of a client, layer3 and layer4 of ResNet-18 (3×3 stem)",
    ExtractSize(),
    ExtractSize(repeats=1, images=128, columns=128),
    cases,
    rows,
)


def _prepare(size: ExtractSize, folder: Path) -> None:
    """Note which of all columns ours samples, so that the textbook takes the same ones."""
    client, images = _client(size, folder, cached=False)
    mine = _method(client).sample_columns(_task(client))
    every = textbook.unfold_inputs(client.network, images, list(inputs.suffix_layers(client.network)))
    save_file({name: find_columns(mine[name], every[name]) for name in mine}, folder / "chosen.safetensors")


def _sides(size: ExtractSize, folder: Path) -> dict[str, Side]:
    fresh, images = _client(size, folder, cached=False)
    cached, _ = _client(size, folder, cached=True)
    network, phi = fresh.network, SubspaceBank.from_tensors(fresh.knowledge).layers
    chosen = load_file(folder / "chosen.safetensors")

    def plain() -> dict[str, Tensor]:
        every = textbook.unfold_inputs(network, images, list(phi))
        sampled = {name: columns[:, chosen[name]] for name, columns in every.items()}
        return {name: textbook.core_basis(a, phi[name], size.threshold) for name, a in sampled.items()}

    return {
        "ours": lambda: _bases(fresh),
        "textbook": plain,
        "cached": lambda: _bases(cached),
    }


@torch.no_grad()
def _bases(client: Workspace) -> dict[str, Tensor]:
    return {name: core.basis for name, core in _method(client).layer_cores(_task(client)).items()}


def _method(client: Workspace) -> FedProTIP:
    assert isinstance(client.method, FedProTIP)
    return client.method


def _task(client: Workspace) -> ClientTask:
    return ClientTask(0, TASK, client.network, client.knowledge, client.stream, client.store, inputs.SEED, client.cache)


def _client(size: ExtractSize, folder: Path, cached: bool) -> tuple[Workspace, Tensor]:
    """The only client of the second task, as it stands after training; and all its images."""
    network, settings = inputs.backbone(size.model, size.side)
    settings = _settings(size, settings, folder, cached)
    stream, store = build_stream(settings), ClientStore(ObjectFolder(folder), budget_bytes=2**30)
    workspace = Workspace(settings, create_method(settings), network, stream, store)
    workspace.knowledge = _knowledge(network, size)
    workspace.begin_task(TASK)
    images, _ = stream.train_batch(TASK, stream.tasks[TASK].train)
    return workspace, images


def _settings(size: ExtractSize, settings: Settings, folder: Path, cached: bool) -> Settings:
    source = inputs.write_dataset(folder, 20, size.images // 10, 1, size.side)
    wanted = {
        "data": {"name": "own", "source": str(source)},
        "stream": {"tasks": 2, "task_size": 10},
        "clients": {"count": 1},
        "method": {"threshold": size.threshold, "increment": 0.0, "rank_rule": "energy", "columns": size.columns},
    }
    return load(settings.model_dump() | wanted, [f"run.cache_mb={1024 if cached else 0}"])


def _knowledge(network: Network, size: ExtractSize) -> Knowledge:
    """What the first task left: a basis of every layer, and one for routing."""
    bank = SubspaceBank(routing=[inputs.orthonormal(network.features, 1)])
    for layers in inputs.suffix_layers(network).values():
        for layer in layers:
            bank.extend(layer.name, inputs.orthonormal(layer.d, max(round(size.earlier * layer.d), 1)), task=0)
    return bank.to_tensors()


def find_columns(some: Tensor, every: Tensor) -> Tensor:
    """Where the columns of `some` (d, m) stand in `every` (d, n); raises when one is not there.

    Columns are told apart by a few random projections, and those found are compared entry by entry.
    """
    marks = torch.randn(16, len(some), generator=torch.Generator().manual_seed(inputs.SEED))
    places = torch.cdist((marks @ some).T.double(), (marks @ every).T.double()).argmin(1)
    error = (every[:, places] - some).abs().max() / every.abs().max()
    if not error <= 1e-4:
        raise ValueError(f"a sampled column is not an input of its layer (off by {error:.1e})")
    return places


def angle(u: Tensor, v: Tensor) -> float:
    """The largest principal angle between two spans, from its sine; a right angle where their sizes differ."""
    if u.shape != v.shape:
        return torch.pi / 2
    u, v = u.double(), v.double()
    sine = torch.linalg.matrix_norm(v - u @ (u.T @ v), 2) if v.shape[1] else torch.zeros(())
    return float(torch.asin(sine.clamp(max=1.0)))


def _same_subspaces(results: dict[str, Any]) -> Agreement:
    """Every layer."""
    plain = results["textbook"]
    worst = max(angle(results[side][name], plain[name]) for side in ("ours", "cached") for name in plain)
    return Agreement("largest principal angle", worst, TOLERANCE)
