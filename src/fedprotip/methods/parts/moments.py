"""Moments of a client's final features, which stay with the client: routing needs no more of past features."""

import torch
from torch import Tensor

from fedprotip.methods.local import Local
from fedprotip.methods.state import Form, Kept

FORMS = {"samples": Form("", torch.int64), "sum": Form("d", torch.float64), "root": Form("p")}
MOMENTS = Kept("moment", "private", FORMS)
MANY = 1024
"""Features, beside as many as they are wide, that wait to be taken into the root together."""


class Moments:
    """Number, sum and second moment of a client's features; the features themselves are gone."""

    def __init__(self, d: int) -> None:
        self.samples = 0
        self.moment = torch.zeros(d, d, dtype=torch.float64)
        self._sum = torch.zeros(d, dtype=torch.float64)
        self._rows = [torch.zeros(0, d, dtype=torch.float64)]  # AᵀA of all of them is the second moment

    def add(self, features: Tensor) -> None:
        features = features.double().cpu()
        self.samples += len(features)
        self._sum += features.sum(0)
        self.moment.addmm_(features.T, features)
        self._rows.append(features)
        if sum(map(len, self._rows)) > MANY + len(self._sum):
            self._rows = [self._root()]

    def keep(self, local: Local) -> None:
        """Store them with the client, for `refer` in this task and all later ones.

        The moment of n samples as its root: at most n·d numbers instead of d², and half of them where n is d.
        """
        root = self._root()[*_places(self.samples, len(self._sum))]
        local.own.put(_name(local.task), {"samples": torch.tensor(self.samples), "sum": self._sum, "root": root})

    def _root(self) -> Tensor:
        """R, triangular, with RᵀR the second moment."""
        return torch.linalg.qr(torch.cat(self._rows), mode="r").R


def kept_moments(local: Local, task: int) -> dict[str, Tensor] | None:
    """Samples, sum and moment as `Moments.keep` stored them in a task; None where the client had no part in it."""
    kept = local.own.get(_name(task))
    if kept is None or "moment" in kept:  # as it was kept before
        return kept
    samples, d = int(kept["samples"]), len(kept["sum"])
    root = torch.zeros(min(samples, d), d, dtype=torch.float64)
    root[*_places(samples, d)] = kept["root"].double()
    return kept | {"moment": root.T @ root}


def _places(samples: int, d: int) -> Tensor:
    """Rows and columns (2, p) of the root of so many samples that are not zero."""
    return torch.triu_indices(min(samples, d), d)


def _name(task: int) -> str:
    return f"moment-{task}"
