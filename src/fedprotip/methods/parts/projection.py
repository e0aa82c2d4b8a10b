"""Keeping a client's steps outside Φ (Eq. 4–5), on whichever side of a layer is cheaper.

The gradient of a weight is ∆Aᵀ, with one column of A (d, n) and of ∆ (out, n) per position of the batch. After the
optimiser's step W − W₀ can be projected, in 4·out·d·min(r, d − r) operations; or A before it, in
4·n·d·min(r, d − r) or fewer, where the step is linear in the gradient. Then the gradient is the product ∆(P·A)ᵀ
(`models/products.py`).
"""

from collections.abc import Mapping
from types import TracebackType

from torch import Tensor, nn

from fedprotip.methods.constraint import Constraint
from fedprotip.models.capture import Layer
from fedprotip.models.patches import all_columns, by_taps, coordinates, count_columns
from fedprotip.settings import TrainSettings
from fedprotip.subspace.project import Anchored, Projector


def linear_decay(train: TrainSettings) -> float | None:
    """Weight decay of an optimiser whose steps are linear in gradient and weight; None for any other."""
    decay = train.optimizer_options.get("weight_decay", train.weight_decay)
    linear = train.optimizer == "SGD" and not train.optimizer_options.get("maximize")
    return decay if linear and isinstance(decay, int | float) else None


class ProjectUpdate(Constraint):
    """Projection last: whatever the optimiser did, the whole step stays outside Φ (Eq. 5).

    Args:
        backbone: its parameters that require gradients are kept outside the bases of `projectors`.
        decay: weight decay of a linear optimiser; then plain layers with no more positions than outputs, known
            from the first batch on, are projected by their inputs. None: every layer by its weight.
        anchors: layer → where its weight began, as far as that is known; the others begin where they are.
    """

    def __init__(
        self,
        backbone: nn.Module,
        projectors: list[tuple[Layer, Projector]],
        decay: float | None = None,
        anchors: Mapping[str, Anchored] | None = None,
    ) -> None:
        parameters = {name: p for name, p in backbone.named_parameters() if p.requires_grad}
        self._decay = decay
        self._guards = [
            _Guard(layer, projector, parameters[layer.parameter], (anchors or {}).get(layer.name))
            for layer, projector in projectors
            if layer.parameter in parameters
        ]
        self.columns = {guard.parameter: guard for guard in self._guards} if decay is not None else {}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Inputs are projected to float precision only: what rounding has left in the weights goes now."""
        for guard in self._guards:
            if guard.by_inputs:
                guard.pull_back()

    def before_step(self) -> None:
        if self._decay:
            for guard in self._guards:
                guard.spare(self._decay)

    def after_step(self) -> None:
        for guard in self._guards:
            if not guard.by_inputs:
                guard.pull_back()


class _Guard:
    """One layer during one round; P·A for its columns A where it is projected by its inputs."""

    def __init__(self, layer: Layer, projector: Projector, parameter: nn.Parameter, anchored: Anchored | None) -> None:
        self.parameter, self._layer, self._projector = parameter, layer, projector
        self._weight = layer.weight({layer.parameter: parameter.detach()})
        self._anchored = anchored or projector.anchor(self._weight.clone())
        self.by_inputs: bool | None = None  # None: the layer has not been called yet
        self._kernels: Tensor | None = None  # the basis, as products with inputs of a convolution read it

    def pull_back(self) -> None:
        self._anchored.pull_back_(self._weight)

    def spare(self, decay: float) -> None:
        """Keep decay away from W₀ΦΦᵀ, the part of W that stays: λW − λW₀ΦΦᵀ is outside Φ, as W·Φ = W₀·Φ."""
        if self.by_inputs and self.parameter.grad is not None:
            gradient = self._layer.weight({self._layer.parameter: self.parameter.grad})
            gradient.sub_(self._anchored.fixed_part, alpha=decay)

    def serve(self, module: nn.Module, inputs: Tensor) -> bool:
        """The first batch decides for the round: no more positions than outputs."""
        if self.by_inputs is None:
            self.by_inputs = count_columns(module, inputs) <= len(self.parameter)
        return self.by_inputs

    def __call__(self, module: nn.Module, inputs: Tensor) -> Tensor:
        """P·A (d, n) for the columns A of a call."""
        if not isinstance(module, nn.Conv2d):
            return self._projector.columns(all_columns(module, inputs))
        basis = self._projector.basis
        if self._kernels is None:
            self._kernels = by_taps(module, basis)
        known = coordinates(module, inputs, self._kernels)
        if self._projector.is_complement:
            return basis @ known
        return all_columns(module, inputs).addmm_(basis, known, alpha=-1)


class ProjectGradient(Constraint):
    """Projection of the gradient only, as in published code: decay and momentum escape it.

    Unlike there, biases and norm layers stay frozen, so decay does not act on them.
    """

    def __init__(self, backbone: nn.Module, projectors: list[tuple[Layer, Projector]]) -> None:
        self._projectors, self._weights = projectors, dict(backbone.named_parameters())

    def before_step(self) -> None:
        for layer, projector in self._projectors:
            gradient = self._weights[layer.parameter].grad
            if gradient is not None:
                view = layer.weight({layer.parameter: gradient})
                view.copy_(projector(view))
