"""Runs by nothing but `fedprotip.run` and `fedprotip.extend`, so that another checkout can do them too."""

import json
import shutil
from pathlib import Path
from time import perf_counter
from typing import Any

import fedprotip


def first_task(settings: dict[str, Any], overrides: list[str], path: str) -> str:
    """A run of the first task; where the package is that did it."""
    fedprotip.run(settings, overrides, path)
    return str(fedprotip.__file__)


def next_task(base: str, path: str, what: str = "task") -> dict[str, Any]:
    """Extend a copy of a run by its second task: seconds of the whole task or of its last round, and of its phases."""
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(base, path)
    stamps: dict[tuple[str, int | None], float] = {}

    def watch(event: Any) -> None:
        fields = dict(event)
        stamps[fields["event"], fields.get("task")] = perf_counter()

    fedprotip.extend(path, 1, observers=[watch])
    events = [event for event in records(path, "events.jsonl") if event.get("task") == 1]
    rounds = [event["seconds"] for event in events if event["event"] == "round"]
    phases = next(event["seconds"] for event in events if event["event"] == "task")
    whole = stamps["task", 1] - stamps["start", None]
    return {"seconds": rounds[-1] if what == "round" else whole, **phases}


def records(run: str | Path, log: str) -> list[dict[str, Any]]:
    """The lines of events.jsonl or ledger.jsonl."""
    return [json.loads(line) for line in (Path(run) / log).read_text(encoding="utf-8").splitlines()]


def sizes(run: str | Path, kind: str, task: int, directions: tuple[str, ...] = ("up", "down")) -> list[int]:
    """Bytes of every message of a kind in a task."""
    lines = (line for line in records(run, "ledger.jsonl") if (line["kind"], line["task"]) == (kind, task))
    return [line["bytes"] for line in lines if line["direction"] in directions]
