"""load: a process that asks a finished run one question, beside torch's import and reading the same file."""

import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import inputs
from benchmarks.apart import ROOT
from benchmarks.harness import Agreement, Bench
from fedprotip import RunError, run

OURS = "import fedprotip; fedprotip.load({folder!r}); print('ready')"
LEAST = "import torch, pathlib; pathlib.Path({folder!r}, 'model.safetensors').read_bytes(); print('ready')"


def load(
    bench: Bench,
    side: int = 32,
    classes: int = 20,
    images: int = 4,
    model: tuple[str, ...] = (*inputs.RESNET, "model.stem=stride1"),
) -> None:
    """A new process until a run can answer (hashes and checks included), beside `import torch` and reading the file."""
    bench.say("load: making the run")
    data = inputs.write_dataset(bench.folder, classes, images, 2, side)
    settings = {"stream": {"tasks": 2, "task_size": classes // 2}, "method": {"name": "lda"}, "data": data}
    folder = bench.folder / "run"
    run(settings, list(model), out=folder)
    spent: dict[str, list[float]] = {OURS: [], LEAST: []}

    def turn(code: str) -> str:
        told, seconds = started(code, folder)
        spent[code].append(seconds)
        return told

    sides = {"ours": lambda: turn(OURS), "textbook": lambda: turn(LEAST)}
    case = bench.measure("ResNet-18, from nothing to ready", sides, _ready, least=0.0)
    bench.figure(case, "times torch's import and reading the file", case.ratio("ours", "textbook"), "≤", 1.5)
    ours, least = (median(seconds[1:]) for seconds in spent.values())  # Python compiled us in the first turn
    bench.figure(case, "the same by CPU seconds", ours / least, "≤", 1.5)


def started(code: str, folder: Path) -> tuple[str, float]:
    """What a new process printed, and the CPU seconds it took.

    Python keeps what it compiled, as of any installed package: else it would compile us each time, and torch never.
    """
    before = _cpu_seconds()
    command = [sys.executable, "-c", code.format(folder=str(folder))]
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT / "src", env=kept)
    if done.returncode:
        raise RunError(f"A new process failed: {(done.stderr.strip() or 'no message').splitlines()[-1]}")
    return done.stdout.strip(), _cpu_seconds() - before


def _cpu_seconds() -> float:
    """Of all processes that were started here and have ended."""
    times = os.times()
    return times.children_user + times.children_system


def _ready(results: dict[str, Any]) -> Agreement:
    return "processes that were not ready", float(sum(told != "ready" for told in results.values())), 0.0
