"""From the clients' bases to one basis of the task: Eq. 10, and a variant that bounds the rank.

Both take the clients one after another, so memory does not grow with their number.
"""

from typing import Protocol

import torch
from torch import Tensor

from fedprotip.subspace.basis import (
    DEPENDENT,
    Core,
    Earlier,
    RankRule,
    enter,
    leave,
    left_svd,
    noise,
    orthonormalise,
    outside,
    spectrum,
)
from fedprotip.subspace.project import Projector
from fedprotip.subspace.rank import rank_energy, rank_mass


class Merger(Protocol):
    """Takes the clients' bases of one layer, in client order, and gives Φ^(t)."""

    left: float
    """The share of all activations of the task that no basis holds, once there is a result; 1 where it is not known."""

    def add(self, core: Core) -> None: ...

    def result(self) -> Tensor: ...


def append(phi: Tensor, u: Tensor) -> Tensor:
    """Eq. 10, one step: [Φ, U − ΦΦᵀU] with the appended part orthonormalised, float64 (d, R').

    Directions of U that Φ already holds are dropped, so R' ≤ d. The columns of Φ stay as they are.
    """
    phi = phi.double()
    return torch.cat([phi, added(u.double(), phi)], dim=1)


def added(u: Tensor, *known: Tensor) -> Tensor:
    """An orthonormal basis (d, n) of what U (d, r) adds to bases that are orthonormal and orthogonal to each other.

    In the precision of U: rounding of the first pass decides nothing above DEPENDENT, and a second pass takes it
    out of the directions that remain.
    """
    room = len(u) - sum(basis.shape[1] for basis in known)
    if room == 0:
        return u[:, :0]
    new, _ = left_svd(outside(u, *known), rank=lambda sines: min(int((sines > DEPENDENT).sum()), room))
    return orthonormalise(outside(new.to(u.dtype), *known)).to(u.dtype)


class UnionMerge:
    """Eq. 10: an orthonormal basis (d, r) of the union of the clients' spans, outside `earlier`.

    The span does not depend on the order of the clients.
    """

    left = 1.0

    def __init__(self, earlier: Earlier) -> None:
        self._earlier = Projector.of(earlier)
        self._known = [] if self._earlier.is_complement else [self._earlier.basis]
        self._new = enter(self._earlier.basis[:, :0], self._earlier)

    def add(self, core: Core) -> None:
        if self._new.shape[1] < self._earlier.room:
            u = enter(core.basis, self._earlier) if self._earlier.is_complement else core.basis
            new = added(u.to(self._new), *self._known, self._new)
            self._new = torch.cat([self._new, new], dim=1)

    def result(self) -> Tensor:
        return leave(self._new, self._earlier) if self._earlier.is_complement else self._new.float()


class EnergyMerge:
    """The dominant directions of all clients together: SVD of [U₁Σ₁, …, U_KΣ_K], cut by the rank rule.

    What clients cut off themselves counts as missing, so ε is a share of all their activations; the basis of
    a single client stays as it is.

    Args:
        earlier: what the tasks before hold; the result (d, r) is orthogonal to it.
        threshold, rule: as for a client, but `at_least` this many; with `fixed` > 0 that many directions instead.
        most: no more than this many.

    Never holds more than d + r_k columns: beyond that only the sum of U_kΣ_k²U_kᵀ (d, d) is kept.
    """

    def __init__(
        self,
        earlier: Earlier,
        threshold: float,
        rule: RankRule,
        fixed: int = 0,
        at_least: int = 0,
        most: int | None = None,
    ) -> None:
        self._earlier = Projector.of(earlier)
        self._most = self._earlier.room if most is None else min(most, self._earlier.room)
        self._threshold, self._rule, self._fixed, self._at_least = threshold, rule, fixed, at_least
        self._factor = enter(self._earlier.basis[:, :0], self._earlier).double()
        self._moment: Tensor | None = None
        self._energy = self._captured = self._tail = 0.0
        self.left = 1.0

    def add(self, core: Core) -> None:
        self._captured += core.captured
        self._energy += core.sigma.double().square().sum().item()
        # Energies of clients add up; singular values of like spectra add up in quadrature.
        self._tail = self._tail + core.tail if self._rule == "energy" else (self._tail**2 + core.tail**2) ** 0.5
        scaled = enter(core.basis, self._earlier).double() * core.sigma.double()
        self._factor = torch.cat([self._factor, scaled], dim=1)
        if self._factor.shape[1] > len(self._factor):
            self._moment = self._whole_moment()
            self._factor = self._factor[:, :0]

    def result(self) -> Tensor:
        floor = noise(self._earlier) * self._energy**0.5
        if self._moment is None:
            u, sigma = left_svd(self._factor, floor, self._rank)
        else:
            sigma, u = spectrum(self._whole_moment(), floor)
            u = u[:, : self._rank(sigma)]
        tail = self._tail if self._rule == "energy" else self._tail**2
        whole = self._captured + self._energy + tail
        held = self._captured + sigma[: u.shape[1]].square().sum().item()
        self.left = min(max(1 - held / whole, 0.0), 1.0) if whole else 0.0
        return leave(u, self._earlier)

    def _whole_moment(self) -> Tensor:
        new = self._factor @ self._factor.T
        return new if self._moment is None else new.add_(self._moment)

    def _rank(self, sigma: Tensor) -> int:
        if self._fixed:
            rank = self._fixed
        elif self._rule == "mass":
            rank = rank_mass(sigma, self._threshold, self._tail)
        else:
            rank = rank_energy(sigma, self._captured, self._threshold, self._tail)
        return min(max(rank, self._at_least), self._most)
