"""The part of a backbone that stops learning: its parameters do not move and its norm statistics stand still."""

from collections.abc import Callable

from fedprotip.errors import UsageError
from fedprotip.settings import ModelSettings

Stages = dict[str, tuple[str, ...]]
"""Stages of a backbone from input to output: name → prefixes of its parameters."""

_stages: dict[str, Callable[[ModelSettings], Stages]] = {}


def declare_stages(model: str, stages: Stages | Callable[[ModelSettings], Stages]) -> None:
    """Say which parts of a backbone `model.freeze` can name; a function where they depend on settings."""
    _stages[model] = stages if callable(stages) else lambda settings: stages


def stages_of(settings: ModelSettings) -> Stages:
    """The stages that a backbone was registered with; none where nobody named them."""
    return _stages[settings.name](settings)


def frozen_prefixes(settings: ModelSettings, task: int) -> tuple[str, ...]:
    """Prefixes of the backbone's parameters that do not move while training `task`."""
    if settings.freeze == "none" or (settings.freeze_from == "first" and task == 0):
        return ()
    stages = stages_of(settings)
    names = list(stages)
    if settings.freeze not in stages:
        raise UsageError(
            f"model.freeze = {settings.freeze!r} is not a stage of {settings.name!r}; "
            f"known: {', '.join(['none', *names])}."
        )
    frozen = names[: names.index(settings.freeze) + 1]
    return tuple(prefix for name in frozen for prefix in stages[name])
