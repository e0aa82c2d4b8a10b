"""Fetching an official archive when the user asks for it: resumed when broken, kept only when its checksum is right."""

import hashlib
import http.client
import os
import shutil
import tarfile
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import IO

from fedprotip.errors import RunError

OnBytes = Callable[[int, int], None]
"""Told the bytes that are here and the bytes there are (0: unknown)."""
CHUNK = 1 << 20
TIMEOUT = 60
ATTEMPTS = 3


def fetch(url: str, target: Path, checksum: str, progress: OnBytes = lambda done, total: None) -> Path:
    """Download `url` to `target`; what a broken download left in `target.part` is continued.

    Args:
        checksum: "md5:…" or "sha256:…" of the whole file. A wrong one keeps nothing and is a RunError.
    """
    if target.exists() and _matches(target, checksum):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    for attempt in range(1, ATTEMPTS + 1):
        try:
            _continue(url, part, progress)
            break
        except (OSError, http.client.HTTPException) as error:
            refused = isinstance(error, urllib.error.HTTPError)
            if refused or attempt == ATTEMPTS or getattr(error, "errno", None) in (28, 122):  # no space, over quota
                raise RunError(_broken(url, part, error)) from None
    if not _matches(part, checksum):
        part.unlink()
        raise RunError(f"{url} does not have the checksum {checksum}: it was not what was expected, and is not kept.")
    os.replace(part, target)
    return target


def unpack(archive: Path, folder: Path, name: str) -> Path:
    """Extract the top folder `name` of a tar archive into `folder`: all of it or nothing, and nothing outside.

    Only plain files and folders below `name` are accepted; links, devices, absolute paths and `..` are refused.
    """
    target, staging = folder / name, folder / f".{name}.unpacking"
    if target.exists():
        raise RunError(f"{target} exists already; remove it to unpack {archive.name} again.")
    shutil.rmtree(staging, ignore_errors=True)
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                path = Path(member.name)
                inside = path.parts[:1] == (name,) and ".." not in path.parts
                if not inside or not (member.isdir() or (member.isfile() and len(path.parts) > 1)):
                    raise RunError(
                        f"{archive} holds {member.name!r}, which does not belong there; nothing is unpacked."
                    )
                place = staging.joinpath(*path.parts[1:])
                (place if member.isdir() else place.parent).mkdir(parents=True, exist_ok=True)
                source = tar.extractfile(member)
                if source is not None:
                    with source, place.open("wb") as file:
                        shutil.copyfileobj(source, file, CHUNK)
        if not staging.exists():
            raise RunError(f"{archive} holds no folder {name!r}.")
        os.rename(staging, target)
    except (OSError, tarfile.TarError, EOFError) as error:
        raise RunError(f"{archive} cannot be unpacked into {folder}: {error}.") from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target


def _continue(url: str, part: Path, progress: OnBytes) -> None:
    """Append what is missing; a server that cannot continue sends everything again."""
    done = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"User-Agent": "fedprotip"} | _range(done))
    try:
        answer = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code != 416 or not done:
            raise
        if _length(error.headers.get("Content-Range", "").rpartition("/")[2]) == done:
            return  # everything is here already
        part.unlink()
        raise http.client.HTTPException("another file than before") from None
    with answer:
        if answer.status != 206:
            done = 0
        elif not answer.headers.get("Content-Range", "").startswith(f"bytes {done}-"):
            part.unlink(missing_ok=True)
            raise http.client.HTTPException("another piece than was asked for")
        length = _length(answer.headers.get("Content-Length", ""))
        with part.open("ab" if done else "wb") as file:
            _copy(answer, file, done, done + length if length else 0, progress)


def _copy(answer: IO[bytes], file: IO[bytes], done: int, total: int, progress: OnBytes) -> None:
    progress(done, total)
    while chunk := answer.read(CHUNK):
        file.write(chunk)
        done += len(chunk)
        progress(done, total)
    if total and done < total:
        raise http.client.IncompleteRead(b"", total - done)


def _range(done: int) -> dict[str, str]:
    return {"Range": f"bytes={done}-"} if done else {}


def _length(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def _matches(path: Path, checksum: str) -> bool:
    kind, _, wanted = checksum.partition(":")
    with path.open("rb") as file:
        return hashlib.file_digest(file, kind).hexdigest() == wanted


def _broken(url: str, part: Path, error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"{url} cannot be downloaded: the server answers {error.code} {error.reason}."
    reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or type(error).__name__
    here = part.stat().st_size if part.exists() else 0
    return f"{url} broke off after {here:,} bytes ({reason}); run the same command again to continue from there."
