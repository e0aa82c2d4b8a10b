"""Files that are either whole or absent."""

import os
import tempfile
from pathlib import Path

from fedprotip.errors import RunError


def write_atomic(path: Path, content: bytes | str) -> Path:
    """Write `content` to `path`: a reader sees the old file or the new one, never half of it."""
    temporary = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
        os.chmod(temporary, 0o644)  # mkstemp makes private files; a report is meant to be shown
        os.replace(temporary, path)
    except OSError as error:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        raise RunError(f"Cannot write {path}: {error.strerror}.") from None
    return path
