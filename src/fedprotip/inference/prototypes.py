"""The expert of Fed+SCR: the nearest class mean of unit features, which has no bias to new classes."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedprotip.inference.parts import Context, Expert, expert
from fedprotip.models.heads import Features

PROTOTYPES = "prototypes"


@dataclass(frozen=True)
class NearestPrototype:
    """Score of a class: minus the squared distance of a unit feature to its prototype; without one it never wins."""

    means: Tensor  # (p, d) unit vectors
    rows: Tensor  # (C,) the prototype of every candidate
    known: Tensor  # (C,) whether it has one

    def __call__(self, features: Features) -> Tensor:
        if not self.known.any():
            return torch.full((len(features), len(self.rows)), -torch.inf)
        products = F.normalize(features.final.cpu()) @ self.means.T
        return torch.where(self.known, 2 * products[:, self.rows] - 2, -torch.inf)


@expert(PROTOTYPES)
def _prototypes(given: Context) -> Expert:
    labels, means = (given.knowledge[f"{PROTOTYPES}/{part}"] for part in ("labels", "means"))
    if means.shape != (*labels.shape, given.network.features) or labels.dim() != 1 or not means.isfinite().all():
        raise ValueError(f"prototypes of shape {tuple(means.shape)} for {len(labels)} classes, or not finite")
    match = given.candidates.labels[:, None] == labels
    rows = match.int().argmax(1) if match.shape[1] else torch.zeros(len(match), dtype=torch.int64)
    return NearestPrototype(means, rows, match.any(1))
