"""A reservoir: of all samples that passed by, each is in it with the same chance (Vitter's algorithm R)."""

import torch
from torch import Tensor

from fedprotip.methods.state import Form
from fedprotip.store.files import Tensors

FORMS = {
    "images": Form("n c h w"),
    "labels": Form("n", torch.int64),
    "seen": Form("", torch.int64),
    "task": Form("", torch.int64),
}
"""As a client keeps it: the samples, how many have passed by, and the last task of which some did."""


def slots(seen: int, count: int, capacity: int, chance: torch.Generator) -> Tensor:
    """Where each of `count` samples goes when `seen` have passed before (count,); −1: nowhere."""
    places = seen + torch.arange(count)
    drawn = (torch.rand(count, generator=chance, dtype=torch.float64) * (places + 1)).long()
    drawn = torch.where(places < capacity, places, drawn)
    return torch.where(drawn < capacity, drawn, -1)


def offered(kept: Tensors, images: Tensor, labels: Tensor, capacity: int, chance: torch.Generator) -> Tensors:
    """The reservoir after these samples (n, c, h, w) and (n,) have passed by, in their order."""
    seen = int(kept["seen"])
    taken = {slot: index for index, slot in enumerate(slots(seen, len(labels), capacity, chance).tolist()) if slot >= 0}
    places, samples = (torch.tensor(values, dtype=torch.int64) for values in (list(taken), list(taken.values())))
    size = max(len(kept["labels"]), int(places.max()) + 1 if len(places) else 0)
    found = {"seen": torch.tensor(seen + len(labels)), "task": kept["task"]}
    for name, new in (("images", images), ("labels", labels)):
        grown = torch.cat([kept[name], kept[name].new_zeros(size - len(kept[name]), *new.shape[1:])])
        grown[places] = new[samples]
        found[name] = grown
    return found


def empty(shape: tuple[int, int, int]) -> Tensors:
    """For images of this shape, before any has passed."""
    numbers = {"seen": torch.tensor(0), "task": torch.tensor(-1), "labels": torch.zeros(0, dtype=torch.int64)}
    return {"images": torch.zeros(0, *shape), **numbers}
