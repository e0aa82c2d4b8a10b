"""From sampled activations to a core basis: Eq. 7 (residual), Eq. 8 (SVD), Eq. 9 (rank)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedprotip.subspace.project import Projector
from fedprotip.subspace.rank import rank_energy, rank_mass

RankRule = Literal["mass", "energy"]
Earlier = Tensor | Projector
"""Earlier tasks: their basis Φ (d, R), R may be 0, or a projector that holds Φ or its complement."""

EPS = torch.finfo(torch.float32).eps
"""Rounding of activations and bases, which are kept in float32."""


DEPENDENT = 1e-2
"""A direction closer than this (sine of the angle) to what is there already adds nothing.

One that holds a share q of ‖a‖ is known to `noise`/q, about 1e-6 over 1e-2; one that is added at sine s carries that
blown up by 1/s, and the bases of later clients are off by as much from it: above √1e-4 that is not taken for yet
another direction, however many clients there are.
"""


FAINT = 1e-3
"""What lies outside the earlier routing bases with less than this share of ‖a‖ tells nobody the task of a feature."""


BLOCK = 128
"""Rows of a Gram matrix that are computed together."""


SPARE = 8
"""Random combinations beyond the rank of a range that is looked for."""


@dataclass(frozen=True)
class Core:
    """A client's core basis of one layer, and what a merge needs to weigh it."""

    basis: Tensor  # (d, r), float32, orthonormal
    sigma: Tensor  # (r,), float64, the retained singular values
    captured: float  # ‖a‖² − ‖ã‖², energy that earlier bases hold already
    tail: float = 0.0  # what the rank rule cut off: Σσ (mass) or Σσ² (energy) of the dropped directions

    def first(self, most: int, rule: RankRule) -> "Core":
        """At most so many of its directions, the strongest; what the others hold counts as cut off."""
        rest = self.sigma[most:] if rule == "mass" else self.sigma[most:].square()
        return Core(self.basis[:, :most], self.sigma[:most], self.captured, self.tail + rest.sum().item())


def noise(earlier: Projector) -> float:
    """The share of ‖a‖ that rounding leaves of activations (d, m): singular values below it are no directions.

    Activations and residual are sums of d products in float32, whose rounding adds up to √d·EPS. Where there is a Φ, it
    is off by EPS blown up by 1/DEPENDENT (see there), so that activations inside the true span leave that much.
    """
    d = len(earlier.basis)
    return EPS * (d**0.5 + (1 / DEPENDENT if earlier.room < d else 0))


def residual(a: Tensor, phi: Tensor) -> Tensor:
    """Eq. 7: a − ΦΦᵀa, the part of the activations outside the earlier subspaces, float64 (d, m).

    Applied twice: the second pass removes what rounding of the float32 basis left behind.
    """
    a, phi = a.double(), phi.double()
    return outside(a, phi, phi)


def enter(a: Tensor, earlier: Projector) -> Tensor:
    """Eq. 7 in one pass: a − ΦΦᵀa (d, m); where the projector holds the complement N, Nᵀa (d − R, m).

    In float32 unless an argument is float64: what rounding leaves inside Φ, `leave` takes out of the few
    directions that are kept.
    """
    dtype = torch.promote_types(a.dtype, earlier.basis.dtype)
    a, basis = a.to(dtype), earlier.basis.to(dtype)
    return basis.T @ a if earlier.is_complement else outside(a, basis)


def leave(u: Tensor, earlier: Projector) -> Tensor:
    """Nearly orthonormal directions of the space that `enter` leads to, as an orthonormal float32 basis (d, r)."""
    if earlier.is_complement:
        return (earlier.basis @ orthonormalise(u).to(earlier.basis.dtype)).float()
    return orthonormalise(outside(u, earlier.basis.to(u.dtype))).float()


def outside(a: Tensor, *bases: Tensor) -> Tensor:
    """The part of a (d, m) outside orthonormal bases (d, r), taken out one after another."""
    for basis in bases:
        if basis.shape[1]:
            inside = basis.T @ a  # columns as they are sampled lie one after another: aᵀ is what is copied fast
            a = torch.addmm(a.T, inside.T, basis.T, alpha=-1).T if a.T.is_contiguous() else a - basis @ inside
    return a


def spectrum(gram: Tensor, floor: float = 0.0, rank: int | None = None) -> tuple[Tensor, Tensor]:
    """Singular values (n,), descending, and vectors (·, n) of a matrix with this Gram matrix (float64).

    Values not above `floor` or √size·EPS of the largest one are dropped, so n is the numerical rank; rounding of the
    Gram matrix itself is below √size·1.5e-8. `rank`: where it is known to be no more than this, and that is little, its
    range is found first and the rest is done within it.
    """
    if rank is not None and 4 * (rank + SPARE) < len(gram):
        span = leading_range(gram, rank + SPARE)
        inner = span.T @ gram @ span
        values, vectors = torch.linalg.eigh((inner + inner.T) / 2)
        vectors = span @ vectors
    else:
        values, vectors = torch.linalg.eigh(gram)
    sigma = values.clamp_min(0).sqrt().flip(0)
    count = int((sigma > max(len(gram) ** 0.5 * EPS * sigma[0].item(), floor)).sum()) if len(sigma) else 0
    return sigma[:count], vectors.flip(1)[:, :count]


def leading_range(gram: Tensor, size: int, passes: int = 1) -> Tensor:
    """Orthonormal columns (d, size) that span the range of a symmetric matrix (d, d), from random combinations.

    All of it where its rank is lower than `size`; else nearly its dominant part, the better the more passes.
    """
    chance = torch.Generator(gram.device).manual_seed(0)
    span = torch.randn(len(gram), size, generator=chance, dtype=gram.dtype, device=gram.device)
    for _ in range(passes):
        span = torch.linalg.qr(gram @ span)[0]
    return span


def left_svd(a: Tensor, floor: float = 0.0, rank: Callable[[Tensor], int] = len) -> tuple[Tensor, Tensor]:
    """Eq. 8: left singular vectors (d, r) of a in its own precision, and singular values (n,), float64, descending.

    Works on the smaller Gram matrix (a aᵀ or aᵀa) in float64. `rank` says from the values how many vectors are
    wanted. Those of faint values are only nearly orthonormal, so `orthonormalise` or `leave` comes next.
    """
    wide = a.shape[1] >= a.shape[0]
    sigma, vectors = spectrum(gram_of(a if wide else a.T), floor)
    vectors = vectors[:, : rank(sigma)]
    return (vectors.to(a.dtype) if wide else a @ (vectors / sigma[: vectors.shape[1]]).to(a.dtype)), sigma


def gram_of(rows: Tensor) -> Tensor:
    """a aᵀ (n, n) in float64 for rows a (n, m): what lies above the diagonal is computed, the rest mirrored."""
    rows = rows.double()
    gram = rows.new_empty(len(rows), len(rows))
    for start in range(0, len(rows), BLOCK):
        stop = start + BLOCK
        gram[start:stop, start:] = rows[start:stop] @ rows[start:].T
        gram[stop:, start:stop] = gram[start:stop, stop:].T
    return gram


def orthonormalise(u: Tensor) -> Tensor:
    """Exactly orthonormal columns (to float64 rounding) for nearly orthonormal ones, order and signs kept.

    By Cholesky: U = QR with R from UᵀU. It is as exact as Householder's QR where UᵀU is close to the identity.
    """
    u = u.double()
    upper = torch.linalg.cholesky(u.T @ u, upper=True)
    return torch.linalg.solve_triangular(upper, u, upper=True, left=False)


def core_basis(a: Tensor, earlier: Earlier, threshold: float, rule: RankRule) -> Core:
    """Section 4.2: residual, SVD and rank of one layer's sampled activations.

    Args:
        a: activations (d, m); earlier: what earlier tasks hold; threshold: ε of this layer.
        rule: `mass` (Eq. 9) or `energy` (GPM).
    """
    earlier = Projector.of(earlier)
    norm = torch.linalg.vector_norm(torch.linalg.vector_norm(a, dim=0).double()).item()

    def captured(sigma: Tensor) -> float:
        return max(norm**2 - sigma.square().sum().item(), 0.0)

    def rank(sigma: Tensor) -> int:
        return _rank(sigma, captured(sigma), threshold, rule, earlier.room)

    u, sigma = left_svd(enter(a, earlier), noise(earlier) * norm, rank)
    return _core(u, sigma, earlier, captured(sigma), rule)


def core_of_moment(
    moment: Tensor, samples: int, earlier: Earlier, threshold: float, rule: RankRule, fixed: int = 0
) -> Core:
    """The core basis of so many activations known only by their second moment aaᵀ (d, d), never empty.

    For the routing basis U_L: with `fixed` > 0 that many directions, else by the rank rule; where nothing above FAINT
    is left outside the earlier bases, the dominant directions of the activations themselves.
    """
    moment, earlier = moment.double(), Projector.of(earlier)
    total = max(moment.trace().item(), 0.0)
    for known in (earlier, Projector.of(moment[:, :0])):
        rest = enter(enter(moment, known).T, known)
        sigma, u = spectrum((rest + rest.T) / 2, noise(known) * total**0.5, rank=samples)
        if len(sigma) and sigma[0] > FAINT * total**0.5:
            captured = max(total - rest.trace().item(), 0.0)
            rank = fixed or max(_rank(sigma, captured, threshold, rule, known.room), 1)
            return _core(u[:, : min(rank, known.room)], sigma, known, captured, rule)
    first = torch.eye(len(moment), 1, dtype=torch.float64)  # all-zero features: any direction serves
    return Core(first.float(), first.new_zeros(1), 0.0)


def _rank(sigma: Tensor, captured: float, threshold: float, rule: RankRule, room: int) -> int:
    """Directions by the rule, together with the earlier ones never more than d."""
    by_rule = rank_mass(sigma, threshold) if rule == "mass" else rank_energy(sigma, captured, threshold)
    return min(by_rule, room)


def _core(u: Tensor, sigma: Tensor, earlier: Projector, captured: float, rule: RankRule) -> Core:
    """The chosen directions u, brought back to d dimensions, and what the rule left of the spectrum."""
    kept, dropped = sigma[: u.shape[1]], sigma[u.shape[1] :]
    return Core(leave(u, earlier), kept, captured, (dropped if rule == "mass" else dropped.square()).sum().item())
