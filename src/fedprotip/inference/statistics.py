"""Class statistics as plain sums, and the discriminants that follow from them in closed form.

A client adds up its features: per class their number and sum, and over all classes one second moment Σ aaᵀ. Sums of
clients and tasks add up to the sums of all data, in any order, so nothing else is kept and nothing else need be seen.
As long as features of old tasks stay where they were (which projection sees to), the sums stay valid.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedprotip.seeds import torch_stream
from fedprotip.store.files import Tensors
from fedprotip.subspace.basis import SPARE, leading_range

COUNTS, SUMS, MOMENT = "statistics/counts", "statistics/sums", "statistics/moment"
"""In the knowledge: (C,), (C, M) and the packed second moment, one row per class of every task so far; float64."""


def pack(moment: Tensor) -> Tensor:
    """The upper triangle of a symmetric matrix (d, d), row by row: d(d + 1)/2 numbers."""
    rows, columns = torch.triu_indices(*moment.shape, device=moment.device)
    return moment[rows, columns]


def unpack(packed: Tensor, d: int) -> Tensor:
    """The symmetric matrix (d, d) of a packed triangle."""
    rows, columns = torch.triu_indices(d, d, device=packed.device)
    moment = packed.new_empty(d, d)
    moment[rows, columns] = packed
    moment[columns, rows] = packed
    return moment


def low_rank(scatter: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """F (d, rank) and r (d,) with FFᵀ + diag(r) close to a scatter matrix (d, d): its dominant part, and all variances.

    Nyström's approximation, which never exceeds the matrix: what is sent is a scatter matrix too, r is not negative and
    the variance of every feature is exact.
    """
    span = leading_range(scatter, min(rank + SPARE, len(scatter)), passes=2)
    image = scatter @ span
    values, vectors = torch.linalg.eigh(span.T @ image)
    good = values > 1e-12 * values[-1:]
    whole = image @ (vectors[:, good] / values[good].sqrt())  # whole @ wholeᵀ is the approximation
    factor = whole @ torch.linalg.eigh(whole.T @ whole).eigenvectors.flip(1)[:, :rank]
    factor = torch.nn.functional.pad(factor, (0, rank - factor.shape[1]))  # a matrix of lower rank
    return factor, (scatter.diagonal() - factor.square().sum(1)).clamp_min(0)


@dataclass
class Sums:
    """Number and sum of the features of every class, and the second moment of all of them; in float64."""

    counts: Tensor  # (C,)
    sums: Tensor  # (C, d)
    moment: Tensor  # (d, d)

    @classmethod
    def zeros(cls, classes: int, d: int) -> "Sums":
        zeros = torch.zeros(classes, d + 1, dtype=torch.float64)
        return cls(zeros[:, 0].clone(), zeros[:, 1:].clone(), torch.zeros(d, d, dtype=torch.float64))

    def add(self, features: Tensor, classes: Tensor) -> None:
        """Enter features (n, d) of these classes (n,), given as row numbers."""
        features = features.double().cpu()
        self.counts += torch.bincount(classes.cpu(), minlength=len(self.counts))
        self.sums.index_add_(0, classes.cpu(), features)
        self.moment.addmm_(features.T, features)

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(self.counts + other.counts, self.sums + other.sums, self.moment + other.moment)

    @property
    def seen(self) -> Tensor:
        """(C,) the classes that have statistics."""
        return self.counts > 0

    def means(self) -> Tensor:
        """(C, d); zero for a class that was never seen."""
        return self.sums / self.counts.clamp_min(1)[:, None]

    def scatter(self) -> Tensor:
        """Σ (a − μ_c)(a − μ_c)ᵀ over all samples, (d, d)."""
        return self.moment - self.sums.T @ self.means()

    def freedom(self) -> int:
        """Degrees of freedom of the scatter: samples less classes, at least 1."""
        return max(int(self.counts.sum()) - int(self.seen.sum()), 1)


def recall(knowledge: Tensors) -> Sums:
    """All statistics so far."""
    sums = knowledge[SUMS]
    return Sums(knowledge[COUNTS], sums, unpack(knowledge[MOMENT], sums.shape[1]))


def oas(covariance: Tensor, samples: int) -> float:
    """How far to shrink a covariance (d, d) of so many samples towards a multiple of I: between 0 and 1.

    The oracle-approximating estimate for Gaussian samples (Chen, Wiesel, Eldar, Hero 2010, Eq. 23). It needs two
    traces, so no data and no labels.
    """
    d, trace, square = len(covariance), covariance.trace().item(), covariance.square().sum().item()
    excess = (samples + 1 - 2 / d) * (square - trace**2 / d)
    return 1.0 if excess <= 0 else min(((1 - 2 / d) * square + trace**2) / excess, 1.0)


@dataclass(frozen=True)
class Gaussians:
    """One Gaussian per class around its mean, all with one covariance: linear discriminant analysis.

    Features are whitened first; then log N(a; μ_c, Σ) = −½‖z − m_c‖² up to a constant that all classes share.
    """

    whitening: Tensor  # (d, d): z = a · whitening
    centres: Tensor  # (C, d): whitened means m_c
    seen: Tensor  # (C,) classes that have statistics; the others are never the answer
    shrinkage: float

    @classmethod
    def of(cls, sums: Sums, shrinkage: float | None = None) -> "Gaussians":
        """From sums of features; the shrinkage of the covariance by `oas`, or as given."""
        d, freedom = sums.sums.shape[1], sums.freedom()
        scatter = sums.scatter() / freedom
        share = oas(scatter, freedom) if shrinkage is None else shrinkage
        size = max(scatter.trace().item() / d, 0.0)
        rounding = 1e-6 * sums.moment.trace().item() / (d * max(sums.counts.sum().item(), 1.0))  # sums come as float32
        eye = torch.eye(d, dtype=torch.float64)
        floor = max(max(share, 1e-7) * size, rounding, 1e-12)
        covariance = (1 - share) * (scatter + scatter.T) / 2 + floor * eye
        triangle, failed = torch.linalg.cholesky_ex(covariance)
        if failed:  # sums that no samples have: a client may tell anything
            spread = torch.linalg.eigvalsh(covariance)
            triangle = torch.linalg.cholesky(covariance + (1e-9 * spread[-1].abs() - 2 * spread[0].clamp_max(0)) * eye)
        whitening = torch.linalg.solve_triangular(triangle, eye, upper=False).T
        return cls(whitening.float(), (sums.means() @ whitening).float(), sums.seen, share)

    def whiten(self, features: Tensor) -> Tensor:
        """Features (n, d) in coordinates in which every class has variance 1 in all directions."""
        return features.float().cpu() @ self.whitening

    def log_densities(self, features: Tensor) -> Tensor:
        """log N(a; μ_c, Σ) for features (n, d), without the constant; −∞ for a class without statistics."""
        whitened = self.whiten(features)
        distances = whitened.square().sum(1)[:, None] - 2 * whitened @ self.centres.T + self.centres.square().sum(1)
        return torch.where(self.seen, -0.5 * distances.clamp_min(0), -torch.inf)

    def head(self) -> tuple[Tensor, Tensor]:
        """The same decision as weights (C, d) and biases (C,) of a linear layer: logits whose softmax is the posterior.

        A class without statistics answers as the mean of all classes would, so that training can begin.
        """
        centres = torch.where(self.seen[:, None], self.centres, self.centres[self.seen].mean(0))
        centre = centres.mean(0)  # what all classes share changes no decision, and stays out of the weights
        bias = -0.5 * (centres - centre).square().sum(1) - (centres - centre) @ centre
        return (centres - centre) @ self.whitening.T, bias


def ridge(sums: Sums, strength: float) -> tuple[Tensor, Tensor]:
    """Least squares to one-hot labels with a penalty: weights (C, d), biases (C,), from centred sums.

    Args:
        strength: λ as a multiple of the mean variance of a feature.
    """
    n, d = max(sums.counts.sum().item(), 1.0), sums.sums.shape[1]
    mean = sums.sums.sum(0) / n
    covariance = sums.moment / n - torch.outer(mean, mean)
    cross = (sums.sums - sums.counts[:, None] * mean) / n  # (C, d): covariance of labels and features
    penalty = strength * max(covariance.trace().item() / d, torch.finfo(torch.float32).tiny)
    weights = torch.linalg.solve(covariance + penalty * torch.eye(d, dtype=torch.float64), cross.T).T
    bias = sums.counts / n - weights @ mean
    return weights.float(), torch.where(sums.seen, bias, -torch.inf).float()


@dataclass(frozen=True)
class FeatureMap:
    """relu(aR) with a seeded random R (d, M), so that sums see more than linear features; M = 0: features as they are.

    Only seed and M travel: every machine draws the same R.
    """

    d: int
    width: int
    seed: int

    @property
    def out(self) -> int:
        return self.width or self.d

    def __call__(self, features: Tensor) -> Tensor:
        if not self.width:
            return features
        return (features @ self._matrix().to(features)).relu()

    def _matrix(self) -> Tensor:
        if "_drawn" not in self.__dict__:
            chance = torch_stream(self.seed, "features", self.d, self.width)
            object.__setattr__(self, "_drawn", torch.randn(self.d, self.width, generator=chance) / self.d**0.5)
        return self.__dict__["_drawn"]
