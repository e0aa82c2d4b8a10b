"""From sampled activations to a core basis: Eq. 7 (residual), Eq. 8 (SVD), Eq. 9 (rank)."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedprotip.subspace.rank import rank_energy, rank_mass

RankRule = Literal["mass", "energy"]

NOISE = 1e-6
"""Singular values below this share of ‖a‖ are rounding of float32 activations, not directions."""


FAINT = 1e-3
"""A routing direction with less than this share of ‖a‖ would tell nobody which task a feature belongs to."""


@dataclass(frozen=True)
class Core:
    """A client's core basis of one layer, and what a merge needs to weigh it."""

    basis: Tensor  # (d, r), float32, orthonormal
    sigma: Tensor  # (r,), float64, the retained singular values
    captured: float  # ‖a‖² − ‖ã‖², energy that earlier bases hold already
    tail: float = 0.0  # what the rank rule cut off: Σσ (mass) or Σσ² (energy) of the dropped directions


def residual(a: Tensor, phi: Tensor) -> Tensor:
    """Eq. 7: a − ΦΦᵀa, the part of the activations outside the earlier subspaces, float64 (d, m).

    Applied twice: the second pass removes what rounding of the float32 basis left behind.
    """
    a, phi = a.double(), phi.double()
    for _ in range(2):
        a = a - phi @ (phi.T @ a)
    return a


def left_svd(a: Tensor, floor: float = 0.0) -> tuple[Tensor, Tensor]:
    """Eq. 8: left singular vectors (d, n) and singular values (n,) of a, descending, float64.

    Works on the smaller Gram matrix (a aᵀ or aᵀa), scaled so that no input overflows. Values not above
    `floor` or NOISE of the largest one are dropped, so n is the numerical rank.
    """
    a = a.double()
    scale = a.abs().max().item() if a.numel() else 0.0
    if scale == 0.0:
        return a.new_zeros(a.shape[0], 0), a.new_zeros(0)
    a = a / scale
    wide = a.shape[1] >= a.shape[0]
    values, vectors = torch.linalg.eigh(a @ a.T if wide else a.T @ a)
    sigma = values.clamp_min(0).sqrt().flip(0)
    keep = sigma > max(NOISE * sigma[0].item(), floor / scale)
    sigma, vectors = sigma[keep], vectors.flip(1)[:, keep]
    u = vectors if wide else a @ vectors / sigma
    return orthonormalise(u), sigma * scale


def orthonormalise(u: Tensor) -> Tensor:
    """Exactly orthonormal columns (to float64 rounding) for nearly orthonormal ones, order and signs kept."""
    if u.shape[1] == 0:
        return u
    q, r = torch.linalg.qr(u.double())
    return q * torch.sign(r.diagonal())


def core_basis(a: Tensor, phi: Tensor, threshold: float, rule: RankRule) -> Core:
    """Section 4.2: residual, SVD and rank of one layer's sampled activations.

    Args:
        a: activations (d, m); phi: basis of earlier tasks (d, R), R may be 0; threshold: ε of this layer.
        rule: `mass` (Eq. 9) or `energy` (GPM).
    """
    a = a.double()
    total = a.square().sum().item()
    rest = residual(a, phi) if phi.shape[1] else a
    u, sigma = left_svd(rest, floor=NOISE * total**0.5)
    captured = max(total - rest.square().sum().item(), 0.0)
    rank = rank_mass(sigma, threshold) if rule == "mass" else rank_energy(sigma, captured, threshold)
    return _cut(u, sigma, phi, captured, rank, rule)


def core_of_moment(moment: Tensor, phi: Tensor, threshold: float, rule: RankRule, fixed: int = 0) -> Core:
    """The core basis of activations known only by their second moment aaᵀ (d, d), never empty.

    For the routing basis U_L: with `fixed` > 0 that many directions, else by the rank rule; where nothing is
    left outside the earlier bases (nothing above FAINT), the dominant directions of the activations themselves.
    """
    moment, phi = moment.double(), phi.double()
    for earlier in (phi, phi[:, :0]):
        rest = residual(residual(moment, earlier).T, earlier)
        values, vectors = torch.linalg.eigh((rest + rest.T) / 2)
        sigma, u = values.clamp_min(0).sqrt().flip(0), vectors.flip(1)
        keep = sigma > FAINT * moment.trace().clamp_min(0).sqrt()
        sigma, u = sigma[keep], u[:, keep]
        if len(sigma):
            captured = max((moment.trace() - rest.trace()).item(), 0.0)
            rank = rank_mass(sigma, threshold) if rule == "mass" else rank_energy(sigma, captured, threshold)
            return _cut(u, sigma, earlier, captured, fixed or max(rank, 1), rule)
    first = torch.eye(len(moment), 1, dtype=torch.float64)  # all-zero features: any direction serves
    return Core(first.float(), first.new_zeros(1), 0.0)


def _cut(u: Tensor, sigma: Tensor, phi: Tensor, captured: float, rank: int, rule: RankRule) -> Core:
    """The first `rank` directions, made exactly orthogonal to Φ, together never more than d."""
    basis = u[:, : min(rank, phi.shape[0] - phi.shape[1])]
    if phi.shape[1] and basis.shape[1]:
        basis = orthonormalise(residual(basis, phi))
    kept, dropped = sigma[: basis.shape[1]], sigma[basis.shape[1] :]
    return Core(basis.float(), kept, captured, (dropped if rule == "mass" else dropped.square()).sum().item())
