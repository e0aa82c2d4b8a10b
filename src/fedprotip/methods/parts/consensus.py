"""What most clients say about their classes, and who contradicts them.

Labels that were swapped give class statistics that nothing is wrong with by themselves. But a class has one mean, and
clients that know it know where it is: a client whose mean of one class lies where the others have another one does not
speak of the same class. It needs three clients that have a class, of two either may be the odd one.
"""

from collections.abc import Callable, Sequence

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
CHANCE = 6.0
"""Standard deviations of a mean of so many samples: no step towards another class that is smaller counts.

A covariance of f degrees of freedom in d dimensions takes some directions for narrower than they are: the smallest
eigenvalue of a Wishart matrix is near (1 − √(d/f))² of the true one, 0 where f < d, and `RIDGE` is what keeps it from
there. So steps have to be longer where few samples told the covariance, by √10 where f < d."""


class Consensus:
    """First hears every client, then says of each whether it takes a class for another one.

    Args:
        labels: of the classes, row by row.
        read: the sums that a message tells.
    """

    def __init__(self, labels: Sequence[int], read: Callable[[Message], Sums]) -> None:
        self._labels, self._read = labels, read
        self._means: list[list[Tensor]] = [[] for _ in labels]  # of every class those of the clients that have it
        self._spreads: list[tuple[float, Tensor]] = []  # degrees of freedom, covariance (d, d)
        self._found: tuple[Tensor, Tensor, Tensor, float] | None = None

    def add(self, message: Message) -> None:
        """Hear a client."""
        sums = self._read(message)
        means = sums.means().float()
        for row in sums.seen.nonzero().flatten().tolist():
            if len(self._means[row]) < MOST:
                self._means[row].append(means[row].clone())
        freedom = sums.freedom()
        if sums.seen.any() and (len(self._spreads) < SPREADS or freedom > self._spreads[-1][0]):
            self._spreads.append((freedom, (sums.scatter() / freedom).float()))
            self._spreads.sort(key=lambda one: -one[0])
            del self._spreads[SPREADS:]

    def objection(self, message: Message) -> str:
        """Which class a client takes for another one; empty: none that can be told."""
        known, centres, triangle, longest = self._found = self._found or self._agree()
        if not len(known):
            return ""
        sums = self._read(message)
        counts, means = sums.counts[known], _whitened(sums.means()[known], triangle)
        distances = torch.cdist(means, centres).square()  # (k, k): of its mean to the others' of every class
        own, apart = distances.diagonal()[:, None], torch.cdist(centres, centres)
        steps = (own - distances + apart.square()) / (2 * apart)  # how far it is on the way to another class
        taken = (distances < CLOSER * own) & (counts.sqrt()[:, None] * steps > longest)
        if not taken.any():
            return ""
        row, other = divmod(int(torch.where(taken, distances / own, torch.inf).argmin()), len(known))
        mine, theirs = (self._labels[int(known[place])] for place in (row, other))
        return f"its mean of class {mine} lies where the others have class {theirs}"

    def _agree(self) -> tuple[Tensor, Tensor, Tensor, float]:
        """The classes (k,) that enough clients have, the middle of their means (k, d), whitened, by what (d, d), and
        the longest step √n · s of a mean of n samples that may be chance."""
        known = torch.tensor([row for row, means in enumerate(self._means) if len(means) >= FEWEST], dtype=torch.int64)
        nothing = known[:0], torch.zeros(0), torch.zeros(0), 0.0
        if len(known) < 2:
            return nothing
        spread = geometric_median(torch.stack([spread for _, spread in self._spreads]).double())
        ridge = RIDGE * spread.diagonal().mean()
        triangle, failed = torch.linalg.cholesky_ex(spread + ridge * torch.eye(len(spread), dtype=torch.float64))
        if failed:  # features that hardly vary: whatever is near is chance
            return nothing
        centres = torch.stack([middle(torch.stack(self._means[row]).double(), "median", 0.0) for row in known.tolist()])
        freedom = self._spreads[len(self._spreads) // 2][0]  # of those heard the middle one: a liar's is another's
        narrow = max(1 - (len(spread) / freedom) ** 0.5, 0) ** 2
        self._means, self._spreads = [], []
        return known, _whitened(centres, triangle), triangle, CHANCE / (narrow + RIDGE) ** 0.5


def _whitened(rows: Tensor, triangle: Tensor) -> Tensor:
    """Rows (k, d) where a class has variance 1."""
    return torch.linalg.solve_triangular(triangle, rows.T, upper=False).T
