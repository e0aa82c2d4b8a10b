"""Which samples are for testing, and which of too many are taken: the same for every run."""

import numpy as np

from fedprotip.errors import UsageError
from fedprotip.seeds import numpy_stream

TEST_EVERY = 5


def every_fifth(groups: list[str]) -> np.ndarray:
    """(n,) whether a sample is for testing: every fifth of its group (in few, the last), so 80/20 in each.

    In the order of file names this also shares out kinds that names begin with, as in ImageNet-R.
    """
    is_test = np.zeros(len(groups), bool)
    members: dict[str, list[int]] = {}
    for place, group in enumerate(groups):
        members.setdefault(group, []).append(place)
    for group, places in members.items():
        if len(places) < 2:
            raise UsageError(
                f"{group} has one sample; at least two are needed, for training and for testing: add one, or leave it "
                "out."
            )
        is_test[places[TEST_EVERY - 1 :: TEST_EVERY] or places[-1:]] = True
    return is_test


def at_most(limit: int, groups: np.ndarray, seed: int, purpose: str) -> np.ndarray:
    """Sorted positions of at most `limit` samples of every group (n,), by seeded choice."""
    chosen = []
    for group in np.unique(groups):
        places = np.flatnonzero(groups == group)
        if len(places) > limit:
            places = numpy_stream(seed, purpose, int(group)).choice(places, limit, replace=False)
        chosen.append(places)
    return np.sort(np.concatenate(chosen)) if chosen else np.zeros(0, np.int64)
