"""The numbers that the paper publishes, with the protocol behind each.

    find(table=1, dataset="cifar100", alpha=0.5, method="fedprotip", mode="batch64", metric="acc")[0].value   # 86.0

The data are in published.toml beside this file.
"""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files
from itertools import product
from typing import Any

from fedprotip.errors import UsageError, nearest
from fedprotip.paper.finished import CellSummary

Figure = tuple[str, str, str]
"""Metric, mode, and the part that a figure is about: a task, a kind of message, a phase."""
GAIN = "trained − frozen"
"""What training adds to class statistics (`report/gains.py`); not in the paper."""
DIGITS = {"acc": 2, "ft": 2, GAIN: 2}
"""Digits that the paper prints; of all other metrics three."""
ROUTING_AT_END = "routing at the end"
"""By task, after the last one; "routing" is over all tasks so far, right after each."""
DOMAIN_ORDERS = {
    1: ["clipart", "real", "painting", "sketch", "infograph", "quickdraw"],
    2: ["clipart", "infograph", "painting", "quickdraw", "real", "sketch"],
}
"""The two orders of DomainNet (Tables 12 and 13)."""
EPOCHS = 5
"""Local epochs in a round, everywhere in the paper."""
PREFIX = {"resnet18": "layer2", "vit_b16": "block5"}
"""Last stage of a pretrained backbone that is frozen after the first task (appendix E.2)."""


@dataclass(frozen=True)
class Published:
    """One number of the paper and the protocol it belongs to. Tasks count from 1, as in the paper."""

    table: int
    dataset: str
    tasks: int
    partition: str  # iid or dirichlet
    clients: int
    fraction: float
    backbone: str
    pretrained: bool
    mode: str  # aware, agnostic, batch64; empty where the number belongs to no mode
    metric: str  # acc, ft (%), routing (share), mib (per client and task), hours
    batch: int
    overlap: int
    sketch: str  # columns s of the sketch, "d" for the layer's width; empty without
    method: str
    value: float
    alpha: float | None = None  # Dirichlet α; None for iid
    threshold: float | None = None  # ε, for methods that have one
    m_s: int | None = None  # sampled columns, for methods that have them
    order: int | None = None  # which of the two orders of DomainNet
    task: int | None = None  # the single task that the number is about
    kind: str = ""  # mib: kind of message; hours: phase
    std: float | None = None
    surplus: float = 0.0  # part of the value that is no part of the method
    note: str = ""

    @property
    def figure(self) -> Figure:
        """What the number measures, in the terms of `figures`."""
        return self.metric, self.mode, " ".join(filter(None, (self.kind, f"task {self.task}" if self.task else "")))

    @property
    def protocol(self) -> str:
        """How the number was obtained, in a few words, with what the paper contradicts."""
        order = f" order {self.order}" if self.order else ""
        weights = "pretrained" if self.pretrained else "from scratch"
        stage = frozen(self.backbone, self.pretrained)
        words = [
            f"Table {self.table}: {self.dataset} ×{self.tasks}{order}",
            _partition(self.partition, self.alpha),
            f"{self.clients} clients",
            f"{self.backbone} {weights}",
            "nothing frozen" if stage == "none" else f"frozen to {stage} after the first task",
            f"{rounds(self.dataset, self.backbone)} × {EPOCHS} epochs",
            f"batch {self.batch}",
            *([f"ε {self.threshold}"] if self.threshold else []),
            *([self.note] if self.note else []),
        ]
        return ", ".join(words)


FIELDS = frozenset(field.name for field in fields(Published))


@cache
def published() -> tuple[Published, ...]:
    """All records of published.toml, in the order of the paper."""
    raw = tomllib.loads((files("fedprotip.paper") / "published.toml").read_text(encoding="utf-8"))
    return tuple(_completed(record, raw) for block in raw["block"] for record in _records(block))


def find(**wanted: Any) -> list[Published]:
    """Records whose fields have these values; a tuple or list means any of its values.

    >>> find(table=3, clients=20, method="fot", metric="acc")[0].value
    37.35
    """
    for name in wanted:
        if name not in FIELDS:
            raise UsageError(f"{name!r} is not a field of the published numbers; {nearest(name, FIELDS)}.")
    return [record for record in published() if _matches(vars(record), wanted)]


def rounds(dataset: str, backbone: str) -> int:
    """Global rounds of a task in the paper (appendices D.1 and E.3)."""
    return 20 if dataset == "domainnet" or backbone == "vit_b16" else 50


def frozen(backbone: str, pretrained: bool) -> str:
    """Up to which stage a backbone is frozen after the first task; one from scratch is not."""
    return PREFIX.get(backbone, "none") if pretrained else "none"


def figures(summary: CellSummary) -> dict[Figure, float]:
    """What a finished cell of `fedprotip reproduce` measured, under the same names as the published numbers."""
    found: dict[Figure, float] = {}
    for metric, values in (("acc", summary.accuracy), ("ft", summary.forgetting)):
        found |= {(metric, mode, ""): value for mode, value in values.items()}
    for mode, reading in summary.routing_over_tasks.items():  # Table 14 fits so_far (docs/paper-map.md)
        for metric, shares in (("routing", reading.so_far), (ROUTING_AT_END, reading.at_end)):
            known = [(task, share) for task, share in enumerate(shares, 1) if share is not None]
            found |= {(metric, mode, f"task {task}"): share for task, share in known}
    for kind, by_task in summary.mib_by_task.items():
        found |= {("mib", "", f"{kind} task {task}"): size for task, size in enumerate(by_task, 1)}
        found["mib", "", kind] = sum(by_task) / len(by_task)
    found |= {("hours", "", phase): seconds / 3600 for phase, seconds in summary.seconds.items()}
    peaks = {"rss": summary.peak_rss_mb, "gpu": summary.peak_gpu_mb}
    peaks |= {f"rss {phase}": mib for phase, mib in summary.memory.peaks("rss").items()}
    peaks |= {f"gpu {phase}": mib for phase, mib in summary.memory.peaks("gpu").items()}
    found |= {("memory", "", f"{name} MiB"): peak for name, peak in peaks.items() if peak is not None}
    if summary.geometry:
        measured = {("rho", "", f"task {task}"): value for task, value in enumerate(summary.geometry.rho_mean, 1)}
        measured["beta", "", "mean"] = summary.geometry.beta_bar
        found |= {figure: value for figure, value in measured.items() if value is not None}
    return found


def _partition(partition: str, alpha: float | None) -> str:
    return "iid" if partition == "iid" else f"α {alpha}"


def _records(block: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The numbers of one block with what its fields, rows and columns say."""
    columns = [_words(" ".join(words)) for words in product(*map(_axis, block["columns"]))]
    for line in block["rows"].strip().splitlines():
        names, _, numbers = line.partition("|")
        keys = dict(zip(block["keys"], map(_value, names.split()), strict=True))
        for column, number in zip(columns, numbers.split(), strict=True):
            if number != "-":
                value, _, std = number.partition("±")
                measured = {"value": float(value), "std": float(std) if std else None}
                yield {"table": block["table"], **block["fields"], **keys, **column, **measured}


def _completed(record: dict[str, Any], raw: Mapping[str, Any]) -> Published:
    record = raw["defaults"] | {"partition": "dirichlet" if "alpha" in record else "iid"} | record
    for rule in raw["rule"]:
        if _matches(record, rule["when"]):
            record = {**record, **{name: value for name, value in rule["set"].items() if not record.get(name)}}
    return Published(**record | {"sketch": str(record["sketch"])})


def _axis(entries: list[str]) -> list[str]:
    """Entries of an axis; "task=1..3" stands for three of them."""
    name, dots, last = entries[0].partition("..")
    if not dots:
        return entries
    key, _, first = name.partition("=")
    return [f"{key}={number}" for number in range(int(first), int(last) + 1)]


def _words(text: str) -> dict[str, Any]:
    return {key: _value(value) for key, _, value in (word.partition("=") for word in text.split())}


def _value(text: str) -> str | int | float:
    """A number where it is one, else the word itself."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _matches(record: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    return all(
        record.get(name) in values if isinstance(values, tuple | list) else record.get(name) == values
        for name, values in wanted.items()
    )
