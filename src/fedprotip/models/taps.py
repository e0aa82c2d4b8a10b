"""Where class statistics look into a backbone: pooled outputs of stages on the way, beside the final features."""

from torch import nn

from fedprotip.errors import UsageError
from fedprotip.models.freeze import stages_of
from fedprotip.models.steps import steps_of
from fedprotip.settings import ModelSettings

QUARTERS = 4


def taps_of(model: ModelSettings, backbone: nn.Module) -> tuple[int, ...]:
    """After how many steps of the backbone `model.stages` looks at it; the last ones are the features anyway."""
    stages, steps = stages_of(model), steps_of(backbone)
    names = [name for name in stages if name != "stem"]
    wanted = default_stages(names) if model.stages == "auto" else model.stages
    if unknown := [name for name in wanted if name not in stages]:
        raise UsageError(
            f"model.stages = {list(wanted)}: {unknown[0]!r} is not a stage of {model.name!r}; "
            f"known: {', '.join(stages) or 'none'}."
        )
    if wanted and not steps:
        if model.stages == "auto":
            return ()
        raise UsageError(f"model.stages: {model.name!r} is no chain of steps (docs/extend.md); the valid value is [].")
    owned = [name for name, _ in (*backbone.named_parameters(), *backbone.named_buffers())]
    bare = [not (step.names and any(name.startswith(step.names) for name in owned)) for step in steps]
    taps = set()
    for name in wanted:
        own = [i for i, step in enumerate(steps) if any(part.startswith(stages[name]) for part in step.names)]
        end = max(own, default=-1) + 1
        while 0 < end < len(steps) and bare[end]:  # what has no weights belongs to the stage before it
            end += 1
        taps.add(end)
    return tuple(sorted(taps - {0, len(steps)}))


def default_stages(names: list[str]) -> list[str]:
    """Of few stages those before the last, two at most; of many the ones at half and at three quarters."""
    apart = max(len(names) // QUARTERS, 1)
    return [names[place - 1] for place in (len(names) - 2 * apart, len(names) - apart) if place > 0]
