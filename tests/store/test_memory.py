"""Memory figures of this process."""

import resource

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


def test_without_proc_the_systems_own_figure_is_taken(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "STATUS", tmp_path / "none")
    assert memory.status_mb("VmRSS") is None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert memory.peak_rss_mb() >= peak / 2**20


def test_a_system_without_malloc_trim_is_fine(monkeypatch):
    def missing(name):
        raise OSError

    monkeypatch.setattr(memory.ctypes, "CDLL", missing)
    memory.hand_back_memory()
