"""Folders for files that are only for speed: they go with the process, or after a kill with the next command."""

import fcntl
import re
import shutil
import tempfile
from pathlib import Path

from fedprotip.store.plain import PlainFolder

IN_USE = "in-use"
"""A file that whoever works in such a folder holds a lock on."""
_NAME = re.compile(r"fedprotip-[a-z0-9_]{8}")
_ROWS = re.compile(r"[a-z]+-\d+-\d+")
"""Rows of a frozen prefix (`models/prefix.py`): what, task, steps."""


class Scratch:
    """A new folder within another, by default the system's for temporary files."""

    def __init__(self, within: Path | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fedprotip-", dir=within, ignore_cleanup_errors=True)
        self.path = Path(self._folder.name)
        self._lock = PlainFolder(self.path).lockable(IN_USE)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def close(self) -> None:
        self._folder.cleanup()
        self._lock.close()


def sweep(folder: PlainFolder) -> None:
    """Remove what processes that were killed left in a folder: only what is surely theirs, and in nobody's use."""
    for name in folder.folders("fedprotip-*"):
        left = folder.inner(name)
        if _NAME.fullmatch(name) and _is_ours(left) and not _in_use(left):
            shutil.rmtree(left.path, ignore_errors=True)


def _is_ours(left: PlainFolder) -> bool:
    files = all(name == IN_USE or _ROWS.fullmatch(name) for name in left.names())
    return files and all(_NAME.fullmatch(name) and _is_ours(left.inner(name)) for name in left.folders())


def _in_use(left: PlainFolder) -> bool:
    if any(_in_use(left.inner(name)) for name in left.folders()):
        return True
    if not left.has(IN_USE):  # made by an earlier version, or the kill came at once
        return False
    with left.lockable(IN_USE) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
