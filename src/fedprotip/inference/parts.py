"""What answers are made of: experts score classes, routers score tasks. A plan names them, builders make them.

@router("mine")
def mine(given: Context) -> Router:
    return MyRouter(given.knowledge["references/mine"], **given.options)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from fedprotip.errors import UsageError
from fedprotip.inference.candidates import Candidates
from fedprotip.models import Network
from fedprotip.models.heads import Features
from fedprotip.store.files import Tensors
from fedprotip.store.records import one_line
from fedprotip.stream.plan import Options

Expert = Callable[[Features], Tensor]
"""Features of n samples → scores (n, C), one for every candidate."""
Part = TypeVar("Part")


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
class Context:
    """What builders make an expert or a router of."""

    network: Network
    knowledge: Tensors  # by name: subspaces/…, references/…, statistics/…, calibration/…
    classes: Sequence[Sequence[int]]  # of every task so far
    candidates: Candidates
    options: Options  # as the plan says


Builder = Callable[[Context], Part]
EXPERTS: dict[str, Builder[Expert]] = {}
ROUTERS: dict[str, Builder[Router]] = {}


def expert(name: str) -> Callable[[Builder[Expert]], Builder[Expert]]:
    """Make an expert available under a name that `Method.answering` can give."""
    return _entry(EXPERTS, name)


def router(name: str) -> Callable[[Builder[Router]], Builder[Router]]:
    """Make a router available under a name that `Method.answering` can give."""
    return _entry(ROUTERS, name)


def _entry(known: dict[str, Builder[Part]], name: str) -> Callable[[Builder[Part]], Builder[Part]]:
    def add(builder: Builder[Part]) -> Builder[Part]:
        known[name] = builder
        return builder

    return add


def builder_of(kind: str, name: str, known: dict[str, Builder[Part]]) -> Builder[Part]:
    """The builder of an expert or a router; one that is not registered here is explained in a sentence."""
    if name not in known:
        shown = one_line(name, 60)
        raise UsageError(
            f"The {kind} {shown!r} is not registered in this process; "
            f'first import the file that has @{kind}("{shown}") from fedprotip.inference.'
        )
    return known[name]
