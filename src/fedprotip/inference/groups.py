"""A group of samples whose tasks are unknown: of one task, or of several."""

import math

import torch
from torch import Tensor

STEPS = 30


def mixture(evidence: Tensor) -> Tensor:
    """log p(task | sample, group), (…, n, T), from the log-likelihoods (…, n, T) of the samples of a group.

    Either all samples are of one task, or each comes from a task drawn with shares that the group itself tells (by
    expectation maximisation). The second explanation always fits better and has T − 1 more numbers, so it has to be
    better by log(n)/2 for each of them. Then a pure group decides as one, and in a mixed one every sample for itself.
    """
    scores, (n, tasks) = evidence.double(), evidence.shape[-2:]
    if n == 1:  # of one task, whatever shares fit it best
        return scores.log_softmax(-1)
    together = scores.sum(-2, keepdim=True)
    shares = scores.new_full((*scores.shape[:-2], 1, tasks), 1 / tasks)
    for _ in range(STEPS):
        shares = (scores + shares.log()).softmax(-1).mean(-2, keepdim=True).clamp_min(1e-12)
    weighed = scores + shares.log()
    fit = weighed.logsumexp(-1, keepdim=True).sum(-2, keepdim=True)
    pure = together.amax(-1, keepdim=True) >= fit - (tasks - 1) / 2 * math.log(n)
    return torch.where(pure, together, weighed).log_softmax(-1)
