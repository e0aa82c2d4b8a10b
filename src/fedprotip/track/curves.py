"""What happens in a run as curves: a name, a step, a number."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from fedprotip.settings import Settings
from fedprotip.store.events import Event, RoundDone, Started, TaskDone
from fedprotip.store.folder import RunFolder


class Backend(Protocol):
    """Where curves go."""

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Points of several curves at one step."""

    def close(self, finished: bool) -> None:
        """The run has ended: as it should, or before."""


Make = Callable[[Path, Settings, int], Backend]
"""(run folder, settings, first step) → a backend."""


class Curves:
    """An observer that hands points to a backend, which is made when there is a first one."""

    def __init__(self, folder: Path, settings: Settings, make: Make) -> None:
        self._folder, self._settings, self._make = folder, settings, make
        self._backend: Backend | None = None
        self._rounds = self._step = 1

    def __call__(self, event: Event) -> None:
        match event:
            case Started():
                self._rounds = max(1, event.rounds)
            case RoundDone():
                values = {"train/clients": float(event.clients), "train/seconds": event.seconds}
                values |= {} if event.loss is None else {"train/loss": event.loss}
                self._add(event.task * self._rounds + event.round + 1, values)
            case TaskDone():
                self._add((event.task + 1) * self._rounds, _of_task(event))

    def close(self, finished: bool) -> None:
        """A run that is finished adds what only its summary knows."""
        if self._backend is None:
            return
        if finished:
            summary = RunFolder(self._folder).summary()
            values = {f"forgetting/{mode}": points for mode, points in summary.forgetting.items()}
            values |= {f"bytes/{way}": float(sum(kinds.values())) for way, kinds in summary.bytes.items()}
            self._backend.add(self._step, values)
        self._backend.close(finished)

    def _add(self, step: int, values: Mapping[str, float]) -> None:
        if self._backend is None:
            self._backend = self._make(self._folder, self._settings, step)
        self._step = step
        self._backend.add(step, values)


def _of_task(event: TaskDone) -> dict[str, float]:
    """Tasks are counted from 1, as in all that people read."""
    values = {f"accuracy/{mode}": mean for mode, mean in event.accuracy.items()}
    for mode, by_task in event.by_task.items():
        values |= {f"accuracy_{mode}/task_{t}": value for t, value in enumerate(by_task, 1) if value is not None}
    values |= {f"seconds/{phase}": spent for phase, spent in event.seconds.items()}
    values |= {f"rank_share/{layer}": rank / event.dims[layer] for layer, rank in event.ranks.items()}
    return values | {f"samples_kept/{kind}": float(count) for kind, count in event.samples.items()}
