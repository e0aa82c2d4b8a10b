"""Tables of a run as plain rows, their CSV files, and mean ± std over seeds.

Tasks are counted from 1 in every table.
"""

import csv
import io
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from fedprotip.errors import RunError
from fedprotip.report.files import save
from fedprotip.report.rundata import RunData
from fedprotip.report.text import setting_text
from fedprotip.store.records import Number, mean_of
from fedprotip.store.results import MODES, Memory, RouterFigures, standing_for

Cell = str | int | float | None

QUIET = frozenset(
    {
        *("data.root", "data.workers", "evaluate.batch", "evaluate.examples"),
        *("run.out", "run.engine", "run.workers", "run.device", "run.threads"),
        *("run.checkpoint", "run.cache_mb", "run.state_mb", "run.track"),
    }
)
"""Where things are and how fast it goes: no result depends on them."""
# Settings that say where or how often something is written, not what is computed.
BOOKKEEPING = {
    *("run.seed", "run.out", "run.checkpoint", "run.state_mb", "run.geometry"),
    *("data.root", "evaluate.examples", "run.track"),
}


@dataclass(frozen=True)
class Table:
    """Rows under named columns; the name is also the name of the CSV file."""

    name: str
    columns: list[str]
    rows: list[list[Cell]]


def headline(run: RunData) -> Table:
    """Accuracy (%) and forgetting (percentage points) of each mode."""
    summary = run.summary
    rows: list[list[Cell]] = [[m, summary.accuracy[m], summary.forgetting.get(m)] for m in summary.modes]
    return Table("headline", ["mode", "accuracy", "forgetting"], rows)


def matrix(run: RunData, mode: str) -> Table:
    """Accuracy (%) on each task after each task; empty where the task had not come yet."""
    rows = run.summary.matrix[mode]
    columns = ["after_task", *(f"task_{t + 1}" for t in range(len(rows)))]
    later = [[None] * (len(rows) - i - 1) for i in range(len(rows))]
    return Table(f"matrix_{mode}", columns, [[i + 1, *rows[i][: i + 1], *later[i]] for i in range(len(rows))])


def routing(run: RunData) -> Table:
    """Share of samples sent to a right task, configured router: at the end by task, and right after each task.

    so_far: of all tasks up to that one. newest: of that task alone.
    """
    parts: dict[str, Sequence[Number]] = dict(run.summary.routing.by_task)
    for reading in ("so_far", "newest"):
        for mode, found in run.summary.routing_over_tasks.items():
            parts[f"{mode}_{reading}"] = getattr(found, reading)
    rows = [[t + 1, *values] for t, values in enumerate(zip_longest(*parts.values()))]
    return Table("routing", ["task", *parts], rows)


def routing_after(run: RunData) -> Table:
    """Share of samples sent to a right task, by every router, of each task after each task."""
    rows: list[list[Cell]] = [
        [router, mode, event.task + 1, task, share]
        for event in run.tasks
        for router, modes in event.routing.items()
        for mode, by_task in modes.items()
        for task, share in enumerate(by_task, 1)
    ]
    return Table("routing_after", ["router", "mode", "after_task", "task", "share"], rows)


def routers(run: RunData) -> Table:
    """Accuracy (%) and share of right decisions of every router."""
    columns = list(RouterFigures.model_fields)
    rows: list[list[Cell]] = [[name, *router.model_dump().values()] for name, router in run.summary.routers.items()]
    return Table("routers", ["router", *columns], rows)


def sweep_size(run: RunData) -> Table:
    """Accuracy (%) of every way when so many samples of one task come together."""
    sweeps = run.summary.sweeps
    rows: list[list[Cell]] = [
        [way, size, value]
        for way, values in sweeps.size.items()
        for size, value in zip(sweeps.sizes, values, strict=True)
    ]
    return Table("sweep_size", ["router", "size", "accuracy"], rows)


def sweep_purity(run: RunData) -> Table:
    """Accuracy (%) of every way and rule when only a share of a group is of one task."""
    sweeps = run.summary.sweeps
    rows: list[list[Cell]] = [
        [way, rule, purity, value]
        for way, rules in sweeps.purity.items()
        for rule, values in rules.items()
        for purity, value in zip(sweeps.purities, values, strict=True)
    ]
    return Table("sweep_purity", ["router", "rule", "purity", "accuracy"], rows)


def confidence(run: RunData) -> Table:
    """Answers of mode single by confidence: how many, their mean confidence, the share that is right."""
    rows: list[list[Cell]] = [[line.count, line.confidence, line.accuracy] for line in run.summary.confidence.bins]
    return Table("confidence", ["count", "confidence", "accuracy"], rows)


def unknown(run: RunData) -> Table:
    """How well inputs of a task that was never learned are told from known ones."""
    return Table("unknown", ["score", "auroc"], [[score, value] for score, value in run.summary.unknown.items()])


def drift(run: RunData) -> Table:
    """Distance of class means from their statistics (standard deviations), by task after each task."""
    rows = run.summary.drift
    tasks = max(map(len, rows), default=0)
    later = [[None] * (tasks - len(row)) for row in rows]
    columns = ["after_task", *(f"task_{t + 1}" for t in range(tasks))]
    return Table("drift", columns, [[len(row), *row, *more] for row, more in zip(rows, later, strict=True)])


def ranks(run: RunData) -> Table:
    """Cumulative rank R of each layer's subspace after each task, and the layer's input width d."""
    rows: list[list[Cell]] = [
        [event.task + 1, layer, rank, event.dims[layer]] for event in run.tasks for layer, rank in event.ranks.items()
    ]
    return Table("ranks", ["task", "layer", "rank", "dim"], rows)


def traffic(run: RunData) -> Table:
    """Bytes per task, direction and kind, over all clients."""
    rows: list[list[Cell]] = [
        [task + 1, direction, kind, count] for (task, direction, kind), count in sorted(run.traffic.items())
    ]
    return Table("bytes", ["task", "direction", "kind", "bytes"], rows)


def seconds(run: RunData) -> Table:
    """Seconds per task and phase."""
    rows: list[list[Cell]] = [
        [event.task + 1, phase, spent] for event in run.tasks for phase, spent in event.seconds.items()
    ]
    return Table("seconds", ["task", "phase", "seconds"], rows)


def geometry(run: RunData) -> Table:
    """ρ̂ of each task, and what was measured beside its bound (Eq. 13, 14, 15, 31, Lemma 3)."""
    if run.geometry is None:
        return Table("geometry", [], [])
    measured, bounds = run.geometry.measured, run.geometry.bounds
    parts: dict[str, list[Number]] = {
        "rho_min": run.geometry.rho,
        "rho_mean": run.geometry.rho_mean,
        "gradient_sq_mean": measured.gradient_sq_mean,
        "bound_eq13": bounds.taskwise,
        "bound_eq15": bounds.taskwise_canonical,
        "loss_increase": measured.loss_increase,
        "bound_eq14": bounds.forgetting,
        "bound_eq31": bounds.forgetting_canonical,
        "drift_sq": measured.drift,
        "bound_lemma3": bounds.drift,
    }
    rows = [[t + 1, *values] for t, values in enumerate(zip_longest(*parts.values()))]
    return Table("geometry", ["task", *parts], rows)


def geometry_rounds(run: RunData) -> Table:
    """β̂ of every new and old task, and the loss increase in one round (Eq. 24) beside its bound (Eq. 25)."""
    columns, found = ["task", "old_task", "beta", "increase_mean", "increase_largest", "bound_eq25"], run.geometry
    if found is None:
        return Table("geometry_rounds", columns, [])
    measured = found.measured
    tables = (found.beta, measured.round_increase_mean, measured.round_increase, found.bounds.round_increase)
    parts = [found.pairs(rows) for rows in tables]
    rows: list[list[Cell]] = [[t + 1, tau + 1, *(part[t, tau] for part in parts)] for t, tau in found.pairs()]
    return Table("geometry_rounds", columns, rows)


def memory(run: RunData) -> Table:
    """Peak memory (MiB) per task and phase."""
    found = run.memory or Memory()
    both = {(task + 1, phase) for mbs in (found.rss, found.gpu) for phase, by in mbs.items() for task in range(len(by))}

    def mb(by_phase: dict[str, list[Number]], task: int, phase: str) -> Number:
        return dict(enumerate(by_phase.get(phase, []), start=1)).get(task)

    rows: list[list[Cell]] = [
        [task, phase, mb(found.rss, task, phase), mb(found.gpu, task, phase)] for task, phase in sorted(both)
    ]
    return Table("memory", ["task", "phase", "rss_mb", "gpu_mb"], rows)


def samples(run: RunData) -> Table:
    """Samples of the past that are kept for learning after each task, of all clients together."""
    rows: list[list[Cell]] = [
        [event.task + 1, kind, count] for event in run.tasks for kind, count in event.samples.items()
    ]
    return Table("samples", ["task", "kind", "samples"], rows)


def all_tables(run: RunData) -> list[Table]:
    """Every table of a run that has rows."""
    tables = [headline(run), *(matrix(run, mode) for mode in MODES if mode in run.summary.matrix)]
    tables += [routing(run), routing_after(run), routers(run)]
    tables += [sweep_size(run), sweep_purity(run), confidence(run), unknown(run)]
    tables += [drift(run), ranks(run), traffic(run), samples(run), seconds(run), memory(run)]
    tables += [geometry(run), geometry_rounds(run)]
    return [table for table in tables if table.rows]


def csv_text(table: Table) -> str:
    """One table as CSV; numbers keep full precision, an empty cell is "not measured"."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(table.columns)
    writer.writerows(table.rows)
    return text.getvalue()


def write_csv(table: Table, folder: Path, name: str) -> Path:
    return save(folder, name, csv_text(table))


@dataclass(frozen=True)
class Stat:
    """Mean and sample standard deviation; None when there is no value, or only one."""

    mean: Number
    std: Number

    @classmethod
    def of(cls, values: Iterable[Number]) -> "Stat":
        known = [value for value in values if value is not None and value == value]
        return cls(mean_of(known), statistics.stdev(known) if len(known) > 1 else None)


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed."""

    label: str
    method: str
    runs: list[RunData]
    accuracy: dict[str, Stat]
    forgetting: dict[str, Stat]
    bytes: dict[str, Stat]
    seconds: Stat
    memory: dict[str, Stat]  # phase → peak, MiB
    samples: dict[str, Stat]  # "raw", "synthetic" → kept of the past; empty where nothing is

    @property
    def seeds(self) -> list[int]:
        return [run.summary.seed for run in self.runs]

    def curve(self, mode: str) -> list[Stat]:
        """Average accuracy over the tasks seen so far, after each task, over seeds; in `single` as it can."""
        mode = standing_for(mode, self.accuracy)
        curves = [run.summary.over_tasks(mode) for run in self.runs if mode in run.summary.matrix]
        return [Stat.of(values) for values in zip(*curves, strict=False)]

    def as_row(self) -> dict[str, Any]:
        """Plain values for JSON and for printing."""

        return {
            "label": self.label,
            "method": self.method,
            "n": len(self.runs),
            "seeds": self.seeds,
            "accuracy": {mode: asdict(stat) for mode, stat in self.accuracy.items()},
            "forgetting": {mode: asdict(stat) for mode, stat in self.forgetting.items()},
            "bytes": {way: asdict(stat) for way, stat in self.bytes.items()},
            "seconds": asdict(self.seconds),
            "samples": {kind: asdict(stat) for kind, stat in self.samples.items()},
        }


def aggregate(runs: list[RunData]) -> list[Group]:
    """Group runs by label, in the order in which the labels first occur."""
    for run in runs:
        if not run.finished:
            raise RunError(f"{run.folder} is not finished and cannot be compared; resume it first.")
    members: dict[str, list[RunData]] = {}
    for run, label in zip(runs, labels(runs), strict=True):
        members.setdefault(label, []).append(run)
    return [_group(label, sorted(group, key=lambda r: r.summary.seed)) for label, group in members.items()]


def labels(runs: list[RunData], leave_out: frozenset[str] = frozenset()) -> list[str]:
    """A name for each run: its method, and the settings in which runs of that method differ."""
    return [_label(run, [r for r in runs if r.summary.method == run.summary.method], leave_out) for run in runs]


def other_differences(runs: list[RunData]) -> list[str]:
    """Settings outside [method] that differ between methods and that not every label mentions."""
    methods = {run.summary.method for run in runs}
    told = [set(_differing([run for run in runs if run.summary.method == method])) for method in methods]
    return [key for key in _differing(runs) if key not in set.intersection(*told) and not key.startswith("method.")]


def comparison(groups: list[Group], way: Mapping[str, Mapping[str, float]]) -> Table:
    """One row per group, flat columns; `way`: label → mode → how far from FedAvg to joint training, per cent."""
    modes = [mode for mode in MODES if any(mode in group.accuracy for group in groups)]
    kinds = kinds_of_samples(groups)
    ways = [mode for mode in MODES if any(mode in found for found in way.values())]
    nothing = Stat(None, None)
    columns, rows = ["label", "method", "n", "seeds"], []
    for kind in ("accuracy", "forgetting"):
        columns += [f"{kind}_{mode}_{part}" for mode in modes for part in ("mean", "std")]
    others = ["bytes_up", "bytes_down", "seconds", *(f"samples_{kind}" for kind in kinds)]
    columns += [f"{name}_{part}" for name in others for part in ("mean", "std")]
    columns += [f"way_{mode}" for mode in ways]
    for group in groups:
        stats = [group.accuracy.get(mode, nothing) for mode in modes]
        stats += [group.forgetting.get(mode, nothing) for mode in modes]
        stats += [group.bytes["up"], group.bytes["down"], group.seconds]
        stats += [group.samples.get(kind, nothing) for kind in kinds]
        row: list[Cell] = [group.label, group.method, len(group.runs), " ".join(map(str, group.seeds))]
        row += [value for stat in stats for value in (stat.mean, stat.std)]
        rows.append(row + [way.get(group.label, {}).get(mode) for mode in ways])
    return Table("comparison", columns, rows)


def kinds_of_samples(groups: list[Group]) -> list[str]:
    """Kinds of samples that some of these methods keep."""
    return sorted({kind for group in groups for kind in group.samples})


def _group(label: str, runs: list[RunData]) -> Group:
    modes = [mode for mode in MODES if any(mode in run.summary.accuracy for run in runs)]
    return Group(
        label=label,
        method=runs[0].summary.method,
        runs=runs,
        accuracy={m: Stat.of(run.summary.accuracy.get(m) for run in runs) for m in modes},
        forgetting={m: Stat.of(run.summary.forgetting.get(m) for run in runs) for m in modes},
        bytes={
            "up": Stat.of(sum(run.summary.bytes["up"].values()) for run in runs),
            "down": Stat.of(sum(run.summary.bytes["down"].values()) for run in runs),
        },
        seconds=Stat.of(run.summary.seconds.get("total") for run in runs),
        memory={
            phase: Stat.of(run.memory.peaks("rss").get(phase) for run in runs if run.memory)
            for phase in dict.fromkeys(phase for run in runs if run.memory for phase in run.memory.peaks("rss"))
        },
        samples={
            kind: Stat.of(run.summary.samples.get(kind) for run in runs)
            for kind in sorted({kind for run in runs for kind in run.summary.samples})
        },
    )


def _label(run: RunData, peers: list[RunData], leave_out: frozenset[str]) -> str:
    keys = [key for key in _differing(peers) if key not in leave_out]
    fields = [key.partition(".")[2] for key in keys]
    parts = [run.summary.method]
    for key, field in zip(keys, fields, strict=True):
        name = field if fields.count(field) == 1 else key
        parts.append(f"{name}={setting_text(run.setting(key, '–'))}")
    return " ".join(parts)


def _differing(runs: list[RunData]) -> list[str]:
    keys = {f"{s}.{k}" for run in runs for s, t in run.settings.items() for k in t}
    varying = [key for key in sorted(keys - BOOKKEEPING) if len({repr(run.setting(key)) for run in runs}) > 1]
    return [key for key in varying if key != "method.name"]
