"""Records of a run folder: what a file or a line may say, declared once for whoever writes it and whoever reads it.

`events.py` has the lines of events.jsonl, `results.py` summary.json and geometry.json. A record with a field that is
missing, of another kind or not finite is refused with a sentence; unknown fields are left aside, so that newer folders
stay readable. What clients say is made printable and cut, here and nowhere else.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, Field, ModelWrapValidatorHandler, ValidationError, model_validator

from fedprotip.errors import RunError
from fedprotip.store.plain import PlainFolder, plain_name


def one_line(text: str, most: int) -> str:
    """Text that may be a client's, as it can stand in one line: printable, an ellipsis where it is too long."""
    line = "".join(letter if letter.isprintable() else " " for letter in text[: most + 1])
    return line if len(line) <= most else line[: most - 1] + "…"


def _figure(least: float, most: float) -> Any:
    """A number between these two: nothing that was rounded, but neither true nor text, nor what no run can have."""
    return Field(strict=True, ge=least - ROUNDED, le=most + ROUNDED)


ROUNDED = 1e-3
Count = Annotated[int, Field(strict=True, ge=0, le=2**53)]
Amount = Annotated[float, _figure(0, 1e15)]
"""Seconds, or MiB."""
Percent = Annotated[float, _figure(0, 100)]
Points = Annotated[float, _figure(-100, 100)]
Share = Annotated[float, _figure(0, 1)]
Number = Annotated[float, Field(strict=True)] | None
"""Any figure; None (JSON null) where there is none."""
Reason = Annotated[str, AfterValidator(lambda text: one_line(text, 300))]
Kind = Annotated[str, AfterValidator(lambda text: one_line(text, 100))]


FileName = Annotated[str, AfterValidator(plain_name)]


def finite(value: float) -> Number:
    """None in the place of NaN and infinity, which a record refuses."""
    return value if math.isfinite(value) else None


def mean_of(values: Iterable[Number]) -> Number:
    """The mean of what was measured; None where nothing was."""
    known = [value for value in values if value is not None and value == value]
    return sum(known) / len(known) if known else None


class BadRecord(RunError):
    """Neither to be written nor to be believed; the text names the field and says why."""


class Part(BaseModel, extra="ignore", frozen=True, allow_inf_nan=False, defer_build=True):
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
    """A task by its name and its classes, and hashes of its samples; empty where there were none."""

    name: str = ""
    labels: list[int] = []  # places in DataRecord.classes, in the order of its head
    train: str
    test: str


class Accepted(Part):
    """Changes of the data with which a run went on: before which round of which task, and what changed."""

    task: int
    round: int
    changes: list[str]


class DataRecord(Part):
    """The fingerprint of the data with the names that the run knows it by, and what was accepted since."""

    hash: str
    shape: list[int]
    classes: list[str] = []  # the place of a name is its label; folders from before have none here
    domains: list[str] = []
    clients: list[str] = []
    tasks: list[TaskData]
    accepted: list[Accepted] = []

    @model_validator(mode="after")
    def _every_class_has_a_name(self) -> "DataRecord":
        if len(self.shape) != 3 or len(set(self.classes)) < len(self.classes):
            raise ValueError("the shape has not three numbers, or a class is named twice")
        for task in self.tasks:
            if self.classes and not (task.labels and {*task.labels} <= {*range(len(self.classes))}):
                raise ValueError(f"the task {task.name!r} has no classes, or one without a name")
        return self


class Manifest(Record):
    """`manifest.json`: what the run is made of, and the SHA-256 of its files."""

    format: int
    status: Literal["running", "finished"]
    versions: dict[str, str] = {}
    threads: Annotated[int, Field(strict=True, ge=1, le=2**16)] | None = None
    seed: Annotated[int, Field(strict=True, ge=0)] | None = None
    replaced: str | None = None
    """Hash of the settings.toml that an extension is about to replace."""
    settings: str = ""
    """The settings the run goes by, as TOML."""
    files: dict[FileName, str] = {}
    needs: list[Kind] | None = None
    """Modules from outside the package that registered what the run is made of: for words only, never imported."""
    data: DataRecord | None = None

    def plain(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True)


SEAL = "seal"
"""The last entry of `manifest.json`: the hash of all others. Folders from before have none."""

R = TypeVar("R", bound=Record)


def read_text(path: Path) -> str:
    with _explained(path):
        return PlainFolder(path.parent).text(path.name)


DIGITS = 40
"""Of the longest whole number that any record has, a seed; longer ones are no number to compute with."""


def parse_json(data: str | bytes) -> Any:
    """Any JSON; RunError says in a few words what is wrong with it."""
    try:
        found = json.loads(data, parse_int=_whole)
        text = data if isinstance(data, str) else data.decode()
        if "\\u" in text:  # nothing else can be half a character
            json.dumps(found, ensure_ascii=False).encode()
        return found
    except UnicodeEncodeError:
        raise RunError("it has half a character") from None
    except json.JSONDecodeError as error:
        raise RunError(f"it is not valid JSON (line {error.lineno})") from None
    except RecursionError:
        raise RunError("its JSON is nested too deeply") from None
    except ValueError:  # a number of thousands of digits, text that is none
        raise RunError("it is not valid JSON") from None


def _whole(digits: str) -> int:
    if len(digits) > DIGITS:
        raise RunError(f"it has a whole number of {len(digits):,} digits")
    return int(digits)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object of a file; RunError says what is wrong with it."""
    text = read_text(path)
    try:
        found = parse_json(text)
    except RunError as error:
        raise RunError(f"{path} is damaged: {error}.") from None
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


def read_manifest(path: Path) -> Manifest:
    """The manifest of a file; one that is not as it was written is refused."""
    raw = read_json(path)
    if SEAL in raw and raw[SEAL] != seal_of(raw):
        raise RunError(f"{path} is damaged: it was changed since it was written (its own hash does not fit).")
    return read_record(Manifest, path)


def seal_of(raw: Mapping[str, Any]) -> str:
    """SHA-256 of all entries of a manifest but the seal, which recognises damage; whoever forges can forge it too."""
    rest = {key: value for key, value in raw.items() if key != SEAL}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def read_lines(path: Path, record: Callable[[dict[str, Any]], R]) -> Iterator[R]:
    """The records of a log, one by one; RunError names the file and the line."""
    with _explained(path):
        for number, text in enumerate(PlainFolder(path.parent).lines(path.name), start=1):
            try:
                raw = parse_json(text)
            except RunError:
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
