"""The run folder: settings, logs, checkpoints and artefacts on disk. Knows files, not methods.

    DIR/settings.toml  manifest.json  plan.json  data.safetensors  events.jsonl  ledger.jsonl  summary.json
        model.safetensors  a file for each artefact of the method  checkpoint/  clients/  report.html  plots/  tables/

`checkpoints.py` has what lies in checkpoint/.
"""

import errno
import fcntl
import json
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

import torch

from fedprotip.errors import RunError, UsageError
from fedprotip.settings import tomltext
from fedprotip.store.answers import Answers
from fedprotip.store.checkpoints import LOGS, Checkpoints
from fedprotip.store.clients import ClientStore
from fedprotip.store.events import read_events
from fedprotip.store.files import Tensors, hash_of, parsed, serialise
from fedprotip.store.plain import PlainFolder
from fedprotip.store.records import (
    SEAL,
    DataRecord,
    Manifest,
    read_json,
    read_ledger,
    read_manifest,
    read_record,
    seal_of,
)
from fedprotip.store.results import Geometry, Memory, Summary
from fedprotip.store.scratch import sweep
from fedprotip.store.site import SiteFolder, check_site

FORMAT = 2
"""Raised when a run folder of an older version could no longer be continued exactly."""
READABLE = (1, FORMAT)
"""Formats whose results can be looked at."""

TRIALS = 4
"""How often a lock is asked for before it counts as somebody else's."""
DATA = "data.safetensors"
ANSWERS, GEOMETRY, MEMORY = "answers.json", "geometry.json", "memory.json"
ARTEFACTS = ("settings.toml", "summary.json", "plan.json", "*.safetensors")
"""Files whose hashes the manifest holds; once the run is finished, also those of the logs and of what was measured."""


@contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Turn errors of the file system into a sentence that says what to do."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = f"free some space, then: fedprotip resume {folder}" if full else "choose another folder with --out"
        raise RunError(f"Cannot write to {folder}: {error.strerror or error}; {advice}.") from error


class RunFolder:
    """One run on disk. Make it with `create`, come back with `open`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = PlainFolder(path)
        self._checkpoints = Checkpoints(self._files)
        self._lock: IO[bytes] | None = None

    @classmethod
    def create(cls, path: Path, settings_toml: str, needs: Sequence[str] = ()) -> "RunFolder":
        """A new run in an empty or missing folder. It is locked from here until the end of `locked`, which follows."""
        run = cls(path)
        with explained(path):
            refuse_unless_blank(path)
            run._checkpoints.objects.create()
            run._hold()
            try:
                refuse_unless_blank(path)  # another run may have begun here meanwhile
                for log in LOGS:
                    run._files.append(log, [])
                run.write("settings.toml", settings_toml)
                run.write_manifest("running", settings_toml, needs=list(needs) or None)
            except BaseException:
                run._release()
                raise
        return run

    @classmethod
    def open(cls, path: Path, to_continue: bool = False) -> "RunFolder":
        """An existing run; refuses folders of a format that cannot be read, or not be continued if that is wanted."""
        if not is_run(path):
            raise UsageError(f"{path} is not a run folder (it has no manifest.json).")
        run = cls(path)
        raw = read_json(path / "manifest.json")
        if raw.get("format") not in ((FORMAT,) if to_continue else READABLE):
            versions = raw.get("versions")
            maker = versions.get("fedprotip", "unknown") if isinstance(versions, dict) else "unknown"
            does = f"continues format {FORMAT}" if to_continue else f"reads formats up to {FORMAT}"
            raise UsageError(
                f"The run folder {path} has format {_brief(raw.get('format'))}, this fedprotip {does}; "
                f"use the version that made it ({_brief(maker)})."
            )
        return run

    def store(self, budget_mb: int) -> ClientStore:
        return ClientStore(self._checkpoints.objects, budget_mb * 2**20)

    def manifest(self) -> Manifest:
        """What the run goes by; refuses one that lacks it."""
        manifest = read_manifest(self.path / "manifest.json")
        if not manifest.versions or "settings" not in manifest.model_fields_set:
            raise RunError(
                f"{self.path / 'manifest.json'} is incomplete, or of an early version; remove {self.path}, "
                "or choose another folder with --out."
            )
        return manifest

    def summary(self) -> Summary:
        """The result of a finished run."""
        if not self._files.taken("summary.json"):
            raise RunError(f"{self.path} has no summary.json yet; finish it with: fedprotip resume {self.path}.")
        return read_record(Summary, self.path / "summary.json")

    def write(self, name: str, data: bytes | str) -> None:
        self._files.write(name, data)

    def write_json(self, name: str, value: Any) -> None:
        self.write(name, json.dumps(value, indent=1, ensure_ascii=False) + "\n")

    def write_tensors(self, name: str, tensors: Tensors) -> None:
        self.write(name, serialise(tensors))

    def write_manifest(self, status: str, settings_toml: str, **more: Any) -> None:
        """State, versions and hashes. Holds the settings too: what it says is what the run goes by."""
        versions = {name: version(name) for name in ("fedprotip", "torch", "numpy")}
        versions |= {"python": platform.python_version(), "platform": f"{platform.system()} {platform.machine()}"}
        patterns = (*ARTEFACTS, *LOGS, ANSWERS, GEOMETRY, MEMORY) if status == "finished" else ARTEFACTS
        names = (name for pattern in patterns for name in self._files.names(pattern) if self._files.has(name))
        files = {name: self._files.hash(name) for name in names}
        files["settings.toml"] = hash_of(settings_toml.encode())
        own = {"format": FORMAT, "status": status, "versions": versions, "settings": settings_toml, "files": files}
        known = self.manifest() if is_run(self.path) else None
        kept = {"data": known.data, "needs": known.needs} if known else {}
        self._write_manifest(Manifest.model_validate({"threads": torch.get_num_threads(), **kept, **own, **more}))

    def _write_manifest(self, manifest: Manifest) -> None:
        plain = manifest.plain()
        self.write_json("manifest.json", plain | {SEAL: seal_of(plain)})

    def read_data(self) -> tuple[dict[str, Any], Tensors]:
        """The fingerprint of the data and the table of samples behind it; empty: there is none, or it is damaged."""
        manifest, table = self.manifest(), Tensors()
        with suppress(RunError):
            table = parsed(self.read_verified(DATA), DATA)
        return manifest.data.model_dump() if manifest.data else {}, table

    def write_data(self, record: dict[str, Any], table: Tensors) -> None:
        """Write both, if they are new: the table first, then the manifest that vouches for it."""
        manifest, content = self.manifest(), serialise(table)
        files = manifest.files | {DATA: hash_of(content)}
        new = manifest.model_copy(update={"data": DataRecord.model_validate(record), "files": files})
        if new != manifest or not self._files.has(DATA):
            self.write(DATA, content)
            self._write_manifest(new)

    def settings(self, warn: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
        """The settings of the run; refuses a settings.toml that was edited behind its back."""
        manifest, path = self.manifest(), self.path / "settings.toml"
        text = manifest.settings
        found = self._files.hash(path.name) if self._files.taken(path.name) else None
        if found == manifest.replaced or found is None:  # an extension stopped before it wrote the file
            self.write("settings.toml", text)
        elif found != hash_of(text.encode()):
            raise UsageError(f"{path} was changed since the run began; put it back, or start another run with it.")
        changed = [n for n in ("fedprotip", "torch", "numpy") if manifest.versions.get(n) != version(n)]
        if changed:
            warn(f"The run began with another version of {', '.join(changed)}: it may not end with the same bytes.")
        return self.manifest_settings()

    def change_settings(self, text: str) -> None:
        """Let the run go by other settings; one that was finished is under way then."""
        manifest = self.manifest()
        self.write_manifest("running", text, threads=manifest.threads, replaced=manifest.files.get("settings.toml"))
        self.write("settings.toml", text)

    def manifest_settings(self) -> dict[str, Any]:
        """The settings as the manifest has them."""
        try:
            return tomltext.loads(self.manifest().settings)
        except ValueError as error:
            raise RunError(f"{self.path / 'manifest.json'} is damaged: its settings are no TOML ({error}).") from None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Only one process at a time may be at work in a run folder."""
        self._hold()
        try:
            yield
        finally:
            self._release()

    def _hold(self) -> None:
        if self._lock is not None:  # since `create`
            return
        if not self._checkpoints.there:
            raise RunError(f"{self.path} has no checkpoint: it answers, but cannot be continued.")
        lock = self._checkpoints.folder.lockable("lock")
        for trial in range(TRIALS):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:  # somebody may only be asking (`in_use`), which is over in a moment
                time.sleep(0.02 if trial < TRIALS - 1 else 0)
        else:
            lock.close()
            raise RunError(f"{self.path} is in use by another fedprotip process; wait for it or stop it.") from None
        self._lock = lock

    def in_use(self) -> bool:
        """Whether a process is at work in it right now; nothing is written to find out."""
        if not self._checkpoints.there or not self._checkpoints.folder.has("lock"):
            return False
        with self._checkpoints.folder.opened("lock") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def sweep(self) -> None:
        """Remove what a process that was killed left behind for speed; the lock must be held."""
        sweep(self._files)
        if "clients" in self._files.folders():
            sites = self._files.inner("clients")
            sweep(sites)
            for name in sites.folders():
                sweep(sites.inner(name))

    # What is intact

    def verify(self) -> dict[str, str]:
        """Every file of the manifest: intact, changed, missing, or no file that a run would have written."""
        return {name: self._state(name, expected) for name, expected in self.manifest().files.items()}

    def _state(self, name: str, expected: str) -> str:
        if not self._files.taken(name):
            return "missing"
        if not self._files.has(name):
            return "not a plain file"
        return "intact" if self._files.hash(name) == expected else "changed"

    def examine(self) -> dict[str, str]:
        """What else a later command would read: logs and geometry, checkpoints with their objects, clients' states."""
        files, state = self.manifest().files, dict[str, str]()
        readers: dict[str, Callable[[Path], Any]] = {
            "events.jsonl": lambda path: [None for _ in read_events(path)],
            "ledger.jsonl": lambda path: [None for _ in read_ledger(path)],
            ANSWERS: lambda path: read_record(Answers, path),
            GEOMETRY: lambda path: read_record(Geometry, path),
            MEMORY: lambda path: read_record(Memory, path),
        }
        for name, read in readers.items():
            if name not in files and self._files.taken(name):
                state[name] = _outcome(read, self.path / name)
        if self._checkpoints.there:
            for name in self._checkpoints.names():
                state[f"checkpoint/{name}"] = _outcome(self._checkpoints.check, name)
        if "clients" in self._files.folders():
            sites = self._files.inner("clients")
            for client in sites.folders("[0-9]*"):
                state[f"clients/{client}"] = _outcome(check_site, sites.inner(client))
        return state

    def require_intact(self, *names: str) -> None:
        """Raise RunError unless these files of a finished run, or all, are those of its manifest.

        The table of the data is only for words, and settings.toml has its own check (`settings`).
        """
        files = read_manifest(self.path / "manifest.json").files
        for name in names or files.keys() - {DATA, "settings.toml"}:
            if name in files and (state := self._state(name, files[name])) != "intact":
                raise self._not_intact(name, state)

    def _not_intact(self, name: str, state: str) -> RunError:
        why = "was changed since the run ended (its hash does not fit)" if state == "changed" else f"is {state}"
        return RunError(f"{self.path / name} {why}; put it back, or run it again.")

    def read_verified(self, name: str) -> bytes:
        """The content of a file of the manifest; one that is missing or changed is refused."""
        try:
            data = self._files.read(name)
        except FileNotFoundError:
            raise self._not_intact(name, "missing") from None
        except OSError as error:
            raise RunError(f"{self.path / name} cannot be read: {error.strerror or error}.") from None
        if hash_of(data) != self.manifest().files.get(name):
            raise self._not_intact(name, "changed")
        return data

    def has(self, name: str) -> bool:
        """Whether anything of this name is in the folder."""
        return self._files.taken(name)

    def remove(self, name: str) -> None:
        self._files.remove(name)

    def append(self, log: str, records: Iterable[Mapping[str, Any]]) -> None:
        """Add lines to a log; those after the last checkpoint are cut off on resume."""
        self._files.append(log, (json.dumps(record, ensure_ascii=False) + "\n" for record in records))

    # Checkpoints

    def checkpoint(self, state: Mapping[str, Any], groups: Mapping[str, Tensors], store: ClientStore) -> None:
        """Save a state (JSON) and groups of tensors so that `restore` gives exactly them back."""
        self._checkpoints.save(state, groups, store)

    def restore(
        self, store: ClientStore, warn: Callable[[str], None]
    ) -> tuple[dict[str, Any], dict[str, Tensors]] | None:
        """The newest good checkpoint (state, groups), or None when there is none yet; see `Checkpoints.restore`."""
        found = self._checkpoints.restore(store, warn)
        if found is None:
            if self.manifest().status == "finished":
                raise RunError(f"{self.path} has no checkpoint: it answers, but cannot be continued.")
            self._checkpoints.begin()
        return found

    def drop_spares(self) -> None:
        """A finished run keeps what an extension needs, once: older states and all second copies go."""
        self._checkpoints.drop_spares()
        if "clients" in self._files.folders():
            sites = self._files.inner("clients")
            for client in sites.folders("[0-9]*"):
                SiteFolder(sites.inner(client).path).keep_newest()


def is_run(path: Path) -> bool:
    return os.path.lexists(path / "manifest.json")


def refuse_unless_blank(path: Path, choose: str = "choose another with --out") -> None:
    if path.exists() and not (path.is_dir() and _is_blank(path)):
        hint = f"continue it with: fedprotip resume {path}" if is_run(path) else choose
        raise UsageError(f"The run folder {path} is not empty; {hint}.")


def _is_blank(path: Path) -> bool:
    """Whether a folder is empty, or holds only what an interrupted `create` left before it was a run."""
    names = {entry.name for entry in path.iterdir()}
    left = {"checkpoint", *LOGS, "settings.toml", "settings.toml.tmp", "manifest.json.tmp"}
    return not names or ("checkpoint" in names and names <= left)


def free_path(base: Path) -> Path:
    """`base`, or the first of base-2, base-3, … that is not taken."""
    candidate, number = base, 1
    while candidate.exists():
        number += 1
        candidate = base.with_name(f"{base.name}-{number}")
    return candidate


def _outcome(check: Callable[[Any], Any], what: Any) -> str:
    """intact, or what is wrong."""
    try:
        check(what)
    except RunError as error:
        return f"damaged: {str(error).rstrip('.')}"
    except OSError as error:
        return f"damaged: {error.strerror or error}"
    return "intact"


def _brief(value: Any) -> str:
    return str(value)[:40]
