"""Curves of a run where people already look: TensorBoard and MLflow, off unless asked (extra `track`).

    fedprotip run my.toml --track tensorboard --track mlflow

A tracker is told what happens and can do nothing to the run: one that fails is left out from there on, with a word.
Steps of all curves are rounds since the run began, so a resumed run continues them, and what it does again replaces
what it had done.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from fedprotip.errors import UsageError
from fedprotip.settings import Settings
from fedprotip.store.events import Event, Observer, Warned
from fedprotip.track.curves import Backend, Curves, Make
from fedprotip.track.mlflow import MLflow
from fedprotip.track.tensorboard import TensorBoard

__all__ = ["Backend", "require", "tracked"]

TRACKERS: dict[str, tuple[Make, str]] = {"tensorboard": (TensorBoard, "tensorboard"), "mlflow": (MLflow, "mlflow")}
"""By name: what makes one, and the module that it needs."""


def require(names: Iterable[str]) -> None:
    """Refuse trackers whose packages are not installed, before a run begins."""
    for name in names:
        if find_spec(TRACKERS[name][1]) is None:
            raise UsageError(
                f"run.track has {name!r}, whose package is missing; install it with: pip install 'fedprotip[track]'."
            )


@contextmanager
def tracked(folder: Path, settings: Settings, observers: list[Observer]) -> Iterator[list[Observer]]:
    """The observers of a run and the trackers that its settings ask for, which are closed when it ends."""

    def warn(text: str) -> None:
        for observer in observers:
            observer(Warned(text=text))

    names = dict.fromkeys(settings.run.track)
    trackers = [Guarded(name, Curves(folder, settings, TRACKERS[name][0]), warn) for name in names]
    try:
        yield [*observers, *trackers]
    except BaseException:
        for tracker in trackers:
            tracker.close(finished=False)
        raise
    for tracker in trackers:
        tracker.close(finished=True)


class Guarded:
    """A tracker whose faults are its own: after the first it is told nothing more, and the run goes on."""

    def __init__(self, name: str, curves: Curves, warn: Callable[[str], None]) -> None:
        self._name, self._curves, self._warn = name, curves, warn
        self._broken = False

    def __call__(self, event: Event) -> None:
        self._try(lambda: self._curves(event))

    def close(self, finished: bool) -> None:
        self._try(lambda: self._curves.close(finished))

    def _try(self, action: Callable[[], None]) -> None:
        if self._broken:
            return
        try:
            action()
        except Exception as error:  # whatever a package or a server of somebody else comes up with
            self._broken = True
            why = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
            self._warn(f"Tracking by {self._name} has failed ({why}); the run goes on without it.")
