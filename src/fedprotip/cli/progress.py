"""How far a run is, while it works."""

from time import monotonic
from types import TracebackType

from rich import progress as bars

from fedprotip.cli.display import MEANINGS, Console, plain
from fedprotip.errors import RunError
from fedprotip.report.text import plural
from fedprotip.store.events import Event, Failure, Note, RoundDone, Started, Step, TaskDone, Warned

PAUSE = 30.0
"""Seconds between lines about rounds, where there is no terminal."""


class ProgressDisplay:
    """How far runs are: on a terminal a bar for each, elsewhere plain lines. Is itself an observer of events.

    For several runs, `of(name)` gives an observer for each.
    """

    def __init__(self, console: Console, runs: int = 1) -> None:
        self._console, self._runs = console, runs
        self._bars = bars.Progress(
            bars.TextColumn("[bold]{task.description}"),
            bars.BarColumn(),
            bars.TextColumn("{task.percentage:>3.0f}%"),
            bars.TimeRemainingColumn(),
            bars.TextColumn("{task.fields[note]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._started = 0
        self.folder = ""

    def __enter__(self) -> "ProgressDisplay":
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()
        if isinstance(error, KeyboardInterrupt) and self.folder:
            raise RunError(f"Stopped; nothing is lost. Continue with: fedprotip resume {self.folder}") from None

    def of(self, name: str) -> "_Shown":
        self._started += 1
        name = plain(f"{name} ({self._started}/{self._runs})" if self._runs > 1 else name)
        return _Bar(self, name, self._bars) if self._console.is_terminal else _Lines(self, name)

    def __call__(self, event: Event) -> None:
        if not hasattr(self, "_one"):
            self._one = self.of("run")
        self._one(event)

    def say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, highlight=False)


class _Shown:
    """One run as it goes. Tasks and rounds count from 1, as people do."""

    def __init__(self, owner: ProgressDisplay, name: str) -> None:
        self._owner, self._name = owner, name
        self._tasks = self._rounds = 1
        self._accuracy = ""

    def __call__(self, event: Event) -> None:
        match event:
            case Started():
                self._owner.folder = event.folder
                self._tasks, self._rounds = event.tasks, event.rounds
                self.begin(event)
            case RoundDone():
                loss = "" if event.loss is None else f"loss {event.loss:.3f}"
                self.round(event.task * self._rounds + event.round + 1, self._task(event.task), event.round + 1, loss)
            case TaskDone():
                known = [mode for mode in MEANINGS if mode in event.accuracy]
                self._accuracy = " · ".join(f"{mode} {event.accuracy[mode]:.1f} %" for mode in known)
                self.task((event.task + 1) * self._rounds, self._task(event.task))
            case Step():
                self.step(f"{plain(event.what)} {event.done}/{event.total}")
            case Note():
                self._owner.say(f"[dim]{plain(event.text)}")
            case Warned():
                self._owner.say(f"[yellow]{plain(event.text)}")
            case Failure():
                place = "task end" if event.round is None else f"round {event.round + 1}"
                what = f"client {event.client} left out in task {event.task + 1}, {place}:"
                self._owner.say(f"[yellow]{what}[/yellow] {plain(event.reason)}")

    def _task(self, index: int) -> str:
        return f"task {index + 1} of {self._tasks}"

    def begin(self, event: Started) -> None:
        """A run starts or goes on."""

    def round(self, done: int, task: str, number: int, loss: str) -> None:
        """So many rounds are done, all tasks together."""

    def task(self, done: int, task: str) -> None:
        """A task is learned."""

    def step(self, note: str) -> None:
        """A long step of the server."""


class _Bar(_Shown):
    """A bar over all rounds with loss, accuracy and time left."""

    def __init__(self, owner: ProgressDisplay, name: str, shown: bars.Progress) -> None:
        super().__init__(owner, name)
        self._bars = shown
        self._bar: bars.TaskID | None = None

    def begin(self, event: Started) -> None:
        total, done = event.tasks * event.rounds, event.done * event.rounds
        self._bar = self._bars.add_task(self._name, total=total, completed=done, note="")

    def round(self, done: int, task: str, number: int, loss: str) -> None:
        self._show(done, f"{task} · {loss}")

    def task(self, done: int, task: str) -> None:
        self._show(done, task)

    def step(self, note: str) -> None:
        self._show(None, note)

    def _show(self, completed: int | None, note: str) -> None:
        if self._bar is not None:
            self._bars.update(self._bar, completed=completed, note=f"{note}  {self._accuracy}".strip())


class _Lines(_Shown):
    """For logs: a line when it starts, one for each task, and now and then one for a round."""

    def begin(self, event: Started) -> None:
        self._since = self._last = monotonic()
        self._first: int | None = None  # rounds that were done before
        done = f", {event.done} of them learned before" if event.done else ""
        what = f"{plural(event.tasks, 'task')} of {plural(event.rounds, 'round')}{done}"
        self._owner.say(f"{self._name}: {what}; in {plain(event.folder)}")

    def round(self, done: int, task: str, number: int, loss: str) -> None:
        self._first = done - 1 if self._first is None else self._first
        if monotonic() - self._last >= PAUSE:
            self._line(", ".join(filter(None, [task, f"round {number} of {self._rounds}", loss, self._left(done)])))

    def task(self, done: int, task: str) -> None:
        self._first = done - self._rounds if self._first is None else self._first
        self._line("; ".join(filter(None, [f"{task} learned: {self._accuracy}", self._left(done)])))

    def _line(self, text: str) -> None:
        self._last = monotonic()
        self._owner.say(f"{self._name}: {text}")

    def _left(self, done: int) -> str:
        """How long the rest takes if it goes on like this."""
        rest = self._tasks * self._rounds - done
        seconds = (monotonic() - self._since) * rest / (done - (self._first or 0))
        return f"about {duration(seconds)} left" if rest else ""


def duration(seconds: float) -> str:
    """
    >>> duration(45), duration(100), duration(9000)
    ('45 s', '2 min', '2.5 h')
    """
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
