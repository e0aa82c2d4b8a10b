"""What a run writes down as it goes: events, the ledger of all messages, seconds, checkpoints."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from fedprotip.federation.server import Direction, Log, Progress, Server
from fedprotip.store.clients import ClientStore
from fedprotip.store.events import Absent, Event, Failure, Observer, Remark, Warned
from fedprotip.store.files import Tensors
from fedprotip.store.folder import RunFolder
from fedprotip.store.memory import Peak, peak_rss_mb, watched
from fedprotip.store.records import LedgerLine, Line

Crossed = dict[int, Log]
"""Client → what crossed for the question under way, but for the reply."""
MOST_REASONS = 50
"""Different reasons of failures that are counted one by one; all are in events.jsonl."""


class Journal:
    """Keeps the records of one run. Lines are written together with each checkpoint."""

    def __init__(self, folder: RunFolder, store: ClientStore, observers: list[Observer]) -> None:
        self._folder, self._store, self._observers = folder, store, observers
        self._lines: dict[str, list[Line]] = {"events.jsonl": [], "ledger.jsonl": []}

    def event(self, record: Event) -> None:
        self._lines["events.jsonl"].append(record)
        for observer in self._observers:
            observer(record)

    def message(
        self,
        progress: Progress,
        direction: Direction,
        client: int,
        task: int,
        round_: int | None,
        kind: str,
        size: int,
        rejected: str = "",
    ) -> None:
        """Enter one message into the ledger; totals count everything that was sent, used or not."""
        line = LedgerLine(
            task=task,
            round=round_,
            client=client,
            direction=direction,
            kind=kind,
            bytes=size,
            status="rejected" if rejected else "ok",
            reason=rejected,
        )
        self._lines["ledger.jsonl"].append(line)
        totals = progress.bytes[direction]
        totals[line.kind] = totals.get(line.kind, 0) + line.bytes

    def crossed(self, progress: Progress, client: int, task: int, round_: int | None, messages: Log) -> None:
        """Enter what crossed for a question, but for the reply; a client that had lost its place is named."""
        for way, kind, size in messages:
            self.message(progress, way, client, task, round_, kind, size)
            if way == "up":
                text = (
                    "it lacks what it was sent before and is sent everything anew; what it kept for itself may be gone"
                )
                self.event(Remark(event="lost", task=task, client=client, text=text))

    def failure(self, progress: Progress, client: int, task: int, round_: int | None, reason: str) -> None:
        """A client was left out: say so and count it."""
        record = Failure(task=task, round=round_, client=client, reason=reason)
        known = record.reason in progress.failures or len(progress.failures) < MOST_REASONS
        counted = record.reason if known else "other reasons"
        progress.failures[counted] = progress.failures.get(counted, 0) + 1
        progress.last_failure = record.reason
        self.event(record)

    def unsummed(self, progress: Progress, task: int, why: str) -> None:
        """A secure sum was not made: say so and count it."""
        progress.failures[why] = progress.failures.get(why, 0) + 1
        progress.last_failure = why
        self.event(Remark(event="unsummed", task=task, text=why))

    def undone(self, progress: Progress, task: int, round_: int, why: str) -> None:
        """A task begins anew: say so and count it."""
        counted = f"the rounds of a task began anew: {why}"
        progress.failures[counted] = progress.failures.get(counted, 0) + 1
        self.event(Remark(event="anew", task=task, text=f"after round {round_ + 1} the task begins anew: {why}"))

    def bounded(self, task: int, client: int, samples: int, most: float) -> None:
        text = f"it states {samples} samples, many times those of all others, and counts for {most:.0f}"
        self.event(Remark(event="bounded", task=task, client=client, text=text))

    def absent(self, task: int, clients: list[int]) -> None:
        self.event(Absent(task=task, clients=clients, reason="no data of this task"))

    def warn(self, texts: Iterable[str]) -> None:
        for text in texts:
            self.event(Warned(text=text))

    @contextmanager
    def phase(self, progress: Progress, name: str) -> Iterator[None]:
        """Add the seconds inside to progress.seconds[name] and cpu_seconds; the peak of memory to progress.memory."""
        start, busy, gpu = time.perf_counter(), time.process_time(), torch.cuda.is_available()
        if gpu:
            torch.cuda.reset_peak_memory_stats()
        peak: Peak | None = None
        try:
            with watched() as peak:
                yield
        finally:  # Ctrl-C may come at any line
            progress.seconds[name] = progress.seconds.get(name, 0.0) + time.perf_counter() - start
            progress.cpu_seconds[name] = progress.cpu_seconds.get(name, 0.0) + time.process_time() - busy
            _note_peak(progress, "rss", name, peak.mb if peak else None)
            _note_peak(progress, "gpu", name, torch.cuda.max_memory_allocated() / 2**20 if gpu else None)

    def flush(self) -> None:
        """Write the lines so far; a resume cuts off those that no checkpoint covers."""
        for log, lines in self._lines.items():
            self._folder.append(log, (line.plain() for line in lines))
            lines.clear()

    def checkpoint(self, server: Server, extra: dict[str, Tensors]) -> None:
        server.progress.peak_rss_mb = max(server.progress.peak_rss_mb, peak_rss_mb())
        self.flush()
        server.about_to_save()
        self._folder.checkpoint(server.state(), server.tensors() | extra, self._store)


def _note_peak(progress: Progress, where: str, phase: str, mb: float | None) -> None:
    """The largest value of a phase in the task under way."""
    if mb is not None:
        peaks = progress.memory.setdefault(where, {}).setdefault(phase, [])
        peaks += [None] * (progress.task + 1 - len(peaks))
        peaks[progress.task] = max(peaks[progress.task] or 0.0, mb)
