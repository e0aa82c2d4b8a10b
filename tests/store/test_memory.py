"""Memory figures of this process."""

import resource
import threading
import time

import pytest
import torch

from fedprotip.store import memory


def test_the_peak_is_what_this_process_has_had():
    before = memory.peak_rss_mb()
    held = torch.ones(2**26)  # 256 MiB
    assert memory.peak_rss_mb() >= before
    size = memory.status_mb("VmRSS")
    assert size is None or memory.peak_rss_mb() >= size > 256
    del held
    memory.hand_back_memory()
    assert memory.peak_rss_mb() > 256


def test_every_phase_has_its_own_peak():
    """What was there before and is gone does not count, what comes and goes inside does."""
    with memory.watched() as large:
        held = torch.ones(2**26)  # 256 MiB
        time.sleep(5 * memory.PAUSE)
        del held
        memory.hand_back_memory()
    with memory.watched() as small:
        pass
    if memory.status_mb("VmRSS") is not None:
        assert large.mb > small.mb + 200


def test_a_new_peak_of_the_process_is_never_missed(monkeypatch):
    """Also when it is shorter than the pause between two looks."""
    monkeypatch.setattr(memory, "PAUSE", 60.0)
    size, peak = memory.status_mb("VmRSS"), memory.peak_rss_mb()
    with memory.watched() as found:
        held = torch.ones(int((peak - (size or 0.0) + 64) * 2**18))  # as much as to pass the old peak
        del held
    assert found.mb == memory.peak_rss_mb() > peak


def test_the_watch_ends_with_what_it_watches():
    before = threading.active_count()

    def fail():
        assert threading.active_count() == before + 1
        raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"), memory.watched():
        fail()
    assert threading.active_count() == before


def test_without_proc_the_systems_own_figure_is_taken(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "STATUS", tmp_path / "none")
    assert memory.status_mb("VmRSS") is None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert memory.peak_rss_mb() >= peak / 2**20
    with memory.watched() as found:
        pass
    assert found.mb is None or found.mb == memory.peak_rss_mb()  # only where the peak of the process rose


def test_a_system_without_malloc_trim_is_fine(monkeypatch):
    def missing(name):
        raise OSError

    monkeypatch.setattr(memory.ctypes, "CDLL", missing)
    memory.hand_back_memory()
