"""Experts: features of n samples → scores (n, C)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedprotip.inference.backdrop import Backdrop
from fedprotip.inference.candidates import Candidates
from fedprotip.inference.parts import Context, Expert, expert
from fedprotip.inference.statistics import FeatureMap, Gaussians, Sums, recall, ridge
from fedprotip.models import Network
from fedprotip.models.heads import Features
from fedprotip.stream.plan import Options

HEADS, STATISTICS, SHARED, RIDGE = "heads", "statistics", "shared", "ridge"
BIRTH, BIRTH_SHARED = "birth", "birth-shared"
"""Names of experts. The last two are as STATISTICS and SHARED, by sums of the network before any training."""


def network_of(expert: str) -> str:
    """The class statistics of the network that an expert sees: as it is, or at birth."""
    return BIRTH if expert in (BIRTH, BIRTH_SHARED) else STATISTICS


@dataclass(frozen=True)
class HeadExpert:
    """The trained heads; a head that all tasks share answers for each of them."""

    network: Network
    tasks: int

    def __call__(self, features: Features) -> Tensor:
        heads = [self.network.heads[self.network.head_of(task)] for task in range(self.tasks)]
        weights, biases = (torch.cat([getattr(head, part) for head in heads]) for part in ("weight", "bias"))
        return torch.nn.functional.linear(features.final, weights, biases).cpu()


@dataclass(frozen=True)
class StatisticsExpert:
    """Gaussians around class means: the log-density of every answer."""

    gaussians: Gaussians
    rows: Tensor  # (C,) the Gaussian of each answer: a label seen in several tasks has one, with domains one each
    map: FeatureMap
    backdrop: Backdrop

    @classmethod
    def of(
        cls, sums: Sums, candidates: Candidates, feature_map: FeatureMap, pooled: bool, first: int = 0
    ) -> "StatisticsExpert":
        """`pooled`: statistics of a label that several tasks hold add up; `first`: features of the first stage."""
        rows = torch.arange(len(candidates))
        if pooled:
            sums, rows = candidates.by_label(sums)
        backdrop = Backdrop.of(sums, feature_map.out if feature_map.width else first or feature_map.out)
        return cls(Gaussians.of(sums, omega=feature_map.omega), rows, feature_map, backdrop)

    def __call__(self, features: Features) -> Tensor:
        return self.gaussians.log_densities(self.map.see(features))[:, self.rows]

    def strange(self, features: Features, scores: Tensor) -> dict[str, Tensor]:
        """How unusual samples look, (n,) each: `Backdrop`."""
        seen = self.map.see(features).cpu().float()
        return self.backdrop(seen, scores, self.gaussians.alike().log_densities(seen))

    def whiten(self, features: Features) -> Tensor:
        """Mapped features in standard deviations of a sample around its class."""
        return self.gaussians.whiten(self.map.see(features))


@dataclass(frozen=True)
class LinearExpert:
    """Weights and biases in closed form on mapped features."""

    weights: Tensor  # (C, M)
    bias: Tensor  # (C,)
    map: FeatureMap

    def __call__(self, features: Features) -> Tensor:
        return self.map.see(features).cpu() @ self.weights.T + self.bias


@expert(HEADS)
def _heads(given: Context) -> Expert:
    return HeadExpert(given.network, len(given.classes))


@expert(STATISTICS)
def _statistics(given: Context) -> Expert:
    """A class seen again adds up (`pooled`), but for domains, each of which has class means of its own."""
    pooled = bool(given.options["pooled"])
    return StatisticsExpert.of(recall(given.knowledge), given.candidates, _map(given), pooled, given.network.first)


@expert(SHARED)
def _shared(given: Context) -> Expert:
    """The classes of all domains together: it needs no domain."""
    return StatisticsExpert.of(recall(given.knowledge), given.candidates, _map(given), True, given.network.first)


@expert(BIRTH)
def _birth(given: Context) -> Expert:
    return _of_birth(given, bool(given.options["pooled"]))


@expert(BIRTH_SHARED)
def _birth_shared(given: Context) -> Expert:
    return _of_birth(given, True)


def _of_birth(given: Context, pooled: bool) -> Expert:
    sums = recall(given.knowledge, BIRTH)
    return StatisticsExpert.of(sums, given.candidates, _map(given), pooled, given.network.first)


@expert(RIDGE)
def _ridge(given: Context) -> Expert:
    sums, rows = given.candidates.by_label(recall(given.knowledge))
    weights, bias = ridge(sums, float(given.options["strength"]), bool(given.options.get("centred", True)))
    return LinearExpert(weights[rows], bias[rows], _map(given))


def _map(given: Context) -> FeatureMap:
    return feature_map(given.network, given.options)


def feature_map(network: Network, options: Options) -> FeatureMap:
    """What class statistics see of a network's features, by the options of an expert."""
    width = int(options["features"])
    final = bool(options.get("final", False))
    d = network.features if final else network.stacked
    columns = min(2 * int(options["directions"]), width or d)
    born = bool(options.get("born", False))
    return FeatureMap(d, width, int(options["seed"]), bool(options["root"]), columns, final, born)
