"""A method of its own file whose loss looks at private state, and whose rounds begin with a look at it."""

import torch
from pydantic import Field

from fedprotip.methods import Form, Kept, register
from fedprotip.methods.fedprotip import FedProTIP, FedProTIPOptions


class KeeperOptions(FedProTIPOptions):
    name: str = Field("keeper", description="Method; its own settings follow.")


@register
class Keeper(FedProTIP):
    """Every client weighs its loss by the number of rounds that it has begun."""

    name = "keeper"
    Options = KeeperOptions

    def __init__(self, settings):
        super().__init__(settings)
        self.state += (Kept("begun", "private", {"rounds": Form("1")}),)

    def begin_round(self, local):
        before = local.own.get("begun") or {"rounds": torch.zeros(1)}
        local.scratch["begun"] = before["rounds"] + 1
        local.own.put("begun", {"rounds": local.scratch["begun"]})

    def loss(self, local, inputs, labels):
        return super().loss(local, inputs, labels) * (1 + local.scratch["begun"].item() * (1 + local.client))
