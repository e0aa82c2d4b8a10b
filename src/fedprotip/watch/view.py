"""How far the run in a folder is, from its logs: where it stands, accuracy by task, losses, bytes, time left.

The folder may not be there yet, may grow meanwhile, be finished, be given up, or be a stranger's.
"""

import os
import time
from collections import Counter
from pathlib import Path
from typing import Any, Literal

from fedprotip.errors import FedprotipError, RunError
from fedprotip.report.text import SCENARIOS, method_name
from fedprotip.settings import tomltext
from fedprotip.store.events import Failure, Remark, RoundDone, TaskDone, Warned, as_event
from fedprotip.store.folder import RunFolder, is_run
from fedprotip.store.records import LedgerLine, Manifest, Number, Part, Reason, one_line, read_manifest, read_text
from fedprotip.store.results import MODES
from fedprotip.store.tail import Tail

POINTS = 400
"""Of a curve, at most: so many pixels is a page wide."""
TOLD = 20
"""Warnings and failures, and kinds of messages, that are shown one by one."""
OTHERS = "others"
LISTED = 200
"""Tasks whose accuracy is shown one by one; of more the newest."""

Status = Literal["waiting", "running", "stopped", "finished", "damaged"]


class View(Part):
    """What the page shows: all numbers and texts of it, nothing to be interpreted."""

    status: Status
    folder: str
    sentence: str
    """Where it stands, for people."""
    title: str = ""
    facts: list[str] = []
    tasks: int = 0
    learned: int = 0
    round: int = 0
    """Rounds of the task under way."""
    rounds: int = 0
    """Rounds of a task; 0 where the method has none."""
    done: float = 0.0
    """Share of all the work, from 0 to 1."""
    seconds: float = 0.0
    """Spent so far, without pauses between a stop and a resume."""
    left: Number = None
    """Seconds that the rest takes if it goes on like this; None where that is not known, or nothing is left."""
    silent: Number = None
    """Seconds since the logs grew."""
    first: int = 1
    """Number of the first task that `accuracy` and `by_task` are about."""
    accuracy: dict[str, list[Number]] = {}
    """Mode → mean over the tasks so far, after each task, %."""
    by_task: dict[str, list[Number]] = {}
    """Mode → of each task, after the newest, %."""
    loss: list[tuple[float, float]] = []
    """(tasks learned, loss): mean over clients."""
    bytes: dict[str, dict[str, int]] = {"up": {}, "down": {}}
    rejected: int = 0
    failures: int = 0
    told: list[Reason] = []
    """The newest warnings and failures, newest first."""


class Watched:
    """A run folder, looked at again and again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._forget()

    def _forget(self) -> None:
        self._events = Tail(self._path, "events.jsonl", as_event)
        self._ledger = Tail(self._path, "ledger.jsonl", LedgerLine.model_validate)
        self._forget_events()
        self._forget_ledger()

    def _forget_events(self) -> None:
        self._rounds: dict[int, dict[int, RoundDone]] = {}
        self._tasks: dict[int, TaskDone] = {}
        self._failures, self._told = 0, list[str]()

    def _forget_ledger(self) -> None:
        self._bytes = {"up": Counter[str](), "down": Counter[str]()}
        self._rejected = 0

    def look(self) -> View:
        """Where the run stands now."""
        try:
            if not is_run(self._path):
                self._forget()  # whatever was here is gone
                return self._plain("waiting", f"There is no run in {self._path} yet; it will show here once it begins.")
            manifest = read_manifest(self._path / "manifest.json")
            self._take()
            return self._view(manifest)
        except FileNotFoundError:  # it is being made, or removed
            return self._plain("waiting", f"The run in {self._path} is about to begin.")
        except OSError as error:
            return self._plain("damaged", f"Cannot read {self._path}: {error.strerror or error}.")
        except FedprotipError as error:
            self._forget()
            return self._plain("damaged", str(error))

    def _plain(self, status: Status, sentence: str) -> View:
        return View(status=status, folder=str(self._path), sentence=sentence)

    def _take(self) -> None:
        anew, events = self._events.look()
        if anew:
            self._forget_events()
        for event in events:
            match event:
                case RoundDone():
                    self._rounds.setdefault(event.task, {})[event.round] = event
                case TaskDone():
                    self._tasks[event.task] = event
                case Failure():
                    self._failures += 1
                    self._tell(f"Task {event.task + 1}: client {event.client} was left out: {event.reason}")
                case Warned():
                    self._tell(event.text)
                case Remark(event="anew"):
                    self._tell(f"Task {(event.task or 0) + 1}: {event.text}")
        anew, lines = self._ledger.look()
        if anew:
            self._forget_ledger()
        for line in lines:
            self._bytes[line.direction][line.kind] += line.bytes
            self._rejected += line.status == "rejected"

    def _tell(self, text: str) -> None:
        self._told = [*self._told, one_line(text, 300)][-TOLD:]

    def _view(self, manifest: Manifest) -> View:
        settings = _settings(manifest, self._path)
        tasks, learned = _number(settings, "stream", "tasks"), len(self._tasks)
        rounds = self._rounds_of_a_task(_number(settings, "train", "rounds"))
        under_way = self._rounds.get(learned, {})
        status = self._status(manifest)
        silent = max(0.0, time.time() - self._written())
        share = (learned + len(under_way) / (rounds + 1)) / tasks if tasks else 0.0
        seconds = sum(sum(task.seconds.values()) for task in self._tasks.values())
        seconds += sum(event.seconds for event in under_way.values())
        first = max(0, learned - LISTED)
        newest = self._tasks[max(self._tasks)] if self._tasks else None
        shown = [self._tasks[task] for task in sorted(self._tasks)][first:]
        modes = [mode for mode in MODES if any(mode in task.accuracy for task in shown)]
        scenario = _text(settings, "stream", "scenario")
        return View(
            status=status,
            folder=str(self._path),
            sentence=self._sentence(status, tasks, rounds, len(under_way)),
            title=one_line(
                f"{method_name(_text(settings, 'method', 'name'))} on {_text(settings, 'data', 'name')}", 100
            ),
            facts=[
                SCENARIOS.get(scenario, scenario),
                f"{tasks} tasks",
                f"{_number(settings, 'clients', 'count')} clients",
                f"seed {_number(settings, 'run', 'seed')}",
            ],
            tasks=tasks,
            learned=learned,
            round=len(under_way),
            rounds=rounds,
            done=1.0 if status == "finished" else min(share, 0.999),
            seconds=seconds,
            left=self._left(tasks, rounds) if status == "running" else None,
            silent=silent if status == "running" else None,
            first=first + 1,
            accuracy={mode: [task.accuracy.get(mode) for task in shown] for mode in modes},
            by_task={m: newest.by_task[m][first:] for m in modes if m in newest.by_task} if newest else {},
            loss=self._losses(rounds),
            bytes={way: _largest(counts) for way, counts in self._bytes.items()},
            rejected=self._rejected,
            failures=self._failures,
            told=self._told[::-1],
        )

    def _status(self, manifest: Manifest) -> Status:
        if manifest.status == "finished":
            return "finished"
        return "running" if RunFolder(self._path).in_use() else "stopped"

    def _sentence(self, status: Status, tasks: int, rounds: int, under_way: int) -> str:
        learned = len(self._tasks)
        if status == "finished":
            return f"Finished: {tasks} of {tasks} tasks are learned. The report is {self._path / 'report.html'}."
        place = f"{learned} of {tasks} tasks are learned"
        place += f", {under_way} of {rounds} rounds of the next" if under_way else ""
        if status == "stopped":
            return f"Stopped: nobody is at work in it. {place}. Continue with: fedprotip resume {self._path}"
        if learned >= tasks:
            return f"{place}; the results are being written."
        return f"Learning task {learned + 1} of {tasks}" + (f", round {under_way + 1} of {rounds}" if rounds else "")

    def _rounds_of_a_task(self, said: int) -> int:
        """As many as tasks that are learned had, which is what the method makes of the settings."""
        had = [len(self._rounds.get(task, {})) for task in self._tasks]
        return max(had) if had else said

    def _left(self, tasks: int, rounds: int) -> Number:
        """By the newest tasks; before the first one is learned by its rounds alone, which is too little."""
        learned, known = len(self._tasks), [self._tasks[task] for task in sorted(self._tasks)[-3:]]
        paces = [event.seconds for event in self._rounds.get(max(self._rounds, default=0), {}).values()]
        pace = sum(paces) / len(paces) if paces else None
        missing = max(0, rounds - len(self._rounds.get(learned, {})))
        if not known:
            return None if pace is None else pace * (missing + rounds * (tasks - 1))
        whole = sum(sum(task.seconds.values()) for task in known) / len(known)
        spent = sum(event.seconds for event in self._rounds.get(learned, {}).values())
        return max(0.0, whole - spent) + whole * max(0, tasks - learned - 1) if learned < tasks else None

    def _losses(self, rounds: int) -> list[tuple[float, float]]:
        found = [
            (task + (place + 1) / max(rounds, len(events)), event.loss)
            for task, events in sorted(self._rounds.items())
            for place, event in enumerate(events[number] for number in sorted(events))
            if event.loss is not None
        ]
        step = -(-len(found) // POINTS)
        return found[:: max(step, 1)] + (found[-1:] if step > 1 else [])

    def _written(self) -> float:
        try:
            return os.lstat(self._path / "events.jsonl").st_mtime
        except OSError:
            return time.time()


def _settings(manifest: Manifest, path: Path) -> dict[str, Any]:
    """As the manifest has them; folders from before have a file alone."""
    try:
        return tomltext.loads(manifest.settings or read_text(path / "settings.toml"))
    except ValueError:
        raise RunError(f"{path} is damaged: its settings are no TOML.") from None


def _largest(counts: Counter[str]) -> dict[str, int]:
    """The largest kinds and what the others have together, so that the sum is that of all."""
    shown = dict(counts.most_common(TOLD))
    rest = counts.total() - sum(shown.values())
    return shown | ({OTHERS: shown.get(OTHERS, 0) + rest} if rest else {})


def _value(settings: dict[str, Any], section: str, key: str) -> Any:
    part = settings.get(section)
    return part.get(key) if isinstance(part, dict) else None


def _number(settings: dict[str, Any], section: str, key: str) -> int:
    value = _value(settings, section, key)
    return value if isinstance(value, int) else 0


def _text(settings: dict[str, Any], section: str, key: str) -> str:
    return one_line(str(_value(settings, section, key) or "?"), 60)
