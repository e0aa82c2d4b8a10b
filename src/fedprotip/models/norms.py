"""Norm layers: when their running statistics stop moving. A protected weight is worth little if they drift."""

from collections.abc import Iterator

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from fedprotip.models.freeze import frozen_prefixes
from fedprotip.models.steps import steps_of
from fedprotip.settings import ModelSettings


def training_mode(backbone: nn.Module, settings: ModelSettings, task: int, still: int = 0) -> None:
    """Put the backbone into training mode, except its frozen part and norm layers whose statistics stand still.

    So the output of the frozen part is the same in training and in evaluation: no dropout, no batch statistics.

    Args:
        still: further steps at the beginning that cannot move (`steps.still_steps`), also left in evaluation mode.
    """
    frozen = frozen_prefixes(settings, task)
    for name, module in backbone.named_modules():
        module.training = not f"{name}.".startswith(frozen)  # not .train(), which would reach the children too
    moving = set(moving_norms(backbone, settings, task))
    for name, norm in _norms(backbone):
        norm.train(name in moving)
    for step in steps_of(backbone)[:still]:
        for module in step.modules:
            module.eval()


def moving_norms(backbone: nn.Module, settings: ModelSettings, task: int) -> list[str]:
    """Names of the norm layers whose running statistics are updated while training `task`."""
    if settings.norm == "frozen" or (settings.norm == "freeze_after_first" and task > 0):
        return []
    frozen = frozen_prefixes(settings, task)
    return [name for name, _ in _norms(backbone) if not f"{name}.".startswith(frozen)]


def fresh_norms(backbone: nn.Module, settings: ModelSettings, task: int) -> bool:
    """Whether a norm layer that is to follow the data in `task` has not seen any yet: all its means are 0 then."""
    norms = moving_norms(backbone, settings, task)
    return any(not backbone.get_buffer(f"{norm}.running_mean").any() for norm in norms)


def _norms(backbone: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return ((n, m) for n, m in backbone.named_modules() if isinstance(m, _NormBase) and m.track_running_stats)
