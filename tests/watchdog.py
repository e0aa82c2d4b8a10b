"""An end to what hangs."""

import signal
from contextlib import contextmanager


class Hang(BaseException):
    """Nobody takes it for a problem of the disk, or for one that can be handled."""


@contextmanager
def in_time(seconds):
    """Hang is raised in what takes longer."""

    def late(*_):
        raise Hang

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
