"""Keeping an update outside a subspace: Eq. 4, as W·P on the rows of W, without ever building P (d×d)."""

from dataclasses import dataclass

import torch
from torch import Tensor


def complement(phi: Tensor) -> Tensor:
    """An orthonormal basis (d, d − r) of everything orthogonal to Φ (d, r).

    From the Householder reflectors of Φ, so it is the same on every machine that has the same Φ.
    """
    d, r = phi.shape
    reflectors, tau = torch.geqrf(phi.double())
    padded = torch.cat([reflectors, reflectors.new_zeros(d, d - r)], dim=1)
    taus = torch.cat([tau, tau.new_zeros(d - r)])
    return torch.linalg.householder_product(padded, taus)[:, r:].to(phi.dtype)


def project(g: Tensor, phi: Tensor) -> Tensor:
    """Eq. 4: g − (gΦ)Φᵀ for g (out, d) and Φ (d, r), in O(out·d·r)."""
    return g - (g @ phi) @ phi.T


def project_by_complement(g: Tensor, n: Tensor) -> Tensor:
    """Eq. 4 with the complement N (d, d − r): (gN)Nᵀ, cheaper when r > d/2."""
    return (g @ n) @ n.T


@dataclass(frozen=True)
class Projector:
    """Eq. 4 for one layer, holding whichever of Φ and its complement is the smaller."""

    basis: Tensor  # (d, r) or (d, d − r)
    is_complement: bool

    @classmethod
    def outside(cls, phi: Tensor) -> "Projector":
        """The projector onto the orthogonal complement of Φ (d, r)."""
        if 2 * phi.shape[1] > phi.shape[0]:
            return cls(complement(phi), True)
        return cls(phi, False)

    def __call__(self, g: Tensor) -> Tensor:
        """The part of g (out, d) with g·Φ = 0."""
        return project_by_complement(g, self.basis) if self.is_complement else project(g, self.basis)

    def anchor(self, start: Tensor) -> "Anchored":
        """This projector for all updates that begin at the weight `start` (out, d)."""
        if self.is_complement:
            return Anchored(self, start.clone())
        return Anchored(self, start @ self.basis)


@dataclass(frozen=True)
class Anchored:
    """Keeps a weight on W₀ + {∆ : ∆Φ = 0} during training, whatever the optimiser does.

    After each optimiser step, `pull_back_` makes W ← W₀ + P(W − W₀). As P is linear and idempotent this is
    W_s − P(update_s), the projected step of Eq. 5, with decay and momentum inside the update; and rounding
    errors of earlier steps are removed instead of added up.
    """

    projector: Projector
    held: Tensor  # W₀Φ (out, r) with the basis, or W₀ (out, d) with the complement

    def pull_back_(self, weight: Tensor) -> None:
        """Move `weight` (out, d), changed in place, to the nearest point that keeps W·Φ."""
        basis = self.projector.basis
        if self.projector.is_complement:
            weight.copy_(self.held + project_by_complement(weight - self.held, basis))
        else:
            weight.sub_((weight @ basis - self.held) @ basis.T)
