"""How much memory this process has, and handing back what it does not need."""

import ctypes
import os
import resource
import sys
from contextlib import suppress
from pathlib import Path

STATUS = Path("/proc/self/status")


def hand_back_memory() -> None:
    """Give pages of the heap that nobody uses back to the system, where the C library can."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def machine_bytes() -> int:
    """Memory of this machine; where the system does not say, more than any."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 2**63


def status_mb(key: str) -> float | None:
    """A size of this process in MiB, VmRSS or VmHWM; None where the system has no /proc."""
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{key}:")), None)


def peak_rss_mb() -> float:
    """Largest resident memory of this process so far, MiB.

    From /proc where there is one: `ru_maxrss` of a child process begins at the peak of the one that started it.
    """
    own = status_mb("VmHWM")
    if own is not None:
        return own
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10
