"""Benchmarks: ours beside a plain textbook implementation, on the same inputs, with the results compared."""

from typing import Any

from fedprotip.bench import average, clients, evaluate, extract, merge, project, resume, round, task, tasks
from fedprotip.bench.base import Benchmark

_MODULES = (extract, project, merge, average, round, task, evaluate, clients, tasks, resume)
BENCHMARKS: dict[str, Benchmark[Any]] = {module.BENCHMARK.name: module.BENCHMARK for module in _MODULES}
"""By name, in the order in which a run goes through them."""
