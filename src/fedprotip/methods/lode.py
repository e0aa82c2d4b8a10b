"""Tar+LODE: TARGET whose loss on new samples is taken apart (Liang and Li 2023, loss decoupling).

Cross-entropy over all classes is the sum of two: which of the new classes it is, and that it is a new one at all. The
second pushes old classes down, so it gets a small weight, smaller the more tasks lie behind.
"""

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedprotip.methods.base import About, register
from fedprotip.methods.local import Local
from fedprotip.methods.parts.distillation import earlier
from fedprotip.methods.target import Target, TargetOptions


class LodeOptions(TargetOptions):
    name: str = Field("lode", description="Method; its own settings follow.")
    rho: float = Field(0.01, ge=0, description="ρ: weight of old against new classes, over the number of past tasks.")


@register
class Lode(Target):
    name = "lode"
    about = About(
        "TARGET that tells old from new classes with little weight",
        stores=Target.about.stores,
        sends=Target.about.sends,
        needs=Target.about.needs,
    )
    scenarios = ("class",)
    Options = LodeOptions

    def learning(self, local: Local, features: Tensor, labels: Tensor) -> Tensor:
        """L_intra + (ρ/t)·L_inter, with t tasks behind this one."""
        assert isinstance(self.options, LodeOptions)
        within = super().learning(local, features, labels)
        if not local.task:
            return within
        old, new = earlier(local.network, features, local.task), local.network.logits(features, local.task)
        return within + self.options.rho / local.task * new_or_old(old[:, only_old(local)], new)


def only_old(local: Local) -> list[int]:
    """Places among the earlier outputs of those whose class the task does not have: the others are right, or new."""
    network = local.network
    past = [label for labels in network.labels[: local.task] for label in labels]
    return [place for place, label in enumerate(past) if label not in network.labels[local.task]]


def new_or_old(old: Tensor, new: Tensor) -> Tensor:
    """L_inter of samples of new classes, by the outputs of old ones (n, C_old) and new ones (n, C_new).

    Without any old class there is nothing to tell apart, and it is 0.
    """
    if not old.shape[1]:
        return new.new_zeros(())
    both = torch.stack([old.logsumexp(1), new.logsumexp(1)], dim=1)
    return F.cross_entropy(both, torch.ones(len(both), dtype=torch.long, device=both.device))
