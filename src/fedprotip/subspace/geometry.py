"""Section 5: the two coefficients of Assumptions 4 and 5, and the bounds they enter (Eq. 13–16, 25, 31, Lemma 3).

Plain numbers in, plain numbers out; `federation/geometry.py` measures what goes in.
"""

from collections.abc import Sequence
from math import inf, sqrt

from torch import Tensor

from fedprotip.subspace.project import Projector


def squared_norms(gradients: dict[str, Tensor], projectors: dict[str, Projector]) -> tuple[float, float]:
    """(‖P∇L‖², ‖∇L‖²) over the layers of `gradients`; a layer without projector is admissible as it is."""
    inside = whole = 0.0
    for name, gradient in gradients.items():
        whole += gradient.double().square().sum().item()
        kept = projectors[name](gradient) if name in projectors else gradient
        inside += kept.double().square().sum().item()
    return inside, whole


def adequacy(projected_sq: float, whole_sq: float) -> float:
    """Assumption 4 at one iterate: ρ = ‖P∇L‖² / ‖∇L‖² of the current task; 1 where the gradient vanishes."""
    return projected_sq / whole_sq if whole_sq > 0 else 1.0


def interference(projected_sq: float, whole_sq: float) -> float:
    """Assumption 5 at one iterate: β = ‖P∇L‖ / ‖∇L‖ of an old task; 0 where the gradient vanishes."""
    return sqrt(projected_sq / whole_sq) if whole_sq > 0 else 0.0


def mean_interference(beta: Sequence[Sequence[float]]) -> float:
    """β̄_T = 2/(T(T−1)) Σ_t Σ_{τ<t} β_τ^(t−1), for beta[t][τ] with τ < t."""
    pairs = [beta[t][tau] for t in range(len(beta)) for tau in range(t)]
    return sum(pairs) / len(pairs) if pairs else 0.0


def loss_forgetting(increases: Sequence[float]) -> float:
    """FT_loss (Eq. 28): mean over the old tasks of L^(τ)(W^(T)) − L^(τ)(W^(τ))."""
    return sum(increases) / len(increases) if increases else 0.0


def taskwise_bound(
    gap: float, rho: float, rounds: int, steps: int, lr: float, smoothness: float, second_moment: float
) -> float:
    """Eq. 13: bound on the mean squared gradient of the current task.

    Args:
        gap: Δ_t = L^(t)(W^(t,0)) − inf L^(t); rho: ρ_t; rounds, steps, lr: E_t, S_t, η_t;
        smoothness: L of Assumption 1; second_moment: G² of Assumption 3.
    """
    if rho <= 0:
        return inf  # nothing of the gradient is left: no bound
    drift = smoothness * lr * steps
    return 2 * gap / (rho * rounds * steps * lr) + drift * second_moment / rho * (1 + drift / (3 * rho))


def drift_bound(steps: int, lr: float, second_moment: float) -> float:
    """Lemma 3: bound on ‖W_k^(t,e,s) − W^(t,e−1)‖² after s local steps of a client."""
    return steps**2 * lr**2 * second_moment


def round_bound(beta: float, steps: int, lr: float, smoothness: float, second_moment: float) -> float:
    """Eq. 25: bound on Γ_τ^(t,e), the loss increase of an old task in one round; β_τ^(t−1) and S_t of the task."""
    return second_moment * (beta * steps * lr + smoothness / 2 * steps**2 * lr**2)


def forgetting_bound(
    betas: Sequence[float], steps: Sequence[int], rounds: int, lr: float, smoothness: float, second_moment: float
) -> float:
    """Eq. 14: bound on the loss increase of an old task; β_τ^(t−1) and S_t of every later task t."""
    return sum(
        rounds * round_bound(beta, s, lr, smoothness, second_moment) for beta, s in zip(betas, steps, strict=True)
    )


def canonical_lr(rounds: int, steps: int, smoothness: float) -> float:
    """Eq. 29: η = 1 / (L S √E), the step size of the corollary."""
    return 1 / (smoothness * steps * sqrt(rounds))


def taskwise_bound_canonical(gap: float, rho: float, rounds: int, smoothness: float, second_moment: float) -> float:
    """Eq. 15: Eq. 13 at the canonical step size."""
    if rho <= 0:
        return inf
    root = sqrt(rounds)
    return 2 * smoothness * gap / (rho * root) + second_moment / (rho * root) * (1 + 1 / (3 * rho * root))


def forgetting_bound_canonical(betas: Sequence[float], rounds: int, smoothness: float, second_moment: float) -> float:
    """Eq. 31: Eq. 14 at the canonical step size of every later task."""
    return second_moment / smoothness * sum(beta * sqrt(rounds) + 1 / 2 for beta in betas)


def loss_forgetting_bound(tasks: int, beta_bar: float, rounds: int, smoothness: float, second_moment: float) -> float:
    """Eq. 16: bound on FT_loss at the canonical step size."""
    return tasks * second_moment / smoothness * (beta_bar * sqrt(rounds) / 2 + 1 / 4)
