"""What a run folder says, checked once: everything else in the report works on a `RunData`."""

import json
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from fedprotip.errors import RunError

Number = float | None  # JSON null: not measured
MODES = ("single", "aware", "agnostic", "batch64")  # first what a user gets: one sample, task unknown


class Part(BaseModel):
    """A piece of a run file. Unknown keys are left aside, so newer runs stay readable."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class ByteTotals(Part):
    up: dict[str, int] = {}
    down: dict[str, int] = {}


class Failures(Part):
    count: int = 0
    by_reason: dict[str, int] = {}


class Bin(Part):
    """Answers of about the same confidence, and the share of them that is right."""

    count: int
    confidence: float
    accuracy: float


class Confidence(Part):
    """How sure the answers of mode single are, and whether rightly so."""

    bins: list[Bin] = []
    ece: Number = None
    temperature: Number = None


class Sweeps(Part):
    """Accuracy (%) of every way over the size of a group, and over the share of its samples that are of one task."""

    sizes: list[int] = []
    size: dict[str, list[Number]] = {}
    purities: list[float] = []
    purity: dict[str, dict[str, list[Number]]] = {}

    @model_validator(mode="after")
    def _lines_are_whole(self) -> "Sweeps":
        for way, values in self.size.items():
            if len(values) != len(self.sizes):
                raise ValueError(f"size.{way} has {len(values)} numbers for {len(self.sizes)} sizes")
        for way, rules in self.purity.items():
            for rule, values in rules.items():
                if len(values) != len(self.purities):
                    raise ValueError(f"purity.{way}.{rule} has {len(values)} numbers for {len(self.purities)} purities")
        return self


class Summary(Part):
    """`summary.json`; accuracies in %, forgetting in percentage points."""

    method: str
    scenario: str
    tasks: int
    clients: int
    seed: int
    accuracy: dict[str, Number]
    forgetting: dict[str, Number]
    matrix: dict[str, list[list[Number]]]
    routing: dict[str, Number | list[Number]] = {}
    routers: dict[str, dict[str, Number]] = {}
    confidence: Confidence = Confidence()
    unknown: dict[str, Number] = {}
    sweeps: Sweeps = Sweeps()
    drift: list[list[Number]] = []
    confusion: dict[str, list[list[int]]] = {}
    bytes: ByteTotals = ByteTotals()
    seconds: dict[str, float] = {}
    peak_rss_mb: Number = None
    peak_gpu_mb: Number = None
    failures: Failures = Failures()

    @model_validator(mode="after")
    def _rows_are_long_enough(self) -> "Summary":
        for mode, rows in self.matrix.items():
            for i, row in enumerate(rows):
                if len(row) <= i:
                    raise ValueError(f"matrix.{mode} has {len(row)} numbers after task {i + 1}")
        for mode, counts in self.confusion.items():
            if any(len(row) != len(counts) for row in counts):
                raise ValueError(f"confusion.{mode} is not square")
        return self

    @property
    def modes(self) -> list[str]:
        """Modes of this run in the order of the report."""
        return [mode for mode in MODES if mode in self.accuracy]

    @property
    def learned(self) -> int:
        """Tasks learned so far: all of them once the run is finished."""
        return min((len(rows) for rows in self.matrix.values()), default=0)

    def curve(self, mode: str) -> list[Number]:
        """Average accuracy over the tasks seen so far, after each task (the paper's Fig. 3)."""
        return [average(row[: i + 1]) for i, row in enumerate(self.matrix.get(mode, []))]

    def by_task(self, mode: str) -> list[Number]:
        """Share of right routing decisions for each task."""
        value = self.routing.get(f"{mode}_by_task")
        return value if isinstance(value, list) else []


class LedgerLine(Part):
    task: int
    direction: Literal["up", "down"]
    kind: str
    bytes: int


class TaskEvent(Part):
    task: int
    seconds: dict[str, float] = {}
    ranks: dict[str, int] = {}
    dims: dict[str, int] = {}

    @model_validator(mode="after")
    def _every_rank_has_its_width(self) -> "TaskEvent":
        if missing := self.ranks.keys() - self.dims.keys():
            raise ValueError(f"dims has no width of {min(missing)}")
        return self


class FailureEvent(Part):
    task: int
    round: int | None = None
    client: int
    reason: str


class AbsentEvent(Part):
    task: int
    clients: list[int]
    reason: str


class WithheldEvent(Part):
    task: int
    client: int
    classes: int


class Bounds(Part):
    taskwise: list[Number] = []
    forgetting: list[Number] = []
    taskwise_canonical: list[Number] = []
    ft_loss_canonical: Number = None


class Measured(Part):
    gradient_sq_mean: list[Number] = []
    loss_increase: list[Number] = []


class Geometry(Part):
    """`geometry.json`: the measured ρ̂ and β̂ of Assumptions 4 and 5, and the bounds they give."""

    rho: list[Number]
    rho_mean: list[Number]
    beta: list[list[Number]]
    beta_bar: Number = None
    gradient_bound_G2: Number = None
    smoothness_L: Number = None
    ft_loss: Number = None
    bounds: Bounds = Bounds()
    measured: Measured = Measured()
    threshold: Number = None

    @model_validator(mode="after")
    def _beta_is_square(self) -> "Geometry":
        if any(len(row) > len(self.beta) for row in self.beta):
            raise ValueError("beta has a row that is too long")
        return self


class Accepted(Part):
    """Changes of the data with which a run went on: before which round of which task, and what changed."""

    task: int
    round: int
    changes: list[str]


class DataRecord(Part):
    accepted: list[Accepted] = []


class Manifest(Part):
    status: str
    data: DataRecord = DataRecord()
    versions: dict[str, str] = {}
    seed: int | None = None
    threads: int | None = None


@dataclass(frozen=True)
class RunData:
    """One run folder, read and checked."""

    folder: Path
    settings: dict[str, Any]
    settings_text: str
    summary: Summary
    manifest: Manifest
    traffic: dict[tuple[int, str, str], int]  # (task, direction, kind) → bytes, rejected messages included
    tasks: list[TaskEvent]
    failures: list[FailureEvent]
    absences: list[AbsentEvent]
    withheld: list[WithheldEvent]
    geometry: Geometry | None

    @classmethod
    def load(cls, folder: Path) -> "RunData":
        """Read a run folder; RunError names the file that is missing or damaged."""
        if not folder.is_dir():
            raise RunError(f"{folder} is not a run folder: there is no such directory.")
        text = _read(folder / "settings.toml")
        try:
            settings = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise RunError(f"{folder / 'settings.toml'} is damaged: {error}.") from None
        traffic: Counter[tuple[int, str, str]] = Counter()
        for line in _lines(folder / "ledger.jsonl"):
            entry = _checked(LedgerLine, line, folder / "ledger.jsonl")
            traffic[entry.task, entry.direction, entry.kind] += entry.bytes
        tasks: dict[int, TaskEvent] = {}
        failures, absences, withheld = [], [], []
        path = folder / "events.jsonl"
        for line in _lines(path):
            event = line.get("event")
            if event == "task":
                done = _checked(TaskEvent, line, path)
                tasks[done.task] = done  # a resumed run may tell of a task twice; the last word counts
            elif event == "failure":
                failures.append(_checked(FailureEvent, line, path))
            elif event == "absent":
                absences.append(_checked(AbsentEvent, line, path))
            elif event == "withheld":
                withheld.append(_checked(WithheldEvent, line, path))
        geometry = folder / "geometry.json"
        return cls(
            folder=folder,
            settings=settings,
            settings_text=text,
            summary=_checked(Summary, _json(folder / "summary.json"), folder / "summary.json"),
            manifest=_checked(Manifest, _json(folder / "manifest.json"), folder / "manifest.json"),
            traffic=dict(traffic),
            tasks=[tasks[task] for task in sorted(tasks)],
            failures=failures,
            absences=absences,
            withheld=withheld,
            geometry=_checked(Geometry, _json(geometry), geometry) if geometry.exists() else None,
        )

    @property
    def finished(self) -> bool:
        return self.manifest.status == "finished"

    @property
    def chosen(self) -> str:
        """The way to find the task that modes single and batch64 use; ridge and lda have theirs by name or alone."""
        ways = [*self.summary.routers, *self.summary.sweeps.size]
        for name in (self.setting("method.router"), self.summary.method, *ways):
            if name in ways:
                return str(name)
        return ""

    def setting(self, key: str, default: Any = None) -> Any:
        """The value of a setting such as "method.threshold"."""
        section, _, field = key.partition(".")
        table = self.settings.get(section, {})
        return table.get(field, default) if isinstance(table, dict) else default


def average(values: list[Number]) -> Number:
    """Mean of the measured values; None when there is none."""
    known = [value for value in values if value is not None and value == value]
    return sum(known) / len(known) if known else None


_Part = TypeVar("_Part", bound=Part)


def _checked(model: type[_Part], raw: Any, path: Path) -> _Part:
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(str(part) for part in problem["loc"])
        reason = problem["msg"].removeprefix("Value error, ")
        raise RunError(f"{path} is damaged: {place + ': ' if place else ''}{reason}.") from None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RunError(f"{path} is missing: the run has not got that far, or this is no run folder.") from None
    except UnicodeDecodeError:
        raise RunError(f"{path} is damaged: it is not text in UTF-8.") from None
    except OSError as error:
        raise RunError(f"Cannot read {path}: {error.strerror}.") from None


def _json(path: Path) -> Any:
    text = _read(path)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise RunError(f"{path} is damaged: it is not valid JSON (line {error.lineno}).") from None


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for number, text in enumerate(_read(path).splitlines(), start=1):
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            line = None
        if not isinstance(line, dict):
            raise RunError(f"{path} is damaged: line {number} is not a JSON object.")
        yield line
