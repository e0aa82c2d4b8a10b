"""From features to answers: experts score classes, routers score tasks, and a way joins one of each.

Everything here is per sample; a group of samples of one task pools its evidence first, by the same rule for one sample,
8, 64 or all that a device has sent.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from fedprotip.inference.calibration import Calibration
from fedprotip.inference.route import CosineRouter, energies
from fedprotip.inference.statistics import FeatureMap, Gaussians, Sums
from fedprotip.models import Network

HEADS, STATISTICS, SHARED, RIDGE = "heads", "statistics", "shared", "ridge"
"""Names of experts."""


@dataclass(frozen=True)
class Columns:
    """All answers there are, a class of a task each, in the order in which every expert scores them."""

    labels: Tensor  # (C,) global labels; with overlap or domains a label stands in several tasks
    tasks: Tensor  # (C,)

    @classmethod
    def of(cls, classes: Sequence[Sequence[int]]) -> "Columns":
        """From the classes of every task."""
        labels = torch.tensor([label for known in classes for label in known])
        return cls(labels, torch.repeat_interleave(torch.tensor([len(known) for known in classes])))

    def by_task(self, scores: Tensor) -> Tensor:
        """log Σ exp of the scores (n, C) of every task's classes, (n, T)."""
        return self._spread(scores).logsumexp(2)

    def largest(self, scores: Tensor) -> Tensor:
        """The largest score of every task's classes, (n, T)."""
        return self._spread(scores).amax(2)

    def within_task(self, scores: Tensor) -> Tensor:
        """log p(class | task), (n, C): what an expert says once the task is known."""
        spread = self._spread(scores).log_softmax(2)
        return spread[:, self.tasks, self._table[1]].nan_to_num(-torch.inf)

    def best(self, within: Tensor) -> tuple[Tensor, Tensor]:
        """The largest log p(class | task) (n, C) of every task's classes, and its label: (n, T) each."""
        largest = self._spread(within).max(2)
        columns = self._table[0].gather(1, largest.indices.T).T
        return largest.values, self.labels[columns.clamp_max(len(self.labels) - 1)]

    def find(self, labels: Tensor, tasks: Tensor) -> Tensor:
        """The column of each label of a task, (n,)."""
        return ((labels[:, None] == self.labels) & (tasks[:, None] == self.tasks)).int().argmax(1)

    @cached_property
    def known(self) -> tuple[Tensor, Tensor]:
        """All labels, each once, and the place of every column's label among them (C,)."""
        labels, places = self.labels.unique(return_inverse=True)
        return labels, places

    @property
    def distinct(self) -> bool:
        """Whether every label stands in one task only."""
        return len(self.known[0]) == len(self.labels)

    def by_label(self, sums: Sums) -> tuple[Sums, Tensor]:
        """Sums of every label, of whatever tasks, and the row of each answer among them (C,)."""
        known, rows = self.known
        counts, totals = sums.counts.new_zeros(len(known)), sums.sums.new_zeros(len(known), sums.sums.shape[1])
        return Sums(counts.index_add(0, rows, sums.counts), totals.index_add(0, rows, sums.sums), sums.moment), rows

    def _spread(self, scores: Tensor) -> Tensor:
        """Scores (n, C) as (n, T, most classes of a task), −∞ where a task has fewer."""
        return torch.nn.functional.pad(scores, (0, 1), value=-torch.inf)[:, self._table[0]]

    @cached_property
    def _table(self) -> tuple[Tensor, Tensor]:
        """The columns of every task (T, most), C where it has no more, and the place of each column in its row (C,)."""
        sizes = torch.bincount(self.tasks)
        starts = sizes.cumsum(0) - sizes
        offsets = torch.arange(int(sizes.max()))
        columns = torch.where(offsets < sizes[:, None], starts[:, None] + offsets, len(self.tasks))
        return columns, torch.arange(len(self.tasks)) - starts[self.tasks]


# Experts: features (n, d) → scores (n, C)


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
    def of(cls, sums: Sums, columns: Columns, feature_map: FeatureMap, pooled: bool) -> "StatisticsExpert":
        """`pooled`: statistics of a label that several tasks hold add up."""
        if not pooled:
            return cls(Gaussians.of(sums), torch.arange(len(columns.labels)), feature_map)
        together, rows = columns.by_label(sums)
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


Expert = HeadExpert | StatisticsExpert | LinearExpert


# Routers: what a sample tells about its task


@dataclass(frozen=True)
class Seen:
    """Some samples as routers see them."""

    features: Tensor  # (n, d)
    scores: dict[str, Tensor]  # expert → (n, C)


class Router:
    """Evidence of samples, which is averaged over a group, and log-scores of every task from that average."""

    adds: bool = True
    """Whether the evidence of a sample is its log-likelihood by task, so that it may come from a mixture of tasks."""

    def evidence(self, seen: Seen) -> Tensor:
        """(n, E). Every router has its own; this one is reached only from a class that forgot it."""
        raise NotImplementedError(f"{type(self).__name__} is a router without evidence")

    def log_scores(self, evidence: Tensor, sizes: Tensor) -> Tensor:
        """(g, T) for groups with mean evidence (g, E) and so many members (g,). Log-likelihoods of samples add up."""
        return evidence * sizes[:, None]


@dataclass(frozen=True)
class Vote(Router):
    """The paper: relevance vectors, cosine similarity to every client's references, majority."""

    cosine: CosineRouter
    adds = False

    def evidence(self, seen: Seen) -> Tensor:
        return self.cosine.energies(seen.features).cpu()

    def log_scores(self, evidence: Tensor, sizes: Tensor) -> Tensor:
        return self.cosine.scores(evidence.sqrt()).log()


@dataclass(frozen=True)
class RelevanceGaussians(Router):
    """Log-likelihood of the logs of a sample's energies ‖U_t U_tᵀ a‖², as independent Gaussians for every task."""

    bases: Sequence[Tensor]
    means: Tensor  # (T, T) mean energy of task τ in U_t
    variances: Tensor  # (T, T)

    def evidence(self, seen: Seen) -> Tensor:
        floor = self.means.max().clamp_min(torch.finfo(torch.float32).tiny) * 1e-6
        logs = energies(seen.features, self.bases).cpu().double().clamp_min(floor).log()
        means = self.means.double().clamp_min(floor)
        spread = (self.variances.double() / means.square()).log1p().clamp_min(1e-4)  # of the log, if it is normal
        centres = means.log() - spread / 2
        squares = logs.square() @ (1 / spread).T - 2 * logs @ (centres / spread).T  # Σ (log − centre)² / spread
        return -0.5 * (squares + (centres.square() / spread + spread.log()).sum(1))


@dataclass(frozen=True)
class ClassEvidence(Router):
    """log p(a | task): the mean density of its classes, by class statistics."""

    columns: Columns
    expert: str = STATISTICS

    def evidence(self, seen: Seen) -> Tensor:
        scores = seen.scores[self.expert]
        known = self.columns.by_task(torch.where(scores[:1].isfinite(), 0.0, -torch.inf))
        return (self.columns.by_task(scores) - known).nan_to_num(nan=-1e30, neginf=-1e30)


@dataclass(frozen=True)
class LargestOutput(Router):
    """The task of the largest output of an expert; over a group, of the largest mean."""

    columns: Columns
    expert: str
    adds = False

    def evidence(self, seen: Seen) -> Tensor:
        return self.columns.largest(seen.scores[self.expert])


# Ways


@dataclass(frozen=True)
class Way:
    """A router, and the expert that answers once it has spoken."""

    router: Router
    expert: str
    hard: bool = True
    """Whether the best task alone counts; else log p(task) and log p(class | task) add up, and the sum decides."""


@dataclass(frozen=True)
class Opinion:
    """What an expert says about samples once their task is known."""

    classes: Tensor  # (n, C) log p(class | task)
    best: Tensor  # (n, T) the largest of every task
    labels: Tensor  # (n, T) the label that has it


@dataclass(frozen=True)
class Routed:
    """Samples whose tasks have been decided group by group."""

    samples: Tensor  # (m,)
    groups: Tensor  # (m,) the group of each
    decisions: Tensor  # (g, T) log p(task) of every group
    labels: Tensor  # (m,) the answer for each sample


@dataclass(frozen=True)
class Inference:
    """All that answering needs: the first expert is the model's own, for the modes aware and agnostic."""

    columns: Columns
    experts: dict[str, Expert]
    ways: dict[str, Way] = field(default_factory=dict)
    chosen: str = ""
    """The way of modes single and batch64; the others are reported beside it."""
    calibration: Calibration = field(default_factory=Calibration)

    def see(self, features: Tensor) -> Seen:
        return Seen(features, {name: expert(features) for name, expert in self.experts.items()})

    def opinions(self, scores: dict[str, Tensor]) -> dict[str, Opinion]:
        """What every expert says, by its scores (n, C)."""
        within = {name: self.columns.within_task(values) for name, values in scores.items()}
        return {name: Opinion(classes, *self.columns.best(classes)) for name, classes in within.items()}

    def decide(self, way: Way, evidence: Tensor, sizes: Tensor) -> Tensor:
        """log p(task) of groups with mean evidence (g, E), up to a constant of each: (g, T)."""
        scores = way.router.log_scores(evidence, sizes)
        if not way.hard:
            return scores
        best = torch.nn.functional.one_hot(scores.argmax(1), scores.shape[1]).bool()
        return torch.where(best, 0.0, -torch.inf)

    def route(self, way: Way, evidence: Tensor, opinion: Opinion, groups: Sequence[Tensor] | None) -> Routed:
        """One decision for every group; without groups every sample is decided alone."""
        if groups is None:
            samples = group = torch.arange(len(evidence))
            sizes = torch.ones_like(samples)
        else:
            samples, sizes = torch.cat(list(groups)), torch.tensor([len(members) for members in groups])
            group = torch.repeat_interleave(sizes)
        pooled = torch.nn.functional.embedding_bag(samples, evidence, sizes.cumsum(0) - sizes, mode="mean")
        decisions = self.decide(way, pooled, sizes.float())
        return Routed(samples, group, decisions, self.labels(decisions, group, opinion, samples, way.hard))

    def labels(self, tasks: Tensor, group: Tensor, opinion: Opinion, samples: Tensor, hard: bool) -> Tensor:
        """The label of each of some samples (m,), as `answer` finds it, in less time.

        Args:
            tasks: log p(task) of groups (g, T); group: that of each sample (m,).
            hard: every row of `tasks` has 0 for one task and −∞ for the others.
        """
        if hard:
            task = tasks.argmax(1)[group]
            sure = opinion.best[samples, task]
        elif self.columns.distinct:
            sure, task = (tasks[group] + opinion.best[samples]).max(1)
        else:
            return self.answer(tasks[group], opinion.classes[samples])[0]
        known, places = self.columns.known
        commonest = known[torch.bincount(places).argmax()]  # where nobody knows, all columns are alike
        return torch.where(sure == -torch.inf, commonest, opinion.labels[samples, task])

    def joint(self, evidence: dict[str, Tensor], scores: dict[str, Tensor]) -> Tensor:
        """log p(task, class) of samples that come alone (n, C), by the chosen way, before any calibration."""
        way, own = self.ways[self.chosen], evidence[self.chosen]
        decisions = self.decide(way, own, torch.ones(len(own)))
        return decisions[:, self.columns.tasks] + self.columns.within_task(scores[way.expert])

    def single(self, evidence: dict[str, Tensor], scores: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Labels and probabilities of samples that come alone, by the chosen way."""
        return self._labels(self.joint(evidence, scores))

    def unusual(self, scores: dict[str, Tensor]) -> dict[str, Tensor]:
        """How little samples look like anything learned, (n,), by every expert: higher is stranger.

        mahalanobis: squared distance to the nearest class mean. energy: −log Σ exp of the heads' outputs.
        """
        found = {}
        if STATISTICS in scores:
            found["mahalanobis"] = -2 * scores[STATISTICS].amax(1)
        if HEADS in scores:
            found["energy"] = -scores[HEADS].logsumexp(1)
        return found

    def strangeness(self, scores: dict[str, Tensor]) -> Tensor:
        """How unusual samples are among held-back ones, from 0 to 1; without class statistics NaN."""
        found = self.unusual(scores).get("mahalanobis")
        if found is None:
            return torch.full((len(next(iter(scores.values()))),), torch.nan)
        return self.calibration.unusual(found)

    def answer(self, tasks: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
        """Labels (n,) and their probabilities (n,) from log p(task) (n, T) and log p(class | task) (n, C)."""
        return self._labels(tasks[:, self.columns.tasks] + classes)

    def _labels(self, joint: Tensor) -> tuple[Tensor, Tensor]:
        joint = joint.masked_fill((joint == -torch.inf).all(1, keepdim=True), 0.0)  # nobody knows: all alike
        joint = (joint / self.calibration.temperature).softmax(1)
        known, places = self.columns.known
        by_label = joint.new_zeros(len(joint), len(known)).index_add_(1, places, joint)
        surest = by_label.max(1)
        return known[surest.indices], surest.values


def with_cosine(network: Network, router: CosineRouter, classes: Sequence[Sequence[int]]) -> Inference:
    """The paper's inference alone: heads, and the vote that chooses one."""
    ways = {"cosine": Way(Vote(router), HEADS)}
    return Inference(Columns.of(classes), {HEADS: HeadExpert(network, len(classes))}, ways, "cosine")
