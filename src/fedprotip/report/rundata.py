"""One run folder as its records say: everything else in the report works on a `RunData`."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedprotip.errors import RunError
from fedprotip.settings import tomltext
from fedprotip.store.answers import Answers
from fedprotip.store.events import Absent, Failure, TaskDone, Warned, Withheld, read_events
from fedprotip.store.folder import ANSWERS, GEOMETRY, MEMORY, RunFolder
from fedprotip.store.records import Manifest, read_ledger, read_manifest, read_record, read_text
from fedprotip.store.results import Geometry, Memory, Summary

READ = ("settings.toml", "summary.json", "events.jsonl", "ledger.jsonl", ANSWERS, GEOMETRY, MEMORY)
"""What a report is made of."""


@dataclass(frozen=True)
class RunData:
    """One run folder, read and checked."""

    folder: Path
    settings: dict[str, dict[str, Any]]
    settings_text: str
    summary: Summary
    manifest: Manifest
    traffic: dict[tuple[int, str, str], int]  # (task, direction, kind) → bytes, rejected messages included
    tasks: list[TaskDone]
    failures: list[Failure]
    absences: list[Absent]
    withheld: list[Withheld]
    answers: Answers | None
    warnings: list[str]
    geometry: Geometry | None
    memory: Memory | None

    @classmethod
    def load(cls, folder: Path) -> "RunData":
        """Read a run folder; RunError names the file that is missing or damaged."""
        if not folder.is_dir():
            raise RunError(f"{folder} is not a run folder: there is no such directory.")
        manifest = read_manifest(folder / "manifest.json")
        if manifest.status == "finished":
            RunFolder(folder).require_intact(*READ)
        text = read_text(folder / "settings.toml")
        traffic: Counter[tuple[int, str, str]] = Counter()
        for line in read_ledger(folder / "ledger.jsonl"):
            traffic[line.task, line.direction, line.kind] += line.bytes
        events = list(read_events(folder / "events.jsonl"))
        tasks = {event.task: event for event in events if isinstance(event, TaskDone)}  # the last word on a task counts
        has = RunFolder(folder).has
        return cls(
            folder=folder,
            settings=_sections(text, folder / "settings.toml"),
            settings_text=text,
            summary=read_record(Summary, folder / "summary.json"),
            manifest=manifest,
            traffic=dict(traffic),
            tasks=[tasks[task] for task in sorted(tasks)],
            failures=[event for event in events if isinstance(event, Failure)],
            absences=[event for event in events if isinstance(event, Absent)],
            withheld=[event for event in events if isinstance(event, Withheld)],
            answers=read_record(Answers, folder / ANSWERS) if has(ANSWERS) else None,
            warnings=list(dict.fromkeys(event.text for event in events if isinstance(event, Warned))),
            geometry=read_record(Geometry, folder / GEOMETRY) if has(GEOMETRY) else None,
            memory=read_record(Memory, folder / MEMORY) if has(MEMORY) else None,
        )

    @property
    def finished(self) -> bool:
        return self.manifest.status == "finished"

    @property
    def chosen(self) -> str:
        """The way to find the task that modes single and batch64 use; ridge and lda have theirs by name or alone.

        The last task says which one method.router = "auto" has come to.
        """
        ways = [*self.summary.routers, *self.summary.sweeps.size]
        said = self.tasks[-1].router if self.tasks else ""
        for name in (self.summary.router, said, self.setting("method.router"), self.summary.method, *ways):
            if name in ways:
                return str(name)
        return ""

    def setting(self, key: str, default: Any = None) -> Any:
        """The value of a setting such as "method.threshold"; the default where the run is older than the setting."""
        section, _, field = key.partition(".")
        return self.settings.get(section, {}).get(field, default)


def _sections(text: str, path: Path) -> dict[str, dict[str, Any]]:
    try:
        sections = tomltext.loads(text)
    except ValueError as error:
        raise RunError(f"{path} is damaged: {error}.") from None
    if loose := [name for name, section in sections.items() if not isinstance(section, dict)]:
        raise RunError(f"{path} is damaged: {loose[0]} stands outside of all sections.")
    return sections
