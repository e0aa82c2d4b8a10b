"""Routers: what a sample tells about its task."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedprotip.inference.candidates import Candidates
from fedprotip.inference.experts import BIRTH, BIRTH_SHARED, RIDGE, SHARED, STATISTICS
from fedprotip.inference.parts import Context, Router, Seen, router
from fedprotip.inference.route import CosineRouter, believed, energies, fill_missing
from fedprotip.seeds import numpy_stream
from fedprotip.store.files import Tensors
from fedprotip.subspace.bank import SubspaceBank

UNKNOWN = 100.0
"""Variance of an energy that nobody can tell, in squares of its usual mean: it then says little about a task."""


@dataclass(frozen=True)
class Vote(Router):
    """The paper: relevance vectors, cosine similarity to every client's references, majority."""

    cosine: CosineRouter
    adds = False

    def evidence(self, seen: Seen) -> Tensor:
        return self.cosine.energies(seen.features).cpu()

    def log_scores(self, evidence: Tensor, sizes: Tensor) -> Tensor:
        return self.cosine.scores(evidence.sqrt()).log()


@router("cosine")
def _cosine(given: Context) -> Router:
    return Vote(cosine_router(given.knowledge, int(given.options["voters"]), int(given.options["seed"])))


def cosine_router(knowledge: Tensors, voters: int, seed: int) -> CosineRouter:
    """Eq. 12 with the references of all clients, or of some `voters` of them."""
    counts, clients = knowledge["references/counts"], knowledge["references/clients"]
    references = fill_missing(knowledge["references/values"], counts)
    if 0 < voters < len(clients):
        order = numpy_stream(seed, "voters").permutation(len(clients))
        references = references[torch.from_numpy(order[:voters]).sort().values]
    return CosineRouter(SubspaceBank.from_tensors(knowledge).routing, references)


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


@router("gaussian")
def _gaussian(given: Context) -> Router:
    """Energies of all clients together: their mean, and their variance within and between clients."""
    counts = believed(given.knowledge["references/counts"]).double()[:, :, None]
    values, variances = (given.knowledge[f"references/{part}"].double() for part in ("values", "variances"))
    known = ~values.isnan()
    total = (counts * known).sum(0)
    weights = counts * known / total.clamp_min(1)
    means = torch.where(known, values.square(), 0.0)
    pooled = (weights * means).sum(0)
    spread = (weights * (torch.where(known, variances, 0.0) + (means - pooled).square())).sum(0)
    guess = (pooled * (total > 0)).sum(0) / (total > 0).sum(0).clamp_min(1)  # of an entry that nobody knows
    pooled = torch.where(total > 0, pooled, guess)
    spread = torch.where(total > 0, spread, UNKNOWN * guess.square())
    return RelevanceGaussians(SubspaceBank.from_tensors(given.knowledge).routing, pooled, spread)


@dataclass(frozen=True)
class ClassEvidence(Router):
    """log p(a | task): the mean density of its classes, by class statistics."""

    candidates: Candidates
    expert: str = STATISTICS

    def evidence(self, seen: Seen) -> Tensor:
        scores = seen.scores[self.expert]
        known = self.candidates.by_task(torch.where(scores[:1].isfinite(), 0.0, -torch.inf))
        return (self.candidates.by_task(scores) - known).nan_to_num(nan=-1e30, neginf=-1e30)


@router(STATISTICS)
def _statistics(given: Context) -> Router:
    return ClassEvidence(given.candidates)


@router(SHARED)
def _shared(given: Context) -> Router:
    return ClassEvidence(given.candidates, SHARED)


@router(BIRTH)
def _birth(given: Context) -> Router:
    return ClassEvidence(given.candidates, BIRTH)


@router(BIRTH_SHARED)
def _birth_shared(given: Context) -> Router:
    return ClassEvidence(given.candidates, BIRTH_SHARED)


@dataclass(frozen=True)
class LargestOutput(Router):
    """The task of the largest output of an expert; over a group, of the largest mean."""

    candidates: Candidates
    expert: str
    adds = False

    def evidence(self, seen: Seen) -> Tensor:
        return self.candidates.largest(seen.scores[self.expert])


@router(RIDGE)
def _ridge(given: Context) -> Router:
    return LargestOutput(given.candidates, RIDGE)
