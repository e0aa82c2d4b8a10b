"""project: keeping updates outside Φ (Eq. 4–5), alone and within a training step, from small to almost full bases."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedprotip.bench import inputs, textbook
from fedprotip.bench.base import Agreement, Benchmark, Case, Machine, Measured, Row, Side, Size, Target, row
from fedprotip.federation.client import build_optimizer
from fedprotip.methods import create_method
from fedprotip.methods.base import Constraint, Knowledge
from fedprotip.models import Network
from fedprotip.models.capture import Layer
from fedprotip.models.prefix import still_prefix
from fedprotip.models.products import by_products
from fedprotip.models.steps import Hidden, run_steps
from fedprotip.seeds import torch_stream
from fedprotip.settings import Settings, load
from fedprotip.subspace.bank import SubspaceBank
from fedprotip.subspace.project import Projector

BARRED = 0.1
"""The share r/d that the bars are about."""
RATE = 0.1
"""Learning rate: large, so that a step is far above the rounding of the weights when updates are compared."""
DENSE = Target("times faster than Eq. 4 as written, P built and applied", "higher", 8)
KEPT = Target("times faster than a dense P kept from step to step (at most d/2r)")
BOUND = Target("times the arithmetic bound at the machine's matmul rate", "lower", None, 1.2)
ADDED = Target("% that projection adds to a plain step", "lower", 25, 10)


@dataclass(frozen=True)
class ProjectSize(Size):
    shares: tuple[float, ...] = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95)  # r/d
    batch: int = 64
    side: int = 32
    model: tuple[str, ...] = inputs.RESNET


def cases(size: ProjectSize) -> list[Case]:
    alone = [Case(_name("alone", share), partial(_alone, size, share), _same_gradients) for share in size.shares]
    steps = [Case(_name("step", share), partial(_step, size, share), _same_updates, least=0.0) for share in size.shares]
    return alone + steps


def rows(measured: list[Measured], machine: Machine, size: ProjectSize) -> list[Row]:
    found, by_name = [], {case.case: case for case in measured}
    layers = _shapes(inputs.backbone(size.model, size.side)[0])
    for share in size.shares:
        case, barred = by_name[_name("alone", share)], share == BARRED
        bound = sum(operations(lay, _rank(lay, share)) for lay in layers.values()) / machine.flops
        found.append(row(case, DENSE if barred else _open(DENSE)))
        found.append(row(case, KEPT, case.ratio("kept", "ours")))
        found.append(row(case, BOUND if barred else _open(BOUND), case.seconds["ours"] / bound))
    for share in size.shares:
        case = by_name[_name("step", share)]
        added = 100 * (case.ratio("ours", "plain") - 1)
        found.append(row(case, ADDED if share <= BARRED else _open(ADDED), added))
    return found


BENCHMARK = Benchmark(
    "project",
    "Projection of updates, layer3 and layer4 of ResNet-18 (3×3 stem)",
    ProjectSize(),
    ProjectSize(repeats=3, shares=(0.1,)),
    cases,
    rows,
)


def _name(what: str, share: float) -> str:
    return f"{what}, r/d {share}"


def _open(target: Target) -> Target:
    """The same figure where nothing is asked of it."""
    return Target(target.figure, target.better)


def operations(layer: Layer, rank: int, columns: int | None = None) -> int:
    """The arithmetic bound of projecting one gradient: 4·out·d·min(r, d − r).

    With `columns` n = batch × positions, the inputs may be projected instead where they are fewer than `out`.
    """
    out = layer.rows.stop - layer.rows.start
    return 4 * min(out, columns or out) * layer.d * min(rank, layer.d - rank)


def _alone(size: ProjectSize, share: float, folder: Path) -> dict[str, Side]:
    """Gradients of all layers, projected one after another."""
    layers = _shapes(inputs.backbone(size.model, size.side)[0])
    chance = torch_stream(inputs.SEED, "gradients")
    gradients = {n: torch.randn(lay.rows.stop, lay.d, generator=chance) for n, lay in layers.items()}
    bases = {name: inputs.orthonormal(layer.d, _rank(layer, share)) for name, layer in layers.items()}
    low_rank = {name: Projector.outside(phi) for name, phi in bases.items()}
    dense = {name: textbook.dense_projector(phi) for name, phi in bases.items()}
    return {
        "ours": lambda: {name: low_rank[name](g) for name, g in gradients.items()},
        "textbook": lambda: {name: g @ textbook.dense_projector(bases[name]) for name, g in gradients.items()},
        "kept": lambda: {name: g @ dense[name] for name, g in gradients.items()},
    }


def _step(size: ProjectSize, share: float, folder: Path) -> dict[str, Side]:
    """One training step behind the frozen prefix: with our projection, with a dense one, and without any."""
    network, settings = inputs.backbone(size.model, size.side)
    settings = load(settings, [f"train.lr={RATE}"])
    layers = [layer for group in inputs.suffix_layers(network).values() for layer in group]
    bases = {layer.name: inputs.orthonormal(layer.d, _rank(layer, share)) for layer in layers}
    bank = SubspaceBank()
    for name, phi in bases.items():
        bank.extend(name, phi, task=0)
    steps = still_prefix(network, settings, task=1)
    with torch.no_grad():
        images = inputs.smooth_images(size.batch, size.side) - 0.5
        hidden = Hidden(run_steps(network.backbone, images, 0, steps), steps)
    labels = torch.arange(size.batch) % 10
    dense = {name: textbook.dense_projector(phi) for name, phi in bases.items()}
    return {
        "ours": _our_step(deepcopy(network), settings, bank.to_tensors(), hidden, labels),
        "textbook": _plain_step(deepcopy(network), settings, hidden, labels, dense),
        "plain": _our_step(deepcopy(network), settings, None, hidden, labels),
    }


def _our_step(
    network: Network, settings: Settings, knowledge: Knowledge | None, hidden: Hidden, labels: Tensor
) -> Side:
    """A step as a client makes it; without knowledge nothing is projected."""
    optimizer = build_optimizer(settings.train, [p for p in network.parameters() if p.requires_grad])
    constraint = (knowledge and create_method(settings).constraint(network, knowledge, 1)) or Constraint()
    constraint.__enter__()  # a round that is never left: the network goes with it
    changes = _changes(network)

    def step() -> Callable[[], dict[str, Tensor]]:
        with by_products(network.backbone, constraint.columns):
            loss = F.cross_entropy(network.logits(network.embed(hidden), 1), labels)
            optimizer.zero_grad()
            loss.backward()
        with torch.no_grad():
            constraint.before_step()
            optimizer.step()
            constraint.after_step()
        return changes

    return step


def _plain_step(network: Network, settings: Settings, hidden: Hidden, labels: Tensor, dense: dict[str, Tensor]) -> Side:
    optimizer = build_optimizer(settings.train, [p for p in network.parameters() if p.requires_grad])
    changes = _changes(network)

    def step() -> Callable[[], dict[str, Tensor]]:
        loss = F.cross_entropy(network.logits(network.embed(hidden), 1), labels)
        textbook.local_step(network, optimizer, loss, dense)
        return changes

    return step


def _changes(network: Network) -> Callable[[], dict[str, Tensor]]:
    """How far the weights have moved from where they are now, as soon as somebody asks."""
    start = {name: network.backbone.get_parameter(name).detach().clone() for name in inputs.suffix_layers(network)}
    return lambda: {name: network.backbone.get_parameter(name).detach() - w for name, w in start.items()}


def _shapes(network: Network) -> dict[str, Layer]:
    """One layer of every shape."""
    layers = [layer for group in inputs.suffix_layers(network).values() for layer in group]
    return {layer.name: layer for layer in {(layer.rows.stop, layer.d): layer for layer in layers}.values()}


def _rank(layer: Layer, share: float) -> int:
    return max(round(share * layer.d), 1)


def _same_gradients(results: dict[str, Any]) -> Agreement:
    return Agreement("largest relative difference", _difference(results["ours"], results["textbook"]), 1e-4)


def _same_updates(results: dict[str, Any]) -> Agreement:
    error = _difference(results["ours"](), results["textbook"]())
    return Agreement("largest relative difference of an update", error, 1e-2)


def _difference(ours: dict[str, Tensor], plain: dict[str, Tensor]) -> float:
    return max(float((ours[name] - plain[name]).norm() / plain[name].norm()) for name in plain)
