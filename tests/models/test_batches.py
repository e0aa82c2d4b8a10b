"""Batches: every sample once, in order, and never one alone beside others."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fedprotip.models.batches import pieces


@given(st.integers(0, 200), st.integers(1, 70))
def test_pieces_hold_every_sample_once_in_order(n, size):
    found = pieces(np.arange(n), size)
    assert np.array_equal(np.concatenate([*found, np.zeros(0, int)]), np.arange(n))
    assert all(len(piece) == size for piece in found[:-1])
    assert all(0 < len(piece) <= size + 1 for piece in found)


@given(st.integers(2, 200), st.integers(2, 70))
def test_no_sample_is_alone_beside_others(n, size):
    assert min(len(piece) for piece in pieces(np.arange(n), size)) > 1


def test_a_single_sample_and_none():
    assert [piece.tolist() for piece in pieces(np.array([7]), 4)] == [[7]]
    assert pieces(np.zeros(0, int), 4) == []
