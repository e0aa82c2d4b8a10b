"""One side of a case in a process of its own, and its peak memory: python -m fedprotip.bench.probe JSON

The kernel keeps the largest resident size of a process (VmHWM) and lets the process set it back to the present one.
So the side runs once to load kernels and libraries, freed memory is handed back, the mark is set back, and the side
runs again: what lies between the mark after that and the size before it is what the work itself needs on top of its
inputs. `ru_maxrss` would not do: a child process begins with the peak of the one that started it.
"""

import gc
import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from fedprotip.bench.base import Benchmark, Case, Size
from fedprotip.errors import RunError
from fedprotip.store.memory import hand_back_memory, status_mb

CLEAR = Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Probe:
    """What a process found out about one side of a case."""

    seconds: float
    peak_mb: float | None  # of a case that runs `apart`: the whole process; else on top of the inputs
    result: Any = None


def in_process(benchmark: Benchmark[Any], size: Size, case: Case, side: str, folder: Path) -> Probe:
    """Run a side here. The figures of memory are only right when nothing else ran in this process."""
    if case.apart:
        start = perf_counter()
        result = case.sides(folder)[side]()
        return Probe(perf_counter() - start, status_mb("VmHWM"), result)
    call = case.sides(folder)[side]
    call()
    before = _reset_peak()
    start = perf_counter()
    call()
    seconds, peak = perf_counter() - start, status_mb("VmHWM")
    return Probe(seconds, max(peak - before, 0.1) if peak is not None and before is not None else None)


def in_own_process(benchmark: Benchmark[Any], size: Size, case: Case, side: str, folder: Path) -> Probe:
    """The same in a process that does nothing else."""
    request = {
        "benchmark": benchmark.name,
        "size": asdict(size),
        "case": case.name,
        "side": side,
        "folder": str(folder),
    }
    command = [sys.executable, "-m", "fedprotip.bench.probe", json.dumps(request)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        raise RunError(f"{benchmark.name}, {case.name}: the process of {side!r} failed: {last}")
    return Probe(**json.loads(done.stdout.splitlines()[-1]))


def _reset_peak() -> float | None:
    """Hand freed memory back and set the peak to the present size; that size in MiB, None where it cannot be done."""
    gc.collect()
    hand_back_memory()
    try:
        CLEAR.write_text("5")
    except OSError:
        return None
    return status_mb("VmRSS")


def main() -> None:
    from fedprotip.bench import BENCHMARKS

    request = json.loads(sys.argv[1])
    benchmark = BENCHMARKS[request["benchmark"]]
    size = type(benchmark.full)(**request["size"])
    case = next(case for case in benchmark.cases(size) if case.name == request["case"])
    print(json.dumps(asdict(in_process(benchmark, size, case, request["side"], Path(request["folder"])))))


if __name__ == "__main__":
    main()
