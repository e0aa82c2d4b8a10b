"""Norm layers: when their running statistics stop moving. A protected weight is worth little if they drift."""

from collections.abc import Iterator

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from fedprotip.settings import ModelSettings


def statistics_move(settings: ModelSettings, task: int) -> bool:
    """Whether running statistics are updated while training `task`."""
    return settings.norm == "track" or (settings.norm == "freeze_after_first" and task == 0)


def training_mode(backbone: nn.Module, settings: ModelSettings, task: int) -> None:
    """Put the backbone into training mode, norm layers with frozen statistics into evaluation mode."""
    backbone.train()
    if not statistics_move(settings, task):
        for norm in norms_with_statistics(backbone):
            norm.eval()


def norms_with_statistics(backbone: nn.Module) -> Iterator[nn.Module]:
    return (m for m in backbone.modules() if isinstance(m, _NormBase) and m.track_running_stats)
