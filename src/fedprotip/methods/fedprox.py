"""FedProx (Li et al. 2020): FedAvg whose clients stay near the model that they were sent."""

from pydantic import Field
from torch import Tensor

from fedprotip.methods.base import About, Method, register
from fedprotip.methods.local import Local
from fedprotip.models.steps import Inputs
from fedprotip.settings import MethodSettings


class FedProxOptions(MethodSettings):
    name: str = Field("fedprox", description="Method; its own settings follow.")
    mu: float = Field(0.01, ge=0, description="μ: weight of ½‖W − W^(t,e−1)‖², the distance from the model received.")


@register
class FedProx(Method):
    name = "fedprox"
    about = About("FedAvg whose clients stay near the model that they were sent")
    Options = FedProxOptions

    def begin_round(self, local: Local) -> None:
        moving = (local.network.get_parameter(name) for name in local.network.moving)
        local.scratch["received"] = [(parameter, parameter.detach().clone()) for parameter in moving]

    def loss(self, local: Local, inputs: Inputs, labels: Tensor) -> Tensor:
        assert isinstance(self.settings.method, FedProxOptions)
        loss = super().loss(local, inputs, labels)
        for parameter, received in local.scratch["received"]:
            loss = loss + self.settings.method.mu / 2 * (parameter - received).square().sum()
        return loss
