"""What a run measured: `summary.json`, under stable keys that other tools read, `geometry.json` and `memory.json`."""

from collections.abc import Container, Sequence
from typing import Annotated, Literal

from pydantic import Field, model_validator

from fedprotip.settings.schema import CLIENTS, TASKS
from fedprotip.store.records import (
    Amount,
    BadRecord,
    Count,
    Kind,
    Number,
    Part,
    Percent,
    Points,
    Reason,
    Record,
    Share,
    mean_of,
)

MODES = ("single", "aware", "agnostic", "batch64")  # first what a user gets: one sample, task unknown


def standing_for(mode: str, known: Container[str]) -> str:
    """The mode whose figure stands under `mode`: who looks for no task answers a single sample agnostically."""
    return "agnostic" if mode == "single" and mode not in known else mode


class Routing(Part):
    """Share of samples that were sent to a right task, by the configured router; nothing where there is none."""

    single: Share | None = None
    batch64: Share | None = None
    single_by_task: list[Share | None] = []  # None where no test samples of a task were left; so in all that follows
    batch64_by_task: list[Share | None] = []

    @property
    def shares(self) -> dict[str, float]:
        found = {"single": self.single, "batch64": self.batch64}
        return {mode: share for mode, share in found.items() if share is not None}

    @property
    def by_task(self) -> dict[str, list[Number]]:
        found = {"single": self.single_by_task, "batch64": self.batch64_by_task}
        return {mode: shares for mode, shares in found.items() if shares}


class RoutingOverTasks(Part):
    """Shares of samples that the configured router sent to a right task, from the evaluations after all tasks.

    Entry i of each is about task i: three things that "routing at each task" may mean. None where an evaluation is not
    recorded. The by-task shares of every evaluation and router are in events.jsonl.
    """

    at_end: list[Share | None] = []  # samples of that task, after the last task
    so_far: list[Share | None] = []  # right after that task: samples of all tasks up to it, each task counted alike
    newest: list[Share | None] = []  # right after that task: its own samples

    @classmethod
    def of(cls, rows: Sequence[Sequence[Number] | None]) -> "RoutingOverTasks":
        """`rows`: after each task the shares by task; None where nothing is known."""
        unknown: Sequence[Number] = [None] * len(rows)
        return cls(
            at_end=list(rows[-1] or unknown),
            so_far=[mean_of(row) if row else None for row in rows],
            newest=[row[-1] if row else None for row in rows],
        )


class RouterFigures(Part):
    """Accuracy (%) and share of right decisions of one way to find the task."""

    single: Percent | None = None
    routing_single: Share | None = None
    batch64: Percent | None = None
    routing_batch64: Share | None = None


class Bin(Part):
    """Answers of about the same confidence, and the share of them that is right."""

    count: Count
    confidence: Share
    accuracy: Share


class Confidence(Part):
    """How sure the answers of mode single are, and whether rightly so."""

    bins: list[Bin] = []
    ece: Share | None = None
    temperature: Amount | None = None


class Sweeps(Part):
    """Accuracy (%) of every way over the size of a group, and over the share of its samples that are of one task."""

    sizes: list[Count] = []
    size: dict[str, list[Percent | None]] = {}
    purities: list[Share] = []
    purity: dict[str, dict[str, list[Percent | None]]] = {}

    @model_validator(mode="after")
    def _lines_are_whole(self) -> "Sweeps":
        for way, values in self.size.items():
            if len(values) != len(self.sizes):
                raise ValueError(f"size.{way} has {len(values)} numbers for {len(self.sizes)} sizes")
        for way, rules in self.purity.items():
            for rule, values in rules.items():
                if len(values) != len(self.purities):
                    raise ValueError(f"purity.{way}.{rule} has {len(values)} numbers for {len(self.purities)} purities")
        return self


class Failures(Part):
    count: Count = 0
    by_reason: dict[Reason, Count] = {}


class Privacy(Part):
    """(ε, δ) of all noisy sums that the server saw, by which any one client's part in them is hidden."""

    epsilon: Amount
    delta: Share
    sums: Count


class Summary(Record):
    """`summary.json`; accuracies in %, forgetting in percentage points."""

    method: Kind
    scenario: Kind
    tasks: Annotated[int, Field(strict=True, ge=1, le=TASKS)]
    clients: Annotated[int, Field(strict=True, ge=0, le=CLIENTS)]
    seed: Annotated[int, Field(strict=True, ge=0)]
    accuracy: dict[str, Percent]
    forgetting: dict[str, Points]
    routing: Routing = Routing()
    routing_over_tasks: dict[str, RoutingOverTasks] = {}  # mode → readings of the configured router
    router: Kind = ""  # the way that answers: of `routers`, as evidence chose or method.router says; empty without any
    routers: dict[str, RouterFigures] = {}
    confidence: Confidence = Confidence()
    unknown: dict[str, Number] = {}
    sweeps: Sweeps = Sweeps()
    drift: list[list[Number]] = []
    matrix: dict[str, list[list[Percent | None]]]
    confusion: dict[str, list[list[Count]]] = {}
    bytes: dict[Literal["up", "down"], dict[str, Count]]  # kind → of all clients together
    samples: dict[str, Count] = {}  # "raw", "synthetic" → samples of the past kept at the end, of all clients together
    seconds: dict[str, Amount] = {}
    cpu_seconds: dict[str, Amount] = {}  # processor time of the run's own process, by phase; older runs have none
    peak_rss_mb: Amount | None = None
    peak_gpu_mb: Amount | None = None
    failures: Failures = Failures()
    privacy: Privacy | None = None  # where noise promises any

    @model_validator(mode="after")
    def _rows_are_long_enough(self) -> "Summary":
        for mode, rows in self.matrix.items():
            for i, row in enumerate(rows):
                if len(row) <= i:
                    raise BadRecord(f"matrix.{mode} has {len(row)} numbers after task {i + 1}.")
        for mode, counts in self.confusion.items():
            if any(len(row) != len(counts) for row in counts):
                raise BadRecord(f"confusion.{mode} is not square.")
        return self

    @property
    def modes(self) -> list[str]:
        """Modes of this run in the order of the report."""
        return [mode for mode in MODES if mode in self.accuracy]

    @property
    def learned(self) -> int:
        """Tasks learned so far: all of them once the run is finished."""
        return min((len(rows) for rows in self.matrix.values()), default=0)

    def over_tasks(self, mode: str) -> list[Number]:
        """Average accuracy over the tasks seen so far, after each task (the paper's Fig. 3)."""
        return [mean_of(row[: i + 1]) for i, row in enumerate(self.matrix.get(mode, []))]

    @property
    def unmeasured(self) -> list[int]:
        """Tasks that were not evaluated after the last one: there were no test samples of theirs."""
        last = next((rows[-1] for rows in self.matrix.values() if rows), [])
        return [task for task, value in enumerate(last) if value is None]


class Memory(Record):
    """`memory.json`: phase → peak in each task, MiB, of this process and of the GPU (the paper's Fig. 7)."""

    rss: dict[str, list[Amount | None]] = {}
    gpu: dict[str, list[Amount | None]] = {}

    def peaks(self, where: Literal["rss", "gpu"]) -> dict[str, float]:
        """Phase → peak of all tasks."""
        known = {p: [mb for mb in mbs if mb is not None] for p, mbs in getattr(self, where).items()}
        return {phase: max(mbs) for phase, mbs in known.items() if mbs}


class Bounds(Part, allow_inf_nan=True):
    taskwise: list[Number] = []
    forgetting: list[Number] = []
    taskwise_canonical: list[Number] = []
    forgetting_canonical: list[Number] = []
    ft_loss_canonical: Number = None
    round_increase: list[list[Number]] = []
    drift: list[Number] = []


class Measured(Part, allow_inf_nan=True):
    """What the bounds are about, by task, and by new and old task (rows and columns)."""

    gradient_sq_mean: list[Number] = []
    loss_increase: list[Number] = []
    round_increase: list[list[Number]] = []  # Γ of Eq. 24: the largest of the measured rounds
    round_increase_mean: list[list[Number]] = []
    drift: list[Number] = []  # Lemma 3 after the last step of a round: of the client that came nearest to its bound


class Geometry(Record, allow_inf_nan=True):
    """`geometry.json`: the measured ρ̂ and β̂ of Assumptions 4 and 5, and the bounds they give, which may be infinite."""

    threshold: Number = None
    rho: list[Number]
    rho_mean: list[Number]
    beta: list[list[Number]]
    beta_bar: Number = None
    gradient_bound_G2: Number = None
    smoothness_L: Number = None
    canonical_lr: Number = None
    ft_loss: Number = None
    bounds: Bounds = Bounds()
    measured: Measured = Measured()

    @model_validator(mode="after")
    def _tables_are_square(self) -> "Geometry":
        measured, known, size = self.measured, self.bounds, len(self.beta)
        if any(len(row) > size for row in self.beta):
            raise BadRecord("beta has a row that is too long.")
        for rows in (measured.round_increase, measured.round_increase_mean, known.round_increase):
            if rows and [len(row) for row in rows] != [size] * size:
                raise BadRecord(f"round_increase is not a table of {size} by {size} tasks.")
        return self

    def pairs(self, rows: list[list[Number]] | None = None) -> dict[tuple[int, int], Number]:
        """(new task, old task) → a figure of theirs, for pairs whose rounds were measured; the increase by default."""
        increase = self.measured.round_increase
        known = [(t, tau) for t, row in enumerate(increase) for tau in range(t) if row[tau] is not None]
        values = increase if rows is None else rows
        return {(t, tau): values[t][tau] if values else None for t, tau in known}
