"""The one door to the files of a run folder, which may come from strangers.

The folder itself is where the user says, by way of links if need be. Below it nothing is followed and nothing but plain
files is opened: a link, a pipe or a device is refused with a sentence before it is touched, so that no content of a
folder can make a command read, write or delete a file outside of it, or wait forever.
"""

import hashlib
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from io import BufferedReader
from pathlib import Path
from typing import IO

from fedprotip.errors import RunError
from fedprotip.store.memory import machine_bytes

TEXT = 2**28
"""Bytes of the largest text that is read at once."""
LINE = 2**20
"""Characters of the longest line of a log."""
UNFINISHED = ".tmp"


class Foreign(RunError):
    """Something that no run puts into its folder."""


def plain_name(name: str) -> str:
    """The name of a file within a folder; ValueError for anything that could lead elsewhere."""
    if name in ("", ".", "..") or "/" in name or os.sep in name or not name.isprintable() or len(name.encode()) > 250:
        raise ValueError(f"{name[:250]!r} is not the name of a file of the folder")
    return name


class PlainFolder:
    """A folder whose files are opened, written and removed here and nowhere else."""

    def __init__(self, path: Path, top: Path | None = None) -> None:
        """`top`: the folder that the user named, within which this one lies; by default this one."""
        self.path, self.top = path, top or path

    def inner(self, name: str) -> "PlainFolder":
        return PlainFolder(self.path / plain_name(name), self.top)

    def make(self) -> "PlainFolder":
        """The folder itself, where it is missing."""
        self.top.mkdir(parents=True, exist_ok=True)
        for path in self._below():
            with suppress(FileExistsError):
                path.mkdir()
            _check_folder(path)
        return self

    # Looking

    def has(self, name: str) -> bool:
        """Whether there is a plain file of this name."""
        found = self._found(name)
        return found is not None and stat.S_ISREG(found.st_mode)

    def taken(self, name: str) -> bool:
        """Whether there is anything of this name."""
        return self._found(name) is not None

    def names(self, pattern: str = "*") -> list[str]:
        """Of everything here that is no folder."""
        return self._entries(pattern, folders=False)

    def folders(self, pattern: str = "*") -> list[str]:
        """Of folders here, without links to any."""
        return self._entries(pattern, folders=True)

    # Reading

    @contextmanager
    def opened(self, name: str) -> Iterator[BufferedReader]:
        with os.fdopen(self._open(name, os.O_RDONLY), "rb") as file:
            yield file

    def read(self, name: str, most: int = 0) -> bytes:
        """All of a file; one that is larger than `most`, or than half of this machine's memory, is refused."""
        with self.opened(name) as file:
            size, limit = os.fstat(file.fileno()).st_size, most or machine_bytes() // 2
            if size > limit:
                raise RunError(f"{self.path / name} has {size:,} bytes, more than the {limit:,} that can be read here.")
            return file.read(size)  # not `limit`: so much memory would be asked for before anything is read

    def text(self, name: str) -> str:
        return self.read(name, TEXT).decode()

    def lines(self, name: str) -> Iterator[str]:
        """The lines of a text; an overlong one is refused."""
        with os.fdopen(self._open(name, os.O_RDONLY), encoding="utf-8") as file:
            while line := file.readline(LINE):
                if len(line) == LINE:
                    raise RunError(f"{self.path / name} is damaged: a line has more than {LINE:,} characters.")
                yield line

    def piece(self, name: str, start: int, most: int) -> bytes:
        """At most so many bytes of a file from a place on; fewer where it ends."""
        with self.opened(name) as file:
            file.seek(start)
            return file.read(most)

    def hash(self, name: str) -> str:
        """SHA-256 of a file, read in pieces; none (empty) of one that is larger than memory, which no run writes."""
        with self.opened(name) as file:
            if os.fstat(file.fileno()).st_size > machine_bytes():
                return ""
            return hashlib.file_digest(file, "sha256").hexdigest()

    def size(self, name: str, synced: bool = False) -> int:
        """Bytes of a file; synced: they are on the disk."""
        with self.opened(name) as file:
            if synced:
                os.fsync(file.fileno())
            return os.fstat(file.fileno()).st_size

    # Writing

    def write(self, name: str, data: bytes | str, mode: int = 0o666) -> None:
        """Write a whole file or nothing: temporary file, fsync, rename, fsync of the folder.

        What had the name before, a link included, is replaced and never written to. `mode`: who may read it.
        """
        payload = data.encode() if isinstance(data, str) else data
        temporary = plain_name(name) + UNFINISHED
        with os.fdopen(self._new(temporary, mode), "wb") as file:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        os.replace(self.path / temporary, self.path / name)
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def append(self, name: str, lines: Iterable[str]) -> None:
        """Add to a text, which is made if it is missing."""
        with os.fdopen(self._alone(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "a", encoding="utf-8") as file:
            file.writelines(lines)

    def cut(self, name: str, size: int) -> None:
        """Bring a file to this length; it is made if it is missing."""
        descriptor = self._alone(name, os.O_WRONLY | os.O_CREAT)
        try:
            os.truncate(descriptor, size)
        finally:
            os.close(descriptor)

    def lockable(self, name: str) -> IO[bytes]:
        """A file to hold a lock on; nothing is written to it."""
        return os.fdopen(self._open(name, os.O_RDWR | os.O_CREAT), "rb+")

    def remove(self, name: str) -> None:
        """A file or a link, never what the link leads to; nothing happens if it is missing."""
        self._check()
        with suppress(FileNotFoundError):
            os.unlink(self.path / plain_name(name))

    def _new(self, name: str, mode: int) -> int:
        """A file that was not there; what a kill or a stranger left in its place is removed."""
        self._check()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            return os.open(self.path / name, flags, mode)
        except FileExistsError:
            os.unlink(self.path / name)
            return os.open(self.path / name, flags, mode)

    def _alone(self, name: str, flags: int) -> int:
        """A file to be changed where it is. One that has another name too, perhaps outside, is copied first."""
        descriptor = self._open(name, flags)
        if os.fstat(descriptor).st_nlink == 1:
            return descriptor
        os.close(descriptor)
        self.write(name, self.read(name))
        return self._open(name, flags)

    def _open(self, name: str, flags: int) -> int:
        found = self._found(name)
        if found is not None and not stat.S_ISREG(found.st_mode):
            raise _foreign(self.path / name, found, "file")
        flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        return os.open(self.path / name, flags, 0o666)

    def _found(self, name: str) -> os.stat_result | None:
        self._check()
        try:
            return os.lstat(self.path / plain_name(name))
        except FileNotFoundError:
            return None

    def _entries(self, pattern: str, folders: bool) -> list[str]:
        self._check()
        with os.scandir(self.path) as entries:
            found = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False) == folders]
        return sorted(name for name in found if fnmatchcase(name, pattern))

    def _below(self) -> list[Path]:
        """This folder and those above it, down from `top`, without it."""
        return [self.top.joinpath(*part) for part in _beginnings(self.path.relative_to(self.top).parts)]

    def _check(self) -> None:
        """No link on the way from `top` to here."""
        for path in self._below():
            with suppress(FileNotFoundError):
                _check_folder(path)


KINDS = {
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFBLK: "a device",
    stat.S_IFCHR: "a device",
    stat.S_IFREG: "a file",
    stat.S_IFDIR: "a folder",
}


def _check_folder(path: Path) -> None:
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode):
        raise _foreign(path, found, "folder")


def _foreign(path: Path, found: os.stat_result, wanted: str) -> Foreign:
    what = KINDS.get(stat.S_IFMT(found.st_mode), "something else")
    return Foreign(f"{path} is {what}, where a run has a plain {wanted}; it is left alone: put the {wanted} there.")


def _beginnings(parts: tuple[str, ...]) -> list[tuple[str, ...]]:
    return [parts[: number + 1] for number in range(len(parts))]
