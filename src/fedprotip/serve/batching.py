"""Requests that come at the same time are answered by one forward pass."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from fedprotip.inference.predictor import Predictor
from fedprotip.serve.describe import describe

Described = list[dict[str, Any]]
PATIENCE = 0.5
"""Of the time that a batch takes, spent at most on waiting for those who will be in the next one."""


@dataclass
class Job:
    """Images (n, c, h, w) of one request, as the predictor wants them that is to answer."""

    predictor: Predictor
    pixels: Tensor
    together: bool = False
    task: int | None = None
    done: "Future[Described]" = field(default_factory=Future)

    @property
    def plain(self) -> bool:
        """Whether each image is answered alone, so that those of other requests may stand beside it."""
        return not self.together and self.task is None


class Batcher:
    """One thread that answers jobs in their order, as many at once as fit into a batch.

    Whoever asked at the same time is likely to do so again: it waits until as many jobs are there as were answered last
    or stood behind them, but no longer than `wait`, nor than a part of what the last batch took. Who is alone never
    waits. `threads`: of torch; 0: as it has them.
    """

    def __init__(
        self,
        most: int,
        wait: float,
        note: Callable[[int, float], object] = lambda size, seconds: None,
        threads: int = 0,
    ) -> None:
        self._most, self._wait, self._note, self._threads = most, wait, note, threads
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._left: Job | None = None  # did not fit into the last batch
        self._last, self._seconds = 1, 0.0  # jobs of the last batch and behind it, and what it took
        self._thread = threading.Thread(target=self._work, name="answers", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> "Future[Described]":
        self._jobs.put(job)
        return job.done

    def waiting(self) -> int:
        return self._jobs.qsize()

    def close(self) -> None:
        """Answer what was submitted, then end."""
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        if self._threads:
            torch.set_num_threads(self._threads)  # here: some libraries count them for each thread that calls
        while (jobs := self._gathered()) is not None:
            started = monotonic()
            try:
                answer_all(jobs)
            except BaseException as error:
                for job in jobs:
                    if not job.done.done():
                        job.done.set_exception(error)
            self._last, self._seconds = len(jobs) + self.waiting(), monotonic() - started
            self._note(sum(len(job.pixels) for job in jobs), self._seconds)

    def _gathered(self) -> list[Job] | None:
        """The jobs of the next batch, at least one; None: the end."""
        first = self._left or self._jobs.get()
        self._left = None
        if first is None:
            return None
        jobs, size = [first], len(first.pixels)
        until = monotonic() + min(self._wait, PATIENCE * self._seconds)
        while size < self._most:
            rest = until - monotonic() if len(jobs) < self._last else 0.0
            try:
                job = self._jobs.get(timeout=rest) if rest > 0 else self._jobs.get_nowait()
            except queue.Empty:
                break
            if job is None:  # the end comes after this batch
                self._jobs.put(None)
                break
            if job.predictor is not first.predictor or size + len(job.pixels) > self._most:
                self._left = job
                break
            jobs.append(job)
            size += len(job.pixels)
        return jobs


def answer_all(jobs: list[Job]) -> None:
    """Answer jobs of one predictor: their images are looked at together, and those without a group also decided."""
    jobs = [job for job in jobs if job.done.set_running_or_notify_cancel()]
    if not jobs:
        return
    predictor, sizes = jobs[0].predictor, [len(job.pixels) for job in jobs]
    heard = predictor.hear(torch.cat([job.pixels for job in jobs]))
    rows = list(torch.arange(len(heard)).split(sizes))
    plain = [place for job, place in zip(jobs, rows, strict=True) if job.plain]
    alone = iter(describe(predictor, heard.some(torch.cat(plain))) if plain else [])
    for job, place in zip(jobs, rows, strict=True):
        if job.plain:
            job.done.set_result([next(alone) for _ in place])
        else:
            job.done.set_result(describe(predictor, heard.some(place), job.together, job.task))
