"""Sketches of activations that add up over clients, and the basis that follows from their sum (FOT)."""

import torch
from torch import Tensor

from fedprotip.subspace.basis import Core, Earlier, enter, gram_of, leave, left_svd, noise
from fedprotip.subspace.project import Projector
from fedprotip.subspace.rank import rank_energy

JITTER = 1e-12
"""Share of the mean square that is added in all directions where a second moment is split; far below float32."""


class Root:
    """F (d, n) with FFᵀ = Σ aaᵀ over all columns a that were added: n is below 2d, however many they are.

    A·G with a Gaussian G (m, s) has the law of F·G' with a Gaussian G' (n, s), so no Gaussian is as long as the data.
    """

    def __init__(self, d: int) -> None:
        self._d, self._parts = d, list[Tensor]()

    def add(self, columns: Tensor) -> None:
        """Columns (d, m) in float32; they are copied."""
        for part in columns.split(self._d, dim=1):
            self._parts.append(part.float().clone())
            if sum(held.shape[1] for held in self._parts) >= 2 * self._d:
                self._parts = [_half(torch.cat(self._parts, dim=1))]

    @property
    def factor(self) -> Tensor:
        """F."""
        return torch.cat(self._parts, dim=1) if self._parts else torch.zeros(self._d, 0)


def _half(columns: Tensor) -> Tensor:
    """L (d, d), triangular, with LLᵀ = AAᵀ, for columns A (d, n)."""
    moment = gram_of(columns)
    moment.diagonal().add_(JITTER * moment.trace() / len(moment) + torch.finfo(torch.float64).tiny)
    triangle, failed = torch.linalg.cholesky_ex(moment)
    if failed:  # rounding, where few directions hold nearly everything
        values, vectors = torch.linalg.eigh(moment)
        triangle = vectors * values.clamp_min(0).sqrt()
    return triangle.to(columns.dtype)


def upright(basis: Tensor) -> Tensor:
    """A basis (d, r) whose columns are positive where they are largest.

    An SVD leaves their signs to rounding; with one G_k they would be another sketch then, as random as the first.
    """
    if not basis.numel():
        return basis
    largest = basis.gather(0, basis.abs().argmax(0, keepdim=True))
    return basis * torch.where(largest < 0, -1.0, 1.0).to(basis.dtype)


def sketch_core(sketch: Tensor, captured: float, tail: float) -> Core:
    """A summed sketch B = Σ U_k·diag(σ_k)·G_k (d, s), Eq. 41, as what `EnergyMerge` takes.

    BBᵀ stands for Σ U_kΣ_k²U_kᵀ. Its columns are no basis; they all weigh the same, and their squares add up to the
    energy of the sketch.
    """
    width = sketch.shape[1]
    each = torch.linalg.vector_norm(sketch, dtype=torch.float64) / max(width, 1) ** 0.5
    columns = sketch / each if each > 0 else sketch
    return Core(columns.to(sketch.dtype), each.expand(width), captured, tail)


def corrected_threshold(ratio: float, threshold: float) -> float:
    """ε' = (ρ − (1 − ε))/ρ: the share of the residual that is still missing where it is a share ρ of everything.

    Not above 0 where the earlier bases hold ε already.

    >>> corrected_threshold(1.0, 0.75), corrected_threshold(0.5, 0.75), corrected_threshold(0.125, 0.75)
    (0.75, 0.5, -1.0)
    """
    return (ratio - (1 - threshold)) / ratio if ratio > 0 else -1.0


def sketch_basis(sketch: Tensor, earlier: Earlier, ratio: float, threshold: float) -> Tensor:
    """The dominant directions of a summed sketch (d, s) outside `earlier`, (d, r): as few as hold ε' of its energy.

    None where nothing is missing, or where the residual is rounding.
    """
    earlier, missing = Projector.of(earlier), corrected_threshold(ratio, threshold)
    if missing <= 0 or not earlier.room:
        return torch.zeros(len(sketch), 0)

    def rank(sigma: Tensor) -> int:
        return min(rank_energy(sigma, 0.0, missing), earlier.room)

    floor = noise(earlier) * torch.linalg.vector_norm(sketch, dtype=torch.float64).item() / ratio
    u, _ = left_svd(enter(sketch, earlier), floor, rank)
    return leave(u, earlier)
