"""FedLwF: Learning without Forgetting (Li and Hoiem 2016) in a federation. Needs no sample of the past.

While a new task is learned, the outputs of all earlier heads on the new samples stay what they were when it began.
"""

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedprotip.methods.base import About, Method, register
from fedprotip.methods.local import Local
from fedprotip.methods.parts.distillation import distillation
from fedprotip.methods.site import Site
from fedprotip.models.steps import Inputs
from fedprotip.settings import MethodSettings


class FedLwFOptions(MethodSettings):
    name: str = Field("fedlwf", description="Method; its own settings follow.")
    strength: float = Field(1.0, ge=0, description="λ: weight of what earlier heads are to keep saying.")
    temperature: float = Field(2.0, gt=0, description="Temperature of that distillation.")


@register
class FedLwF(Method):
    name = "fedlwf"
    about = About("keeps what old heads say about the new samples", stores="the last model")
    remembers = True
    Options = FedLwFOptions

    def trainable(self, site: Site) -> set[str]:
        """Old heads move too: it is their outputs that are kept, not their weights."""
        return super().trainable(site) | site.heads()

    def loss(self, local: Local, inputs: Inputs, labels: Tensor) -> Tensor:
        options, network = self.settings.method, local.network
        assert isinstance(options, FedLwFOptions)
        features = network.embed(inputs)
        loss = F.cross_entropy(network.logits(features, local.task), network.targets(labels, local.task))
        if local.task == 0:
            return loss
        with torch.no_grad():
            before = local.before.embed(inputs)
        for head in sorted({network.head_of(task) for task in range(local.task)}):
            said = local.before.heads[head](before)
            loss = loss + options.strength * distillation(network.heads[head](features), said, options.temperature)
        return loss
