"""Names of a package whose modules are imported when they are first asked for (PEP 562)."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazily(package: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """A `__getattr__` for a package: name → "module" or "module:its name there"."""

    def find(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, _, known_as = places[name].partition(":")
        return getattr(import_module(module), known_as or name)

    return find
