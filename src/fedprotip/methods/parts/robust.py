"""Sums and means that one client of many cannot move far (`train.aggregate`)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedprotip.inference.statistics import Sums

SUPPORT = 0.5
"""Squared cosines with the bases of others, summed up, that a direction needs to be asked for by somebody else too."""
STRONGEST = 3.0
"""No client weighs more than this many of the median weight."""
WIDTH = 0.1
"""A median is the mean of the middle fifth of the weight: of few clients the very middle would be a single one."""
PASSES = 30
"""Steps of Weiszfeld's iteration; it ends before where nothing changes."""


def is_robust(aggregate: str) -> bool:
    """Whether no single reply can decide about a mean; then the stated numbers of samples do not count either."""
    return aggregate in ("trimmed", "median")


def bounded(weights: Tensor) -> Tensor:
    """Weights of which none is larger than `STRONGEST` median ones, nor reaches into the middle fifth of all.

    How many samples a client has, it says itself: that makes nobody strong enough to decide alone.
    """
    alone = 0.99 * (len(weights) - 1) * (0.5 - WIDTH) / (0.5 + WIDTH)
    return weights.clamp_max(weights.median() * max(min(STRONGEST, alone), 1.0))


def middle(rows: Tensor, weights: Tensor, aggregate: str, trim: float) -> Tensor:
    """Of every column of (K, n) the weighted median, or the weighted mean without `trim` of the weight at each end."""
    ordered, order = rows.sort(dim=0)
    shares = bounded(weights.to(rows.dtype))[order]  # (K, n)
    above = shares.cumsum(0) / shares.sum(0)
    below = torch.cat([torch.zeros_like(above[:1]), above[:-1]])
    cut = 0.5 - WIDTH if aggregate == "median" else trim
    kept = (above.clamp_max(1 - cut) - below.clamp_min(cut)).clamp_min(0)
    return (ordered * kept).sum(0) / kept.sum(0)


def geometric_median(points: Tensor, weights: Tensor) -> Tensor:
    """The point (d, …) with the least weighted sum of distances to those of (K, d, …): a mixture of them (Weiszfeld).

    So of covariances it is one; and less than half of the weight cannot take it away.
    """
    flat, share = points.flatten(1), weights / weights.sum()
    centre, mixture = flat.median(dim=0).values, share
    scale = (flat - centre).norm(dim=1).median().clamp_min(1e-200)  # one point, or equal ones
    for _ in range(PASSES):
        near = share / (flat - centre).norm(dim=1).clamp_min(1e-6 * scale)
        near = near / near.sum()
        moved, mixture = (near - mixture).abs().max(), near
        centre = mixture @ flat
        if moved < 1e-9:
            break
    return centre.view(points.shape[1:])


def robust_sums(clients: Sequence[Sums], aggregate: str, trim: float, omega: Tensor) -> Sums:
    """Sums of features, sketched by Ω (d, k), as if all clients were like most of them.

    Class means: the middle of the clients' means. Counts: none larger than the median one. Scatter, of all and of a
    class: the geometric median of the clients' covariances, times all samples. One or two clients of a class have no
    middle: their mean.
    """
    counts = torch.stack([one.counts for one in clients])  # (K, C)
    means = torch.stack([one.means() for one in clients])  # (K, C, d)
    total, centres = torch.zeros_like(counts[0]), torch.zeros_like(means[0])
    for known in range(counts.shape[1]):
        have = counts[:, known] > 0
        if have.any():
            some = counts[have, known]
            total[known] = bounded(some).sum()
            centres[known] = middle(means[have, known], some, aggregate, trim)
    sketches = torch.stack([_middle_sketch(clients, row, omega) for row in range(counts.shape[1])])
    told = [one for one in clients if one.seen.any()]
    moment = torch.zeros_like(clients[0].moment)
    if told:
        weights = bounded(torch.tensor([float(one.freedom()) for one in told], dtype=torch.float64))
        spread = geometric_median(torch.stack([one.scatter() / one.freedom() for one in told]), weights)
        sums = Sums(total, centres, moment)
        moment = spread * sums.freedom() + centres.T @ (centres * total[:, None])
    whole = sketches * (total - 1).clamp_min(1)[:, None, None]
    whole += (centres * total[:, None])[:, :, None] * (centres @ omega)[:, None]
    return Sums(total, centres * total[:, None], moment, whole * (total > 0)[:, None, None])


def _middle_sketch(clients: Sequence[Sums], row: int, omega: Tensor) -> Tensor:
    """S·Ω (d, k) for the geometric median S of the clients' covariances of one class; of too few samples zero."""
    have = [one for one in clients if one.counts[row] > 1]
    if not have or not omega.shape[1]:
        return clients[0].sketches[row] * 0
    freedom = torch.stack([one.counts[row] - 1 for one in have])
    own = [Sums(o.counts[row, None], o.sums[row, None], o.moment, o.sketches[row, None]) for o in have]
    spread = torch.stack([one.own_scatter(omega)[0] for one in own]) / freedom[:, None, None]
    return geometric_median(spread, bounded(freedom))


def supported(bases: Sequence[Tensor]) -> list[Tensor]:
    """For each of the bases (d, r_k) a rotation (r_k, s_k): the directions in it that another client asks for too.

    Fewer than three clients cannot be told apart: all of theirs.
    """
    if len(bases) < 3:
        return [torch.eye(basis.shape[1], dtype=torch.float64) for basis in bases]
    every, widths = torch.cat([basis.double() for basis in bases], dim=1), [basis.shape[1] for basis in bases]
    found = []
    for place, basis in enumerate(bases):
        shared = list((basis.double().T @ every).split(widths, dim=1))
        del shared[place]
        cosines = torch.cat(shared, dim=1)
        values, vectors = torch.linalg.eigh(cosines @ cosines.T)
        found.append(vectors[:, values >= SUPPORT])
    return found
