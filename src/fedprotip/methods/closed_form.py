"""The closed-form rivals: nothing is trained but sums, one exchange per task, in any order the same answer.

They are the honest bar for gradient training: on a pretrained backbone, class statistics of frozen features already
answer well without knowing the task.
"""

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from fedprotip.inference.experts import RIDGE
from fedprotip.methods.base import About, Method, register
from fedprotip.methods.exchange import Exchange
from fedprotip.methods.parts import statistics
from fedprotip.methods.parts.calibration import CALIBRATION, Calibrating
from fedprotip.settings import MethodSettings, Settings
from fedprotip.stream.plan import Answering, WayPlan


class LDAOptions(MethodSettings):
    name: str = Field("lda", description="Method; its own settings follow.")
    adapt: bool = Field(False, description="Train the backbone on the first task, as FedAvg does; then never again.")


class RidgeOptions(LDAOptions):
    name: str = Field("ridge", description="Method; its own settings follow.")
    strength: float = Field(0.01, gt=0, description="λ as a multiple of the mean variance of a feature.")


@register
class LDA(Method):
    """Gaussians with one covariance around the class means: linear discriminant analysis."""

    name = "lda"
    about = About(
        "class Gaussians of frozen features, in closed form", sends="sums and products of features, once a task"
    )
    routes = True
    Options: ClassVar[type[MethodSettings]] = LDAOptions

    def __init__(self, settings: Settings) -> None:
        self.calibrates = settings.clients.held_back > 0
        self.state = (statistics.kept(shared=self.calibrates), CALIBRATION)
        super().__init__(settings)

    def at_end(self) -> Sequence[Exchange]:
        asked = (
            [Calibrating(self.answering(), self.settings.train, self.settings.method.secure)] if self.calibrates else []
        )
        return (statistics.Statistics(self.settings, tells=self.calibrates), *asked)

    def rounds(self, task: int) -> int:
        assert isinstance(self.settings.method, LDAOptions)
        return super().rounds(task) if task == 0 and self.settings.method.adapt else 0

    def answering(self) -> Answering:
        return statistics.answering(self.settings)


@register
class Ridge(LDA):
    """Least squares to one-hot labels; its outputs are no densities, so the largest one decides."""

    name = "ridge"
    about = About("least squares on frozen features, in closed form", sends=LDA.about.sends)
    Options: ClassVar[type[MethodSettings]] = RidgeOptions

    def answering(self) -> Answering:
        assert isinstance(self.settings.method, RidgeOptions)
        lda, features = super().answering(), statistics.feature_options(self.settings)
        experts = {RIDGE: {**features, "strength": self.settings.method.strength}, **lda.experts}
        ways = {RIDGE: WayPlan(router=RIDGE, expert=RIDGE), **lda.ways}
        return Answering(experts=experts, ways=ways, chosen=RIDGE, tried=(RIDGE,))
