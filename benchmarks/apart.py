"""One function in a process of its own: python -m benchmarks.apart MODULE FUNCTION '[ARGUMENTS]'

Prints what it returned and the peak of the process in MiB. `ru_maxrss` would not do for that: a child process begins
with the peak of the one that started it.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from fedprotip import RunError

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"


def run_apart(function: Callable[..., Any], *arguments: Any, source: Path = SOURCE) -> tuple[Any, float | None]:
    """The result, and the peak of the process (None: not known); the package is the one in `source`."""
    name = f"{function.__module__} {function.__name__}"
    command = [sys.executable, "-m", "benchmarks.apart", *name.split(), json.dumps(arguments)]
    paths = [str(source), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RunError(f"The process of {name} failed: {(done.stderr.strip() or 'no message').splitlines()[-1]}")
    result, peak = json.loads(done.stdout.splitlines()[-1])
    return result, peak


def memory_mb(key: str) -> float | None:
    """A size of this process in MiB, VmRSS now or VmHWM at most; None where the system has no /proc."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{key}:")), None)


if __name__ == "__main__":
    found = getattr(import_module(sys.argv[1]), sys.argv[2])(*json.loads(sys.argv[3]))
    print(json.dumps([found, memory_mb("VmHWM")]))
