"""Files of a report: whole or absent, in folders that are made as needed."""

from pathlib import Path

from fedprotip.errors import RunError
from fedprotip.store.plain import PlainFolder


def save(folder: Path, name: str, content: bytes | str) -> Path:
    """Write `content` to the file NAME or PART/NAME of a folder; a problem of the disk is one sentence."""
    part, _, last = name.rpartition("/")
    place = PlainFolder(folder).inner(part) if part else PlainFolder(folder)
    try:
        place.make().write(last, content)
    except OSError as error:
        raise RunError(f"Cannot write {place.path / last}: {error.strerror}.") from None
    return place.path / last
