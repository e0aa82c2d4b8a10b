"""An update outside Φ in d − r numbers per row instead of d: what has to travel of a layer."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedprotip.subspace.project import Projector

STEEP = 10.0
"""Entries of T above this would cost float precision; then signs are chosen one by one, which takes longer."""


class Complement(Protocol):
    """Coordinates C (out, d − r) of updates ∆ (out, d) with ∆·Φ = 0, in an orthonormal basis N of all such rows."""

    @property
    def width(self) -> int:
        """d − r."""

    def encode(self, update: Tensor) -> Tensor:
        """C = ∆·N (out, d − r); what ∆ has inside Φ is left out."""

    def decode(self, coordinates: Tensor) -> Tensor:
        """∆ = C·Nᵀ (out, d)."""


def complement_of(projector: Projector) -> Complement:
    """The complement that a projector projects onto, by whichever of Φ and N the projector holds."""
    return Held(projector.basis) if projector.is_complement else Reflected.outside(projector.basis)


@dataclass(frozen=True)
class Held:
    """N itself (d, d − r): the cheaper one when r > d/2."""

    basis: Tensor

    @property
    def width(self) -> int:
        return self.basis.shape[1]

    def encode(self, update: Tensor) -> Tensor:
        return update @ self.basis

    def decode(self, coordinates: Tensor) -> Tensor:
        return coordinates @ self.basis.T


@dataclass(frozen=True)
class Reflected:
    """N by way of Φ (d, r), in O(out·d·r) and with r² numbers more than Φ; it is never built.

    Let E be the first r unit vectors, S signs, Y = Φ − E·S and T = (I − Φ₁ᵀS)⁻¹ with Φ₁ the first r rows of Φ.
    Then Q = I − Y·T·Yᵀ is orthogonal and carries E·S to Φ, so its last d − r columns are an N.
    """

    phi: Tensor  # Φ (d, r)
    signs: Tensor  # S (r,)
    core: Tensor  # T (r, r)

    @classmethod
    def outside(cls, phi: Tensor) -> "Reflected":
        exact = phi.double()
        signs = exact.new_full((phi.shape[1],), -1.0)
        core = _core(exact, signs)
        if not core.abs().lt(STEEP).all():
            signs = _safe_signs(exact[: phi.shape[1]])
            core = _core(exact, signs)
        return cls(phi, signs.to(phi), core.to(phi))

    @property
    def width(self) -> int:
        return self.phi.shape[0] - self.phi.shape[1]

    def encode(self, update: Tensor) -> Tensor:
        r = self.phi.shape[1]
        along = update @ self.phi - update[:, :r] * self.signs  # ∆·Y
        return update[:, r:] - (along @ self.core) @ self.phi[r:].T

    def decode(self, coordinates: Tensor) -> Tensor:
        r = self.phi.shape[1]
        along = (coordinates @ self.phi[r:]) @ self.core.T  # [0, C]·Y·Tᵀ
        update = -along @ self.phi.T
        update[:, :r] += along * self.signs
        update[:, r:] += coordinates
        return update


def _safe_signs(block: Tensor) -> Tensor:
    """Signs S with which Gaussian elimination of Φ₁ − S (r, r) finds no pivot below 1; as Householder's QR does."""
    rest, signs = block.clone(), torch.ones_like(block[0])
    for i in range(len(rest)):
        signs[i] = -1.0 if rest[i, i] >= 0 else 1.0
        column = rest[i + 1 :, i] / (rest[i, i] - signs[i])
        rest[i + 1 :, i + 1 :] -= torch.outer(column, rest[i, i + 1 :])
    return signs


def _core(phi: Tensor, signs: Tensor) -> Tensor:
    """T = (I − Φ₁ᵀS)⁻¹; entries that are not finite where there is none."""
    r = phi.shape[1]
    identity = torch.eye(r, dtype=phi.dtype, device=phi.device)
    return torch.linalg.inv_ex(identity - phi[:r].T * signs).inverse
