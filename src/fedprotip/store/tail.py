"""A log that grows, read as it grows: each line once, however often one looks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic

from fedprotip.errors import RunError
from fedprotip.store.plain import LINE, PlainFolder
from fedprotip.store.records import BadRecord, R, parse_json

PIECE = 2**22
"""Bytes that are read at once."""
MARK = 2**12
"""Bytes before the place reached, by which a log is known again."""


class Tail(Generic[R]):
    """What was added to a log since the last look.

    A resumed run cuts its logs back and goes on: where what was read is no longer there, all is read anew.
    """

    def __init__(self, folder: Path, name: str, record: Callable[[dict[str, Any]], R]) -> None:
        self._folder, self._name, self._record = PlainFolder(folder), name, record
        self._place, self._line, self._mark = 0, 0, b""

    def look(self, most: int = 8 * PIECE) -> tuple[bool, list[R]]:
        """(whether it begins anew, the records that came since); at most so many bytes at a time.

        A line without its end is left for the next look; RunError names one that is damaged.
        """
        anew = self._changed()
        if anew:
            self._place, self._line, self._mark = 0, 0, b""
        found: list[R] = []
        for _ in range(max(1, most // PIECE)):
            piece = self._folder.piece(self._name, self._place, PIECE)
            whole = piece[: piece.rfind(b"\n") + 1]
            if not whole:
                if len(piece) >= LINE:
                    raise self._damaged(f"line {self._line + 1} has more than {LINE:,} characters.")
                break
            for line in whole.split(b"\n")[:-1]:
                self._line += 1
                found.append(self._read(line))
            self._place += len(whole)
            self._mark = (self._mark + whole)[-MARK:]
        return anew, found

    @property
    def place(self) -> int:
        """Bytes read so far."""
        return self._place

    def _changed(self) -> bool:
        before = len(self._mark)
        return before > 0 and self._folder.piece(self._name, self._place - before, before) != self._mark

    def _read(self, line: bytes) -> R:
        try:
            raw = parse_json(line)
        except RunError:
            raw = None
        if not isinstance(raw, dict):
            raise self._damaged(f"line {self._line} is not a JSON object.")
        try:
            return self._record(raw)
        except BadRecord as error:
            raise self._damaged(f"line {self._line}: {error}") from None

    def _damaged(self, why: str) -> RunError:
        return RunError(f"{self._folder.path / self._name} is damaged: {why}")
