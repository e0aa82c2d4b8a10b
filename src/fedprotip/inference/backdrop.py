"""How unlike everything learned a sample is, whatever its class."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedprotip.inference.statistics import Gaussians, Sums

TAIL = 0.1
"""What a sample that is e times as far from the mean of all samples as usual adds to `new`."""


@dataclass(frozen=True)
class Backdrop:
    """Two figures, each about 1 for usual samples.

    odd: squared distance from the mean of all samples where a network sees first (`first` features), per feature. Noise
    and blank pictures are far out there, though deep layers may find them usual. new: how much farther away the nearest
    class is than the bulk of all samples (relative Mahalanobis distance, as classes share one covariance, and half as
    much with their own directions), as it is for classes that were not learned; and how far the bulk is.
    """

    first: int
    surface: Gaussians
    everything: Gaussians

    @classmethod
    def of(cls, sums: Sums, first: int) -> "Backdrop":
        total = Sums(sums.counts.sum()[None], sums.sums.sum(0, keepdim=True), sums.moment)
        front = Sums(total.counts, total.sums[:, :first], total.moment[:first, :first])
        return cls(first, Gaussians.of(front), Gaussians.of(total))

    def __call__(self, features: Tensor, densities: Tensor, shared: Tensor) -> dict[str, Tensor]:
        """Of features (n, d) whose log-densities by class are (n, C); `shared`: without own directions of a class."""
        d = features.shape[1]
        away = -2 * self.surface.log_densities(features[:, : self.first])[:, 0] / self.first
        bulk = -2 * self.everything.log_densities(features)[:, 0] / d
        nearest, near = (-2 * found.amax(1) / d for found in (shared, densities))
        apart = (nearest - bulk) + (near - bulk) / 2 + TAIL * bulk.clamp_min(torch.finfo(torch.float32).tiny).log()
        return {"odd": away.nan_to_num(posinf=torch.inf), "new": 1 + apart.nan_to_num(posinf=torch.inf)}
