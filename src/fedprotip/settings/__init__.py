"""Typed settings of a run: TOML file + `--set key=value`, checked before any work.

fedprotip settings                     # every key with its documentation and default, as TOML
fedprotip run my.toml --set train.rounds=5
"""

from fedprotip.settings.loading import documentation, layered, load, preset_settings, relocated, to_toml
from fedprotip.settings.places import placed, seen_from
from fedprotip.settings.schema import (
    KNOWN,
    TASKS,
    DataSettings,
    MethodSettings,
    ModelSettings,
    RunSettings,
    Section,
    Settings,
    StreamSettings,
    TrainSettings,
    declare,
    parse_ids,
)
from fedprotip.settings.tomltext import as_text

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
    "as_text",
    "declare",
    "documentation",
    "layered",
    "load",
    "parse_ids",
    "placed",
    "preset_settings",
    "relocated",
    "seen_from",
    "to_toml",
]
