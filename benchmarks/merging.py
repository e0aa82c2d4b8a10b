"""merge and average: what the server makes of the replies of all clients."""

from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import inputs, inside, textbook
from benchmarks.harness import Agreement, Bench
from fedprotip.seeds import torch_stream
from fedprotip.subspace.basis import Core
from fedprotip.subspace.merge import EnergyMerge, UnionMerge

THRESHOLD = 0.95
DIFFERENT = 4
"""Models that the replies of all clients are taken from in turn: they come one after another, as in a run."""


def merge(
    bench: Bench,
    clients: tuple[int, ...] = (5, 20, 50, 200),
    d: int = 2304,
    rank: int = 32,  # of a client's basis
    shared: int = 256,  # dimension of the space that all clients' bases lie in
    earlier: int = 128,  # rank of Φ before
) -> None:
    """Merging the clients' bases of one layer, by union (Eq. 10) and by energy."""
    whole = inputs.orthonormal(d, earlier + shared).double()
    phi, space = whole[:, :earlier].float(), whole[:, earlier:]
    sigma = torch.linspace(1, 0.1, rank, dtype=torch.float64)  # singular values that fall slowly
    cores = []
    for client in range(max(clients)):  # each in another corner of one space
        mix = torch.randn(shared, rank, generator=torch_stream(inputs.SEED, "client", client)).double()
        cores.append(Core((space @ torch.linalg.qr(mix)[0]).float(), sigma, captured=0.0))

    def ours(rule: str, some: list[Core]) -> Tensor:
        merger = UnionMerge(phi) if rule == "union" else EnergyMerge(phi, THRESHOLD, "energy")
        for core in some:
            merger.add(core)
        return merger.result()

    def plain(rule: str, some: list[Core]) -> Tensor:
        bases, sigmas = [core.basis for core in some], [core.sigma for core in some]
        if rule == "union":
            return textbook.merge_union(bases, phi)
        return textbook.merge_energy(bases, sigmas, phi, THRESHOLD)

    for rule in ("union", "energy"):
        for n in clients:
            sides = {"ours": partial(ours, rule, cores[:n]), "textbook": partial(plain, rule, cores[:n])}
            bench.speedup(bench.measure(f"{rule}, {n} clients", sides, _same_span, memory=n == max(clients)))


def _same_span(results: dict[str, Any]) -> Agreement:
    return "largest principal angle", inputs.angle(results["ours"], results["textbook"]), 1e-3


def average(bench: Bench, clients: tuple[int, ...] = (5, 20, 50), model: tuple[str, ...] = inputs.RESNET) -> None:
    """Average of ResNet-18 models (Eq. 6)."""
    start = {name: tensor.detach() for name, tensor in inputs.backbone(model, 32)[0].named_parameters()}
    chance = torch_stream(inputs.SEED, "replies")
    different = [
        {name: tensor + 0.01 * torch.randn(tensor.shape, generator=chance) for name, tensor in start.items()}
        for _ in range(DIFFERENT)
    ]

    def plain(replies: list[inside.Tensors], weights: list[float]) -> inside.Tensors:
        return textbook.average([deepcopy(reply) for reply in replies], weights)

    for n in clients:
        sent = [different[client % DIFFERENT] for client in range(n)], [float(1 + client) for client in range(n)]
        sides = {"ours": partial(inside.average, *sent), "textbook": partial(plain, *sent)}
        bench.speedup(bench.measure(f"{n} clients", sides, _same_model, memory=n == max(clients)))


def _same_model(results: dict[str, Any]) -> Agreement:
    ours, plain = results["ours"], results["textbook"]
    worst = max(float((ours[name] - plain[name]).abs().max()) for name in plain)
    return "largest difference of a weight", worst, 1e-6
