"""STSA (Guan et al., arXiv 2506.01327): ridge regression from statistics summed over clients (space) and tasks (time).

The backbone learns in the first task, by federated averaging, and stands still from then on. Features pass a fixed
random map, x = relu(f·R). The sums G = Σ xxᵀ and P = Σ xyᵀ over all clients and tasks are those of all data at once,
and W = (G + γI)⁻¹P is the classifier: nothing is forgotten, however data are spread.

STSA-E (variant "first") sends no products. A client splits its samples of a class into groups and sends their sums and
numbers; means of groups differ as much as samples do, only less, so the server estimates G from them.
"""

from collections.abc import Iterable, Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedprotip.errors import UsageError
from fedprotip.inference.experts import RIDGE, feature_map
from fedprotip.inference.statistics import Sums
from fedprotip.messages import SAMPLES, BadMessage, Message, Spec
from fedprotip.methods.base import About, Method, register
from fedprotip.methods.exchange import Exchange, Sender
from fedprotip.methods.local import Local
from fedprotip.methods.parts import statistics
from fedprotip.methods.parts.robust import is_robust
from fedprotip.methods.site import Site
from fedprotip.seeds import torch_stream
from fedprotip.settings import MethodSettings
from fedprotip.store.events import Event
from fedprotip.stream.plan import Answering, Options, WayPlan


class STSAOptions(MethodSettings):
    name: str = Field("stsa", description="Method; its own settings follow.")
    variant: Literal["second", "first"] = Field(
        "second",
        description="second: clients send sums of products (STSA); first: sums of groups of samples, from which the "
        "server estimates them (STSA-E).",
    )
    features: int = Field(1250, ge=0, le=10**6, description="M: width of the random map relu(f·R); 0: none.")
    strength: float = Field(0.01, gt=0, description="γ as a multiple of the mean square of a mapped feature.")
    groups: int = Field(
        5,
        ge=1,
        le=10**4,
        description="Groups that a client splits its samples of a class into, in variant 'first'; fewer where they "
        "would have less than statistics.minimum samples.",
    )
    adapt: bool = Field(True, description="Train the backbone on the first task, as FedAvg does; then never again.")


class GroupSums(Exchange):
    """Sums and numbers of random groups of a client's samples, class by class."""

    name = statistics.KIND
    slack = statistics.SLACK

    def __init__(self, groups: int, options: Options) -> None:
        self._groups, self._options = groups, options

    def answer(self, local: Local) -> Message:
        """A class with fewer than `statistics.minimum` samples is left out, and no group has fewer."""
        minimum, change = local.settings.statistics.minimum, feature_map(local.network, self._options)
        classes = torch.tensor(local.site.classes[local.task])
        sizes = (local.labels()[:, None] == classes).sum(0)
        groups = (sizes // minimum).clamp_max(self._groups)  # of each class; 0: it is left out
        chance = [torch_stream(local.settings.run.seed, "groups", local.task, local.client, int(c)) for c in classes]
        orders = [torch.randperm(int(n), generator=own) for n, own in zip(sizes, chance, strict=True)]
        counts = torch.zeros(len(classes), self._groups, dtype=torch.int64)
        sums = torch.zeros(len(classes), self._groups, change.out, dtype=torch.float64)
        seen = [0] * len(classes)
        for inputs, labels in local.labelled(local.settings.evaluate.batch):
            mapped = change(statistics.looked_at(local.network, inputs, change)).double().cpu()
            for row, label in enumerate(classes.tolist()):
                if not groups[row]:
                    continue
                own = mapped[labels == label]
                group = orders[row][seen[row] : seen[row] + len(own)] % groups[row]
                seen[row] += len(own)
                counts[row] += torch.bincount(group, minlength=self._groups)
                sums[row].index_add_(0, group, own)
        withheld = int(((sizes > 0) & (groups == 0)).sum())
        return Message(self.name, {"counts": counts, "sums": sums.float()}, {"withheld": withheld})

    def check(self, message: Message, site: Site) -> None:
        classes, change = statistics.classes_of(site), feature_map(site.network, self._options)
        shape = (classes, self._groups)
        message.check(self.name, {"counts": Spec(shape, torch.int64), "sums": Spec((*shape, change.out))})
        message.check_meta("withheld")
        statistics.check_withheld(message, classes)
        counts, sums = message.tensors["counts"], message.tensors["sums"]
        if (counts < 0).any() or (counts > SAMPLES).any():
            raise BadMessage("a count is negative or impossible")
        if sums[counts == 0].any():
            raise BadMessage("a group without samples has a sum")
        statistics.check_signs(message, positive=bool(change.width) or site.positive_features())

    def check_sender(self, message: Message, site: Site, sender: Sender) -> None:
        statistics.check_counts(message, sender, site.settings.statistics.minimum)

    def sizes(self, message: Message, site: Site) -> dict[str, float]:
        """The length of the mean of a group, and its inverse; sums of opposite signs do not cancel."""
        counts, sums = message.tensors["counts"].sum().item(), message.tensors["sums"].double()
        length = sums.norm(dim=2).sum().item() / max(counts, 1)
        return {"length of features": length, "inverse length of features": 1 / length} if length > 0 else {}

    def remark(self, message: Message, task: int, client: int) -> Event | None:
        return statistics.withheld(message, task, client)

    def digest(self, combined: Iterable[tuple[int, Message]], site: Site) -> None:
        """Nobody counts for more than `site.most` samples."""
        told = [(message.tensors, statistics.weight(message, site.most)) for _, message in combined]
        counts = torch.cat([one["counts"].double() * share for one, share in told], dim=1)  # (C, all groups)
        sums = torch.cat([one["sums"].double() * share for one, share in told], dim=1)  # (C, all groups, M)
        statistics.remember(site.known, Sums(counts.sum(1), sums.sum(1), moment_of_groups(counts, sums)))


def moment_of_groups(counts: Tensor, sums: Tensor) -> Tensor:
    """An unbiased estimate of Σ xxᵀ (M, M) over all samples from groups of them: n (C, g) and s (C, g, M).

    Of a class with K groups, N samples and the sum p, where samples are independent and groups drawn blindly,
    Σ_g ssᵀ/n − ppᵀ/N is K − 1 times the covariance of a sample on average, as Σ xxᵀ − ppᵀ/N is N − 1 times. So

        Σ xxᵀ ≈ (N − 1)/(K − 1) · Σ_g ssᵀ/n − (N − K)/(K − 1) · ppᵀ/N,

    which is never negative. A single group tells the mean alone, ppᵀ/N. Empty groups are none.
    """
    groups, samples = (counts > 0).sum(1), counts.sum(1).clamp_min(1)
    single = groups < 2
    spread = torch.where(single, 1.0, (samples - 1) / (groups - 1).clamp_min(1))
    excess = torch.where(single, 0.0, (samples - groups) / (groups - 1).clamp_min(1))
    rows = sums * (spread[:, None] / counts.clamp_min(1)).sqrt()[:, :, None]
    means = sums.sum(1) * (excess / samples).sqrt()[:, None]
    return rows.flatten(0, 1).T @ rows.flatten(0, 1) - means.T @ means


@register
class STSA(Method):
    name = "stsa"
    about = About(
        "ridge regression on random features of a backbone that learns in the first task only",
        sends="the model, in the first task; sums and products of features, once a task",
    )
    routes = True
    state = (statistics.kept(shared=False),)
    Options: ClassVar[type[MethodSettings]] = STSAOptions

    @property
    def options(self) -> STSAOptions:
        assert isinstance(self.settings.method, STSAOptions)
        return self.settings.method

    def check(self) -> None:
        super().check()
        if self.options.variant == "first" and is_robust(self.settings.train.aggregate):
            raise UsageError(
                f"train.aggregate = {self.settings.train.aggregate!r} is not possible with method.variant = 'first', "
                "which knows no products; choose 'mean' or 'clipped', or method.variant = 'second'."
            )

    def rounds(self, task: int) -> int:
        return super().rounds(task) if task == 0 and self.options.adapt else 0

    def trainable(self, site: Site) -> set[str]:
        return super().trainable(site) if self.rounds(site.task) else set()

    def at_end(self) -> Sequence[Exchange]:
        features = _features(self.options.features, self.settings.run.seed)
        if self.options.variant == "first":
            return (GroupSums(self.options.groups, features),)
        return (statistics.Statistics(self.settings, options=features),)

    def answering(self) -> Answering:
        """The largest output decides, over all classes; of a group the largest mean output."""
        features = _features(self.options.features, self.settings.run.seed)
        expert = {**features, "strength": self.options.strength, "centred": False}
        return Answering(experts={RIDGE: expert}, ways={RIDGE: WayPlan(router=RIDGE, expert=RIDGE)}, chosen=RIDGE)


def _features(width: int, seed: int) -> Options:
    """The final features by a random map: no roots, no sketches of single classes."""
    return {"features": width, "seed": seed, "root": False, "directions": 0, "final": True}
