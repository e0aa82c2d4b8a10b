"""The journal: what clients say is written down, but never at any length."""

import json
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

import fedprotip
from fedprotip.federation.journal import MOST_REASONS, Journal
from fedprotip.federation.server import Progress
from fedprotip.store.events import RoundDone
from fedprotip.store.folder import RunFolder
from fedprotip.store.memory import status_mb
from fedprotip.store.records import read_record
from fedprotip.store.results import Memory
from tests.sites import through
from tests.small import quick, small


@pytest.fixture
def journal(tmp_path):
    folder = RunFolder.create(tmp_path / "run", "")
    return Journal(folder, folder.store(0), [])


def lines(journal, log):
    journal.flush()
    return [json.loads(line) for line in (journal._folder.path / log).read_text().splitlines()]


def test_observers_see_what_is_written(tmp_path):
    folder, seen = RunFolder.create(tmp_path / "run", ""), []
    journal = Journal(folder, folder.store(0), [seen.append])
    done = RoundDone(task=0, round=2, loss=0.5, clients=3, seconds=1.0)
    journal.event(done)
    assert seen == [done]
    assert lines(journal, "events.jsonl") == [done.plain()]


def test_long_words_of_clients_are_cut_wherever_they_stand(journal):
    progress = Progress()
    journal.message(progress, "up", 1, 0, 0, "k" * 10**6, 7, rejected="r" * 10**6)
    journal.failure(progress, 1, 0, 0, "r" * 10**6)
    (kind,), (reason,) = progress.bytes["up"], progress.failures
    assert (len(kind), len(reason)) == (100, 300)
    assert progress.last_failure == reason
    assert [(line["kind"], line["reason"]) for line in lines(journal, "ledger.jsonl")] == [(kind, reason)]
    assert [line["reason"] for line in lines(journal, "events.jsonl")] == [reason]


def test_reasons_without_end_are_counted_together(journal):
    progress = Progress()
    for number in range(2 * MOST_REASONS):
        journal.failure(progress, 1, 0, 0, f"reason {number}")
    assert len(progress.failures) == MOST_REASONS + 1
    assert progress.failures["other reasons"] == MOST_REASONS
    assert len(lines(journal, "events.jsonl")) == 2 * MOST_REASONS


@pytest.mark.parametrize("change", [{"loss": 1.7e308}, {"withheld": "x" * 10**5}])
def test_no_client_can_stop_a_run_by_what_it_says(tmp_path, monkeypatch, change):
    """Two losses that are finite and whose sum is not; a count that is none."""

    def odd(answer, local, name):
        message = answer()
        message.meta.update(change if local.client < 2 else {})
        return message

    quick(monkeypatch)
    through(monkeypatch, odd)
    summary = fedprotip.run(small(stream={"tasks": 1}, clients={"partition": "iid"}), out=tmp_path / "r")
    assert summary["tasks"] == 1
    assert (tmp_path / "r" / "events.jsonl").stat().st_size < 5000
    rounds = [json.loads(line) for line in (tmp_path / "r" / "events.jsonl").read_text().splitlines()]
    assert [event["loss"] is None for event in rounds if event["event"] == "round"] == ["loss" in change] * 3


def test_peaks_of_memory_are_kept_by_phase_and_task(tmp_path, monkeypatch):
    """memory.json: the largest of all rounds of a task, and no less after a resume."""
    quick(monkeypatch)
    summary = fedprotip.run(small(stream={"tasks": 2}), out=tmp_path / "r")
    found = read_record(Memory, tmp_path / "r" / "memory.json")
    if status_mb("VmRSS") is None:
        return
    assert {phase: len(peaks) for phase, peaks in found.rss.items()} == {"train": 2, "task_end": 2, "evaluate": 2}
    assert found.gpu == {} or torch.cuda.is_available()
    assert 0 < max(found.peaks("rss").values()) <= summary["peak_rss_mb"] + 0.01


def test_a_phase_keeps_its_largest_peak(journal, monkeypatch):
    sizes = iter([30.0, 50.0, 40.0, 20.0])

    @contextmanager
    def watched():
        yield SimpleNamespace(mb=next(sizes))

    monkeypatch.setattr("fedprotip.federation.journal.watched", watched)
    progress = Progress()
    for task, phase in ((0, "train"), (0, "train"), (0, "train"), (2, "train")):
        progress.task = task
        with journal.phase(progress, phase):
            pass
    assert progress.memory["rss"] == {"train": [50.0, None, 20.0]}
