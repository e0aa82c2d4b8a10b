"""Distillation: a network keeps saying what another one says."""

import torch.nn.functional as F
from torch import Tensor


def distillation(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """KL divergence of softened outputs (n, C), times T², so that gradients hardly depend on T (Hinton et al. 2015)."""
    log_student, log_teacher = ((logits / temperature).log_softmax(1) for logits in (student, teacher))
    return F.kl_div(log_student, log_teacher, reduction="batchmean", log_target=True) * temperature**2
