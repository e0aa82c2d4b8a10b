"""Where files of the user are: what relative paths in settings are relative to.

In a settings file: to that file. On the command line and in Python: to the working directory. The settings of a run
folder are a settings file too, so a run folder can be moved together with its data.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedprotip.settings.schema import Settings

PLACES = {"data": ("root", "source"), "model": ("weights",), "method": ("embeddings",)}
"""Settings that name files or folders to read."""


def joined(raw: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Settings out of a file in this folder, for whoever stands in the working directory; relative paths stay so."""
    return _replaced(raw, lambda path: os.path.relpath(os.path.join(os.path.realpath(folder), path)))


def placed(settings: Settings, folder: Path) -> Settings:
    """The settings of a file in this folder, for whoever stands anywhere."""
    here = os.path.realpath(folder)
    return _changed(settings, lambda path: os.path.normpath(os.path.join(here, path)))


def seen_from(settings: Settings, folder: Path) -> Settings:
    """Settings with their relative paths as they are to stand in a file in this folder."""
    here = os.path.realpath(folder)

    def relative(path: str) -> str:
        parent, name = os.path.split(path.rstrip("/"))
        return os.path.relpath(os.path.join(os.path.realpath(parent or "."), name), here)

    return _changed(settings, relative)


def _changed(settings: Settings, new: Callable[[str], str]) -> Settings:
    raw = _replaced(settings.model_dump(include=set(PLACES)), new)
    sections = {name: getattr(settings, name).model_copy(update=_places(raw, name)) for name in PLACES}
    return settings.model_copy(update=sections)


def _replaced(raw: Mapping[str, Any], new: Callable[[str], str]) -> dict[str, Any]:
    """A copy in which every relative path is another one."""
    found = dict(raw)
    for section in PLACES:
        if isinstance(raw.get(section), Mapping):
            relative = {key: path for key, path in _places(raw, section).items() if _is_relative(path)}
            found[section] = {**raw[section], **{key: new(path) for key, path in relative.items()}}
    return found


def _places(raw: Mapping[str, Any], section: str) -> dict[str, Any]:
    return {key: raw[section][key] for key in PLACES[section] if key in raw[section]}


def _is_relative(path: Any) -> bool:
    return isinstance(path, str) and bool(path.strip()) and not os.path.isabs(path)
