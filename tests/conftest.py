import os
import sys

import pytest
import torch
from hypothesis import HealthCheck, settings

import fedprotip.api  # noqa: F401  # all methods and datasets have their names

os.environ.setdefault("OMP_NUM_THREADS", "1")

# The machines are shared and noisy: a slow example is not a failure.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("default")

DRAWN = ("report", "test_demo")
"""Tests in which pictures really become PNGs; elsewhere that would be half of a small run."""


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


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
