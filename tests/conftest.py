import os
import signal
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch, as the package does

import pytest
import torch
from hypothesis import HealthCheck, settings

import fedprotip.api  # noqa: F401  # all methods and datasets have their names
from fedprotip.cells import complete

# The machines are shared and noisy: a slow example is not a failure.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("default"), derandomize=True)
settings.load_profile(
    "same" if os.environ.get("CI") else "default"
)  # new examples are for whoever can mend what they find

DRAWN = ("report", "test_demo")
"""Tests in which pictures really become PNGs; elsewhere that would be half of a small run."""


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch):
    """A process for every run of several is tested where it is made: it takes seconds and sees no patches."""
    monkeypatch.setattr("fedprotip.cells.apart", complete)


@pytest.fixture(autouse=True)
def _no_pictures(request, monkeypatch):
    if not {request.path.parent.name, request.path.stem} & set(DRAWN):
        monkeypatch.setattr("fedprotip.report.style.png", lambda figure: b"\x89PNG, not drawn in this test")


@pytest.fixture
def call(monkeypatch, capsys):
    """Run the command in this process: (exit code, stdout, stderr)."""
    from fedprotip.cli import app as cli

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["fedprotip", *map(str, arguments)])
        try:
            cli.main()
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    monkeypatch.setattr(cli, "out", cli.Console(width=200))
    return run


def pytest_configure(config):
    """Commands under test end by signals, also where the tests were started by nohup or in the background of a shell,
    which make all that they start deaf to them."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
