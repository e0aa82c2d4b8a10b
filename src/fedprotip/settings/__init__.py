"""Typed settings of a run: TOML file + `--set key=value`, checked before any work.

fedprotip settings                     # every key with its documentation and default, as TOML
fedprotip run my.toml --set train.rounds=5
"""

from fedprotip.settings.loading import documentation, layered, load, preset_settings, relocated, to_toml
from fedprotip.settings.names import KNOWN, bring_in, declare, declared, given, is_known, known, load_offered
from fedprotip.settings.places import joined, placed, seen_from
from fedprotip.settings.schema import (
    TASKS,
    DataSettings,
    MethodSettings,
    ModelSettings,
    PathText,
    RunSettings,
    Section,
    Settings,
    StreamSettings,
    TrainSettings,
    parse_ids,
)
from fedprotip.settings.tomltext import as_text

__all__ = [
    "KNOWN",
    "TASKS",
    "DataSettings",
    "MethodSettings",
    "ModelSettings",
    "PathText",
    "RunSettings",
    "Section",
    "Settings",
    "StreamSettings",
    "TrainSettings",
    "as_text",
    "bring_in",
    "declare",
    "declared",
    "documentation",
    "given",
    "is_known",
    "joined",
    "known",
    "layered",
    "load",
    "load_offered",
    "parse_ids",
    "placed",
    "preset_settings",
    "relocated",
    "seen_from",
    "to_toml",
]
