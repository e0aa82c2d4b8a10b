"""How much memory this process has, and handing back what it does not need."""

import ctypes
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread

PAUSE = 0.02
"""Seconds between two looks at the memory of this process."""
STATUS, MACHINE = Path("/proc/self/status"), Path("/proc/meminfo")
LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""What a container may use, in bytes, of the two kinds of control groups."""


def hand_back_memory() -> None:
    """Give pages of the heap that nobody uses back to the system, where the C library can."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def status_mb(key: str) -> float | None:
    """A size of this process in MiB, VmRSS or VmHWM; None where the system has no /proc."""
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{key}:")), None)


def machine_bytes() -> int:
    """All memory that processes can have here, swap included; where the system does not say, more than any."""
    try:
        sizes = dict(line.split(":") for line in MACHINE.read_text().splitlines())
        most = sum(int(sizes[key].split()[0]) * 2**10 for key in ("MemTotal", "SwapTotal"))
    except (OSError, ValueError, KeyError):
        try:
            most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (OSError, ValueError):
            return 2**63
    for limit in LIMITS:
        with suppress(OSError, ValueError):  # "max": none
            most = min(most, int(limit.read_text()))
    return most if most > 0 else 2**63


def peak_rss_mb() -> float:
    """Largest resident memory of this process so far, MiB.

    From /proc where there is one: `ru_maxrss` of a child process begins at the peak of the one that started it.
    """
    own = status_mb("VmHWM")
    if own is not None:
        return own
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


class Peak:
    """The largest resident memory while something was done, MiB; None where the system does not tell."""

    def __init__(self) -> None:
        self.mb: float | None = None

    def look(self) -> None:
        size = status_mb("VmRSS")
        if size is not None:
            self.mb = max(self.mb or 0.0, size)


@contextmanager
def watched() -> Iterator[Peak]:
    """Watch the memory of this process inside.

    Where the peak of the whole process rises it is exact. Below it a thread looks every 20 ms, and what is shorter may
    be missed: setting the system's own mark back would spoil it for whoever measures this process from outside.
    """
    peak, before, over = Peak(), peak_rss_mb(), Event()

    def look_on() -> None:
        while not over.wait(PAUSE):
            peak.look()

    peak.look()
    thread = Thread(target=look_on, daemon=True, name="fedprotip memory")
    thread.start()
    try:
        yield peak
    finally:
        over.set()
        thread.join()
        peak.look()
        after = peak_rss_mb()
        if after > before:
            peak.mb = after
