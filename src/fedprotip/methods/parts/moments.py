"""Moments of a client's final features, which stay with the client: routing needs no more of past features."""

import torch
from torch import Tensor

from fedprotip.methods.local import Local
from fedprotip.methods.state import Form, Kept

FORMS = {"samples": Form("", torch.int64), "sum": Form("d", torch.float64), "moment": Form("d d", torch.float64)}
MOMENTS = Kept("moment", "private", FORMS)


class Moments:
    """Number, sum and second moment of a client's features; the features themselves are gone."""

    def __init__(self, d: int) -> None:
        self.samples = 0
        self._sum, self._moment = torch.zeros(d, dtype=torch.float64), torch.zeros(d, d, dtype=torch.float64)

    def add(self, features: Tensor) -> None:
        features = features.double().cpu()
        self.samples += len(features)
        self._sum += features.sum(0)
        self._moment.addmm_(features.T, features)

    def keep(self, local: Local) -> dict[str, Tensor]:
        """Store them with the client, for `refer` in this task and all later ones."""
        tensors = {"samples": torch.tensor(self.samples), "sum": self._sum, "moment": self._moment}
        local.own.put(_name(local.task), tensors)
        return tensors


def kept_moments(local: Local, task: int) -> dict[str, Tensor] | None:
    """What `Moments.keep` stored in a task, None where the client had no part in it."""
    return local.own.get(_name(task))


def _name(task: int) -> str:
    return f"moment-{task}"
