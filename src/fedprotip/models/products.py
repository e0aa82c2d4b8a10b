"""Gradients of small maps by products, for every method.

With one column of A (d, n) and of ∆ (out, n) per position of the batch, the gradient of a weight is ∆Aᵀ and that of
the columns of its inputs Wᵀ∆. On small maps torch's own way back through a convolution takes up to six times as long
as these products. A method may put other columns in the place of A.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedprotip.models.patches import all_columns, all_outputs, count_columns, inputs_of


class OtherColumns(Protocol):
    """Columns that a method puts in the place of A when the gradient of a weight is taken."""

    def serve(self, module: nn.Module, inputs: Tensor) -> bool:
        """Whether they are used, asked before every call that is trained; if not, A is."""

    def __call__(self, module: nn.Module, inputs: Tensor) -> Tensor:
        """The columns (d, n) of a call."""


@contextmanager
def by_products(backbone: nn.Module, columns: Mapping[nn.Parameter, OtherColumns] | None = None) -> Iterator[None]:
    """Train a backbone with gradients by products, wherever they are the faster ones.

    Only plain layers take part: exactly `nn.Linear` and `nn.Conv2d` in one group, without hooks of others. What they
    compute, and what is kept of it until the way back, stays the same.

    Args:
        columns: weight → what stands in for the columns of its inputs, if all layers with this weight are plain.
    """
    holders: dict[int, list[nn.Module]] = {}
    for module in backbone.modules():
        holders.setdefault(id(getattr(module, "weight", None)), []).append(module)
    given = {id(weight): other for weight, other in (columns or {}).items()}
    with ExitStack() as undo:
        for weight, modules in holders.items():
            plain = [module for module in modules if _is_plain(module)]
            other = given.get(weight) if plain == modules else None
            for module in plain:
                if other is not None or isinstance(module, nn.Conv2d):
                    vars(module)["forward"] = _Forward(module, other)
                    undo.callback(vars(module).pop, "forward", None)
        yield


def _is_plain(module: nn.Module) -> bool:
    """Whether the output is W·A and a bias and nothing else: then its way back is known."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    if any(hooks) or "forward" in vars(module):
        return False
    return type(module) is nn.Linear or (type(module) is nn.Conv2d and module.groups == 1)


def pays(module: nn.Module, inputs: Tensor) -> bool:
    """Whether a convolution's gradients by products are faster than torch's own: known from sizes alone.

    With no more positions than outputs A is no larger than the weight, and torch's own way back to the weight is slow.
    For the inputs that holds where the kernel skips positions. Measured on processors, in single precision.
    """
    if not isinstance(module, nn.Conv2d) or inputs.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
        return False
    needed = module.weight.requires_grad or (inputs.requires_grad and not _keeps_own_inputs(module))
    return needed and count_columns(module, inputs) <= module.out_channels


def _keeps_own_inputs(module: nn.Module) -> bool:
    """Whether torch's own gradient of the inputs is the faster: that of a kernel at every position."""
    return (
        isinstance(module, nn.Conv2d)
        and module.stride == (1, 1)
        and module.padding_mode == "zeros"
        and not isinstance(module.padding, str)
    )


class _Forward:
    """Stands in for `forward` of one plain layer."""

    def __init__(self, module: nn.Module, columns: OtherColumns | None) -> None:
        self._module, self._columns = module, columns

    def __call__(self, input: Tensor) -> Tensor:
        module, columns = self._module, self._columns
        if isinstance(module, nn.Conv2d) and input.dim() == 3:
            return self(input[None])[0]  # one image without a batch
        if torch.is_grad_enabled():
            other = columns if columns is not None and columns.serve(module, input) else None
            if other is not None or pays(module, input):
                output: Tensor = _Products.apply(input, module.weight, module.bias, module, other)
                return output
        own: Tensor = type(module).forward(module, input)
        return own


class _Products(torch.autograd.Function):
    """A plain layer whose way back is products. All of it can be differentiated again, and mapped over samples."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        inputs: Tensor, weight: Tensor, bias: Tensor | None, module: nn.Module, other: OtherColumns | None
    ) -> Tensor:
        weight = weight.detach()  # else autocast of older versions keeps a copy without gradient, for later calls too
        if isinstance(module, nn.Conv2d):
            return module._conv_forward(inputs, weight, bias)
        return F.linear(inputs, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        given, weight, _, ctx.module, ctx.other = inputs
        ctx.save_for_backward(given, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (inputs, weight), (delta,), module = ctx.saved_tensors, gradients, ctx.module
        needs_inputs, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        outputs = all_outputs(module, delta).to(weight.dtype)
        to_inputs = to_weight = None
        if needs_weight:
            columns = (ctx.other or all_columns)(module, inputs.to(weight.dtype))
            to_weight = (outputs @ columns.T).view(weight.shape)
        if needs_inputs and _keeps_own_inputs(module) and inputs.dtype == weight.dtype == delta.dtype:
            to_inputs = _own_inputs(module, delta, inputs, weight)
        elif needs_inputs:
            to_inputs = inputs_of(module, weight.flatten(1).T @ outputs, inputs).to(inputs.dtype)
        return to_inputs, to_weight, outputs.sum(1) if needs_bias else None, None, None


def _own_inputs(module: nn.Conv2d, delta: Tensor, inputs: Tensor, weight: Tensor) -> Tensor:
    """torch's own gradient of the inputs."""
    geometry = (module.stride, module.padding, module.dilation, False, (0, 0), 1)
    found: Tensor = torch.ops.aten.convolution_backward(delta, inputs, weight, None, *geometry, (True, False, False))[0]
    return found
