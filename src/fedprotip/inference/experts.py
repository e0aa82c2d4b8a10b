"""Experts: features (n, d) → scores (n, C)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedprotip.inference.candidates import Candidates
from fedprotip.inference.parts import Context, Expert, expert
from fedprotip.inference.statistics import FeatureMap, Gaussians, Sums, recall, ridge
from fedprotip.models import Network

HEADS, STATISTICS, SHARED, RIDGE = "heads", "statistics", "shared", "ridge"
"""Names of experts."""


@dataclass(frozen=True)
class HeadExpert:
    """The trained heads; a head that all tasks share answers for each of them."""

    network: Network
    tasks: int

    def __call__(self, features: Tensor) -> Tensor:
        heads = [self.network.heads[self.network.head_of(task)] for task in range(self.tasks)]
        weights, biases = (torch.cat([getattr(head, part) for head in heads]) for part in ("weight", "bias"))
        return torch.nn.functional.linear(features, weights, biases).cpu()


@dataclass(frozen=True)
class StatisticsExpert:
    """Gaussians around class means: the log-density of every answer."""

    gaussians: Gaussians
    rows: Tensor  # (C,) the Gaussian of each answer: a label seen in several tasks has one, with domains one each
    map: FeatureMap

    @classmethod
    def of(cls, sums: Sums, candidates: Candidates, feature_map: FeatureMap, pooled: bool) -> "StatisticsExpert":
        """`pooled`: statistics of a label that several tasks hold add up."""
        if not pooled:
            return cls(Gaussians.of(sums), torch.arange(len(candidates)), feature_map)
        together, rows = candidates.by_label(sums)
        return cls(Gaussians.of(together), rows, feature_map)

    def __call__(self, features: Tensor) -> Tensor:
        return self.gaussians.log_densities(self.map(features))[:, self.rows]

    def whiten(self, features: Tensor) -> Tensor:
        """Mapped features in standard deviations of a sample around its class."""
        return self.gaussians.whiten(self.map(features))


@dataclass(frozen=True)
class LinearExpert:
    """Weights and biases in closed form on mapped features."""

    weights: Tensor  # (C, M)
    bias: Tensor  # (C,)
    map: FeatureMap

    def __call__(self, features: Tensor) -> Tensor:
        return self.map(features).cpu() @ self.weights.T + self.bias


@expert(HEADS)
def _heads(given: Context) -> Expert:
    return HeadExpert(given.network, len(given.classes))


@expert(STATISTICS)
def _statistics(given: Context) -> Expert:
    """A class seen again adds up (`pooled`), but for domains, each of which has class means of its own."""
    pooled = bool(given.options["pooled"])
    return StatisticsExpert.of(recall(given.knowledge), given.candidates, _map(given), pooled)


@expert(SHARED)
def _shared(given: Context) -> Expert:
    """The classes of all domains together: it needs no domain."""
    return StatisticsExpert.of(recall(given.knowledge), given.candidates, _map(given), pooled=True)


@expert(RIDGE)
def _ridge(given: Context) -> Expert:
    sums, rows = given.candidates.by_label(recall(given.knowledge))
    weights, bias = ridge(sums, float(given.options["strength"]))
    return LinearExpert(weights[rows], bias[rows], _map(given))


def _map(given: Context) -> FeatureMap:
    return FeatureMap(given.network.features, int(given.options["features"]), int(given.options["seed"]))
