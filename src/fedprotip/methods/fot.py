"""FOT, federated orthogonal training: the server keeps the average update out of what earlier tasks use.

Clients train freely. At the end of a round the server projects the averaged update of every layer, ∆ ← ∆ − ∆ΦΦᵀ. At the
end of a task every client sends Y_k = R_k·G_k for the part R_k of its layer inputs outside Φ, with a Gaussian G_k of
its own. The sum of the Y_k is a sketch of all clients' inputs together, and its dominant directions join Φ.
"""

from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from fedprotip.errors import UsageError
from fedprotip.messages import PRECISIONS, BadMessage, Message, Spec
from fedprotip.methods.base import About, Method, register
from fedprotip.methods.exchange import Exchange, Sender
from fedprotip.methods.local import Local
from fedprotip.methods.parts.private import SECRET, gaussian
from fedprotip.methods.parts.protection import SUBSPACES, Protection, append_bases, protection, ranks
from fedprotip.methods.parts.robust import is_robust
from fedprotip.methods.site import Site
from fedprotip.methods.state import Knowledge
from fedprotip.models.capture import Layer, find_layers, watched
from fedprotip.models.freeze import frozen_prefixes
from fedprotip.models.patches import count_columns, some_columns
from fedprotip.seeds import torch_stream
from fedprotip.settings import MethodSettings, Settings
from fedprotip.subspace.project import Projector
from fedprotip.subspace.sketch import Root, sketch_basis

RATIOS = "ratios"
"""In messages: a row per layer, whose sums over clients give ρ as their quotient."""

UNIT = 2.0**12
"""Energy that counts 1 in `ratios`: those of all columns of many images are too large for a secure sum otherwise."""

PIECE = 4096
"""Columns that are looked at together."""


class FOTOptions(MethodSettings):
    name: str = Field("fot", description="Method; its own settings follow.")
    threshold: float = Field(0.87, gt=0, le=1, description="ε: share of the layer inputs that Φ must hold.")
    increment: float = Field(0.001, ge=0, lt=1, description="Added to ε with every task; the paper's text says 0.01.")
    width: Annotated[int, Field(ge=1)] | Literal["d", "5d"] = Field(
        512, description='Columns s of a sketch: a number, or by the width of a layer; the paper\'s text says "5d".'
    )
    columns: int = Field(
        0,
        ge=0,
        description="Input columns per layer and client that a sketch is of, drawn at random; 0: all there are.",
    )
    ratio: Literal["norms", "energies"] = Field(
        "norms",
        description="ρ, how much of the inputs lies outside Φ. norms: ‖R_k‖/‖A_k‖, averaged by samples, as published; "
        "energies: squares of all clients together, what ε is a share of.",
    )
    vectors: Literal["free", "fixed"] = Field(
        "free",
        description="Biases and norm layers of the backbone after the first task: free, as published, or fixed.",
    )


class Sketches(Exchange):
    """Sketches of what lies outside Φ at the inputs of every layer that later tasks may move."""

    name, combine = "sketch", "sum"

    def __init__(self, settings: Settings) -> None:
        assert isinstance(settings.method, FOTOptions)
        self.options, self.precision = settings.method, PRECISIONS[settings.train.wire]

    def threshold(self, task: int) -> float:
        """ε in a task, counted from 0."""
        return min(self.options.threshold + self.options.increment * task, 1.0)

    def width(self, d: int) -> int:
        """Columns of a sketch of d inputs."""
        width = self.options.width
        return width if isinstance(width, int) else 5 * d if width == "5d" else d

    def layers(self, site: Site) -> list[Layer]:
        """Those that a sketch is asked for, in the order of `ratios`: later tasks may move them, and Φ has room."""
        frozen = frozen_prefixes(site.settings.model, site.task + 1)
        full = {layer.name for layer, outside in protection(site).projectors if not outside.room}
        groups = find_layers(site.network.backbone, False).items()
        moving = (group for name, group in groups if not name.startswith(frozen))
        return [layer for group in moving if not full.issuperset(one.name for one in group) for layer in group]

    # Client

    def answer(self, local: Local) -> Message:
        layers, outside = self.layers(local.site), _outside(local.site)
        shown = {layer.name: _Inputs(layer, outside.get(layer.name)) for layer in layers}
        groups: dict[str, list[_Inputs]] = {}
        for layer in layers:
            groups.setdefault(layer.parameter, []).append(shown[layer.name])

        def chance(name: str) -> torch.Generator:
            return torch_stream(local.settings.run.seed, "columns", local.task, local.client, name)

        images = len(local.samples)
        sees = {n: _See(group, self.options.columns, images, chance(n)) for n, group in groups.items()}
        with watched(local.network.backbone, sees):
            for inputs, _ in local.labelled(local.settings.evaluate.batch):
                local.network.embed(inputs)
        tensors = {name: self._sketch(local, name, one).cpu() for name, one in shown.items()}
        rows = [self._ratio(one, images) for one in shown.values()]
        return Message(self.name, tensors | {RATIOS: torch.tensor(rows, dtype=torch.float64).view(-1, 2)})

    def _sketch(self, local: Local, name: str, seen: "_Inputs") -> Tensor:
        """Y = F·G (d, s) in float32, with independent standard Gaussians."""
        factor = seen.root.factor
        return factor @ gaussian(local, "sketch", name, factor.shape[1], self.width(seen.d)).to(factor)

    def _ratio(self, seen: "_Inputs", samples: int) -> tuple[float, float]:
        if self.options.ratio == "energies":
            return seen.residual / UNIT, seen.total / UNIT
        return samples * (seen.residual / seen.total) ** 0.5 if seen.total else 0.0, samples

    # Server

    def check(self, message: Message, site: Site) -> None:
        layers = self.layers(site)
        specs = {layer.name: Spec((layer.d, self.width(layer.d))) for layer in layers}
        message.check(self.name, specs | {RATIOS: Spec((len(layers), 2), torch.float64)})
        message.check_meta()
        part, whole = message.tensors[RATIOS].unbind(1)
        if (part < 0).any() or (part > whole * (1 + 1e-6)).any():
            raise BadMessage("a share outside of what is known is not between 0 and 1")
        if any(message.tensors[layer.name].any() for layer, share in zip(layers, part, strict=True) if not share):
            raise BadMessage("there is a sketch of inputs of which nothing lies outside of what is known")

    def check_sender(self, message: Message, site: Site, sender: Sender) -> None:
        counts = message.tensors[RATIOS][:, 1]
        if self.options.ratio == "norms" and (counts != (sender.samples or 0)).any():
            raise BadMessage(f"its sketches are not of {sender.samples} samples, as it said before")

    def sizes(self, message: Message, site: Site) -> dict[str, float]:
        """The length of all inputs: as told, and as it follows from the sketch of their residual and its share."""
        found = {}
        for layer, (part, whole) in zip(self.layers(site), message.tensors[RATIOS].tolist(), strict=True):
            if self.options.ratio == "energies":
                found[f"told length of inputs of {layer.name}"] = whole**0.5
            length = torch.linalg.vector_norm(message.tensors[layer.name], dtype=torch.float64).item()
            if part > 0 and length > 0:
                share = part / whole
                outside = share if self.options.ratio == "norms" else share**0.5
                found[f"length of inputs of {layer.name}"] = length / outside
        return found

    def effort(self, message: Message, site: Site, sender: Sender) -> float:
        return min(max(sender.samples or 1, 1), site.most)

    def weight(self, message: Message, site: Site) -> float:
        """1, or less where a client states more samples than it counts for."""
        samples = message.tensors[RATIOS][:, 1].tolist() if self.options.ratio == "norms" else []
        return min([1.0, *(site.most / max(count, 1.0) for count in samples)])

    def digest(self, combined: Message, site: Site) -> Message | None:
        """New directions of every layer by the corrected threshold; none where Φ holds ε already."""
        layers, outside, bases = self.layers(site), _outside(site), {}
        for layer, (part, whole) in zip(layers, combined.tensors[RATIOS].tolist(), strict=True):
            earlier = outside.get(layer.name, Projector(torch.zeros(layer.d, 0), False))
            earlier = Projector(earlier.basis.cpu(), earlier.is_complement)
            ratio = min(part / whole, 1.0) if whole else 0.0
            basis = sketch_basis(combined.tensors[layer.name], earlier, ratio, self.threshold(site.task))
            bases[layer.name] = basis.to(self.precision)
            site.on_progress("bases", len(bases), len(layers))
        return Message(self.name, bases) if bases else None

    # Both

    def receive(self, message: Message, site: Site) -> None:
        append_bases(message.tensors, site)


@register
class FOT(Method):
    name = "fot"
    about = About(
        "the averaged update is projected away from the subspaces of earlier tasks, which sums of sketches tell",
        sends="the model, every round; a sketch of every layer's inputs, once a task",
    )
    protects = True
    state = (SUBSPACES, SECRET)
    Options = FOTOptions

    def check(self) -> None:
        super().check()
        if is_robust(self.settings.train.aggregate):
            raise UsageError(
                f"train.aggregate = {self.settings.train.aggregate!r} is not possible with method.name = 'fot', whose "
                "sketches can only be summed; choose 'mean' or 'clipped'."
            )

    def at_end(self) -> Sequence[Exchange]:
        return (Sketches(self.settings),)

    def view(self, site: Site) -> Protection:
        """Weights travel as coordinates outside Φ: their average is the projected average, ∆·Φ = 0."""
        return Protection(site, travels=site.task > 0)

    def trainable(self, site: Site) -> set[str]:
        names, options = super().trainable(site), self.settings.method
        assert isinstance(options, FOTOptions)
        if site.task == 0 or options.vectors == "free":
            return names
        return {name for name in names if name.startswith("heads.") or site.network.get_parameter(name).dim() > 1}

    def ranks(self, known: Knowledge) -> tuple[dict[str, int], dict[str, int]]:
        return ranks(known)


def _outside(site: Site) -> dict[str, Projector]:
    """Layer → what lies outside its Φ; without those that have none yet."""
    return {layer.name: outside for layer, outside in protection(site).projectors}


class _Inputs:
    """What a client's sketch of one layer is made of."""

    def __init__(self, layer: Layer, outside: Projector | None) -> None:
        self.d, self.root, self._outside = layer.d, Root(layer.d), outside
        self.residual = self.total = 0.0  # ‖R‖², ‖A‖²

    def add(self, columns: Tensor) -> None:
        """Input columns (d, n)."""
        rest = self._outside.columns(columns) if self._outside else columns
        self.total += _energy(columns)
        self.residual += min(_energy(rest), _energy(columns))
        self.root.add(rest)


class _See:
    """Shows columns of a weight's inputs to its layers, several where it has groups: all of them, or some of each call.

    Some stand for all: they are made longer, so that a client counts by its samples and not by what it drew.

    Args:
        wanted: how many of all columns of so many `images`; 0: all.
    """

    def __init__(self, groups: list[_Inputs], wanted: int, images: int, chance: torch.Generator) -> None:
        self._groups, self._wanted, self._images, self._chance = groups, wanted, images, chance

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        total = count_columns(module, inputs[0])
        quota = max(round(self._wanted * len(inputs[0]) / self._images), 1) if self._wanted else total
        chosen = torch.randperm(total, generator=self._chance) if quota < total else torch.arange(total)
        for part in chosen[:quota].to(inputs[0].device).split(PIECE):
            columns = some_columns(module, inputs[0], part) * max(total / quota, 1.0) ** 0.5
            for group, seen in enumerate(self._groups):
                seen.add(columns[:, group].T)


def _energy(columns: Tensor) -> float:
    return float(torch.linalg.vector_norm(columns, dtype=torch.float64).square())
