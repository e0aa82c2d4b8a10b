"""FedAvg on a stream of tasks: the current head's cross-entropy, old heads frozen, nothing else."""

from pydantic import Field

from fedprotip.methods.base import About, Method, register
from fedprotip.settings import MethodSettings


class FedAvgOptions(MethodSettings):
    name: str = Field("fedavg", description="Method; its own settings follow.")


@register
class FedAvg(Method):
    name = "fedavg"
    about = About("trains on each task as if it were the only one: the lower bound")
    Options = FedAvgOptions
