"""Records of a run folder: what a file or a line may say, declared once for whoever writes it and whoever reads it.

`events.py` has the lines of events.jsonl, `results.py` summary.json and geometry.json. A record with a field that is
missing, of another kind or not finite is refused with a sentence; unknown fields are left aside, so that newer folders
stay readable. What clients say is made printable and cut, here and nowhere else.
"""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ModelWrapValidatorHandler, ValidationError, model_validator

from fedprotip.errors import RunError


def shortened(text: str, most: int) -> str:
    """Text that may be a client's, as it can stand in one line: printable, an ellipsis where it is too long."""
    line = "".join(letter if letter.isprintable() else " " for letter in text[: most + 1])
    return line if len(line) <= most else line[: most - 1] + "…"


Number = float | None
"""A figure; None (JSON null) where there is none."""
Reason = Annotated[str, AfterValidator(lambda text: shortened(text, 300))]
Kind = Annotated[str, AfterValidator(lambda text: shortened(text, 100))]


def _within(name: str) -> str:
    if name != Path(name).name:
        raise ValueError(f"{name!r} is not the name of a file of the folder")
    return name


FileName = Annotated[str, AfterValidator(_within)]


def finite(value: float) -> Number:
    """None in the place of NaN and infinity, which a record refuses."""
    return value if math.isfinite(value) else None


class BadRecord(RunError):
    """Neither to be written nor to be believed; the text names the field and says why."""


class Part(BaseModel, extra="ignore", frozen=True, allow_inf_nan=False):
    """A piece of a record."""


class Record(Part):
    """A whole file; fields that were never given are not written."""

    @model_validator(mode="wrap")
    @classmethod
    def _refused_in_a_sentence(cls, raw: Any, build: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return build(raw)
        except ValidationError as error:
            problem = error.errors()[0]
            place = ".".join([cls.__name__, *map(str, problem["loc"])])
            raise BadRecord(f"{place}: {problem['msg'].removeprefix('Value error, ')}.") from None

    def plain(self) -> dict[str, Any]:
        """As it is written: keys in the order of the fields."""
        return self.model_dump(exclude_unset=True)


class Line(Record):
    """A line of a log: every field is written."""

    def plain(self) -> dict[str, Any]:
        return self.model_dump()


class LedgerLine(Line):
    """`ledger.jsonl`: one message that crossed, used or not."""

    task: int
    round: int | None
    client: int
    direction: Literal["up", "down"]
    kind: Kind
    bytes: int
    status: Literal["ok", "rejected"]
    reason: Reason


class TaskData(Part):
    """Hashes of the data of a task."""

    classes: str
    train: str
    test: str


class Accepted(Part):
    """Changes of the data with which a run went on: before which round of which task, and what changed."""

    task: int
    round: int
    changes: list[str]


class DataRecord(Part):
    """The fingerprint of the data, and what was accepted since."""

    hash: str
    shape: list[int]
    tasks: list[TaskData]
    accepted: list[Accepted] = []


class Manifest(Record):
    """`manifest.json`: what the run is made of, and the SHA-256 of its files."""

    format: int
    status: Literal["running", "finished"]
    versions: dict[str, str] = {}
    threads: int | None = None
    seed: int | None = None
    replaced: str | None = None
    """Hash of the settings.toml that an extension is about to replace."""
    settings: str = ""
    """The settings the run goes by, as TOML."""
    files: dict[FileName, str] = {}
    data: DataRecord | None = None

    def plain(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True)


R = TypeVar("R", bound=Record)


def read_text(path: Path) -> str:
    with _explained(path):
        return path.read_text(encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object of a file; RunError says what is wrong with it."""
    try:
        found = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise RunError(f"{path} is damaged: it is not valid JSON (line {error.lineno}).") from None
    if not isinstance(found, dict):
        raise RunError(f"{path} is damaged: it is not a JSON object.")
    return found


def read_record(record: type[R], path: Path) -> R:
    """The record of a file; RunError names the file and the field."""
    raw = read_json(path)
    try:
        return record.model_validate(raw)
    except BadRecord as error:
        raise RunError(f"{path} is damaged: {error}") from None


def read_lines(path: Path, record: Callable[[dict[str, Any]], R]) -> Iterator[R]:
    """The records of a log, one by one; RunError names the file and the line."""
    with _explained(path), path.open(encoding="utf-8") as lines:
        for number, text in enumerate(lines, start=1):
            try:
                raw = json.loads(text)
            except json.JSONDecodeError:
                raw = None
            if not isinstance(raw, dict):
                raise RunError(f"{path} is damaged: line {number} is not a JSON object.")
            try:
                yield record(raw)
            except BadRecord as error:
                raise RunError(f"{path} is damaged in line {number}: {error}") from None


def read_ledger(path: Path) -> Iterator[LedgerLine]:
    return read_lines(path, LedgerLine.model_validate)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn what can happen when a file is read into a sentence."""
    try:
        yield
    except FileNotFoundError:
        raise RunError(f"{path} is missing: the run has not got that far, or this is no run folder.") from None
    except UnicodeDecodeError:
        raise RunError(f"{path} is damaged: it is not text in UTF-8.") from None
    except OSError as error:
        raise RunError(f"Cannot read {path}: {error.strerror}.") from None
