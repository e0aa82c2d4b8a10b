"""GPM, the centralised ancestor: one client that holds all data. The regression check of FedProTIP."""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field, model_validator

from fedprotip.errors import UsageError
from fedprotip.methods.base import About, register
from fedprotip.methods.exchange import Exchange
from fedprotip.methods.fedprotip import FedProTIP, FedProTIPOptions, RouterName
from fedprotip.methods.parts.bases import Bases
from fedprotip.stream.plan import Answering
from fedprotip.subspace.basis import RankRule


class GPMOptions(FedProTIPOptions):
    name: str = Field("gpm", description="Method; its own settings follow.")
    threshold: float = Field(0.97, gt=0, le=1, description="ε: share of the activations that a basis must hold.")
    increment: float = Field(0.003, ge=0, lt=1, description="Added to ε with every task.")
    rank_rule: RankRule = Field("energy", description="GPM's own rule is energy: squares, of the total.")
    merge: Literal["union", "energy"] = Field("union", description="One client: there is nothing to merge.")
    budget: Literal["tasks", "none"] = Field("none", description="GPM takes as many directions as ε says.")
    statistics: bool = Field(False, description="GPM is told the task of a sample, so it needs no class statistics.")
    router: RouterName = Field("cosine", description="Not used: GPM is told the task of a sample.")

    @model_validator(mode="after")
    def _router_has_its_statistics(self) -> "GPMOptions":
        """It has none, and needs none."""
        return self


@register
class GPM(FedProTIP):
    name = "gpm"
    about = About(
        "the centralised ancestor of FedProTIP: gradients projected away from earlier tasks",
        sends="the model, every round; bases, once a task",
        needs="a single client",
    )
    routes = False
    Options = GPMOptions

    def at_end(self) -> Sequence[Exchange]:
        return (Bases(self.options, self.settings),)

    def answering(self) -> Answering:
        return Answering()

    def check(self) -> None:
        if self.options.secure:
            raise UsageError(
                "method.secure = true is not possible with method.name = 'gpm': it has one client, and the sum of one "
                "is what it sent; choose method.name = 'fedprotip' for several clients, or method.secure = false."
            )
        super().check()
        clients = self.settings.clients
        if clients.count != 1 or clients.roster:
            raise UsageError(
                f"clients.count = {clients.count} is not possible with method.name = 'gpm', which is centralised; "
                "the nearest valid value is 1."
            )
