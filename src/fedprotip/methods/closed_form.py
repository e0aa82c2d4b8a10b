"""The closed-form rivals: nothing is trained but sums, one exchange per task, in any order the same answer.

They are the honest bar for gradient training: on a pretrained backbone, class statistics of frozen features already
answer well without knowing the task.
"""

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from fedprotip.inference.statistics import ridge
from fedprotip.inference.ways import RIDGE, Columns, Inference, LargestOutput, LinearExpert, Way
from fedprotip.methods.base import Method, register
from fedprotip.methods.exchange import Exchange
from fedprotip.methods.parts import statistics
from fedprotip.methods.state import Knowledge
from fedprotip.models import Network
from fedprotip.settings import MethodSettings


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
    routes = True
    state = (statistics.kept(shared=False),)
    Options: ClassVar[type[MethodSettings]] = LDAOptions

    def at_end(self) -> Sequence[Exchange]:
        return (statistics.Statistics(self.settings.statistics.rank),)

    def rounds(self, task: int) -> int:
        assert isinstance(self.settings.method, LDAOptions)
        return super().rounds(task) if task == 0 and self.settings.method.adapt else 0

    def inference(self, network: Network, known: Knowledge, classes: Sequence[Sequence[int]]) -> Inference:
        columns = Columns.of(classes)
        experts, ways = statistics.answers(network, known, columns, self.settings)
        return Inference(columns, experts, ways, "statistics")


@register
class Ridge(LDA):
    """Least squares to one-hot labels; its outputs are no densities, so the largest one decides."""

    name = "ridge"
    Options: ClassVar[type[MethodSettings]] = RidgeOptions

    def inference(self, network: Network, known: Knowledge, classes: Sequence[Sequence[int]]) -> Inference:
        assert isinstance(self.settings.method, RidgeOptions)
        lda = super().inference(network, known, classes)
        sums, rows = lda.columns.by_label(statistics.recall(known))
        weights, bias = ridge(sums, self.settings.method.strength)
        own = LinearExpert(weights[rows], bias[rows], statistics.feature_map(network, self.settings))
        ways = {"ridge": Way(LargestOutput(lda.columns, RIDGE), RIDGE), **lda.ways}
        return Inference(lda.columns, {RIDGE: own, **lda.experts}, ways, "ridge")
