"""A finished cell of `fedprotip reproduce`: what is kept of a run, small, and enough for every table and figure."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedprotip import settings as settings_file
from fedprotip.errors import RunError, UsageError
from fedprotip.settings import Settings, layered
from fedprotip.store.folder import GEOMETRY, MEMORY, RunFolder
from fedprotip.store.records import Number, Part, Record, read_ledger, read_record
from fedprotip.store.results import Geometry, Memory, Summary

BULKY = ("matrix", "confusion")
FORMER = {
    "clients": {"held_back": 0.0},
    "model": {"stages": []},
    "train": {"head_start": "random", "fall": "none"},
    "statistics": {"root": False, "directions": 0},
    "method": {
        "budget": "none",
        "birth": False,
        "per_image": 1,  # as many images as columns
        "alike": 0.0,
    },
}
"""What was done before a setting was there, where it is not what its default does. Whoever adds such a setting adds a
line: a cell that lacks it was made so."""


class GeometryMeans(Part):
    rho_mean: list[Number]
    beta_bar: Number


class CellSummary(Summary):
    """The summary of a run without its large tables, and a little of its ledger, geometry and memory."""

    matrix: dict[str, list[list[Number]]] = {}  # left out
    curve: dict[str, list[float]]  # mode → average accuracy after each task
    mib_by_task: dict[str, list[float]]  # kind → MiB of one message that a client sends (Table 9)
    geometry: GeometryMeans | None = None
    memory: Memory = Memory()

    @classmethod
    def of(cls, folder: Path, summary: Summary) -> "CellSummary":
        """What is kept of a run folder and its summary."""
        small = {key: value for key, value in summary.plain().items() if key not in BULKY}
        small["curve"] = {mode: summary.over_tasks(mode) for mode in summary.matrix}
        small["mib_by_task"] = _traffic(folder / "ledger.jsonl", summary.tasks)
        if RunFolder(folder).has(GEOMETRY):
            small["geometry"] = read_record(Geometry, folder / GEOMETRY).model_dump()
        if RunFolder(folder).has(MEMORY):
            small["memory"] = read_record(Memory, folder / MEMORY).plain()
        return cls.model_validate(small)


class FinishedCell(Record):
    """RESULTS/<table>/<scale>/<row>-s<seed>.json"""

    settings: dict[str, Any]
    summary: CellSummary
    versions: dict[str, str]
    seconds: float
    table: str
    scale: str
    row: str
    seed: int
    command: str


def read_cell(path: Path) -> FinishedCell:
    """A finished cell with all settings of today, those that it lacks as they were then."""
    try:
        cell = read_record(FinishedCell, path)
    except RunError as error:
        raise RunError(f"{str(error).removesuffix('.')}; remove it and it is made again.") from None
    try:
        return cell.model_copy(update={"settings": as_then(cell.settings).model_dump(mode="json")})
    except UsageError:  # a setting that this version no longer has
        return cell


def as_then(settings: Mapping[str, Any]) -> Settings:
    """Settings that were written down by this version or one before it."""
    return settings_file.load(layered(FORMER, settings))


def by_key(settings: Settings) -> dict[str, Any]:
    """All settings; what this run never asks for is off."""
    flat = {f"{section}.{key}": value for section, part in settings.model_dump().items() for key, value in part.items()}
    if flat.get("method.birth") and flat["method.router"] not in ("auto", "birth"):
        flat["method.birth"] = False
    return flat


def _traffic(ledger: Path, tasks: int) -> dict[str, list[float]]:
    sizes: dict[str, list[list[int]]] = {}
    for line in read_ledger(ledger):
        if line.direction == "up":
            sizes.setdefault(line.kind, [[] for _ in range(tasks)])[line.task].append(line.bytes)
    return {kind: [sum(b) / max(len(b), 1) / 2**20 for b in by_task] for kind, by_task in sizes.items()}
