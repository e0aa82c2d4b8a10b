"""A group of samples whose tasks are unknown: of one task, or of several."""

import torch
from torch import Tensor

STEPS = 50


def mixture(evidence: Tensor) -> Tensor:
    """log p(task | sample, group), (n, T), from the log-likelihoods (n, T) of a group's samples; one alone: n = 1.

    Either all samples are of one task, or each comes from a task drawn with shares that the group itself tells (by
    expectation maximisation). The second explanation always fits better and has T − 1 more numbers, so it has to be
    better by log(n)/2 for each of them. Then a pure group decides as one, and in a mixed one every sample for itself.
    """
    n, tasks = evidence.shape
    together = evidence.sum(0)
    shares = torch.full((tasks,), 1 / tasks, dtype=torch.float64)
    scores = evidence.double()
    for _ in range(STEPS):
        shares = (scores + shares.log()).softmax(1).mean(0).clamp_min(1e-12)
    fit = (scores + shares.log()).logsumexp(1).sum()
    if together.max() >= fit - (tasks - 1) / 2 * torch.log(torch.tensor(float(n))):
        return together.double().log_softmax(0).expand(n, tasks)
    return (scores + shares.log()).log_softmax(1)
