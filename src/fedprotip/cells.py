"""Several runs as one job: methods × seeds × values of a setting, each in a folder of its own.

What is finished is kept, what was interrupted is resumed, so the same command can be given again.
"""

import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from fedprotip import settings as settings_file
from fedprotip.api import Source, check, resume, run
from fedprotip.errors import UsageError
from fedprotip.settings import Settings
from fedprotip.store.events import Observer
from fedprotip.store.folder import RunFolder, is_run
from fedprotip.stream import settled


@dataclass(frozen=True)
class Cell:
    """One run of a comparison."""

    name: str
    settings: Settings


def plan_cells(
    source: Source,
    overrides: Sequence[str],
    methods: Sequence[str],
    seeds: Sequence[int],
    vary: Sequence[str] = (),
    note: Callable[[str], None] = lambda text: None,
    preset: str = "",
) -> list[Cell]:
    """All combinations, checked before the first one starts.

    Args:
        source, overrides, preset: as for `fedprotip.run`; `methods`: empty for the one in the settings.
        vary: entries such as "method.threshold=0.7,0.9": one run for each value.
    """
    axes = [_values(entry) for entry in vary]
    base = settings_file.load(source, overrides, preset=preset)
    cells: list[Cell] = []
    for method, seed, chosen in product(methods or [base.method.name], seeds, product(*axes)):
        changes = [*overrides, *chosen, f"method.name={method}", f"run.seed={seed}"]
        settings = settled(settings_file.load(source, changes, note, preset))
        if any(settings == cell.settings for cell in cells):
            continue  # a value that this method does not have
        check(settings)
        fields = type(settings.method).model_fields
        parts = [method, *(_short(entry) for entry in chosen if not _foreign(entry, fields))]
        cells.append(Cell("-".join([*parts, f"s{seed}"] if len(seeds) > 1 else parts), settings))
    return cells


def run_cells(cells: Iterable[Cell], out: Path, observe: Callable[[Cell], Iterable[Observer]]) -> list[Path]:
    """Run what is missing, resume what was interrupted; the run folders, in order."""
    folders = []
    for cell in cells:
        folder = out / cell.name
        if is_run(folder):
            _same_settings(folder, cell.settings)
            resume(folder, observe(cell))
        else:
            run(cell.settings, out=folder, observers=observe(cell))
        folders.append(folder)
    return folders


def _same_settings(folder: Path, wanted: Settings) -> None:
    found = settings_file.load(RunFolder.open(folder).settings()).model_dump()
    expected = settings_file.seen_from(wanted, folder).model_dump()
    for section, values in expected.items():
        for key, value in values.items():
            free = (section, key) in (("run", "out"), ("clients", "workers"))  # they change no result
            if not free and found[section].get(key) != value:
                raise UsageError(
                    f"{folder} holds a run with {section}.{key} = {found[section].get(key)!r}, not {value!r}; "
                    "remove it or choose another --out."
                )


def _short(entry: str) -> str:
    """method.threshold=0.9 → threshold-0.9"""
    key, _, value = entry.partition("=")
    return f"{key.rpartition('.')[2]}-{value}"


def _foreign(entry: str, fields: Iterable[str]) -> bool:
    """Whether an assignment is an option of another method."""
    section, _, key = entry.partition("=")[0].partition(".")
    return section == "method" and key not in fields


def _values(entry: str) -> list[str]:
    key, equals, listed = entry.partition("=")
    if not equals or "." not in key:
        raise UsageError(
            f"--vary {entry!r} is not of the form section.key=value,value, such as method.threshold=0.7,0.9."
        )
    try:
        values = tomllib.loads(f"v = [{listed}]")["v"]
    except tomllib.TOMLDecodeError:
        values = [part.strip() for part in listed.split(",")]
    return [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for value in values]
