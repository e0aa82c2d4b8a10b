"""Sums and means that one client of many cannot move far (`train.aggregate`)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedprotip.inference.statistics import Sums

SUPPORT = 0.5
"""Squared cosines with the bases of others, summed up, that a direction needs to be asked for by somebody else too."""
STRONGEST = 3.0
"""No update weighs more than this many of the median weight."""
WIDTH = 0.1
"""A median is the mean of the middle fifth of all clients: of few the very middle would be a single one."""
PASSES = 30
"""Steps of Weiszfeld's iteration; it ends before where nothing changes."""


def is_robust(aggregate: str) -> bool:
    """Whether no single reply can decide about a mean; then the stated numbers of samples do not count either."""
    return aggregate in ("trimmed", "median")


def usual(counts: Tensor) -> Tensor:
    """Numbers of samples (K,), none larger than the median client's, the lower one of two in the middle.

    How many samples a client has, it says itself: one of three or more cannot make this larger than another's.
    """
    return counts.clamp_max(counts.median())


def bounded(weights: Tensor) -> Tensor:
    """Weights of which none is larger than `STRONGEST` median ones, nor than 40 % of all where there are three or more.

    For updates, where clients of many samples know what those of a few do not; what a client says makes it no stronger.
    """
    return weights.clamp_max(min(STRONGEST * weights.median().item(), _fair(weights.sort(descending=True).values)))


def _fair(ordered: Tensor) -> float:
    """To what weights, the largest first, have to be cut so that nobody has more than 40 % of what is left of all."""
    share = 0.99 * (0.5 - WIDTH)
    for heavy in range(1, min(len(ordered), 3)):  # so many of them are cut; three alike have a third each
        most = share * ordered[heavy:].sum().item() / (1 - heavy * share)
        if most >= ordered[heavy]:
            return most
    return ordered[min(len(ordered), 3) - 1].item()


def middle(rows: Tensor, aggregate: str, trim: float, weights: Tensor | None = None) -> Tensor:
    """Of every column of (K, n) the median, or the mean without the share `trim` at each end.

    Whatever the share, as much as the heaviest row weighs is left out at each end: nobody takes the result out of the
    range of the others. Rows count alike, or by `bounded` weights. Two have no middle: their mean.
    """
    ordered, order = rows.sort(dim=0)
    shares = torch.ones_like(ordered) if weights is None else bounded(weights.to(rows.dtype))[order]  # (K, n)
    shares = shares / shares[:, :1].sum(0)
    heaviest = shares.max().item() * (1 + 1e-9)  # rounding leaves nothing of it
    cut = max(0.5 - WIDTH if aggregate == "median" else trim, min(heaviest, 0.5 - WIDTH / 2))
    above = shares.cumsum(0)
    below = torch.cat([torch.zeros_like(above[:1]), above[:-1]])
    kept = (above.clamp_max(1 - cut) - below.clamp_min(cut)).clamp_min(0)
    return (ordered * kept).sum(0) / kept.sum(0)


def geometric_median(points: Tensor) -> Tensor:
    """The point (d, …) with the least sum of distances to those of (K, d, …): a mixture of them (Weiszfeld).

    So of covariances it is one; and less than half of the points cannot take it away.
    """
    flat = points.flatten(1)
    centre, mixture = flat.median(dim=0).values, flat.new_full((len(flat),), 1 / len(flat))
    scale = (flat - centre).norm(dim=1).median().clamp_min(1e-200)  # one point, or equal ones
    for _ in range(PASSES):
        near = 1 / (flat - centre).norm(dim=1).clamp_min(1e-6 * scale)
        near = near / near.sum()
        moved, mixture = (near - mixture).abs().max(), near
        centre = mixture @ flat
        if moved < 1e-9:
            break
    return centre.view(points.shape[1:])


def robust_sums(clients: Sequence[Sums], aggregate: str, trim: float, omega: Tensor) -> Sums:
    """Sums of features, sketched by Ω (d, k), as if all clients were like most of them.

    Class means: the middle of the clients' means. Counts: the `usual` ones. Scatter, of all and of a class: the
    geometric median of the clients' covariances, times all samples. No stated number of samples weighs anything.
    """
    counts = torch.stack([one.counts for one in clients])  # (K, C)
    means = torch.stack([one.means() for one in clients])  # (K, C, d)
    total, centres = torch.zeros_like(counts[0]), torch.zeros_like(means[0])
    for known in range(counts.shape[1]):
        have = counts[:, known] > 0
        if have.any():
            total[known] = usual(counts[have, known]).sum()
            centres[known] = middle(means[have, known], aggregate, trim)
    sketches = torch.stack([_middle_sketch(clients, row, omega) for row in range(counts.shape[1])])
    told = [one for one in clients if one.seen.any()]
    moment = torch.zeros_like(clients[0].moment)
    if told:
        spread = geometric_median(torch.stack([one.scatter() / one.freedom() for one in told]))
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
    return geometric_median(spread)


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
