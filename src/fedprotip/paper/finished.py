"""A finished cell of `fedprotip reproduce`: what is kept of a run, small, and enough for every table and figure."""

from pathlib import Path
from typing import Any

from fedprotip.store.folder import GEOMETRY, MEMORY, RunFolder
from fedprotip.store.records import Number, Part, Record, read_ledger, read_record
from fedprotip.store.results import Geometry, Memory, Summary

BULKY = ("matrix", "confusion")


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


def _traffic(ledger: Path, tasks: int) -> dict[str, list[float]]:
    sizes: dict[str, list[list[int]]] = {}
    for line in read_ledger(ledger):
        if line.direction == "up":
            sizes.setdefault(line.kind, [[] for _ in range(tasks)])[line.task].append(line.bytes)
    return {kind: [sum(b) / max(len(b), 1) / 2**20 for b in by_task] for kind, by_task in sizes.items()}
