"""Eq. 17: average accuracy and forgetting, from the matrix of accuracies."""

from collections.abc import Sequence

Matrix = Sequence[Sequence[float]]
"""Row i: accuracy (%) on tasks 0…i after learning task i."""


def average_accuracy(matrix: Matrix) -> float:
    """ACC = (1/T) Σ_t acc_t^(T).

    >>> average_accuracy([[90.0], [80.0, 100.0]])
    90.0
    """
    last = matrix[-1]
    return sum(last) / len(last)


def forgetting(matrix: Matrix) -> float:
    """FT = (1/T) Σ_{t<T} (max_{i ∈ t…T−1} acc_t^(i) − acc_t^(T)): divided by T, as in the paper.

    >>> forgetting([[90.0], [80.0, 100.0]])
    5.0
    """
    tasks = len(matrix)
    drops = [max(row[t] for row in matrix[t:-1]) - matrix[-1][t] for t in range(tasks - 1)]
    return sum(drops) / tasks
