"""The run folder: settings, logs, checkpoints and artefacts on disk. Knows files, not methods.

    DIR/settings.toml  manifest.json  plan.json  data.safetensors  events.jsonl  ledger.jsonl  summary.json
        model.safetensors  a file for each artefact of the method  checkpoint/  clients/  report.html  plots/  tables/

A checkpoint is an index that names immutable objects by their hash. Objects are written first, the index
last, each atomically, so a crash leaves the old checkpoint or the new one and never half of one. What did
not change since the last checkpoint is neither read nor written again; what two checkpoints share is kept twice.
"""

import errno
import fcntl
import json
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from fedprotip.errors import RunError, UsageError
from fedprotip.store.clients import ClientStore
from fedprotip.store.files import Tensors, hash_of, hash_of_file, serialise, write_atomic
from fedprotip.store.objects import ObjectFolder, sealed, unsealed
from fedprotip.store.records import DataRecord, Manifest, read_json, read_record
from fedprotip.store.results import Summary

FORMAT = 2
"""Raised when a run folder of an older version could no longer be continued exactly."""
READABLE = (1, FORMAT)
"""Formats whose results can be looked at."""

INDEX = "[0-9]" * 8 + ".json"
LOGS = ("events.jsonl", "ledger.jsonl")
DATA = "data.safetensors"
ARTEFACTS = ("settings.toml", "summary.json", "plan.json", "*.safetensors")
"""Files whose hashes the manifest holds."""


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
        self._checkpoints = path / "checkpoint"
        self._objects = ObjectFolder(self._checkpoints / "objects")
        self._step = 0
        self._named: dict[int, set[str]] = {}  # objects that each kept checkpoint names

    @classmethod
    def create(cls, path: Path, settings_toml: str) -> "RunFolder":
        """A new run in an empty or missing folder."""
        run = cls(path)
        with explained(path):
            if path.exists() and not (path.is_dir() and _is_blank(path)):
                hint = f"continue it with: fedprotip resume {path}" if is_run(path) else "choose another with --out"
                raise UsageError(f"The run folder {path} is not empty; {hint}.")
            run._objects.create()
            for log in LOGS:
                (path / log).touch()
            run.write("settings.toml", settings_toml)
            run.write_manifest("running", settings_toml)
        return run

    @classmethod
    def open(cls, path: Path, to_continue: bool = False) -> "RunFolder":
        """An existing run; refuses folders of a format that cannot be read, or not be continued if that is wanted."""
        if not is_run(path):
            raise UsageError(f"{path} is not a run folder (it has no manifest.json).")
        run = cls(path)
        raw = read_json(path / "manifest.json")
        if raw.get("format") not in ((FORMAT,) if to_continue else READABLE):
            maker = dict(raw.get("versions") or {}).get("fedprotip", "unknown")
            does = f"continues format {FORMAT}" if to_continue else f"reads formats up to {FORMAT}"
            raise UsageError(
                f"The run folder {path} has format {raw.get('format')}, this fedprotip {does}; "
                f"use the version that made it ({maker})."
            )
        return run

    def store(self, budget_mb: int) -> ClientStore:
        return ClientStore(self._objects, budget_mb * 2**20)

    def manifest(self) -> Manifest:
        """What the run goes by; refuses one that lacks it."""
        manifest = read_record(Manifest, self.path / "manifest.json")
        if not manifest.versions or "settings" not in manifest.model_fields_set:
            raise RunError(
                f"{self.path / 'manifest.json'} is incomplete, or of an early version; remove {self.path}, "
                "or choose another folder with --out."
            )
        return manifest

    def summary(self) -> Summary:
        """The result of a finished run."""
        if not (self.path / "summary.json").exists():
            raise RunError(f"{self.path} has no summary.json yet; finish it with: fedprotip resume {self.path}.")
        return read_record(Summary, self.path / "summary.json")

    def write(self, name: str, data: bytes | str) -> None:
        write_atomic(self.path / name, data)

    def write_json(self, name: str, value: Any) -> None:
        self.write(name, json.dumps(value, indent=1, ensure_ascii=False) + "\n")

    def write_tensors(self, name: str, tensors: Tensors) -> None:
        self.write(name, serialise(tensors))

    def write_manifest(self, status: str, settings_toml: str, **more: Any) -> None:
        """State, versions and hashes. Holds the settings too: what it says is what the run goes by."""
        versions = {name: version(name) for name in ("fedprotip", "torch", "numpy")}
        versions |= {"python": platform.python_version(), "platform": f"{platform.system()} {platform.machine()}"}
        paths = (path for pattern in ARTEFACTS for path in sorted(self.path.glob(pattern)))
        files = {path.name: hash_of_file(path) for path in paths}
        files["settings.toml"] = hash_of(settings_toml.encode())
        own = {"format": FORMAT, "status": status, "versions": versions, "settings": settings_toml, "files": files}
        known = self.manifest().data if is_run(self.path) else None
        self._write_manifest(
            Manifest.model_validate({"threads": torch.get_num_threads(), "data": known, **own, **more})
        )

    def _write_manifest(self, manifest: Manifest) -> None:
        self.write_json("manifest.json", manifest.plain())

    def read_data(self) -> tuple[dict[str, Any], Tensors]:
        """The fingerprint of the data and the table of samples behind it; empty: there is none, or it is damaged."""
        manifest, path = self.manifest(), self.path / DATA
        intact = path.exists() and hash_of_file(path) == manifest.files.get(DATA)
        return manifest.data.model_dump() if manifest.data else {}, load_file(path) if intact else {}

    def write_data(self, record: dict[str, Any], table: Tensors) -> None:
        """Write both, if they are new: the table first, then the manifest that vouches for it."""
        manifest, content = self.manifest(), serialise(table)
        files = manifest.files | {DATA: hash_of(content)}
        new = manifest.model_copy(update={"data": DataRecord.model_validate(record), "files": files})
        if new != manifest or not (self.path / DATA).exists():
            self.write(DATA, content)
            self._write_manifest(new)

    def settings_toml(self, warn: Callable[[str], None] = lambda text: None) -> str:
        """The settings of the run; refuses a settings.toml that was edited behind its back."""
        manifest, path = self.manifest(), self.path / "settings.toml"
        text = manifest.settings
        found = hash_of(path.read_bytes()) if path.exists() else None
        if found == manifest.replaced or found is None:  # an extension stopped before it wrote the file
            self.write("settings.toml", text)
        elif found != hash_of(text.encode()):
            raise UsageError(f"{path} was changed since the run began; put it back, or start another run with it.")
        changed = [n for n in ("fedprotip", "torch", "numpy") if manifest.versions.get(n) != version(n)]
        if changed:
            warn(f"The run began with another version of {', '.join(changed)}: it may not end with the same bytes.")
        return text

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Only one process at a time may continue a run."""
        with open(self._checkpoints / "lock", "a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunError(f"{self.path} is in use by another fedprotip process; wait for it or stop it.") from None
            yield

    def verify(self) -> dict[str, str]:
        """Every file of the manifest: intact, changed or missing."""
        state = {}
        for name, expected in self.manifest().files.items():
            path = self.path / name
            found = hash_of_file(path) if path.exists() else None
            state[name] = "missing" if found is None else "intact" if found == expected else "changed"
        return state

    def read_verified(self, name: str) -> bytes:
        """The content of a file of the manifest; one that is missing or changed is refused."""
        try:
            data = (self.path / name).read_bytes()
        except OSError as error:
            raise RunError(f"{self.path / name} cannot be read: {error.strerror or error}.") from None
        if hash_of(data) != self.manifest().files.get(name):
            raise RunError(f"{self.path / name} was changed since the run ended (its hash does not fit).")
        return data

    def append(self, log: str, records: Iterable[Mapping[str, Any]]) -> None:
        """Add lines to a log; those after the last checkpoint are cut off on resume."""
        with open(self.path / log, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)

    def checkpoint(self, state: Mapping[str, Any], groups: Mapping[str, Tensors], store: ClientStore) -> None:
        """Save a state (JSON) and groups of tensors so that `restore` gives exactly them back."""
        index = {
            "state": dict(state),
            "groups": {name: self._objects.write_group(name, tensors) for name, tensors in groups.items()},
            "clients": store.flush(),
            "logs": {log: _synced_size(self.path / log) for log in LOGS},
        }
        names = _names(index)
        self._objects.duplicate(sorted(names & self._named.get(self._step, set())))
        self._step += 1
        write_atomic(self._index_path(self._step), sealed(index))
        self._named = {step: kept for step, kept in self._named.items() if step == self._step - 1}
        self._named[self._step] = names
        self._clean()

    def restore(
        self, store: ClientStore, warn: Callable[[str], None]
    ) -> tuple[dict[str, Any], dict[str, Tensors]] | None:
        """The newest good checkpoint (state, groups), or None when there is none yet.

        A damaged index or object is recognised by its hash; then the checkpoint before it is used and
        `warn` says so.
        """
        found = sorted(self._checkpoints.glob(INDEX), reverse=True)
        for path in found:
            try:
                index = unsealed(path.read_bytes())
                self._objects.verify(sorted(_names(index)))
                self._check_logs(index["logs"])
            except (RunError, OSError, ValueError) as error:
                warn(f"Checkpoint {path.name} is damaged ({error}); the one before it is used.")
                continue
            self._cut_logs(index["logs"])
            self._step = int(path.stem)
            self._named = {self._step: _names(index)} | self._older()
            self._clean()
            store.restore(index["clients"])
            return index["state"], {name: self._objects.read(obj) for name, obj in index["groups"].items()}
        if found:
            raise RunError(f"No checkpoint of {self.path} can be read; start again with: fedprotip run.")
        self._cut_logs(dict.fromkeys(LOGS, 0))
        self._clean()
        return None

    def _older(self) -> dict[int, set[str]]:
        """The objects of the checkpoint before the current one, kept in case the current one is damaged later."""
        with suppress(RunError, OSError, ValueError):
            return {self._step - 1: _names(unsealed(self._index_path(self._step - 1).read_bytes()))}
        return {}

    def _index_path(self, step: int) -> Path:
        return self._checkpoints / f"{step:08d}.json"

    def _check_logs(self, sizes: Mapping[str, int]) -> None:
        for log, size in sizes.items():
            if (self.path / log).stat().st_size < size:
                raise RunError(f"{log} is shorter than it should be")

    def _cut_logs(self, sizes: Mapping[str, int]) -> None:
        for log, size in sizes.items():
            os.truncate(self.path / log, size)

    def _clean(self) -> None:
        """Remove every checkpoint, object and half-written file that is no longer needed."""
        for path in self._checkpoints.glob(INDEX):
            if int(path.stem) not in self._named:
                path.unlink()
        self._objects.keep_only(set().union(*self._named.values()))
        for path in [*self._checkpoints.glob("*.tmp"), *self.path.glob("*.tmp")]:
            path.unlink()


def is_run(path: Path) -> bool:
    return (path / "manifest.json").is_file()


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


def _names(index: Mapping[str, Any]) -> set[str]:
    return {*index["groups"].values(), *index["clients"].values()}


def _synced_size(path: Path) -> int:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_size
