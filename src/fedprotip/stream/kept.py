"""What a run has settled, whatever becomes of its data: names of what its data has, its tasks, the size of images.

A class is its name, and so are a domain and a client that has one. Its number is its place in the run's list of names,
which only grows: folders or rows that are added, removed or sorted anew change no number of a run. The manifest holds
this from the first moment of a run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedprotip.settings import DataSettings
from fedprotip.stream.plan import Shape, TaskPlan

NAMED = ("classes", "domains", "clients")


@dataclass(frozen=True)
class Settled:
    """Of a run that is new: nothing."""

    classes: tuple[str, ...] = ()
    domains: tuple[str, ...] = ()
    clients: tuple[str, ...] = ()
    tasks: tuple[TaskPlan, ...] = ()
    shape: Shape | None = None
    learned: int = 0  # the first so many tasks, whose data may be gone

    @classmethod
    def of(cls, record: Mapping[str, Any], learned: int) -> "Settled":
        """From the fingerprint in a manifest; empty where it has no names yet."""
        if not record.get("classes"):
            return cls(learned=learned)
        tasks = tuple(TaskPlan(name=task["name"], classes=tuple(task["labels"])) for task in record["tasks"])
        channels, height, width = record["shape"]
        names = {key: tuple(record[key]) for key in NAMED}
        return cls(**names, tasks=tasks, shape=(channels, height, width), learned=learned)

    def plain(self) -> dict[str, Any]:
        """What `of` reads, for a worker process."""
        tasks = [{"name": task.name, "labels": list(task.classes)} for task in self.tasks]
        return {key: list(getattr(self, key)) for key in NAMED} | {"tasks": tasks, "shape": list(self.shape or ())}

    def sized(self, settings: DataSettings) -> DataSettings:
        """Data of a run that goes on has the size that its model knows, whichever image comes first now."""
        return settings.model_copy(update={"size": list(self.shape[1:])}) if self.shape else settings


NOTHING = Settled()


def grown(known: Sequence[str], found: Sequence[str]) -> list[str]:
    """The known names, and behind them those that are new.

    >>> grown(["bee", "cat"], ["ant", "cat"])
    ['bee', 'cat', 'ant']
    """
    have = set(known)
    return [*known, *(name for name in found if name not in have)]
