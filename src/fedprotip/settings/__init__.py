"""Typed settings of a run: TOML file + `--set key=value`, checked before any work.

fedprotip settings                     # every key with its documentation and default, as TOML
fedprotip run my.toml --set train.rounds=5
"""

from fedprotip.settings.loading import documentation, load, to_toml
from fedprotip.settings.names import KNOWN, bring_in, declare, given, is_known, known, load_offered
from fedprotip.settings.schema import (
    TASKS,
    DataSettings,
    MethodSettings,
    ModelSettings,
    RunSettings,
    Section,
    Settings,
    StreamSettings,
    TrainSettings,
    parse_ids,
)

__all__ = [
    "KNOWN",
    "TASKS",
    "DataSettings",
    "MethodSettings",
    "ModelSettings",
    "RunSettings",
    "Section",
    "Settings",
    "StreamSettings",
    "TrainSettings",
    "bring_in",
    "declare",
    "documentation",
    "given",
    "is_known",
    "known",
    "load",
    "load_offered",
    "parse_ids",
    "to_toml",
]
