"""project: keeping updates outside Φ (Eq. 4–5), alone and within a training step, from small to almost full bases."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import inputs, inside, textbook
from benchmarks.harness import Agreement, Bench, Side
from fedprotip.models import Network
from fedprotip.models.capture import Layer
from fedprotip.models.prefix import still_prefix
from fedprotip.models.steps import Hidden, run_steps
from fedprotip.seeds import torch_stream
from fedprotip.settings import Settings, load
from fedprotip.subspace.project import Projector

BARRED = 0.1
"""The share r/d that the bars are about."""
RATE = 0.1
"""Learning rate: large, so that a step is far above the rounding of the weights when updates are compared."""
Step = Callable[[Hidden, Tensor], None]


def project(
    bench: Bench,
    shares: tuple[float, ...] = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95),  # r/d
    batch: int = 64,
    side: int = 32,
    model: tuple[str, ...] = inputs.RESNET,
) -> None:
    """Projection of updates, layer3 and layer4 of ResNet-18 (3×3 stem)."""
    network, settings = inputs.backbone(model, side)
    layers = list({(layer.rows.stop, layer.d): layer for layer in inputs.suffix_layers(network)}.values())
    for share in shares:  # one layer of every shape
        case = bench.measure(f"alone, r/d {share}", _alone(layers, share), _same_gradients)
        bar, goal = (8, 1.2) if share == BARRED else (None, None)
        bound = sum(operations(layer, inputs.rank(layer, share)) for layer in layers) / bench.machine["gflops"] / 1e9
        bench.figure(case, "times faster than Eq. 4 as written, P built and applied", case.ratio(), "≥", bar)
        bench.figure(case, "times faster than a dense P kept from step to step (at most d/2r)", case.ratio("kept"))
        times = case.seconds["ours"] / bound
        bench.figure(case, "times the arithmetic bound at the machine's matmul rate", times, "≤", None, goal)
    for share in shares:
        case = bench.measure(f"step, r/d {share}", _step(network, settings, share, batch, side), _same_updates, least=0)
        limits, added = (25, 10) if share <= BARRED else (), 100 * (case.ratio("ours", "plain") - 1)
        bench.figure(case, "% that projection adds to a plain step", added, "≤", *limits)


def operations(layer: Layer, rank: int, columns: int | None = None) -> int:
    """The arithmetic bound of projecting one gradient: 4·out·d·min(r, d − r).

    With `columns` n = batch × positions, the inputs may be projected instead where they are fewer than `out`.
    """
    out = layer.rows.stop - layer.rows.start
    return 4 * min(out, columns or out) * layer.d * min(rank, layer.d - rank)


def _alone(layers: list[Layer], share: float) -> dict[str, Side]:
    """Gradients of all layers, projected one after another."""
    chance = torch_stream(inputs.SEED, "gradients")
    gradients = [torch.randn(layer.rows.stop, layer.d, generator=chance) for layer in layers]
    bases = [inputs.orthonormal(layer.d, inputs.rank(layer, share)) for layer in layers]
    low_rank = [Projector.outside(phi) for phi in bases]
    dense = [textbook.dense_projector(phi) for phi in bases]
    return {
        "ours": lambda: [project(g) for project, g in zip(low_rank, gradients, strict=True)],
        "textbook": lambda: [g @ textbook.dense_projector(phi) for phi, g in zip(bases, gradients, strict=True)],
        "kept": lambda: [g @ p for p, g in zip(dense, gradients, strict=True)],
    }


def _step(network: Network, settings: Settings, share: float, batch: int, side: int) -> dict[str, Side]:
    """One training step behind the frozen prefix: with our projection, with a dense one, and without any."""
    settings, bank = load(settings, [f"train.lr={RATE}"]), inputs.bases(network, share)
    steps, labels = still_prefix(network, settings, task=1), torch.arange(batch) % 10
    with torch.no_grad():
        hidden = Hidden(run_steps(network.backbone, inputs.smooth_images(batch, side) - 0.5, 0, steps), steps)
    dense = {name: textbook.dense_projector(phi) for name, phi in bank.layers.items()}

    def side_of(make: Callable[[Network], Step]) -> Side:
        """A side with a network of its own; a call returns how far the weights have moved when somebody asks."""
        own = deepcopy(network)
        step, weights = make(own), [own.backbone.get_parameter(name).detach() for name in bank.layers]
        start = [weight.clone() for weight in weights]

        def call() -> Callable[[], list[Tensor]]:
            step(hidden, labels)
            return lambda: [weight - before for weight, before in zip(weights, start, strict=True)]

        return call

    def plain(own: Network) -> Step:
        optimizer, loss = inside.optimizer_of(own, settings), F.cross_entropy
        return lambda x, y: textbook.local_step(own, optimizer, loss(own.logits(own.embed(x), 1), y), dense)

    return {
        "ours": side_of(lambda own: inside.TrainingStep(own, settings, bank.to_tensors())),
        "textbook": side_of(plain),
        "plain": side_of(lambda own: inside.TrainingStep(own, settings, None)),
    }


def _same_gradients(results: dict[str, Any], tolerance: float = 1e-4) -> Agreement:
    pairs = zip(results["ours"], results["textbook"], strict=True)
    return "largest relative difference", max(float((a - b).norm() / b.norm()) for a, b in pairs), tolerance


def _same_updates(results: dict[str, Any]) -> Agreement:
    return _same_gradients({side: moved() for side, moved in results.items()}, 1e-2)
