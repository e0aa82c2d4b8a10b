"""Which task does a feature belong to? Section 4.4: relevance, references, cosine, vote."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 2**17
"""Similarities that are held at a time, so that a thousand voters need no more memory than ten."""
HEAVIEST, FEW = 4, 100
"""How many times the samples of any other client one counts for, and how many are not told apart: as the defaults of
training have it."""


def references(moments: Tensor, sums: Tensor, samples: Tensor, bases: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Eq. 11: ω^(τ,t), the root mean square of ‖U_t U_tᵀ a‖ over a client's features of task τ, for all τ and t (S, T);
    and the variance of ‖U_t U_tᵀ a‖² over them, if they are normal: 2·tr(C²) + 4·mᵀCm for m, C within U_t.

    Args:
        moments: Σ a aᵀ over its features of each task τ (S, d, d); sums: Σ a (S, d); samples: their numbers n (S,).
        bases: U_L^(t) of each task t, (d, r_t).

    No feature is needed: ‖UUᵀA‖² = tr(UᵀAAᵀU). Divided by n, a group of 3 and one of 64 are comparable.
    """
    whole, own = torch.cat(list(bases), dim=1).double(), _owners(bases).double()  # (d, R), (R, T)
    n = samples.double()[:, None, None]
    within = whole.T @ (moments.double() @ whole) / n  # (S, R, R), of which the blocks of single tasks count
    means = sums.double()[:, None] @ whole / n  # (S, 1, R)
    values = (within.diagonal(dim1=1, dim2=2) @ own).clamp_min(0).sqrt()
    scatter = (within - means.mT @ means) * (own @ own.T)
    variances = (2 * scatter.square().sum(2) + 4 * (means @ scatter * means)[:, 0]) @ own
    return values, variances.clamp_min(0)


def energies(features: Tensor, bases: Sequence[Tensor]) -> Tensor:
    """‖U_t U_tᵀ a‖² of every feature (n, d) for every task's routing basis: (n, T)."""
    coordinates = features @ torch.cat(list(bases), dim=1).to(features)
    return coordinates.square() @ _owners(bases).to(features)


def _owners(bases: Sequence[Tensor]) -> Tensor:
    """Of which task each column of all bases is: (R, T), one 1 in every row."""
    tasks = torch.repeat_interleave(torch.tensor([basis.shape[1] for basis in bases]))
    return torch.nn.functional.one_hot(tasks, len(bases))


def relevance(energy: Tensor) -> Tensor:
    """ω̂ of a group from the energies (n, T) of its members: root mean square, (T,). One sample: n = 1."""
    return energy.mean(0).sqrt()


def believed(counts: Tensor) -> Tensor:
    """Samples (K, T) behind the clients' references, of every task none more than `HEAVIEST` times any other's.

    They are what a client says of itself. Up to `FEW` are not told apart: one client may be the only one with a task.
    """
    if len(counts) < 2:
        return counts
    return counts.minimum(HEAVIEST * counts.topk(2, dim=0).values[1].clamp_min(FEW))


def fill_missing(references: Tensor, counts: Tensor) -> Tensor:
    """References (K, T, T) without gaps (NaN).

    A client that never saw task τ, or left before task t came, borrows ω^(τ,t) from those that have it: the
    root of their mean square, weighted by samples. An entry nobody has is 0, as for later subspaces, which
    are built outside the features of earlier tasks.

    Args:
        counts: samples of each client and task (K, T), 0 where it has none.
    """
    known = ~references.isnan()
    weights = believed(counts)[:, :, None] * known
    squares = torch.where(known, references, 0.0).square()
    pooled = ((squares * weights).sum(0) / weights.sum(0).clamp_min(1)).sqrt()
    return torch.where(known, references, pooled)


@dataclass(frozen=True)
class CosineRouter:
    """Eq. 12 and the vote: every client votes for its most similar reference, the majority decides."""

    bases: Sequence[Tensor]  # U_L^(t) of every task, (d, r_t)
    references: Tensor  # ω_k^(τ), (K, T, T), without gaps

    def energies(self, features: Tensor) -> Tensor:
        return energies(features, self.bases)

    def scores(self, relevance: Tensor) -> Tensor:
        """Share of the votes of each task, (g, T), for relevance vectors (g, T).

        Ties go to the higher mean similarity: it is added with a weight below half a vote.
        """
        relevance = relevance.double()  # with many clients the tie-break is small beside a vote
        unit = torch.nn.functional.normalize(self.references.to(relevance), dim=2)
        chunks = torch.nn.functional.normalize(relevance, dim=1).split(max(1, CHUNK // unit[:, 0].numel()))
        return torch.cat([self._votes(chunk, unit) for chunk in chunks])

    def similarity(self, relevance: Tensor) -> Tensor:
        """Eq. 12, the mean over all clients: (g, T) for relevance vectors (g, T)."""
        unit = torch.nn.functional.normalize(self.references.to(relevance), dim=2)
        return torch.nn.functional.normalize(relevance, dim=1) @ unit.mean(0).T

    def _votes(self, query: Tensor, unit: Tensor) -> Tensor:
        similarity = torch.einsum("gt,kst->gks", query, unit)  # Eq. 12, (g, K, T)
        votes = torch.nn.functional.one_hot(similarity.argmax(2), similarity.shape[2]).to(query)
        return votes.mean(1) + similarity.mean(1) / (4 * len(self.references))

    def route(self, relevance: Tensor) -> Tensor:
        """The predicted task (g,) for relevance vectors (g, T)."""
        return self.scores(relevance).argmax(1)
