"""Class statistics as plain sums, and the discriminants that follow from them in closed form.

A client adds up its features: per class their number and sum, over all classes one second moment Σ aaᵀ, and per class a
sketch of its own one, Σ a(aᵀΩ) with a few random columns Ω that everybody draws alike. Sums of clients and tasks add up
to the sums of all data, in any order, so nothing else is kept and nothing else need be seen. As long as features of old
tasks stay where they were (which projection sees to), the sums stay valid.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fedprotip.models.heads import Features
from fedprotip.seeds import torch_stream
from fedprotip.store.files import Tensors
from fedprotip.subspace.basis import SPARE, leading_range

GROUP = "statistics"
PARTS = ("counts", "sums", "moment", "sketches")
COUNTS, SUMS, MOMENT, SKETCHES = (f"{GROUP}/{part}" for part in PARTS)
"""In the knowledge: (C,), (C, M), the packed second moment and (C, M, k); a row per class of every task so far."""


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
    """Number and sum of the features of every class, second moment of all of them, sketch of that of every class.

    All in float64.
    """

    counts: Tensor  # (C,)
    sums: Tensor  # (C, d)
    moment: Tensor  # (d, d)
    sketches: Tensor = None  # type: ignore[assignment]  # (C, d, k): Σ a(aᵀΩ); by default k = 0

    def __post_init__(self) -> None:
        if self.sketches is None:
            self.sketches = self.sums.new_zeros(*self.sums.shape, 0)

    @classmethod
    def zeros(cls, classes: int, d: int, columns: int = 0) -> "Sums":
        shapes = ((classes,), (classes, d), (d, d), (classes, d, columns))
        return cls(*(torch.zeros(shape, dtype=torch.float64) for shape in shapes))

    def add(self, features: Tensor, classes: Tensor, omega: Tensor | None = None) -> None:
        """Enter features (n, d) of these classes (n,), given as row numbers; sketched by Ω (d, k)."""
        features, classes = features.double().cpu(), classes.cpu()
        self.counts += torch.bincount(classes, minlength=len(self.counts))
        self.sums.index_add_(0, classes, features)
        self.moment.addmm_(features.T, features)
        if omega is not None and omega.shape[1]:
            for row in classes.unique().tolist():
                own = features[classes == row]
                self.sketches[row].addmm_(own.T, own @ omega)

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(
            self.counts + other.counts,
            self.sums + other.sums,
            self.moment + other.moment,
            self.sketches + other.sketches,
        )

    def without(self, some: "Sums") -> "Sums":
        """The sums of all other samples; a class that has no more than these is one that was never seen."""
        left = self + some.times(-1)
        seen = left.seen[:, None]
        return Sums(left.counts.clamp_min(0), left.sums * seen, left.moment, left.sketches * seen[:, :, None])

    def times(self, weight: float) -> "Sums":
        return Sums(self.counts * weight, self.sums * weight, self.moment * weight, self.sketches * weight)

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

    def own_scatter(self, omega: Tensor) -> Tensor:
        """S_c·Ω for the scatter S_c of every class, (C, d, k)."""
        return self.sketches - self.sums[:, :, None] * (self.means() @ omega)[:, None]

    def freedom(self) -> int:
        """Degrees of freedom of the scatter: samples less classes, at least 1."""
        return max(int(self.counts.sum()) - int(self.seen.sum()), 1)


def recall(knowledge: Tensors, group: str = GROUP) -> Sums:
    """All statistics so far, of the network as it is or of another group."""
    counts, sums, moment, sketches = (knowledge[f"{group}/{part}"] for part in PARTS)
    return Sums(counts, sums, unpack(moment, sums.shape[1]), sketches.double())


def oas(covariance: Tensor, samples: int) -> float:
    """How far to shrink a covariance (d, d) of so many samples towards a multiple of I: between 0 and 1.

    The oracle-approximating estimate for Gaussian samples (Chen, Wiesel, Eldar, Hero 2010, Eq. 23). It needs two
    traces, so no data and no labels.
    """
    d, trace, square = len(covariance), covariance.trace().item(), covariance.square().sum().item()
    excess = (samples + 1 - 2 / d) * (square - trace**2 / d)
    return 1.0 if excess <= 0 else min(((1 - 2 / d) * square + trace**2) / excess, 1.0)


WEIGHT = 0.3
"""How much a class's own variance counts along its own directions; the rest is that of all classes, 1."""


@dataclass(frozen=True)
class Own:
    """What classes have for themselves in whitened space: the covariance I + V·diag(v − 1)·Vᵀ instead of I."""

    gains: Tensor  # (C, d, r) G = V·√(1 − 1/v)
    volume: Tensor  # (C,) log det = Σ log v

    @classmethod
    def none(cls, classes: int, d: int) -> "Own":
        return cls(torch.zeros(classes, d, 0), torch.zeros(classes))

    @classmethod
    def of(cls, sums: Sums, whitening: Tensor, omega: Tensor) -> "Own":
        """From sketches S_c·Ω of the classes' scatter: Nyström's approximation, in whitened space.

        Half as many directions as Ω has columns are kept, the others are too uncertain, and only those in which a class
        spreads more than all do. A class of n samples counts by the share (n − 1)/(n − 1 + columns) of WEIGHT.
        """
        kept, tiny = (omega.shape[1] + 1) // 2, torch.finfo(torch.float32).tiny
        freedom = (sums.counts - 1).clamp_min(0)[:, None]
        sketch = sums.own_scatter(omega) / freedom.clamp_min(1)[:, :, None]  # (C, d, k)
        inner = omega.T @ sketch
        values, vectors = torch.linalg.eigh((inner + inner.mT) / 2)
        least = 1e-9 * values[:, -1:].clamp_min(tiny)
        roots = torch.where(values > least, values.clamp_min(least).rsqrt(), 0.0)
        side = sketch.permute(1, 0, 2)  # one product of all classes takes half the time of one for each
        whitened = (whitening.T @ side.flatten(1)).view_as(side).permute(1, 0, 2)
        factor = whitened @ (vectors * roots[:, None])  # factor·factorᵀ approximates S_c
        spread, turn = (part.flip(-1)[..., :kept] for part in torch.linalg.eigh(factor.mT @ factor))
        variance = 1 + WEIGHT * freedom / (freedom + omega.shape[1]) * (spread - 1).clamp_min(0)
        lengths = spread.clamp_min(tiny).rsqrt() * (1 - 1 / variance).sqrt()
        return cls((factor @ turn * lengths[:, None]).float(), variance.log().sum(1).float())

    def corrected(self, distances: Tensor, whitened: Tensor, centres: Tensor) -> Tensor:
        """Squared distances (n, C) of whitened samples (n, d) to centres (C, d), as each class measures them."""
        if not self.gains.shape[2]:
            return distances
        flat = self.gains.permute(1, 0, 2).flatten(1)  # (d, C·r)
        along = (whitened @ flat).unflatten(1, self.gains.shape[::2]) - torch.einsum("cd,cdr->cr", centres, self.gains)
        return distances - along.to(distances).square().sum(2) + self.volume


def _whitening(sums: Sums, shrinkage: float | None, least: float) -> tuple[Tensor, float]:
    """W (d, d) with WᵀΣW = I for the covariance within classes, and how far that was shrunk towards its diagonal.

    Features may have any scales: all are brought to variance 1 first. `least`, as a share of the mean variance, is
    added to that of each.
    """
    d, freedom = sums.sums.shape[1], sums.freedom()
    covariance = sums.scatter() / freedom
    variances = covariance.diagonal().clamp_min(0)
    rounding = 1e-6 * sums.moment.diagonal() / sums.counts.sum().clamp_min(1)  # sums come as float32
    scales = (variances + rounding + max(least * variances.mean().item(), 1e-12)).sqrt()
    correlation = (covariance + covariance.T) / (2 * torch.outer(scales, scales))
    share = oas(correlation, freedom) if shrinkage is None else shrinkage
    eye = torch.eye(d, dtype=torch.float64)
    shrunk = (1 - share) * correlation
    shrunk.diagonal().copy_(torch.ones(d))
    triangle, failed = torch.linalg.cholesky_ex(shrunk)
    if failed:  # few samples that were hardly shrunk, or sums that no samples have: a client may tell anything
        lowest = torch.linalg.eigvalsh(shrunk)[0].clamp_max(0)
        triangle = torch.linalg.cholesky(shrunk + (1e-6 - 2 * lowest) * eye)
    return torch.linalg.solve_triangular(triangle, eye, upper=False).T / scales[:, None], share


@dataclass(frozen=True)
class Gaussians:
    """One Gaussian per class around its mean. All share one covariance; each may have directions of its own.

    Features are whitened by the shared covariance first. There a class has variance 1, but for the few directions in
    which its own samples spread most: log N = −½(‖z − m‖² − ‖Gᵀ(z − m)‖² + log det), up to a constant (`Own`). Without
    them it is linear discriminant analysis.
    """

    whitening: Tensor  # (d, d): z = a · whitening
    centres: Tensor  # (C, d): whitened means m_c
    seen: Tensor  # (C,) classes that have statistics; the others are never the answer
    shrinkage: float
    own: "Own"

    @classmethod
    def of(
        cls, sums: Sums, shrinkage: float | None = None, omega: Tensor | None = None, least: float = 1e-7
    ) -> "Gaussians":
        """From sums of features; the shrinkage of the covariance by `oas`, or as given; `least`: see `_whitening`."""
        whitening, share = _whitening(sums, shrinkage, least)
        centres = (sums.means() @ whitening).float()
        own = Own.of(sums, whitening, omega) if omega is not None and omega.shape[1] else Own.none(*sums.sums.shape)
        return cls(whitening.float(), centres, sums.seen, share, own)

    def whiten(self, features: Tensor) -> Tensor:
        """Features (n, d) in coordinates in which classes have variance 1 in all directions, on average."""
        return features.float().cpu() @ self.whitening

    def log_densities(self, features: Tensor) -> Tensor:
        """log N(a; μ_c, Σ_c) for features (n, d), without the constant; −∞ for a class without statistics.

        In float64: distances to all classes are large, and only their differences count.
        """
        whitened, centres = self.whiten(features), self.centres.double()
        far = whitened.double()
        distances = far.square().sum(1)[:, None] - 2 * far @ centres.T + centres.square().sum(1)
        distances = self.own.corrected(distances.clamp_min(0), whitened, self.centres)
        return torch.where(self.seen, -0.5 * distances, -torch.inf)

    def alike(self) -> "Gaussians":
        """The same without own directions of any class."""
        return replace(self, own=Own.none(*self.centres.shape))

    def head(self) -> tuple[Tensor, Tensor]:
        """The same decision as weights (C, d) and biases (C,) of a linear layer: logits whose softmax is the posterior.

        A class without statistics answers as the mean of all classes would, so that training can begin.
        """
        centres = torch.where(self.seen[:, None], self.centres, self.centres[self.seen].mean(0))
        centre = centres.mean(0)  # what all classes share changes no decision, and stays out of the weights
        bias = -0.5 * (centres - centre).square().sum(1) - (centres - centre) @ centre
        return (centres - centre) @ self.whitening.T, bias


def ridge(sums: Sums, strength: float, centred: bool = True) -> tuple[Tensor, Tensor]:
    """Least squares to one-hot labels with a penalty: weights (C, d), biases (C,).

    Args:
        strength: λ as a multiple of the mean variance of a feature.
        centred: with a bias, which is not penalised; else without any, and λ is a multiple of the mean square.
    """
    n, d = max(sums.counts.sum().item(), 1.0), sums.sums.shape[1]
    mean = sums.sums.sum(0) / n * centred
    covariance = sums.moment / n - torch.outer(mean, mean)
    cross = (sums.sums - sums.counts[:, None] * mean) / n  # (C, d): covariance of labels and features
    penalty = strength * max(covariance.trace().item() / d, torch.finfo(torch.float32).tiny)
    weights = torch.linalg.solve(covariance + penalty * torch.eye(d, dtype=torch.float64), cross.T).T
    bias = sums.counts / n * centred - weights @ mean
    return weights.float(), torch.where(sums.seen, bias, -torch.inf).float()


@dataclass(frozen=True)
class FeatureMap:
    """What class statistics are taken of, and the columns Ω that sketches see.

    The signed root of the features; then relu(aR) with a seeded random R (d, M), so that sums see more than linear
    features; M = 0: without. Only seed and sizes travel: every machine draws the same R and Ω. `final`: of the final
    features alone, without those of earlier stages. `born`: of the network at birth, before any training.
    """

    d: int
    width: int = 0
    seed: int = 0
    root: bool = False
    columns: int = 0
    final: bool = False
    born: bool = False

    @property
    def out(self) -> int:
        return self.width or self.d

    def see(self, features: Features) -> Tensor:
        """What a backbone makes of images, mapped."""
        if self.born:
            assert features.newborn is not None, "whoever looks asks for it"
            return self(features.newborn)
        return self(features.final if self.final else features.stacked)

    def __call__(self, features: Tensor) -> Tensor:
        if self.root:
            features = features.sign() * features.abs().sqrt()
        return (features @ self._matrix.to(features)).relu() if self.width else features

    @cached_property
    def omega(self) -> Tensor:
        """Ω (out, columns), float64."""
        chance = torch_stream(self.seed, "sketch", self.out, self.columns)
        return torch.randn(self.out, self.columns, generator=chance, dtype=torch.float64) / self.out**0.5

    @cached_property
    def _matrix(self) -> Tensor:
        chance = torch_stream(self.seed, "features", self.d, self.width)
        return torch.randn(self.d, self.width, generator=chance) / self.d**0.5
