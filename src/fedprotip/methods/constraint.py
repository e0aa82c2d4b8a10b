"""What keeps a client's steps within bounds."""

from collections.abc import Mapping
from types import MappingProxyType, TracebackType

from torch import nn

from fedprotip.models.products import OtherColumns


class Constraint:
    """Runs around every optimiser step of a client, and is a context for one round; where projection lives."""

    columns: Mapping[nn.Parameter, OtherColumns] = MappingProxyType({})
    """Weight → columns that its gradient is taken from instead of those of its inputs (`models.products`)."""

    def __enter__(self) -> "Constraint":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """After the last step, or when a step failed."""

    def before_step(self) -> None:
        """Gradients are there."""

    def after_step(self) -> None:
        """Weights have moved."""
