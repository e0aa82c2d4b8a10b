"""Who is answered together."""

import threading
import time

import pytest
import torch

from fedprotip.serve import batching
from fedprotip.serve.batching import Batcher, Job


@pytest.fixture
def batches(monkeypatch):
    """Sizes of the batches that are answered, by a predictor that needs no time."""
    found = []

    def answer_all(jobs):
        found.append(len(jobs))
        for job in jobs:
            job.done.set_result([])

    monkeypatch.setattr(batching, "answer_all", answer_all)
    return found


def submitted(batcher, count, pause=0.0):
    jobs = []
    for _ in range(count):
        jobs.append(batcher.submit(Job(None, torch.zeros(1, 3, 4, 4))))
        time.sleep(pause)
    return [job.result(20) for job in jobs]


def test_as_many_are_waited_for_as_were_answered_together(batches):
    batcher = Batcher(most=32, wait=10.0)
    batcher._last, batcher._seconds = 4, 100.0
    submitted(batcher, 4, pause=0.02)
    assert batches == [4]
    batcher.close()


def test_those_who_came_meanwhile_are_answered_with_those_who_come_again(monkeypatch):
    """Two groups that take turns would each have half a batch for ever."""
    found, inside, go_on = [], threading.Event(), threading.Event()

    def answer_all(jobs):
        found.append(len(jobs))
        inside.set()
        assert go_on.wait(20)
        for job in jobs:
            job.done.set_result([])

    monkeypatch.setattr(batching, "answer_all", answer_all)
    batcher = Batcher(most=32, wait=2.0)
    new = [Job(None, torch.zeros(1, 3, 4, 4)) for _ in range(4)]
    first = batcher.submit(new[0])
    assert inside.wait(20)
    waiting = [batcher.submit(job) for job in new[1:3]]
    monkeypatch.setattr(batching, "PATIENCE", 1e9)
    go_on.set()
    first.result(20)
    waiting.append(batcher.submit(new[3]))  # who was answered asks again
    assert [job.result(20) for job in waiting] == [[], [], []]
    assert found == [1, 3]
    batcher.close()


def test_torch_has_as_many_threads_as_are_asked_for(batches, monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    batcher = Batcher(most=4, wait=0.0, threads=3)
    submitted(batcher, 1)
    batcher.close()
    assert asked == [3]


def test_nobody_waits_who_was_alone(batches):
    batcher = Batcher(most=32, wait=10.0)
    for _ in range(3):
        start = time.monotonic()
        submitted(batcher, 1)
        assert time.monotonic() - start < 5
    assert batches == [1, 1, 1]
    batcher.close()


def test_waiting_ends_with_a_part_of_what_a_batch_takes(batches):
    batcher = Batcher(most=32, wait=1000.0)
    batcher._last, batcher._seconds = 4, 0.1
    submitted(batcher, 2)  # and nobody else comes
    assert sum(batches) == 2
    batcher.close()


def test_a_batch_has_an_end(batches):
    batcher = Batcher(most=3, wait=10.0)
    batcher._last, batcher._seconds = 3, 100.0
    submitted(batcher, 7 + 2)
    assert max(batches) == 3
    assert sum(batches) == 9
    batcher.close()
