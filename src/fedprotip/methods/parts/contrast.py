"""The supervised contrastive loss (Khosla et al. 2020, its form L_out)."""

import torch
from torch import Tensor


def contrast(views: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Views of one class come together, all others go apart.

    L_i = −1/|P(i)| Σ_{p ∈ P(i)} log( exp(z_i·z_p/τ) / Σ_{a ≠ i} exp(z_i·z_a/τ) ), P(i): the others of its class.
    The mean over views that have any; 0 where none has.

    Args:
        views: unit vectors (n, d); labels: (n,).
    """
    itself = torch.eye(len(views), dtype=torch.bool, device=views.device)
    products = (views @ views.T / temperature).masked_fill(itself, -torch.inf)
    shares = products - products.logsumexp(1, keepdim=True)
    positive = (labels[:, None] == labels) & ~itself
    counts = positive.sum(1)
    own = torch.where(positive, shares, 0.0).sum(1)
    return -(own / counts.clamp_min(1)).sum() / (counts > 0).sum().clamp_min(1)
