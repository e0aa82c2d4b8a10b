"""Eq. 17 against a plain loop over a full matrix."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedprotip.evaluation.metrics import average_accuracy, forgetting

percent = st.floats(0, 100)
matrices = st.integers(1, 12).flatmap(
    lambda tasks: st.tuples(*(st.lists(percent, min_size=row + 1, max_size=row + 1) for row in range(tasks)))
)


@given(matrices)
def test_metrics_are_those_of_a_plain_loop(matrix):
    last = len(matrix) - 1
    total = drop = 0.0
    for task in range(last + 1):
        total += matrix[last][task]
        best = None
        for after in range(task, last):
            if best is None or matrix[after][task] > best:
                best = matrix[after][task]
        if best is not None:
            drop += best - matrix[last][task]
    assert average_accuracy(matrix) == pytest.approx(total / (last + 1))
    assert forgetting(matrix) == pytest.approx(drop / (last + 1), abs=1e-9)


def test_by_hand():
    matrix = [[90.0], [50.0, 80.0], [60.0, 85.0, 70.0]]
    assert average_accuracy(matrix) == pytest.approx(215 / 3)
    assert forgetting(matrix) == pytest.approx(((90 - 60) + (80 - 85)) / 3)


def test_one_task_forgets_nothing():
    assert forgetting([[70.0]]) == 0.0
    assert average_accuracy([[70.0]]) == 70.0


def test_the_last_row_is_not_among_the_maxima():
    """Learning that comes back counts as negative forgetting."""
    assert forgetting([[50.0], [80.0, 90.0]]) == -15.0


def test_what_was_not_measured_is_left_out():
    matrix = [[90.0], [80.0, 100.0], [None, 70.0, 60.0]]
    assert average_accuracy(matrix) == 65
    assert forgetting(matrix) == 15
    assert forgetting([[None], [80.0, 100.0]]) == 0
