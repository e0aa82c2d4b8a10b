"""What a benchmark is: cases, each done our way and the textbook's way on the same inputs, and figures to reach."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

Side = Callable[[], Any]
"""One way to do the work of a case; what it returns is compared with the other ways."""


@dataclass(frozen=True)
class Size:
    """How large a benchmark is; every benchmark adds its own fields."""

    repeats: int = 5


@dataclass(frozen=True)
class RunSize(Size):
    """A benchmark made of runs at scale cpu, whose settings can be changed."""

    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Agreement:
    """How far apart the results of a case are, and how far they may be."""

    what: str
    error: float
    tolerance: float

    @property
    def holds(self) -> bool:
        return self.error <= self.tolerance


@dataclass(frozen=True)
class Case:
    """The same work done by several sides: `ours`, `textbook`, and others that a figure needs."""

    name: str
    sides: Callable[[Path], dict[str, Side]]  # builds all inputs, on files that `prepare` left in the folder
    agree: Callable[[dict[str, Any]], Agreement]  # from what a call of each side returned
    prepare: Callable[[Path], object] = lambda folder: None
    memory: tuple[str, ...] = ()  # sides whose peak memory is measured, each in a process of its own
    apart: bool = False  # every call in a process of its own; results are JSON, with the seconds if they choose
    least: float = 0.2  # seconds that short calls are repeated for; 0: one call, for sides that change state


@dataclass(frozen=True)
class Measured:
    """What came out of a case."""

    case: str
    seconds: dict[str, float]  # side → median of one call
    peaks: dict[str, float]  # side → MiB, where measured
    results: dict[str, Any]  # side → what its first call returned, or of a case `apart` the call in the middle
    agreement: Agreement

    def ratio(self, above: str = "textbook", below: str = "ours") -> float:
        return self.seconds[above] / self.seconds[below]


@dataclass(frozen=True)
class Target:
    """A figure by name, the bar it has to reach, and the goal beyond it."""

    figure: str
    better: Literal["higher", "lower"] = "higher"
    bar: float | None = None
    goal: float | None = None

    def reached(self, value: float, limit: float | None) -> bool | None:
        """Whether a value is at least (or at most) a limit; None where there is none."""
        if limit is None:
            return None
        return value >= limit if self.better == "higher" else value <= limit


BOTH = ("ours", "textbook")
FASTER = Target("times faster than the textbook")


@dataclass(frozen=True)
class Row:
    """One line of a report: a case, what was measured, and one figure with its bar and goal."""

    case: str
    figure: str
    value: float
    better: str
    bar: float | None
    goal: float | None
    met: bool | None
    goal_met: bool | None
    ours_seconds: float | None
    textbook_seconds: float | None
    speedup: float | None
    ours_peak_mb: float | None
    textbook_peak_mb: float | None
    agreement: dict[str, Any]


def row(measured: Measured, target: Target = FASTER, value: float | None = None) -> Row:
    """A figure of one case; without a value it is how much faster ours is than the textbook."""
    seconds, peaks = measured.seconds, measured.peaks
    speedup = measured.ratio() if {"ours", "textbook"} <= seconds.keys() else None
    value = speedup if value is None else value
    assert value is not None
    return Row(
        measured.case,
        target.figure,
        value,
        target.better,
        target.bar,
        target.goal,
        target.reached(value, target.bar),
        target.reached(value, target.goal),
        seconds.get("ours"),
        seconds.get("textbook"),
        speedup,
        peaks.get("ours"),
        peaks.get("textbook"),
        asdict(measured.agreement) | {"holds": measured.agreement.holds},
    )


@dataclass(frozen=True)
class Machine:
    """Where it was measured: ratios depend on it."""

    cpu: str
    cores: int
    threads: int  # of torch
    gflops: float  # of a large float32 matrix product, 10⁹ operations a second
    torch: str

    @property
    def flops(self) -> float:
        return self.gflops * 1e9


S = TypeVar("S", bound=Size)


@dataclass(frozen=True)
class Benchmark(Generic[S]):
    """A benchmark of the command `fedprotip bench`."""

    name: str
    title: str
    full: S
    quick: S
    cases: Callable[[S], list[Case]]
    rows: Callable[[list[Measured], Machine, S], list[Row]]


@dataclass(frozen=True)
class Report:
    """The result of a benchmark; `to_json` has stable keys."""

    name: str
    title: str
    quick: bool
    machine: Machine
    size: Size
    rows: list[Row]

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "machine": asdict(self.machine),
            "settings": {"quick": self.quick, **asdict(self.size)},
            "results": [asdict(line) for line in self.rows],
        }

    @property
    def disagreements(self) -> list[Row]:
        return [line for line in self.rows if not line.agreement["holds"]]
