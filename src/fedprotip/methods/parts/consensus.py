"""What most clients say about their classes, and who contradicts them.

Labels that were swapped give class statistics that nothing is wrong with by themselves. But a class has one mean, and
clients that know it know where it is: a client whose mean of one class lies where the others have another one does not
speak of the same class. It needs three clients that have a class, of two either may be the odd one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedprotip.inference.statistics import Sums
from fedprotip.messages import Message
from fedprotip.methods.parts.robust import geometric_median, middle

FEWEST, MOST = 3, 256
"""Clients that have a class, so that they can agree on its mean; and so many of them are heard at most."""
SPREADS = 3
"""Clients of which covariances are held, those with the most samples: their geometric median says what is near."""
RIDGE = 0.1
"""Share of the mean variance that is added to every one."""
CLOSER = 0.5
"""How much nearer, squared, a mean is to that of another class than to that of its own; in honest runs at least 1.8 of
it: docs/threats.md."""
FAR = 2.0
"""How much farther, squared, it is from the middle of its class than the means of most clients that have it.

Where most of them have few samples the middle is off by itself, and the farther from it the better a client knows."""
CHANCE = 6.0
"""Standard deviations of a mean of so many samples, and of the middle: no step towards another class that is smaller
counts.

A covariance of f degrees of freedom in d dimensions takes some directions for narrower than they are: the smallest
eigenvalue of a Wishart matrix is near (1 − √(d/f))² of the true one, 0 where f < d, and `RIDGE` is what keeps it from
there. So steps have to be longer where few samples told the covariance, by √10 where f < d."""


@dataclass(frozen=True)
class Agreed:
    """What most clients say: where classes are, in whitened space, and how sure that is."""

    known: Tensor  # (k,) rows of the classes that enough clients have
    triangle: Tensor  # (d, d): what whitens
    centres: Tensor  # (k, d): the middle of their means
    off: Tensor  # (k,): how far from it most of these are, squared
    samples: Tensor  # (k,): of the client in the middle, so many as half of them have at least
    longest: float  # the longest step s/√(1/n + 1/samples) of a mean of n samples that may be chance

    def taken(self, counts: Tensor, means: Tensor) -> tuple[int, int] | None:
        """Places of a class and of the one that a client of these counts (C,) and means (C, d) takes for it."""
        counts = counts[self.known]
        distances = torch.cdist(_whitened(means[self.known], self.triangle), self.centres).square()
        own, apart = distances.diagonal()[:, None], torch.cdist(self.centres, self.centres)
        steps = (own - distances + apart.square()) / (2 * apart)  # (k, k): how far it is on the way to another class
        chance = self.longest * (1 / counts + 1 / self.samples).sqrt()
        taken = (distances < CLOSER * own) & (steps > chance[:, None]) & (own > FAR * self.off[:, None])
        if not taken.any():
            return None
        return divmod(int(torch.where(taken, distances / own, torch.inf).argmin()), len(counts))


class Consensus:
    """First hears every client, then says of each whether it takes a class for another one.

    Args:
        labels: of the classes, row by row.
        read: the sums that a message tells.
    """

    def __init__(self, labels: Sequence[int], read: Callable[[Message], Sums]) -> None:
        self._labels, self._read = labels, read
        self._told: list[list[tuple[float, Tensor]]] = [[] for _ in labels]  # of every class counts, means of clients
        self._spreads: list[tuple[float, Tensor]] = []  # degrees of freedom, covariance (d, d)

    def add(self, message: Message) -> None:
        """Hear a client."""
        sums = self._read(message)
        means = sums.means().float()
        for row in sums.seen.nonzero().flatten().tolist():
            if len(self._told[row]) < MOST:
                self._told[row].append((sums.counts[row].item(), means[row].clone()))
        freedom = sums.freedom()
        if sums.seen.any() and (len(self._spreads) < SPREADS or freedom > self._spreads[-1][0]):
            self._spreads.append((freedom, (sums.scatter() / freedom).float()))
            self._spreads.sort(key=lambda one: -one[0])
            del self._spreads[SPREADS:]

    def objection(self, message: Message) -> str:
        """Which class a client takes for another one; empty: none that can be told."""
        agreed, sums = self._agreed, self._read(message)
        places = agreed.taken(sums.counts, sums.means()) if agreed else None
        if not agreed or not places:
            return ""
        mine, theirs = (self._labels[int(agreed.known[place])] for place in places)
        return f"its mean of class {mine} lies where the others have class {theirs}"

    @cached_property
    def _agreed(self) -> Agreed | None:
        """Of all clients, once they have been heard; None where there is nothing to agree about."""
        known = [row for row, told in enumerate(self._told) if len(told) >= FEWEST]
        told, spreads, self._told, self._spreads = [self._told[row] for row in known], self._spreads, [], []
        if len(known) < 2:
            return None
        spread = geometric_median(torch.stack([spread for _, spread in spreads]).double())
        ridge = RIDGE * spread.diagonal().mean()
        triangle, failed = torch.linalg.cholesky_ex(spread + ridge * torch.eye(len(spread), dtype=torch.float64))
        if failed:  # features that hardly vary: whatever is near is chance
            return None
        means = [_whitened(torch.stack([mean for _, mean in each]).double(), triangle) for each in told]
        centres = torch.stack([middle(each, "median", 0.0) for each in means])
        off = [(each - centre).square().sum(1).median() for each, centre in zip(means, centres, strict=True)]
        samples = [torch.tensor([count for count, _ in each], dtype=torch.float64).median() for each in told]
        freedom = spreads[len(spreads) // 2][0]  # of those heard the middle one: a liar's is another's
        narrow = max(1 - (len(spread) / freedom) ** 0.5, 0) ** 2
        longest = CHANCE / (narrow + RIDGE) ** 0.5
        return Agreed(torch.tensor(known), triangle, centres, torch.stack(off), torch.stack(samples), longest)


def _whitened(rows: Tensor, triangle: Tensor) -> Tensor:
    """Rows (k, d) where a class has variance 1."""
    return torch.linalg.solve_triangular(triangle, rows.T, upper=False).T
