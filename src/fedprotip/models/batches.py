"""Cutting samples into batches."""

import numpy as np


def pieces(samples: np.ndarray, size: int) -> list[np.ndarray]:
    """Samples in their order, `size` at a time; none where there are none.

    A single one left over joins the piece before it: batch norm cannot train on one sample, and convolutions round
    one image alone differently from the same image among others.
    """
    cuts = list(range(size, len(samples), size))
    if cuts and len(samples) - cuts[-1] == 1:
        cuts.pop()
    return np.split(samples, cuts) if len(samples) else []
