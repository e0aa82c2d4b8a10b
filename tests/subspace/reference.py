"""Plain reference implementations: full SVD and dense d×d projectors, written for clarity only."""

import numpy as np
import torch


def projector_onto(u):
    """Dense projector onto the span of unit columns u, by full SVD."""
    left, sigma, _ = np.linalg.svd(u, full_matrices=False)
    keep = left[:, sigma > 1e-5]
    return keep @ keep.T


def core_basis(a, phi, threshold, rule):
    """Eq. 7–9 by the book: residual, full SVD, loop over r."""
    rest = a - phi @ (phi.T @ a)
    u, sigma, _ = np.linalg.svd(rest, full_matrices=False)
    if rule == "mass":
        r = next(r for r in range(1, len(sigma) + 1) if sigma[:r].sum() >= threshold * sigma.sum())
    else:
        total = (a**2).sum()
        captured = total - (rest**2).sum()
        r = next(r for r in range(len(sigma) + 1) if captured + (sigma[:r] ** 2).sum() >= threshold * total)
    return u[:, :r], sigma


def random_basis(rng, d, r):
    return np.linalg.qr(rng.standard_normal((d, r)))[0][:, :r]


def principal_angles(a, b):
    """Angles (radians, ascending) between the spans of two orthonormal bases (d, r) and (d, s)."""
    a, b = a.double(), b.double()
    if a.shape[1] < b.shape[1]:
        a, b = b, a
    sines = torch.linalg.svdvals(b - a @ (a.T @ b)).clamp(max=1.0)
    return torch.asin(sines).flip(0)
