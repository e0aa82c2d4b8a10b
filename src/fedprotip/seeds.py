"""One named random stream per (purpose, task, round, client).

Nothing draws from a shared generator, so a result never depends on which client ran first,
on how many tasks follow, or on whether the run was interrupted in between.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def derive(seed: int, purpose: str, *place: int | str) -> int:
    """A 63-bit seed that belongs to this purpose and place alone.

    >>> derive(0, "batches", 1, 2) == derive(0, "batches", 1, 2) != derive(0, "batches", 2, 1)
    True
    """
    name = "/".join([str(seed), purpose, *map(str, place)])
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") >> 1


def numpy_stream(seed: int, purpose: str, *place: int | str) -> "np.random.Generator":
    return np.random.default_rng(derive(seed, purpose, *place))


def torch_stream(seed: int, purpose: str, *place: int | str) -> torch.Generator:
    return torch.Generator().manual_seed(derive(seed, purpose, *place))


@contextmanager
def ambient_stream(seed: int, purpose: str, *place: int | str) -> Iterator[None]:
    """For code that draws from torch's global generator (weight init, dropout): seeded, then restored."""
    with torch.random.fork_rng():
        torch.manual_seed(derive(seed, purpose, *place))
        yield
