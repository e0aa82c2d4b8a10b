"""Files of a report: whole or absent, in folders that are made as needed."""

from pathlib import Path

from fedprotip.errors import RunError
from fedprotip.store.files import write_atomic


def save(path: Path, content: bytes | str) -> Path:
    """Write `content` to `path`; a problem of the disk is one sentence."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, content)
    except OSError as error:
        raise RunError(f"Cannot write {path}: {error.strerror}.") from None
    return path
