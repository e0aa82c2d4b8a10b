"""Names that settings may give: methods, models and datasets of this package, of installed packages, and of the user.

An installed package offers them as entry points, which are looked at only when a name is asked for that nobody has
declared yet. The user gives modules with `--import`. Nothing else is ever imported: a run folder names what it needs,
but names are all that is taken from it.
"""

import sys
from importlib import import_module, invalidate_caches
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fedprotip.errors import UnknownName, UsageError, nearest, shortened

KNOWN: dict[str, dict[str, Any]] = {"method.name": {}, "data.name": {}, "model.name": {}}
"""Setting → the names that it may have; for method.name with the class of its settings."""
GROUPS = {"method.name": "fedprotip.methods", "data.name": "fedprotip.datasets", "model.name": "fedprotip.models"}
"""Setting → the group of entry points whose names it may have too."""

BUILT_IN = {
    "method.name": "fedprotip.methods",
    "data.name": "fedprotip.stream.datasets",
    "model.name": "fedprotip.models",
}
"""Setting → the package that declares the names of this one, imported when a name is asked for."""

_given: list[str] = []  # modules that the user gave, by name


def declare(key: str, name: str, value: Any) -> None:
    """Make `name` a valid value of the setting `key` (used by the registries of methods, datasets, models)."""
    KNOWN[key][name] = value


def known(key: str, name: str) -> Any:
    """What was declared under a name, here or by an installed package; UnknownName where it is nobody's."""
    if name not in KNOWN[key]:
        import_module(BUILT_IN[key])
    if name not in KNOWN[key]:
        offers = offered(key)
        if name not in offers:
            hint = nearest(name, KNOWN[key].keys() | offers.keys())
            raise UnknownName(key, name, f"{key} = {shortened(name)!r} is unknown; {hint}.")
        _load(key, offers[name])
    return KNOWN[key][name]


def declared(key: str) -> dict[str, Any]:
    """All that was declared so far, with everything of this package."""
    import_module(BUILT_IN[key])
    return KNOWN[key]


def offered(key: str) -> dict[str, EntryPoint]:
    """What installed packages offer, by name; nothing is imported."""
    return {point.name: point for point in entry_points(group=GROUPS[key])}


def is_known(key: str, name: str) -> bool:
    """Whether a name is declared here or offered by an installed package; nothing is imported."""
    return name in declared(key) or name in offered(key)


def load_offered(key: str) -> list[str]:
    """Have everything that installed packages offer; a sentence about each that cannot be had."""
    problems = []
    for name, point in sorted(offered(key).items()):
        if name not in KNOWN[key]:
            try:
                _load(key, point)
            except UsageError as error:
                problems.append(str(error))
    return problems


def bring_in(what: str) -> None:
    """Import what the user gave: a module by its name, or a file by its path, which ends in .py."""
    try:
        name = _beside(Path(what)) if what.endswith(".py") else what
        import_module(name)
    except UsageError:
        raise
    except (Exception, SystemExit) as error:  # whatever somebody's module does
        file = f"; for the file of that name: --import {what}.py" if Path(f"{what}.py").is_file() else ""
        raise UsageError(f"--import {shortened(what)} fails: {_told(error)}{file}.") from error
    if name not in _given:
        _given.append(name)


def given() -> list[str]:
    """The modules that the user gave so far; other processes of the run import them too."""
    return list(_given)


def _load(key: str, point: EntryPoint) -> None:
    package = point.dist.name if point.dist else "unknown"
    what = f"{key} = {point.name!r} of the installed package {package}"
    try:
        point.load()
    except (Exception, SystemExit) as error:
        raise UsageError(f"{what} cannot be loaded: {_told(error)}; mend or remove the package.") from error
    if point.name not in KNOWN[key]:
        raise UsageError(f"{what} cannot be loaded: {point.value} registers nothing of that name.")


def _beside(path: Path) -> str:
    """The module of a file; files beside it can be imported too, after everything that Python finds by itself."""
    name, folder = path.stem, str(path.resolve().parent)
    if not path.is_file():
        raise UsageError(f"--import {path}: there is no such file.")
    if not name.isidentifier():
        raise UsageError(f"--import {path}: {name!r} cannot be the name of a module; rename the file.")
    if folder not in sys.path:
        sys.path.append(folder)
        invalidate_caches()
    found = find_spec(name)
    if found is None or found.origin is None or Path(found.origin).resolve() != path.resolve():
        raise UsageError(f"--import {path}: another module is called {name!r} already; rename the file.")
    return name


def _told(error: BaseException) -> str:
    return shortened(f"{type(error).__name__}: {error}".partition("\n")[0].rstrip("."))
