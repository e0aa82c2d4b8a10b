"""Several runs as one job: methods × seeds × values of a setting, each in a folder of its own.

What is finished is kept, what was interrupted is resumed, so the same command can be given again. Each has a process of
its own, so that its memory and its processor time are its own.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from importlib import import_module
from itertools import product
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from signal import SIG_BLOCK, SIG_IGN, SIG_SETMASK, SIGHUP, SIGINT, SIGTERM, pthread_sigmask, signal
from threading import Thread
from types import FrameType
from typing import Any

from fedprotip import settings as settings_file
from fedprotip.api import Source, check, resume, run
from fedprotip.errors import FedprotipError, RunError, UsageError
from fedprotip.federation.engines.pool import end_with_the_run
from fedprotip.federation.engines.workplace import modules_of
from fedprotip.settings import Settings, tomltext
from fedprotip.store.events import Event, Observer, as_event
from fedprotip.store.folder import RunFolder, is_run
from fedprotip.stream import spelled_out

LONGEST = 40
"""Letters of a setting and its value in the name of a folder."""


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
        note: told what is read into settings that were left out.
    """
    axes = [_values(entry) for entry in vary]
    base = settings_file.load(source, overrides, preset=preset)
    cells: list[Cell] = []
    for method, seed, chosen in product(methods or [base.method.name], seeds, product(*axes)):
        changes = [*overrides, *chosen, f"method.name={method}", f"run.seed={seed}"]
        settings = spelled_out(settings_file.load(source, changes, preset=preset), note)
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
        apart(cell.settings, folder, list(observe(cell)))
        folders.append(folder)
    return folders


def complete(settings: Settings, folder: Path, observers: Iterable[Observer]) -> None:
    """Run what a folder is to hold, or what of it is missing."""
    if is_run(folder):
        resume(folder, observers)
    else:
        run(settings, out=folder, observers=observers)


def apart(settings: Settings, folder: Path, observers: Sequence[Observer]) -> None:
    """`complete` in a new process; its events come here, and whatever ends this ends it, with its last checkpoint."""
    modules = modules_of(settings)
    if "__main__" in modules:  # registered in a script or notebook: no other process has it
        complete(settings, folder, observers)
        return
    context = get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    given = settings.model_dump(exclude_unset=True)
    process = context.Process(target=_work, args=(theirs, given, folder, modules), name=f"fedprotip {folder.name}")
    resource_tracker.ensure_running()  # its own start would unblock the signals again
    before = pthread_sigmask(SIG_BLOCK, {SIGINT, SIGHUP})  # inherited: they are for this process, which ends the other
    try:
        process.start()
    finally:
        theirs.close()
        pthread_sigmask(SIG_SETMASK, before)
    try:
        for event in _told(ours):
            for observer in observers:
                observer(event)
    except BaseException:
        process.terminate()
        raise
    finally:
        process.join()
        ours.close()
    if process.exitcode:
        raise RunError(
            f"The process of {folder} died (exit code {process.exitcode}), perhaps for want of memory; the same "
            "command goes on where it was."
        )


def _told(pipe: Connection) -> Iterator[Event]:
    """The events of a run elsewhere, until it is done."""
    with suppress(EOFError):
        while True:
            line = json.loads(pipe.recv_bytes())
            if "stopped" in line:
                raise (UsageError if line["usage"] else RunError)(line["stopped"])
            yield as_event(line)


def _work(pipe: Connection, given: dict[str, Any], folder: Path, modules: Sequence[str]) -> None:
    """The process of a cell."""
    Thread(target=end_with_the_run, daemon=True).start()
    signal(SIGTERM, _stop)
    try:
        for module in modules:
            import_module(module)
        complete(settings_file.load(given), folder, [lambda event: pipe.send_bytes(json.dumps(event.plain()).encode())])
    except KeyboardInterrupt:
        raise SystemExit(1) from None
    except FedprotipError as error:
        signal(SIGTERM, SIG_IGN)  # whoever is told ends this process, which is at its end already
        line = {"stopped": str(error), "usage": isinstance(error, UsageError)}
        pipe.send_bytes(json.dumps(line).encode())


def _stop(number: int, frame: FrameType | None) -> None:
    signal(SIGTERM, SIG_IGN)
    raise KeyboardInterrupt


def _same_settings(folder: Path, wanted: Settings) -> None:
    found = settings_file.load(RunFolder.open(folder).settings()).model_dump()
    expected = settings_file.seen_from(wanted, folder).model_dump()
    for section, values in expected.items():
        for key, value in values.items():
            free = (section, key) in (("run", "out"), ("run", "track"), ("run", "workers"))  # they change no result
            if not free and found[section].get(key) != value:
                raise UsageError(
                    f"{folder} holds a run with {section}.{key} = {found[section].get(key)!r}, not {value!r}; "
                    "remove it or choose another --out."
                )


def _short(entry: str) -> str:
    """method.threshold=0.9 → threshold-0.9; of a long value the beginning and a hash, for it names a folder."""
    key, _, value = entry.partition("=")
    name = f"{key.rpartition('.')[2]}-{value}"
    return name if len(name) <= LONGEST else f"{name[:LONGEST]}-{blake2b(name.encode(), digest_size=4).hexdigest()}"


def _foreign(entry: str, fields: Iterable[str]) -> bool:
    """Whether an assignment is an option of another method."""
    section, _, key = entry.partition("=")[0].partition(".")
    return section == "method" and key not in fields


def _values(entry: str) -> list[str]:
    key, equals, listed = entry.partition("=")
    if not equals or "." not in key or not listed.strip():
        raise UsageError(
            f"--vary {entry!r} is not of the form section.key=value,value, such as method.threshold=0.7,0.9."
        )
    try:
        values = tomltext.loads(f"v = [{listed}]")["v"]
    except ValueError:
        values = [part.strip() for part in listed.split(",")]
    return [f"{key}={value if isinstance(value, str) else tomltext.write(value)}" for value in values]
