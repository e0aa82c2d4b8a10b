"""From the clients' bases to one basis of the task: Eq. 10, and a variant that bounds the rank.

Both take the clients one after another, so memory does not grow with their number.
"""

from typing import Protocol

import torch
from torch import Tensor

from fedprotip.subspace.basis import NOISE, Core, RankRule, left_svd, orthonormalise, residual
from fedprotip.subspace.rank import rank_energy, rank_mass

DEPENDENT = 1e-5
"""A direction closer than this (sine of the angle) to what is there already adds nothing."""


class Merger(Protocol):
    """Takes the clients' bases of one layer, in client order, and gives Φ^(t)."""

    def add(self, core: Core) -> None: ...

    def result(self) -> Tensor: ...


def append(phi: Tensor, u: Tensor, dependent: float = DEPENDENT) -> Tensor:
    """Eq. 10, one step: [Φ, U − ΦΦᵀU] with the appended part orthonormalised, float64 (d, R').

    Directions of U that Φ already holds are dropped, so R' ≤ d. The columns of Φ stay as they are.
    """
    phi = phi.double()
    new, sines = left_svd(residual(u, phi))
    new = new[:, sines > dependent][:, : phi.shape[0] - phi.shape[1]]
    if phi.shape[1] and new.shape[1]:
        new = orthonormalise(residual(new, phi))
    return torch.cat([phi, new], dim=1)


class UnionMerge:
    """Eq. 10: an orthonormal basis (d, r) of the union of the clients' spans, outside `earlier` (d, R).

    The span does not depend on the order of the clients.
    """

    def __init__(self, earlier: Tensor, dependent: float = DEPENDENT) -> None:
        self._known, self._dependent = earlier.shape[1], dependent
        self._whole = earlier.double()

    def add(self, core: Core) -> None:
        self._whole = append(self._whole, core.basis, self._dependent)

    def result(self) -> Tensor:
        return self._whole[:, self._known :].float()


class EnergyMerge:
    """The dominant directions of all clients together: SVD of [U₁Σ₁, …, U_KΣ_K], cut by the rank rule.

    What clients cut off themselves counts as missing, so ε is a share of all their activations; the basis of
    a single client stays as it is.

    Args:
        earlier: basis of the tasks before (d, R); the result (d, r) is orthogonal to it.
        threshold, rule: as for a client, but `at_least` this many; with `fixed` > 0 that many directions instead.

    Never holds more than d + r_k columns.
    """

    def __init__(self, earlier: Tensor, threshold: float, rule: RankRule, fixed: int = 0, at_least: int = 0) -> None:
        self._earlier = earlier.double()
        self._threshold, self._rule, self._fixed, self._at_least = threshold, rule, fixed, at_least
        self._factor = self._earlier[:, :0]
        self._captured = self._tail = 0.0

    def add(self, core: Core) -> None:
        self._factor = torch.cat([self._factor, core.basis.double() * core.sigma.double()], dim=1)
        self._captured += core.captured
        # Energies of clients add up; singular values of like spectra add up in quadrature.
        self._tail = self._tail + core.tail if self._rule == "energy" else (self._tail**2 + core.tail**2) ** 0.5
        if self._factor.shape[1] > self._factor.shape[0]:
            u, sigma = left_svd(self._factor)
            self._factor = u * sigma

    def result(self) -> Tensor:
        u, sigma = left_svd(residual(self._factor, self._earlier), floor=NOISE * self._factor.norm().item())
        if self._fixed:
            rank = self._fixed
        elif self._rule == "mass":
            rank = rank_mass(sigma, self._threshold, self._tail)
        else:
            rank = rank_energy(sigma, self._captured, self._threshold, self._tail)
        u = u[:, : min(max(rank, self._at_least), self._earlier.shape[0] - self._earlier.shape[1])]
        return (orthonormalise(residual(u, self._earlier)) if u.shape[1] else u).float()
