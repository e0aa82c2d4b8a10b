"""Sharing a task's samples out among clients (appendix E.4): nothing lost, nothing doubled."""

import numpy as np

Shares = list[np.ndarray]

LARGE = 1e100
"""A larger α gives equal shares just the same, but its samples would overflow."""


def split_iid(indices: np.ndarray, clients: int, rng: np.random.Generator) -> Shares:
    """Shuffle and cut into equal parts (sizes differ by one at most)."""
    return [np.sort(part) for part in np.array_split(rng.permutation(indices), clients)]


def split_dirichlet(
    indices: np.ndarray, labels: np.ndarray, clients: int, alpha: float, rng: np.random.Generator
) -> Shares:
    """Per class, shares p ~ Dir(α) over the clients.

    Every client keeps at least one sample of every class that has at least as many samples as there are
    clients: one is dealt to each first, the rest follows p.

    Args:
        indices: samples of the task (n,); labels: their classes (n,).
    """
    parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for label in np.unique(labels):
        samples = rng.permutation(indices[labels == label])
        shares = rng.dirichlet(np.full(clients, min(alpha, LARGE)))
        if len(samples) >= clients:
            for client, sample in enumerate(samples[:clients]):
                parts[client].append(sample[None])
            samples = samples[clients:]
        cuts = np.round(np.cumsum(shares)[:-1] * len(samples)).astype(int)
        starts, ends = np.append(0, cuts), np.append(cuts, len(samples))
        for holder in np.flatnonzero(starts < ends):
            parts[holder].append(samples[starts[holder] : ends[holder]])
    return [np.sort(np.concatenate(part)) if part else indices[:0] for part in parts]


def split_by_owner(indices: np.ndarray, owners: np.ndarray, clients: list[int]) -> dict[int, np.ndarray]:
    """Every client's own samples of a task, as the data says; those of clients that take no part stay unused.

    Args:
        indices: samples of the task (n,); owners: their client ids (n,).
    """
    return {client: indices[owners == client] for client in clients}
