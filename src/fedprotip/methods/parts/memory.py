"""Exemplars: samples of past classes that a client keeps, every class in the order of herding (Rebuffi et al. 2017)."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from fedprotip.models.prefix import InputBatch
from fedprotip.store.files import Tensors
from fedprotip.stream.look import Look


def room(memory: int, classes: int) -> int:
    """m: the exemplars of a class where so many share the memory."""
    return memory // max(classes, 1)


def herding(features: Tensor, count: int) -> Tensor:
    """Rows of features (n, d), best first: with each further one the mean of those chosen stays near that of all.

    Features are taken at length 1; no row is chosen twice.
    """
    normed = F.normalize(features.double(), dim=1)
    mean, total = normed.mean(0), torch.zeros_like(normed[0])
    free, chosen = torch.ones(len(normed), dtype=torch.bool, device=normed.device), list[int]()
    for size in range(1, min(count, len(normed)) + 1):
        away = (mean * size - total - normed).square().sum(1)
        row = int(torch.where(free, away, torch.inf).argmin())
        free[row] = False
        total = total + normed[row]
        chosen.append(row)
    return torch.tensor(chosen, dtype=torch.int64)


def chosen_rows(features: Tensor, labels: Tensor, count: int) -> Tensor:
    """Rows of the exemplars of every class, class after class."""
    rows = [(labels == label).nonzero()[:, 0] for label in labels.unique()]
    found = [mine[herding(features[mine.to(features.device)], count)] for mine in rows]
    return torch.cat([labels.new_zeros(0, dtype=torch.int64), *found])


def first_rows(labels: Tensor, count: int) -> Tensor:
    """Rows of the first `count` of every class, in their order: as they were herded, so the best ones."""
    before = (labels[:, None] == labels).tril(-1).sum(1)
    return (before < count).nonzero()[:, 0]


def shortened(exemplars: Tensors, count: int, without: Tensor) -> Tensors:
    """At most `count` exemplars of every class, and none of the classes `without`."""
    rows = first_rows(exemplars["labels"], count)
    rows = rows[~torch.isin(exemplars["labels"][rows], without)]
    return {name: tensor[rows] for name, tensor in exemplars.items()}


def replayed(
    own: Iterator[InputBatch],
    exemplars: Tensors,
    samples: int,
    batch: int,
    chance: torch.Generator,
    look: Look | None,
) -> Iterator[InputBatch]:
    """Own batches and exemplars together, as if they were one set: each pass over the samples sees every exemplar once.

    Every batch has its share of both, and none is longer than the setting asks.

    Args:
        samples: own ones in a pass. batch: the longest one. look: with it exemplars vary as new samples do.
    """
    order, seen, used = iter(_endless(len(exemplars["labels"]), chance)), 0, 0
    for images, labels in own:
        assert isinstance(images, Tensor)  # `sees_images`
        seen += len(labels)
        due = seen * len(exemplars["labels"]) // samples - used
        used += due
        rows = torch.tensor([next(order) for _ in range(due)], dtype=torch.int64)
        old = exemplars["images"][rows]
        old = varied(old, look, chance) if look and due else old
        images, labels = torch.cat([images, old]), torch.cat([labels, exemplars["labels"][rows]])
        mixed = torch.randperm(len(labels), generator=chance)
        for part in mixed.tensor_split(-(-len(labels) // batch)):
            yield images[part], labels[part]


def varied(images: Tensor, look: Look, chance: torch.Generator) -> Tensor:
    """Kept images, which are normalised, augmented as new samples are.

    By the same steps: where a crop has another border, or the light never changes, a network tells old from new by it.
    """
    return look.batch((look.pixels.scaled(images) * 255).round().to(torch.uint8), chance)


def _endless(count: int, chance: torch.Generator) -> Iterator[int]:
    while count:
        yield from torch.randperm(count, generator=chance).tolist()
