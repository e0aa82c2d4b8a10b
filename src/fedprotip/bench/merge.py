"""merge: one basis of a task from the bases of all clients (Eq. 10, and by energy)."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedprotip.bench import inputs, textbook
from fedprotip.bench.base import BOTH, Agreement, Benchmark, Case, Machine, Measured, Row, Side, Size, row
from fedprotip.bench.extract import TOLERANCE, angle
from fedprotip.seeds import torch_stream
from fedprotip.subspace.basis import Core
from fedprotip.subspace.merge import EnergyMerge, UnionMerge

THRESHOLD = 0.95


@dataclass(frozen=True)
class MergeSize(Size):
    clients: tuple[int, ...] = (5, 20, 50, 200)
    d: int = 2304
    rank: int = 32  # of a client's basis
    shared: int = 256  # dimension of the space that all clients' bases lie in
    earlier: int = 128  # rank of Φ before


def cases(size: MergeSize) -> list[Case]:
    rules = {"union": _union, "energy": _energy}
    return [
        Case(
            f"{rule}, {clients} clients",
            partial(sides, size, clients),
            _same_span,
            memory=BOTH if clients == max(size.clients) else (),
        )
        for rule, sides in rules.items()
        for clients in size.clients
    ]


def rows(measured: list[Measured], machine: Machine, size: MergeSize) -> list[Row]:
    return [row(case) for case in measured]


BENCHMARK = Benchmark(
    "merge",
    "Merging the clients' bases of one layer",
    MergeSize(),
    MergeSize(repeats=3, clients=(5, 20), d=1152),
    cases,
    rows,
)


def _union(size: MergeSize, clients: int, folder: Path) -> dict[str, Side]:
    phi, cores = _inputs(size, clients)

    def ours() -> Tensor:
        merger = UnionMerge(phi)
        for core in cores:
            merger.add(core)
        return merger.result()

    return {"ours": ours, "textbook": lambda: textbook.merge_union([core.basis for core in cores], phi)}


def _energy(size: MergeSize, clients: int, folder: Path) -> dict[str, Side]:
    phi, cores = _inputs(size, clients)

    def ours() -> Tensor:
        merger = EnergyMerge(phi, THRESHOLD, "energy")
        for core in cores:
            merger.add(core)
        return merger.result()

    def plain() -> Tensor:
        bases, sigmas = [core.basis for core in cores], [core.sigma for core in cores]
        return textbook.merge_energy(bases, sigmas, phi, THRESHOLD)

    return {"ours": ours, "textbook": plain}


def _inputs(size: MergeSize, clients: int) -> tuple[Tensor, list[Core]]:
    """Φ, and bases outside it: each in another corner of one space, with singular values that fall slowly."""
    whole = inputs.orthonormal(size.d, size.earlier + size.shared).double()
    phi, space = whole[:, : size.earlier].float(), whole[:, size.earlier :]
    sigma = torch.linspace(1, 0.1, size.rank, dtype=torch.float64)
    cores = []
    for client in range(clients):
        mix = torch.randn(size.shared, size.rank, generator=torch_stream(inputs.SEED, "client", client)).double()
        cores.append(Core((space @ torch.linalg.qr(mix)[0]).float(), sigma, captured=0.0))
    return phi, cores


def _same_span(results: dict[str, Any]) -> Agreement:
    return Agreement("largest principal angle", angle(results["ours"], results["textbook"]), TOLERANCE)
