"""LGA: No One Left Behind, real-world federated class-incremental learning (Dong et al. 2023), the successor of GLFC.

As in GLFC, clients replay exemplars and follow the best old model, which a proxy server finds by images that it
reconstructs from gradients. But every old task is a group of its own, so that none is forgotten for another one that is
harder, weights count less in early tasks and stay within bounds, and both terms of the loss have them. The proxy looks
at noisy copies of its images' features: one lucky prototype does not decide.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedprotip.methods.base import About, register
from fedprotip.methods.local import Local
from fedprotip.methods.parts import proxy
from fedprotip.methods.parts.transition import (
    TransitionOptions,
    Transitions,
    binary_loss,
    errors,
    one_hot,
    softened,
    tasks_of,
)
from fedprotip.methods.site import Site
from fedprotip.models.steps import Inputs
from fedprotip.settings import Settings

RADIUS = 0.15
"""Of noise around features, where the first task has left no images to measure it by."""


class LGAOptions(TransitionOptions):
    name: str = Field("lga", description="Method; its own settings follow.")
    strength: float = Field(1.0, gt=0, description="λ: weight of the loss.")
    groups: Literal["task", "nested"] = Field(
        "task",
        description="Old samples that share a mean error. task: those of the same task; nested: those of a task and "
        "all before it, summed over tasks, as the published code does.",
    )
    lowest: float = Field(0.5, ge=0, description="Smallest weight of a sample.")
    highest: float = Field(5.0, gt=0, description="Largest weight of a sample.")
    ignored: int = Field(6, ge=0, description="Rounds of a task before the server begins to compare models.")
    copies: int = Field(5, ge=1, description="Noisy copies of each feature that the server judges models by.")
    bound: float = Field(0.1, gt=0, description="Longest noise: its square as a share of the summed variances.")
    tries: int = Field(100, ge=1, description="Draws of a noise that is too long, before it is made shorter.")

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> "LGAOptions":
        if self.lowest > self.highest:
            raise ValueError(f"lowest = {self.lowest} is above highest = {self.highest}")
        return self


@register
class LGA(Transitions):
    name = "lga"
    about = About(
        "replays exemplars, every old task balanced by itself, and keeps relations that the best old model saw",
        stores="raw samples of old classes, 2,000 at each client",
        sends="the model, every round; gradients of disturbed prototypes and the best old model, once a task",
        needs="clients that may keep samples, a server that may reconstruct prototypes",
    )
    Options = LGAOptions

    def __init__(self, settings: Settings) -> None:
        assert isinstance(settings.method, LGAOptions)
        self.ignored = settings.method.ignored
        super().__init__(settings)

    def cautions(self) -> Sequence[str]:
        rounds = self.settings.train.rounds
        if self.ignored < rounds:
            return ()
        return (
            f"LGA's server compares no models: method.ignored = {self.ignored} leaves none of train.rounds = {rounds}, "
            f"so the last model of a task counts as its best; choose method.ignored below {rounds}.",
        )

    def loss(self, local: Local, inputs: Inputs, labels: Tensor) -> Tensor:
        """λ·(mean w·BCE(z, y) + mean w·BCE(z, y with what the old model says))."""
        options, network = self.settings.method, local.network
        assert isinstance(options, LGAOptions)
        logits, targets = network(inputs), one_hot(network, labels)
        weights = torch.ones_like(logits[:, 0])
        if local.task > 0:
            weights = balance(
                errors(logits, targets), tasks_of(network, labels), local.task, options.groups == "nested"
            )
            weights = weights.clamp(options.lowest, options.highest)
        loss = (weights * binary_loss(logits, targets, options.per_class)).mean()
        teacher = local.scratch["teacher"]
        if teacher is not None and local.task > 0:
            relations = softened(teacher, inputs, targets, local.task)
            loss = loss + (weights * binary_loss(logits, relations, options.per_class)).mean()
        return options.strength * loss

    def succeeding(self, site: Site) -> None:
        """The first task's images say how far features of a class spread."""
        if f"{proxy.PROXY}/radius" not in site.known and len(site.known.get(f"{proxy.MONITOR}/labels", ())):
            site.known[f"{proxy.PROXY}/radius"] = radius(*proxy.monitor_features(site))

    def performance(self, site: Site) -> float:
        """Accuracy on noisy copies of features; in the first task on the features themselves."""
        options = self.settings.method
        assert isinstance(options, LGAOptions)
        features, labels = proxy.monitor_features(site)
        if site.task == 0:
            return proxy.accuracy(site.network, features, labels)
        length = site.known.get(f"{proxy.PROXY}/radius", torch.tensor(RADIUS)).item()
        chance = site.chance("copies", int(site.known[f"{proxy.PROXY}/rounds"]))
        noisy = [
            copies(features[labels == label], length, options.copies, options.bound, options.tries, chance)
            for label in labels.unique()
        ]
        told = torch.cat([label.repeat(len(part)) for label, part in zip(labels.unique(), noisy, strict=True)])
        return proxy.accuracy(site.network, torch.cat(noisy), told)


def balance(wrong: Tensor, tasks: Tensor, task: int, nested: bool = False) -> Tensor:
    """g_i^(t/(t+1)) over its mean in the group of the sample's task (n,), so each task has mean 1."""
    softer = wrong ** (task / (task + 1))
    weights = torch.zeros_like(softer)
    for group in tasks.unique().tolist():
        mine = tasks <= group if nested and group < task else tasks == group
        mean = softer[mine].mean()
        weights = weights + torch.where(mine, softer / mean if mean > 0 else torch.ones_like(softer), 0.0)
    return weights


def spread(features: Tensor) -> Tensor:
    """Variance of every feature (d,) over rows (n, d); none where there is but one row."""
    return features.var(0) if len(features) > 1 else torch.zeros_like(features[0])


def radius(features: Tensor, labels: Tensor) -> Tensor:
    """r = root of the mean over classes of tr(Cov)/d."""
    return torch.stack([spread(features[labels == label]).mean() for label in labels.unique()]).mean().sqrt()


def copies(features: Tensor, length: float, count: int, bound: float, tries: int, chance: torch.Generator) -> Tensor:
    """Each of the features (n, d) of a class so often, with noise r·N(0, v), v the squared variances of the class.

    Noise whose square is longer than `bound`·Σv is drawn again; what is too long after all tries is cut to that length.
    """
    deviations = spread(features)  # v is its square
    rows = features.repeat(count, 1)
    most = bound * deviations.square().sum()
    noise = torch.zeros_like(rows)
    late = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
    for _ in range(tries):
        fresh = torch.randn(int(late.sum()), rows.shape[1], generator=chance).to(rows)
        noise[late] = length * deviations * fresh
        late = noise.square().sum(1) > most
        if not late.any():
            break
    lengths = noise.square().sum(1, keepdim=True)
    return rows + torch.where(late[:, None], noise * (most / lengths.clamp_min(1e-30)).sqrt(), noise)
