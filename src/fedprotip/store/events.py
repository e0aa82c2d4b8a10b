"""What happens in a run, one class per event: the lines of events.jsonl, and what observers are told besides."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import field_validator, model_validator

from fedprotip.store.records import Amount, BadRecord, Count, Kind, Line, Number, Percent, Reason, Share, read_lines


class Event(Line):
    """Something that happened, recognised by the field `event`."""

    event: str

    def __getitem__(self, field: str) -> Any:
        """event["task"] as well as event.task: observers may read an event like a line of events.jsonl."""
        return getattr(self, field)


Observer = Callable[[Event], None]
"""Called with every event as it happens."""


class RoundDone(Event):
    event: Literal["round"] = "round"
    task: int
    round: int
    loss: Number  # mean over clients; None when no update could be used
    clients: Count  # whose updates were used
    seconds: Amount


class TaskDone(Event):
    event: Literal["task"] = "task"
    task: int
    seconds: dict[str, Amount] = {}  # phase → of this task
    accuracy: dict[str, Percent] = {}  # mode → mean over the tasks so far, %
    by_task: dict[str, list[Percent | None]] = {}  # mode → accuracy of each task so far, %
    router: str = ""  # the configured one of the next
    routing: dict[str, dict[str, list[Share | None]]] = {}  # router → mode → share at a right task, by task
    ranks: dict[str, Count] = {}  # layer → rank R of its subspace
    dims: dict[str, Count] = {}  # layer → input width d
    samples: dict[str, Count] = {}  # "raw", "synthetic" → samples of the past that are kept for learning

    @model_validator(mode="after")
    def _nothing_is_missing(self) -> "TaskDone":
        if missing := self.ranks.keys() - self.dims.keys():
            raise BadRecord(f"dims has no width of {min(missing)}.")
        for router, modes in self.routing.items():
            if any(len(by_task) != self.task + 1 for by_task in modes.values()):
                raise BadRecord(f"routing.{router} does not have a share for each of {self.task + 1} tasks.")
        return self


class Absent(Event):
    """Clients without a part in a task."""

    event: Literal["absent"] = "absent"
    task: int
    clients: list[int]
    reason: Reason


class Failure(Event):
    """A client was left out of a round, or of an exchange before or after them (round None)."""

    event: Literal["failure"] = "failure"
    task: int
    round: int | None
    client: int
    reason: Reason


class Withheld(Event):
    """A client left classes out of what it sent, because it has too few samples of them."""

    event: Literal["withheld"] = "withheld"
    task: int
    client: int
    kind: Kind
    classes: int


class Started(Event):
    """For observers: a run starts or goes on, with so many tasks done."""

    event: Literal["start"] = "start"
    folder: str
    tasks: int
    rounds: int
    done: int


class Step(Event):
    """For observers: how far a long step of the server is."""

    event: Literal["step"] = "step"
    what: Kind
    done: int
    total: int


class Note(Event):
    """For observers: something good to know."""

    event: Literal["note"] = "note"
    text: str


class Warned(Event):
    """Something that may not be as expected, with what to do about it."""

    event: Literal["warning"] = "warning"
    text: str


EVENTS: dict[str, type[Event]] = {
    known.model_fields["event"].default: known
    for known in (RoundDone, TaskDone, Absent, Failure, Withheld, Started, Step, Note, Warned)
}


class Remark(Event):
    """Any other event: what a method has to say, under a name of its own."""

    event: Kind
    task: int | None = None
    client: int | None = None
    text: Reason = ""

    @field_validator("event")
    @classmethod
    def _has_a_name_of_its_own(cls, name: str) -> str:
        if name in EVENTS:
            raise ValueError(f"{name!r} is another event's name")
        return name


def as_event(raw: dict[str, Any]) -> Event:
    """The event of a line; of one that this version does not know, what a remark holds."""
    return EVENTS.get(str(raw.get("event")), Remark).model_validate(raw)


def read_events(path: Path) -> Iterator[Event]:
    """The events of a run."""
    return read_lines(path, as_event)
