"""The one path from features to labels: experts score classes, routers score tasks, and a way joins one of each.

Everything here is per sample; a group of samples of one task pools its evidence first, by the same rule for one sample,
8, 64 or all that a device has sent.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedprotip.inference.calibration import MEASURES, Calibration
from fedprotip.inference.candidates import Candidates
from fedprotip.inference.experts import HEADS, StatisticsExpert, network_of
from fedprotip.inference.groups import mixture
from fedprotip.inference.parts import Expert, Router, Seen
from fedprotip.inference.statistics import FeatureMap
from fedprotip.models import Network
from fedprotip.models.heads import Features
from fedprotip.models.steps import Inputs


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
class Heard:
    """What experts and routers say about some samples: all that any mode needs."""

    candidates: Candidates
    scores: dict[str, Tensor]  # expert → (n, C); the first is the model's own
    evidence: dict[str, Tensor]  # way → (n, E)
    strange: dict[str, Tensor] = field(default_factory=dict)  # how unlike anything learned: score → (n,), high is odd
    _opinions: dict[str, Opinion] = field(default_factory=dict, repr=False, compare=False)

    def __len__(self) -> int:
        return len(next(iter(self.scores.values())))

    @property
    def own(self) -> str:
        """The expert that is the model's own, for the mode agnostic; without ways for aware too."""
        return next(iter(self.scores))

    def opinion(self, expert: str) -> Opinion:
        if expert not in self._opinions:
            classes = self.candidates.within_task(self.scores[expert])
            self._opinions[expert] = Opinion(classes, *self.candidates.best(classes))
        return self._opinions[expert]

    def some(self, chosen: Tensor) -> "Heard":
        """About the chosen samples only."""
        parts = (self.scores, self.evidence, self.strange)
        scores, evidence, strange = ({name: values[chosen] for name, values in part.items()} for part in parts)
        return Heard(self.candidates, scores, evidence, strange)

    @classmethod
    def joined(cls, parts: Sequence["Heard"]) -> "Heard":
        """About the samples of all parts, one after another."""

        def cat(pieces: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
            return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}

        scores, evidence = cat([part.scores for part in parts]), cat([part.evidence for part in parts])
        return cls(parts[0].candidates, scores, evidence, cat([part.strange for part in parts]))


@dataclass(frozen=True)
class Routed:
    """Samples whose tasks have been decided group by group."""

    samples: Tensor  # (m,)
    groups: Tensor  # (m,) the group of each
    decisions: Tensor  # (g, T) log p(task) of every group
    expert: str  # who answers
    labels: Tensor  # (m,) the answer for each sample


def _sees_birth(expert: Expert) -> bool:
    how = getattr(expert, "map", None)
    return isinstance(how, FeatureMap) and how.born


@dataclass(frozen=True)
class Inference:
    """All that turns features into labels."""

    candidates: Candidates
    experts: dict[str, Expert]
    ways: dict[str, Way] = field(default_factory=dict)
    chosen: str = ""
    """The way of modes single and batch64; the others are reported beside it."""
    calibration: Calibration = field(default_factory=Calibration)

    @property
    def on_images(self) -> bool:
        """Whether all experts see images only (they say `on_images`): then no backbone need run."""
        return not self.ways and all(getattr(expert, "on_images", False) for expert in self.experts.values())

    @property
    def sees_birth(self) -> bool:
        """Whether an expert asks for features of the network at birth."""
        return any(map(_sees_birth, self.experts.values()))

    def lean(self) -> "Inference":
        """The same answers without the network at birth, unless they are its own: a pass less for every image."""
        if self.ways and _sees_birth(self.experts[self.ways[self.chosen].expert]):
            return self
        experts = {name: expert for name, expert in self.experts.items() if not _sees_birth(expert)}
        ways = {name: way for name, way in self.ways.items() if way.expert in experts}
        return replace(self, experts=experts, ways=ways)

    def look(self, network: Network, inputs: Inputs) -> Features:
        """What experts and routers are to see of images, or of what a frozen prefix made of them."""
        if not self.on_images:
            return network.look(inputs, newborn=self.sees_birth)
        assert isinstance(inputs, Tensor), "a method whose experts see images says `sees_images`"
        return Features.none(inputs)

    def hear(self, features: Features) -> Heard:
        seen = Seen(features.final, {name: expert(features) for name, expert in self.experts.items()})
        evidence = {name: way.router.evidence(seen) for name, way in self.ways.items()}
        return Heard(self.candidates, seen.scores, evidence, self._strange(features, seen.scores))

    # Labels

    def aware(self, heard: Heard, tasks: Tensor) -> Tensor:
        """The label of each sample, given its task (n,); −1 where nothing is known about that task."""
        opinion, tasks = heard.opinion(self.answerer(heard)), tasks[:, None]
        known = opinion.best.gather(1, tasks) > -torch.inf
        return torch.where(known, opinion.labels.gather(1, tasks), -1)[:, 0]

    def answerer(self, heard: Heard) -> str:
        """The expert that answers once the task is known: that of the chosen way; without any the model's own."""
        return self.ways[self.chosen].expert if self.ways else heard.own

    def agnostic(self, heard: Heard) -> Tensor:
        """The label of the largest of all scores: no task is asked for."""
        return self.candidates.labels[heard.scores[heard.own].argmax(1)]

    def route(self, heard: Heard, name: str, groups: Sequence[Tensor] | None = None) -> Routed:
        """One decision for every group, by the way of this name; without groups every sample is decided alone."""
        way, evidence = self.ways[name], heard.evidence[name]
        if groups is None:
            samples = group = torch.arange(len(evidence))
            sizes = torch.ones_like(samples)
        else:
            samples, sizes = torch.cat(list(groups)), torch.tensor([len(members) for members in groups])
            group = torch.repeat_interleave(sizes)
        pooled = torch.nn.functional.embedding_bag(samples, evidence, sizes.cumsum(0) - sizes, mode="mean")
        decisions = self.decide(way, pooled, sizes.float())
        labels = self.labels(decisions, group, heard.opinion(way.expert), samples, way.hard)
        return Routed(samples, group, decisions, way.expert, labels)

    def decide(self, way: Way, evidence: Tensor, sizes: Tensor) -> Tensor:
        """log p(task) of groups with mean evidence (g, E), up to a constant of each: (g, T)."""
        scores = way.router.log_scores(evidence, sizes)
        if not way.hard:
            return scores
        best = torch.nn.functional.one_hot(scores.argmax(1), scores.shape[1]).bool()
        return torch.where(best, 0.0, -torch.inf)

    def mixed(self, evidence: Tensor) -> Tensor:
        """log p(task) of each sample of groups of one task or several, from log-likelihoods: (…, n, T) both."""
        temperature = self.calibration.temperature  # `posterior` divides by it
        return (mixture(evidence / temperature) * temperature).float()

    def labels(self, tasks: Tensor, group: Tensor, opinion: Opinion, samples: Tensor, hard: bool) -> Tensor:
        """The label of each of some samples (m,): the one with the largest `posterior`, in less time.

        Args:
            tasks: log p(task) of groups (g, T); group: that of each sample (m,).
            hard: every row of `tasks` has 0 for one task and −∞ for the others.
        """
        if hard:
            task = tasks.argmax(1)[group]
            sure = opinion.best[samples, task]
        elif self.candidates.distinct:
            sure, task = (tasks[group] + opinion.best[samples]).max(1)
        else:
            joint = tasks[group][:, self.candidates.tasks] + opinion.classes[samples]
            return self.candidates.known[0][self.posterior(joint).argmax(1)]
        return torch.where(sure == -torch.inf, self.candidates.commonest, opinion.labels[samples, task])

    # How sure

    def joint(self, heard: Heard, routed: Routed) -> Tensor:
        """log p(task, class) of samples whose tasks have been decided (m, C), before any calibration."""
        tasks = routed.decisions[routed.groups][:, self.candidates.tasks]
        return tasks + heard.opinion(routed.expert).classes[routed.samples]

    def posterior(self, joint: Tensor) -> Tensor:
        """p(label) of every label there is (m, L), calibrated, from log p(task, class) (m, C)."""
        return self.calibration.honest(self.candidates.probabilities(joint, self.calibration.temperature))

    def by_label(self, heard: Heard, routed: Routed) -> Tensor:
        """p(label) of every label there is, for samples whose tasks have been decided (m, L)."""
        return self.posterior(self.joint(heard, routed))

    def sureness(self, by_label: Tensor, routed: Routed) -> Tensor:
        """p(label) of the labels that were found, (m,), from `by_label`; 0 where there is none (−1)."""
        labels = routed.labels
        places = torch.searchsorted(self.candidates.known[0], labels.clamp_min(0))
        return by_label.gather(1, places[:, None])[:, 0] * (labels >= 0)

    def tasks(self, by_label: Tensor, routed: Routed) -> Tensor:
        """p(task) of samples whose tasks have been decided (m, T): the sum over its labels, if each has one task."""
        if not self.candidates.distinct:
            return (routed.decisions[routed.groups] / self.calibration.temperature).softmax(1)
        by_task = by_label.new_zeros(by_label.shape[0], routed.decisions.shape[1])
        return by_task.index_add_(1, self.candidates.tasks, by_label[:, self.candidates.known[1]]).clamp_max(1)

    def _strange(self, features: Features, scores: dict[str, Tensor]) -> dict[str, Tensor]:
        """How little samples look like anything learned, (n,), by every expert that can tell: higher is stranger.

        odd, new: class statistics (`Backdrop`) of the network that answers. energy: −log Σ exp of the heads' outputs.
        """
        found = self.strange(features, scores, network_of(self.ways[self.chosen].expert if self.ways else ""))
        return found | ({"energy": -scores[HEADS].logsumexp(1)} if HEADS in scores else {})

    def strange(self, features: Features, scores: dict[str, Tensor], network: str) -> dict[str, Tensor]:
        """How little samples look like anything learned, (n,), to class statistics of a network (`network_of`)."""
        expert = self.experts.get(network)
        return expert.strange(features, scores[network]) if isinstance(expert, StatisticsExpert) else {}

    def strangeness(self, heard: Heard) -> Tensor:
        """How unusual samples are among held-back ones, from 0 to 1; without class statistics NaN."""
        if any(name not in heard.strange for name in MEASURES):
            return torch.full_like(heard.scores[heard.own][:, 0], torch.nan)
        return self.calibration.unusual({name: heard.strange[name] for name in MEASURES})
