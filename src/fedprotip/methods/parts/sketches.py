"""Core bases as sketches that can be summed (Eq. 41): the server needs that of all clients, nobody's own."""

from collections.abc import Iterator
from typing import Any

import torch

from fedprotip.messages import BadMessage, Message, Spec
from fedprotip.methods.exchange import Sender
from fedprotip.methods.local import Local
from fedprotip.methods.parts.bases import ENERGY, Bases
from fedprotip.methods.parts.private import gaussian
from fedprotip.methods.parts.protection import ROUTING
from fedprotip.methods.site import Site
from fedprotip.subspace.basis import Core
from fedprotip.subspace.sketch import sketch_core, upright

REST = "rest"
"""In messages: a row per basis, what earlier bases capture and what the rank rule cut off. Sums over clients."""


class SketchedBases(Bases):
    """B_k = U_k·diag(σ_k)·G_k of every layer that later tasks may move, and of the final features.

    G_k (r, s) has independent entries of variance 1/s, so the squares of the singular values of Σ B_k stand for those
    of all clients' activations together, and the rank rule is that of `EnergyMerge`.
    """

    name, combine, fraction = "sketch", "sum", 28

    def names(self, site: Site) -> dict[str, int]:
        """The bases that are asked for, with their widths d."""
        layers = {layer.name: layer.d for group in self.layers(site).values() for layer in group}
        return dict(sorted(layers.items())) | {ROUTING: site.network.features}

    def width(self, d: int) -> int:
        """Columns of a sketch of d inputs; more than d tell nothing more."""
        return min(self.options.sketch or d, d)

    # Client

    def answer(self, local: Local) -> Message:
        cores, tensors, rest = self.cores(local), {}, []
        for name, d in self.names(local.site).items():
            core, s = cores[name], self.width(d)
            chance = gaussian(local, "sketch", name, core.basis.shape[1], s)
            tensors[name] = (upright(core.basis) * core.sigma.float()) @ (chance / s**0.5)
            rest.append([core.captured, core.tail if self.options.rank_rule == "energy" else core.tail**2])
        return Message(self.name, {**tensors, REST: torch.tensor(rest, dtype=torch.float64)})

    # Server

    def check(self, message: Message, site: Site) -> None:
        names = self.names(site)
        specs = {name: Spec((d, self.width(d))) for name, d in names.items()}
        message.check(self.name, specs | {REST: Spec((len(names), 2), torch.float64)})
        message.check_meta()
        if (message.tensors[REST] < 0).any() or (message.tensors[REST] > ENERGY).any():
            raise BadMessage("energies are not finite numbers ≥ 0")

    def sizes(self, message: Message, site: Site) -> dict[str, float]:
        """Lengths of sketches, the root of the energy that they stand for; and of all energy that there was."""
        lengths = {name: message.tensors[name].double().norm().item() for name in self.names(site)}
        rest = message.tensors[REST].sum(1).tolist()
        wholes = {name: (length**2 + more) ** 0.5 for (name, length), more in zip(lengths.items(), rest, strict=True)}
        heights = [(f"sketch of {name}", length) for name, length in lengths.items()]
        heights += [(f"whole energy of {name}", height) for name, height in wholes.items()]
        return {what: height for what, height in heights if height}

    def effort(self, message: Message, site: Site, sender: Sender) -> float:
        return max(sender.samples or 1, 1)

    def _told(self, combined: Any) -> Iterator[tuple[str, Core]]:
        """All clients as one, layer by layer."""
        rest = combined.tensors[REST].tolist()
        names = sorted(combined.tensors.keys() - {REST, ROUTING})
        for name, (captured, tail) in zip([*names, ROUTING], rest, strict=True):
            tail = tail if self.options.rank_rule == "energy" else tail**0.5
            yield name, sketch_core(combined.tensors[name], captured, tail)
