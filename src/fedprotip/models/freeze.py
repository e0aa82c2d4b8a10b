"""The part of a backbone that stops learning: its parameters do not move and its norm statistics stand still."""

from fedprotip.errors import UsageError, nearest
from fedprotip.settings import ModelSettings

Stages = dict[str, tuple[str, ...]]
"""Stages of a backbone from input to output: name → prefixes of its parameters."""

_stages: dict[str, Stages] = {}


def declare_stages(model: str, stages: Stages) -> None:
    _stages[model] = stages


def frozen_prefixes(settings: ModelSettings, task: int) -> tuple[str, ...]:
    """Prefixes of the backbone's parameters that do not move while training `task`."""
    if settings.freeze == "none" or (settings.freeze_from == "first" and task == 0):
        return ()
    stages = _stages.get(settings.name, {})
    if settings.freeze not in stages:
        raise UsageError(
            f"model.freeze = {settings.freeze!r} is not a stage of {settings.name!r}; "
            f"{nearest(settings.freeze, ['none', *stages])}."
        )
    names = list(stages)
    frozen = names[: names.index(settings.freeze) + 1]
    return tuple(prefix for name in frozen for prefix in stages[name])
