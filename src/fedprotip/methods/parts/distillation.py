"""Distillation: a network keeps saying what another one says."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fedprotip.models import Network


def distillation(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """KL divergence of softened outputs (n, C), times T², so that gradients hardly depend on T (Hinton et al. 2015)."""
    log_student, log_teacher = ((logits / temperature).log_softmax(1) for logits in (student, teacher))
    return F.kl_div(log_student, log_teacher, reduction="batchmean", log_target=True) * temperature**2


def soft_cross_entropy(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """−Σ softmax(teacher/T) · log softmax(student/T), the mean over n: gradients as of `distillation`, over T²."""
    return -((teacher / temperature).softmax(1) * (student / temperature).log_softmax(1)).sum(1).mean()


def earlier(network: Network, features: Tensor, task: int) -> Tensor:
    """What the heads of all tasks before this one say (n, C_old); a head that all tasks share says everything."""
    heads = sorted({network.head_of(past) for past in range(task)})
    return torch.cat([network.heads[head](features) for head in heads], dim=1)
