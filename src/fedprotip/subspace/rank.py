"""How many directions to keep: Eq. 9 and the rule of GPM."""

import torch
from torch import Tensor

ROUNDING = 1e-12
"""Slack in "at least ε", so that a share that equals ε on paper also does in floating point."""


def rank_mass(sigma: Tensor, threshold: float, tail: float = 0.0) -> int:
    """Eq. 9: the smallest r whose singular values hold at least `threshold` of their sum.

    Args:
        sigma: singular values of the residual, descending, (n,).
        threshold: ε in (0, 1].
        tail: sum of further singular values that were cut off before.

    At least 1, except 0 when all values are zero: a zero residual has no direction.

    >>> rank_mass(torch.tensor([3.0, 1.0]), 0.75)
    1
    """
    return _smallest(sigma, threshold * (sigma.double().sum().item() + tail)) if sigma.any() else 0


def rank_energy(sigma: Tensor, captured: float, threshold: float, tail: float = 0.0) -> int:
    """Rule of GPM: what earlier bases capture counts first, new directions fill up to ε of the whole energy.

    Args:
        sigma: singular values of the residual, descending, (n,).
        captured: energy of the activations inside the earlier subspaces, ‖a‖² − ‖ã‖².
        threshold: ε in (0, 1].
        tail: energy of further directions that were cut off before.

    0 when the earlier bases already hold that share.

    >>> rank_energy(torch.tensor([2.0, 1.0]), captured=20.0, threshold=0.9)
    1
    """
    energy = sigma.double() ** 2
    total = captured + energy.sum().item() + tail
    missing = threshold * total - captured
    return _smallest(energy, missing) if missing > ROUNDING * total else 0


def _smallest(values: Tensor, target: float) -> int:
    """The smallest r with sum(values[:r]) ≥ target, never more than the values that are not zero."""
    reached = values.double().cumsum(0) >= target * (1 - ROUNDING)
    first = int(reached.int().argmax()) + 1 if reached.any() else len(values)
    return min(first, int(torch.count_nonzero(values)))
