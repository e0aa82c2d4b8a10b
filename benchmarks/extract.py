"""extract: a client's core bases (Eq. 7–9), from images to one basis per layer, in a later task."""

from typing import Any

import torch
from torch import Tensor

from benchmarks import inputs, textbook
from benchmarks.harness import Agreement, Bench
from benchmarks.inside import Extraction
from fedprotip.settings import load


def extract(
    bench: Bench,
    images: int = 1000,
    side: int = 32,
    columns: int = 512,  # m_s
    threshold: float = 0.95,
    earlier: float = 0.1,  # r/d of Φ
    model: tuple[str, ...] = inputs.RESNET,
) -> None:
    """Core bases of a client, layer3 and layer4 of ResNet-18 (3×3 stem)."""
    network, settings = inputs.backbone(model, side)
    bank = inputs.bases(network, earlier)
    method = {"threshold": threshold, "increment": 0.0, "rank_rule": "energy", "columns": columns}
    wanted = settings.model_dump() | {
        "data": inputs.write_dataset(bench.folder, 20, images // 10, 1, side),
        "stream": {"tasks": 2, "task_size": 10},
        "clients": {"count": 1},
        "method": method,
    }
    fresh, cached = (
        Extraction(network, load(wanted, [f"run.cache_mb={mb}"]), bank.to_tensors(), bench.folder) for mb in (0, 1024)
    )
    mine, every = fresh.columns(), textbook.unfold_inputs(network, fresh.images, list(bank.layers))
    chosen = {name: find_columns(mine[name], every[name]) for name in mine}  # the textbook takes the same
    del mine, every

    def plain() -> dict[str, Tensor]:
        every = textbook.unfold_inputs(network, fresh.images, list(bank.layers))
        sampled = {name: columns[:, chosen[name]] for name, columns in every.items()}
        return {name: textbook.core_basis(a, bank.layers[name], threshold) for name, a in sampled.items()}

    sides = {"ours": fresh.bases, "textbook": plain, "cached": cached.bases}
    case = bench.measure(f"{images} images, m_s {columns}", sides, _same_subspaces, memory=True, least=0.0)
    for ours, start in (("ours", "from the images"), ("cached", "from the cached prefix that training left")):
        bench.figure(case, f"times faster, {start}", case.ratio("textbook", ours), "≥", 20, 100)
        if case.peaks:
            less = case.peaks["textbook"] / case.peaks[ours]
            bench.figure(case, f"times less memory on top of what is there, {start}", less, "≥", 20, 100)


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


def _same_subspaces(results: dict[str, Any]) -> Agreement:
    """Every layer."""
    plain = results["textbook"]
    worst = max(inputs.angle(results[side][name], plain[name]) for side in ("ours", "cached") for name in plain)
    return "largest principal angle", worst, 1e-3
