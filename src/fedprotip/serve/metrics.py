"""Counters of a server as Prometheus reads them."""

import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
SIZES = (1, 2, 4, 8, 16, 32, 64)


class Histogram:
    """How many values lie below each bound, and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds, self._counts, self._sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        self._counts[sum(value > bound for bound in self._bounds)] += 1
        self._sum += value

    def lines(self, name: str) -> Iterator[str]:
        below = list(accumulate(self._counts))
        for bound, count in zip((*self._bounds, "+Inf"), below, strict=True):
            yield f'{name}_bucket{{le="{bound}"}} {count}'
        yield f"{name}_sum {self._sum:.6f}"
        yield f"{name}_count {below[-1]}"


class Metrics:
    """What has happened so far; every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, int]] = Counter()
        self._latency, self._sizes, self._forward = Histogram(SECONDS), Histogram(SIZES), Histogram(SECONDS)
        self._reloads: Counter[str] = Counter(loaded=0, failed=0)

    def request(self, path: str, status: int, seconds: float) -> None:
        with self._lock:
            self._requests[path, status] += 1
            if path == "/predict":
                self._latency.add(seconds)

    def batch(self, images: int, seconds: float) -> None:
        with self._lock:
            self._sizes.add(images)
            self._forward.add(seconds)

    def reload(self, outcome: str) -> None:
        with self._lock:
            self._reloads[outcome] += 1

    def text(self, gauges: Mapping[str, float]) -> str:
        """The exposition format, version 0.0.4; `gauges`: what is so now."""
        with self._lock:
            lines = [
                "# HELP fedprotip_requests_total Requests, by path and status.",
                *_type("requests_total", "counter"),
            ]
            for (path, status), count in sorted(self._requests.items()):
                lines.append(f'fedprotip_requests_total{{path="{path}",status="{status}"}} {count}')
            for name, about, histogram in (
                ("request_seconds", "Seconds from a request for answers to its end.", self._latency),
                ("batch_images", "Images of a forward pass.", self._sizes),
                ("batch_seconds", "Seconds of a forward pass, answers included.", self._forward),
            ):
                lines += [f"# HELP fedprotip_{name} {about}", *_type(name, "histogram")]
                lines += histogram.lines(f"fedprotip_{name}")
            lines += ["# HELP fedprotip_reloads_total Newer runs, loaded or not.", *_type("reloads_total", "counter")]
            lines += [
                f'fedprotip_reloads_total{{outcome="{name}"}} {count}' for name, count in sorted(self._reloads.items())
            ]
        for name, value in gauges.items():
            lines += [*_type(name, "gauge"), f"fedprotip_{name} {value:g}"]
        return "\n".join(lines) + "\n"


def _type(name: str, kind: str) -> list[str]:
    return [f"# TYPE fedprotip_{name} {kind}"]
