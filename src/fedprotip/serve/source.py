"""Which run is served: the folder that was named, or the newest finished run within it."""

import os
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from fedprotip.errors import FedprotipError, UsageError
from fedprotip.inference.predictor import Predictor, load
from fedprotip.store.folder import is_run

MANIFEST = "manifest.json"
Mark = tuple[str, int, int, int]
"""What changes when another run lies there: its folder, and identity, time and size of its manifest."""
Files = list[tuple[str, int, int]]
"""What changes while a run is being copied: name, time and size of every file."""


@dataclass(frozen=True)
class Served:
    """A run that answers, and since when."""

    name: str
    predictor: Predictor
    mark: Mark
    since: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))


class Source:
    """The run that answers now. A newer one takes its place once it is loaded; whoever asked the old one is answered
    by it. One that cannot be loaded changes nothing, and is tried again when its files change: it may be on its way."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._lock = threading.Lock()
        self._failed: dict[str, Files] = {}  # folders that could not be loaded, as they were then
        self.problem = ""
        found = self._marks()
        if not found:
            load(self.folder)  # says what is wrong with it
            raise UsageError(f"{self.folder} is no run folder, and there is none in it.")
        for mark in found[:-1]:
            before = _files(mark[0])
            try:
                self.now = self._load(mark)
                return
            except FedprotipError:
                self._failed[mark[0]] = before
        self.now = self._load(found[-1])

    def refresh(self, again: bool = True) -> bool:
        """Whether a newer run has taken the place of the one that answered so far; `problem`: why one has not.

        Args:
            again: try also what could not be loaded and looks as it did then.
        """
        with self._lock:
            if again:
                self._failed.clear()
                self.problem = ""
            for mark in self._marks():
                older = mark[0] != self.now.mark[0] and mark[2] <= self.now.mark[2]
                if mark == self.now.mark or older:  # an older one is no reason to change, even if the newer is gone
                    return False
                before = _files(mark[0])
                if self._failed.get(mark[0]) == before:
                    continue
                try:
                    self.now, self.problem = self._load(mark), ""
                    return True
                except FedprotipError as error:
                    self._failed[mark[0]] = before
                    self.problem = str(error)
            return False

    def _marks(self) -> list[Mark]:
        """Runs that are there, the newest first."""
        if is_run(self.folder):
            folders = [self.folder]
        else:
            inside: list[Path] = []
            with suppress(OSError):  # it may be gone for a moment
                inside = sorted(self.folder.iterdir())
            folders = [path for path in inside if path.is_dir() and is_run(path)]
        found = []
        for folder in folders:
            try:
                seen = os.stat(folder / MANIFEST)
            except OSError:  # it is being replaced
                continue
            found.append((str(folder), seen.st_ino, seen.st_mtime_ns, seen.st_size))
        return sorted(found, key=lambda mark: mark[2], reverse=True)

    def _load(self, mark: Mark) -> Served:
        return Served(Path(mark[0]).resolve().name, load(mark[0]), mark)


def _files(folder: str) -> Files:
    """As far as they can be seen."""
    found = []
    with suppress(OSError), os.scandir(folder) as inside:
        for one in inside:
            seen = one.stat(follow_symlinks=False)
            found.append((one.name, seen.st_mtime_ns, seen.st_size))
    return sorted(found)
