"""From the clients' bases to one basis of the task: Eq. 10, and a variant that bounds the rank."""

from collections.abc import Iterable

import torch
from torch import Tensor

from fedprotip.subspace.basis import Core, RankRule, left_svd, orthonormalise, residual
from fedprotip.subspace.rank import rank_energy, rank_mass

DEPENDENT = 1e-5
"""A direction closer than this (sine of the angle) to what is there already adds nothing."""


def append(phi: Tensor, u: Tensor) -> Tensor:
    """Eq. 10, one step: [Φ, U − ΦΦᵀU] with the appended part orthonormalised, float64 (d, R').

    Directions of U that Φ already holds are dropped, so R' ≤ d. The columns of Φ stay as they are.
    """
    phi = phi.double()
    new, sines = left_svd(residual(u, phi))
    new = new[:, sines > DEPENDENT][:, : phi.shape[0] - phi.shape[1]]
    if phi.shape[1] and new.shape[1]:
        new = orthonormalise(residual(new, phi))
    return torch.cat([phi, new], dim=1)


def merge_union(bases: Iterable[Tensor], earlier: Tensor) -> Tensor:
    """Eq. 10: an orthonormal basis (d, r) of the union of the clients' spans, outside `earlier` (d, R).

    The span does not depend on the order of the clients. Reads the bases one after another: memory does
    not grow with the number of clients.
    """
    whole = earlier.double()
    for basis in bases:
        whole = append(whole, basis)
    return whole[:, earlier.shape[1] :].float()


def merge_energy(cores: Iterable[Core], earlier: Tensor, threshold: float, rule: RankRule, fixed: int = 0) -> Tensor:
    """The dominant directions of all clients together: SVD of [U₁Σ₁, …, U_KΣ_K], cut by the rank rule.

    Args:
        cores: the clients' bases with their singular values.
        earlier: basis of the tasks before (d, R); the result (d, r) is orthogonal to it.
        threshold, rule: as for a client; with `fixed` > 0 that many directions instead.

    Never holds more than d + r_k columns, whatever the number of clients.
    """
    d = earlier.shape[0]
    factor = earlier.new_zeros(d, 0, dtype=torch.float64)
    captured = 0.0
    for core in cores:
        factor = torch.cat([factor, core.basis.double() * core.sigma.double()], dim=1)
        captured += core.captured
        if factor.shape[1] > d:
            u, sigma = left_svd(factor)
            factor = u * sigma
    u, sigma = left_svd(residual(factor, earlier))
    if fixed:
        rank = fixed
    elif rule == "mass":
        rank = rank_mass(sigma, threshold)
    else:
        rank = rank_energy(sigma, captured, threshold)
    rank = min(rank, d - earlier.shape[1], u.shape[1])
    return (orthonormalise(residual(u[:, :rank], earlier)) if rank else u[:, :0]).float()
