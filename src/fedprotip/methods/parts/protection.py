"""Keeping later tasks out of the subspaces of earlier ones: what follows from the bases, once per task (Eq. 4)."""

from functools import cached_property

import torch

from fedprotip.methods.site import Site
from fedprotip.methods.state import Form, Kept, Knowledge
from fedprotip.methods.wire import TaskView
from fedprotip.models.capture import Layer, find_layers
from fedprotip.store.files import Tensors
from fedprotip.subspace.bank import SubspaceBank
from fedprotip.subspace.basis import orthonormalise, residual
from fedprotip.subspace.coordinates import Complement, complement_of
from fedprotip.subspace.project import Anchored, Projector

ROUTING = "routing"
"""Name of the final-layer basis U_L in messages; layers of the backbone are named after their weight."""
SUBSPACES = Kept(
    "subspaces",
    "shared",
    {"layers/*": Form("d r"), "ranks/*": Form("t", torch.int64), "routing/*": Form("d r")},
    artefact=True,
)


class Protection(TaskView):
    """The projectors of one task and what is made of them. Nothing is computed before it is needed.

    Args:
        site: the end that begins the task; its `view` is still that of the task before.
        travels: layers travel as coordinates outside Φ, because changes inside it do not occur or are not wanted.
    """

    def __init__(self, site: Site, travels: bool) -> None:
        self._site, self._travels, self.task = site, travels, site.task
        before = site.view
        self._before = before if isinstance(before, Protection) and before.task == self.task - 1 else None
        self._bank = SubspaceBank.from_tensors(site.known)

    @cached_property
    def projectors(self) -> list[tuple[Layer, Projector]]:
        """Eq. 4 for every layer that has a basis, made from those of the task before."""
        bank, before = self._bank, {}
        if self._before is not None:
            before = {layer.name: projector for layer, projector in self._before.projectors}
            self._before = None
        bank.layers = {name: basis.to(self._site.device) for name, basis in bank.layers.items()}
        layers = [layer for group in find_layers(self._site.network.backbone, False).values() for layer in group]
        return [(lay, bank.projector(lay.name, before.get(lay.name))) for lay in layers if lay.name in bank.layers]

    @cached_property
    def complements(self) -> list[tuple[Layer, Complement]]:
        """The complement of Φ for every layer that has a basis.

        Global projection is just this: the average of coordinates is the projected average.
        """
        if not self._travels:
            return []
        return [(layer, complement_of(projector)) for layer, projector in self.projectors]

    @cached_property
    def anchors(self) -> dict[str, Anchored]:
        """W^(t,0) of every layer that travels as a change since then, with its projector: no round moves W·Φ."""
        found = {}
        for layer, projector in self.projectors:
            weight = self._site.start.get(f"backbone.{layer.parameter}")
            if weight is not None:
                found[layer.name] = projector.anchor(layer.weight({layer.parameter: weight}))
        return found

    def forget_anchors(self) -> None:
        """No more steps in this task."""
        self.__dict__.pop("anchors", None)

    @cached_property
    def earlier(self) -> dict[str, Projector]:
        """What earlier tasks hold of every layer and of the final features; on the CPU, where bases are made."""
        known = {layer.name: Projector(p.basis.cpu(), p.is_complement) for layer, p in self.projectors}
        known[ROUTING] = Projector.outside(self._bank.routed(self._site.network.features))
        return known


def protection(site: Site) -> Protection:
    """The projectors of the task under way, at this end."""
    assert isinstance(site.view, Protection)
    return site.view


def append_bases(bases: Tensors, site: Site) -> None:
    """Append Φ^(t) of every layer and U_L^(t); what was rounded on its way is made orthonormal again."""
    bank = SubspaceBank.from_tensors(site.known)
    for name, basis in bases.items():
        if basis.dtype != torch.float32:
            earlier = basis[:, :0] if name == ROUTING else bank.basis(name, len(basis))
            basis = orthonormalise(residual(basis, earlier)).float()
        if name == ROUTING:
            bank.routing.append(basis)
        else:
            bank.extend(name, basis, site.task)
    site.known.update(bank.to_tensors())


def ranks(known: Knowledge) -> tuple[dict[str, int], dict[str, int]]:
    """For the report: (layer → rank so far, layer → d), the routing bases together as one more."""
    bank = SubspaceBank.from_tensors(known)
    shapes = {name: basis.shape for name, basis in bank.layers.items()}
    if bank.routing:
        shapes[ROUTING] = bank.routed(len(bank.routing[0])).shape
    return {name: shape[1] for name, shape in shapes.items()}, {name: shape[0] for name, shape in shapes.items()}
