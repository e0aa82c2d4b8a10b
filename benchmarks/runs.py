"""Runs by nothing but `fedprotip.run` and `fedprotip.resume`, so that another checkout can do them too."""

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import fedprotip
from fedprotip.paper.protocols import layered, protocol

Clocks = tuple[float, float]
"""Seconds, and seconds that processors have worked for this process."""


class Stop(Exception):
    """Ends a run that has been measured."""


def first_task(row: list[str], changes: dict[str, Any], overrides: list[str], path: str) -> str:
    """A run of a row (protocol, name) at scale cpu, stopped after its first task; where the package is that did it."""
    table, name = row
    with suppress(Stop):
        fedprotip.run(layered(protocol(table).row(name).at("cpu"), changes), overrides, path, [_until(1)])
    return str(fedprotip.__file__)


def next_task(base: str, path: str, what: str = "task") -> dict[str, Any]:
    """A copy of such a run, up to the end of its second task: seconds of it or of its last round, and of its phases."""
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(base, path)
    begun, rounds, ends = list[Clocks](), list[Clocks](), list[Clocks]()
    told: dict[str, Any] = {}

    def watch(event: Any) -> None:
        fields, now = dict(event), (perf_counter(), process_time())
        places = {("start", None): begun, ("round", 1): rounds, ("task", 1): ends}
        if (place := places.get((fields["event"], fields.get("task")))) is not None:
            place.append(now)
            told[fields["event"]] = fields.get("seconds")

    with suppress(Stop):
        fedprotip.resume(path, [watch, _until(2)])
    (since, worked), (now, work) = rounds[-2:] if what == "round" else (begun[0], ends[0])
    seconds = told["round"] if what == "round" else now - since  # the checkpoint between two rounds counts for neither
    return {"seconds": seconds, "cpu": work - worked, **told["task"]}


def _until(task: int) -> Callable[[Any], None]:
    """Stops a run as soon as a round of this task is over: the last checkpoint is the one before the task."""

    def watch(event: Any) -> None:
        fields = dict(event)
        if (fields["event"], fields.get("task")) == ("round", task):
            raise Stop

    return watch


def records(run: str | Path, log: str) -> list[dict[str, Any]]:
    """The lines of events.jsonl or ledger.jsonl."""
    return [json.loads(line) for line in (Path(run) / log).read_text(encoding="utf-8").splitlines()]


def sizes(run: str | Path, kind: str, task: int, directions: tuple[str, ...] = ("up", "down")) -> list[int]:
    """Bytes of every message of a kind in a task."""
    lines = (line for line in records(run, "ledger.jsonl") if (line["kind"], line["task"]) == (kind, task))
    return [line["bytes"] for line in lines if line["direction"] in directions]
