"""What learning a task does to what is known about earlier ones, found without their data.

Class statistics of earlier tasks were summed with a network that has moved since. Its layers moved by ∆W with ∆W·Φ = 0
(Eq. 4), so an activation of an earlier task is changed by as much of it as lies outside Φ: a share λ of its energy,
which merging told. Of activations of this task a share ν lies outside, and ∆W is made of them. So samples of this task,
seen by W ± √(λ/ν)·∆W, are about as far from the statistics that were summed with W as samples of earlier tasks are from
theirs; how many of the right answers about them are still right tells what the task has cost. On the way back they lose
what the task was learned for, too, and further on they gain by it, neither of which earlier tasks do: so both ways
count alike.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from fedprotip.methods.local import Local
from fedprotip.methods.state import Form, Kept
from fedprotip.models.capture import Layer, capture, find_layers
from fedprotip.store.files import Tensors

LEFT = Kept("left", "shared", {"*": Form("1", torch.float64)})
"""λ of every layer: the share of the activations of the last task that no basis holds."""
COLUMNS, IMAGES = 256, 64
"""Input columns by which ν of a layer is known, of so many images."""
WAYS = (1, -1)
"""Further on the way that the network went, and back."""


@contextmanager
def as_earlier_tasks_see_it(local: Local, way: int) -> Iterator[bool]:
    """In between, the network is as far from itself as samples of this task have to see it; whether it is at all.

    Args:
        way: one of `WAYS`.
    """
    moved = _moved(local)
    if not moved:
        yield False
        return
    backbone = local.network.backbone
    parameters: Tensors = {layer.parameter: backbone.get_parameter(layer.parameter) for layer, _ in moved}
    shares = _outside(local, parameters)
    kept = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    try:
        for layer, start in moved:
            left = local.known.get(f"{LEFT.name}/{layer.name}")
            known = 1.0 if left is None else left.item()
            share = min(1.0, known / max(shares.get(layer.name, 0.0), 1e-12)) ** 0.5
            layer.weight(parameters).add_(way * share * (layer.weight(kept) - start))
        yield True
    finally:
        for name, parameter in parameters.items():
            parameter.copy_(kept[name])


def _moved(local: Local) -> list[tuple[Layer, Tensor]]:
    """Layers that keep out of Φ and whose W^(t,0) is known, with that."""
    start = local.site.start
    layers = [layer for layer, _ in local.site.view.projectors]
    known: Tensors = {
        layer.parameter: start[name] for layer in layers if (name := f"backbone.{layer.parameter}") in start
    }
    return [(layer, layer.weight(known)) for layer in layers if layer.parameter in known]


def _outside(local: Local, parameters: Iterable[str]) -> dict[str, float]:
    """ν of the layers of these parameters: the share of this client's activations that lies outside Φ."""
    every, backbone = find_layers(local.network.backbone, False), local.network.backbone
    seed = (local.settings.run.seed, "wear", local.task, local.client)
    layers = {name: every[name] for name in parameters}
    found = capture(backbone, local.images(IMAGES, IMAGES), COLUMNS, seed, layers, local.network.embed)
    outside = {layer.name: projector for layer, projector in local.site.view.projectors}
    shares = {}
    for name in found.keys() & outside.keys():
        whole = found[name].square().sum().item()
        shares[name] = outside[name].columns(found[name]).square().sum().item() / whole if whole else 1.0
    return shares
