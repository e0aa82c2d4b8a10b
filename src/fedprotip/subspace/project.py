"""Keeping an update outside a subspace: Eq. 4, as W·P on the rows of W, without ever building P (d×d)."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


def complement(phi: Tensor) -> Tensor:
    """An orthonormal basis (d, d − r) of everything orthogonal to Φ (d, r).

    From the Householder reflectors of Φ, so it is the same on every machine that has the same Φ.
    """
    d, r = phi.shape
    reflectors, tau = torch.geqrf(phi.double())
    last = torch.eye(d, dtype=torch.float64, device=phi.device)[:, r:]
    return torch.ormqr(reflectors, tau, last).to(phi.dtype)


def project(g: Tensor, phi: Tensor) -> Tensor:
    """Eq. 4: g − (gΦ)Φᵀ for g (out, d) and Φ (d, r), in O(out·d·r)."""
    return torch.addmm(g, g @ phi, phi.T, alpha=-1)


def project_by_complement(g: Tensor, n: Tensor) -> Tensor:
    """Eq. 4 with the complement N (d, d − r): (gN)Nᵀ, cheaper when r > d/2."""
    return (g @ n) @ n.T


@dataclass(frozen=True)
class Projector:
    """Eq. 4 for one layer, holding whichever of Φ and its complement is the smaller."""

    basis: Tensor  # (d, r) or (d, d − r)
    is_complement: bool

    @classmethod
    def of(cls, earlier: "Tensor | Projector") -> "Projector":
        """A bare Φ (d, r) as a projector; a projector as it is."""
        return earlier if isinstance(earlier, Projector) else cls(earlier, False)

    @classmethod
    def outside(cls, phi: Tensor) -> "Projector":
        """The projector onto the orthogonal complement of Φ (d, r)."""
        if 2 * phi.shape[1] > phi.shape[0]:
            return cls(complement(phi), True)
        return cls(phi, False)

    def without(self, new: Tensor) -> "Projector":
        """The projector onto what is outside Φ and outside a further basis (d, s) that is orthogonal to Φ.

        A complement only loses the new directions, which is far cheaper than a new complement of everything.
        """
        if not self.is_complement:
            return Projector.outside(torch.cat([self.basis, new], dim=1))
        free = self.basis.double()
        return Projector((free @ complement(free.T @ new.double())).to(self.basis.dtype), True)

    @property
    def room(self) -> int:
        """d − r: the directions that are still free."""
        d, held = self.basis.shape
        return held if self.is_complement else d - held

    def __call__(self, g: Tensor) -> Tensor:
        """The part of g (out, d) with g·Φ = 0."""
        return project_by_complement(g, self.basis) if self.is_complement else project(g, self.basis)

    def columns(self, a: Tensor) -> Tensor:
        """The part of columns a (d, n) outside Φ."""
        if a.T.is_contiguous():
            return self(a.T).T
        if self.is_complement:
            return self.basis @ (self.basis.T @ a)
        return torch.addmm(a, self.basis, self.basis.T @ a, alpha=-1)

    def anchor(self, start: Tensor) -> "Anchored":
        """This projector for all updates that begin at the weight `start` (out, d), which must not change."""
        if self.is_complement:
            return Anchored(self, start)
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

    @cached_property
    def fixed_part(self) -> Tensor:
        """W₀ΦΦᵀ (out, d), which no admissible update changes."""
        basis = self.projector.basis
        if self.projector.is_complement:
            return torch.addmm(self.held, self.held @ basis, basis.T, alpha=-1)
        return self.held @ basis.T

    def pull_back_(self, weight: Tensor) -> None:
        """Move `weight` (out, d), changed in place, to the nearest point that keeps W·Φ."""
        basis = self.projector.basis
        if self.projector.is_complement:
            torch.addmm(self.held, (weight - self.held) @ basis, basis.T, out=weight)
        else:
            weight.addmm_(torch.addmm(self.held, weight, basis, beta=-1), basis.T, alpha=-1)
