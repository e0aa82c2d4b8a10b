"""Eq. 17: average accuracy and forgetting, from the matrix of accuracies."""

from collections.abc import Iterable, Sequence

from fedprotip.store.records import Number

Matrix = Sequence[Sequence[Number]]
"""Row i: accuracy (%) on tasks 0…i after learning task i; None where a task had no test samples any more."""


def mean(values: Iterable[Number]) -> float:
    """The mean of what was measured.

    >>> mean([None, 80.0, 100.0])
    90.0
    """
    known = [value for value in values if value is not None]
    return sum(known) / len(known)


def average_accuracy(matrix: Matrix) -> float:
    """ACC = (1/T) Σ_t acc_t^(T).

    >>> average_accuracy([[90.0], [80.0, 100.0]])
    90.0
    """
    return mean(matrix[-1])


def forgetting(matrix: Matrix) -> float:
    """FT = (1/T) Σ_{t<T} (max_{i ∈ t…T−1} acc_t^(i) − acc_t^(T)): divided by T, as in the paper.

    Over the tasks that could be measured at the end.

    >>> forgetting([[90.0], [80.0, 100.0]])
    5.0
    """
    last = {task: value for task, value in enumerate(matrix[-1]) if value is not None}
    before = {task: [row[task] for row in matrix[task:-1]] for task in last}
    known = {task: [value for value in values if value is not None] for task, values in before.items()}
    return sum(max(values) - last[task] for task, values in known.items() if values) / len(last)
