"""GLFC: Federated Class-Incremental Learning (Dong et al. 2022).

Clients keep exemplars of old classes and learn from them again in every round. Two terms keep the balance: a weight for
every sample by how wrong it is among the old or the new ones of its batch, so that neither group is forgotten because
the other is louder, and the relations between classes as an old model saw them. Which old model that is a proxy server
finds out: it judges the model of every round by images that it reconstructs from gradients of the clients' prototypes.
"""

import torch
from pydantic import Field
from torch import Tensor

from fedprotip.methods.base import About, register
from fedprotip.methods.local import Local
from fedprotip.methods.parts.transition import (
    TransitionOptions,
    Transitions,
    binary_loss,
    errors,
    one_hot,
    softened,
    tasks_of,
)
from fedprotip.models.steps import Inputs


class GLFCOptions(TransitionOptions):
    name: str = Field("glfc", description="Method; its own settings follow.")
    relations: float = Field(
        0.5, ge=0, le=1, description="Weight of what the old model says about old classes; the rest is for the labels."
    )


@register
class GLFC(Transitions):
    name = "glfc"
    about = About(
        "replays exemplars, balanced by how wrong they are, and keeps relations that the best old model saw",
        stores="raw samples of old classes, 2,000 at each client",
        sends="the model, every round; gradients of disturbed prototypes and the best old model, once a task",
        needs="clients that may keep samples, a server that may reconstruct prototypes",
    )
    Options = GLFCOptions

    def loss(self, local: Local, inputs: Inputs, labels: Tensor) -> Tensor:
        """½·L_GC + ½·L_RD; before there is an old model, L_GC alone."""
        options, network = self.settings.method, local.network
        assert isinstance(options, GLFCOptions)
        logits, targets = network(inputs), one_hot(network, labels)
        weights = torch.ones_like(logits[:, 0])
        if local.task > 0:
            weights = compensation(errors(logits, targets), tasks_of(network, labels) < local.task)
        compensated = (weights * binary_loss(logits, targets, options.per_class)).mean()
        teacher = local.scratch["teacher"]
        if teacher is None or local.task == 0:
            return compensated
        relations = binary_loss(logits, softened(teacher, inputs, targets, local.task), options.per_class).mean()
        return (1 - options.relations) * compensated + options.relations * relations


def compensation(wrong: Tensor, old: Tensor) -> Tensor:
    """Gradient compensation: g_i over its mean among the old or the new samples (n,), so each group has mean 1.

    A group without any error counts as it is.
    """
    weights = torch.ones_like(wrong)
    for group in (old, ~old):
        mean = wrong[group].mean() if group.any() else wrong.new_zeros(())
        weights = torch.where(group & (mean > 0), wrong / mean, weights)
    return weights
