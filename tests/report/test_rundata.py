"""Reading a run folder: every damaged file is one clear sentence. Also makes the folders the tests use."""

import csv
import json
import math
import random
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

from fedprotip.errors import RunError
from fedprotip.report import write_report
from fedprotip.report.rundata import RunData

MODE_SCALES = {"single": 16, "batch64": 64}
ROUTED = ("aware", "agnostic", "single", "batch64")
PLAIN = ("aware", "agnostic")


def make_run(
    folder: Path,
    method: str = "fedprotip",
    tasks: int = 3,
    clients: int = 5,
    seed: int = 0,
    layers: int = 3,
    failures: int = 0,
    geometry: bool = False,
    finding: bool = False,
    status: str = "finished",
    settings: dict[str, dict[str, Any]] | None = None,
) -> Path:
    """A run folder with made-up but consistent numbers; without `finding` one from before there was such a thing."""
    draw = random.Random(f"{method}{tasks}{seed}{settings}")
    folder.mkdir(parents=True)
    routed = method != "fedavg"
    modes = ROUTED if routed else PLAIN
    kept = {"aware": 0.4, "agnostic": 9.0, "single": 5.0, "batch64": 2.0}
    slope = {mode: value if routed else 6 * value + 4 for mode, value in kept.items()}
    matrix = {
        mode: [[max(0.0, 97 - slope[mode] * (i - t) - draw.uniform(0, 4)) for t in range(i + 1)] for i in range(tasks)]
        for mode in modes
    }
    accuracy = {mode: statistics.fmean(rows[-1]) for mode, rows in matrix.items()}
    forgetting = {
        mode: sum(max(rows[i][t] for i in range(t, tasks - 1)) - rows[-1][t] for t in range(tasks - 1)) / tasks
        for mode, rows in matrix.items()
    }
    confusion = {
        mode: [[draw.randint(0, 30) + (300 if i == j else 0) for j in range(tasks)] for i in range(tasks)]
        for mode in ("single", "batch64")
    }
    right = {mode: [rows[t][t] / sum(rows[t]) for t in range(tasks)] for mode, rows in confusion.items()}
    totals, ledger, events = {"up": {}, "down": {}}, [], []
    kinds = (
        {"up": ("model", "basis", "reference"), "down": ("model", "basis")}
        if routed
        else {"up": ("model",), "down": ("model",)}
    )
    for task in range(tasks):
        for client in range(clients):
            for direction, names in kinds.items():
                for kind in names:
                    size = (80_000 if kind == "model" else 9_000) + 100 * task + client
                    totals[direction][kind] = totals[direction].get(kind, 0) + size
                    ledger.append(
                        {
                            "task": task,
                            "round": 0 if kind == "model" else None,
                            "client": client,
                            "direction": direction,
                            "kind": kind,
                            "bytes": size,
                            "status": "ok",
                            "reason": "",
                        }
                    )
        events.append({"event": "round", "task": task, "round": 0, "loss": 0.5, "clients": clients, "seconds": 1.0})
        dims = {f"backbone.{i}.weight": 64 * (1 + i % 3) for i in range(layers)} if routed else {}
        grown = {name: min(dim, 5 + 6 * task + i) for i, (name, dim) in enumerate(dims.items())}
        spent = {"train": 9.5, "task_end": 1.5, "evaluate": 0.7}
        done = {"event": "task", "task": task, "seconds": spent, "ranks": grown, "dims": dims}
        if finding:
            asked = (settings or {}).get("method", {}).get("router", "auto")
            chosen = "fused" if asked == "auto" else asked
            done |= {"router": chosen, "routing": {way: routed_after(task) for way in ("cosine", "fused")}}
        events.append(done)
    reasons = {"non-finite values in conv1": 0, "<timeout> after 30 s": 0}
    for index in range(failures):
        reason = list(reasons)[index % 2]
        reasons[reason] += 1
        events.append(
            {
                "event": "failure",
                "task": index % tasks,
                "round": None,
                "client": index % clients,
                "reason": reason,
            }
        )
    if failures:
        events.append({"event": "absent", "task": 0, "clients": [3, 1, 2], "reason": "not in the roster"})
    summary = {
        "method": method,
        "scenario": "class",
        "tasks": tasks,
        "clients": clients,
        "seed": seed,
        "accuracy": accuracy,
        "forgetting": forgetting,
        "matrix": matrix,
        "bytes": totals,
        "confusion": confusion if routed else {},
        "routing": {
            **{m: statistics.fmean(r) for m, r in right.items()},
            **{f"{m}_by_task": r for m, r in right.items()},
        }
        if routed
        else {},
        "routers": {
            name: {"single": 61.5 - i, "batch64": 80.2, "routing_single": 0.6, "routing_batch64": 0.8}
            for i, name in enumerate(("cosine", "residual"))
        }
        if routed
        else {},
        "seconds": {
            "train": 9.5 * tasks,
            "task_end": 1.5 * tasks,
            "evaluate": 0.7 * tasks,
            "total": 11.7 * tasks,
        },
        "peak_rss_mb": 512.5,
        "peak_gpu_mb": None,
        "failures": {"count": failures, "by_reason": {r: n for r, n in reasons.items() if n}},
    }
    if finding:
        summary |= make_finding(tasks)
    merged: dict[str, dict[str, Any]] = {
        "data": {"name": "digits"},
        "method": {"name": method},
        "evaluate": {"group": 64},
        "run": {"seed": seed, "out": str(folder)},
    }
    for section, values in (settings or {}).items():
        merged[section] = merged.get(section, {}) | values
    toml = "\n".join(
        f"[{section}]\n" + "\n".join(f"{key} = {json.dumps(value)}" for key, value in values.items()) + "\n"
        for section, values in merged.items()
    )
    manifest = {
        "format": 1,
        "status": status,
        "seed": seed,
        "threads": 2,
        "files": {},
        "versions": {"fedprotip": "0.1.0", "torch": "2.13.0", "platform": "Linux"},
    }
    (folder / "settings.toml").write_text(toml)
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in ledger))
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in events))
    (folder / "memory.json").write_text(json.dumps(make_memory(tasks, 400.0 + 10 * seed)))
    if geometry:
        (folder / "geometry.json").write_text(json.dumps(make_geometry(tasks, merged["method"].get("threshold"))))
    return folder


def routed_after(task: int) -> dict[str, list[float]]:
    """Shares sent to a right task, by mode and task, once so many more tasks are learned."""
    return {
        mode: [max(0.0, 1 - task * (t + 1) / scale) for t in range(task + 1)] for mode, scale in MODE_SCALES.items()
    }


def make_finding(tasks: int) -> dict[str, Any]:
    """What a run says about finding the task: cosine as the paper has it, fused better in all respects."""
    sizes, purities = [1, 2, 4, 8, 16, 32, 64, 128], [1.0, 0.75, 0.5]
    figures = {"single": 70.5, "routing_single": 0.72, "batch64": 94.9, "routing_batch64": 1.0}
    rules = {"pooled": [94.5, 71.0, 47.0], "alone": [93.5, 93.75, 94.0], "mixture": [94.25, 93.5, 94.0]}
    return {
        "routers": {"cosine": figures, "fused": figures | {"single": 93.8, "routing_single": 0.98}},
        "confidence": {
            "bins": [
                {"count": 29, "confidence": 0.56, "accuracy": 0.75},
                {"count": 12_345, "confidence": 0.96, "accuracy": 0.99},
            ],
            "ece": 0.0304,
            "temperature": 2.5,
        },
        "routing_over_tasks": {
            mode: {
                "at_end": routed_after(tasks - 1)[mode],
                "so_far": [statistics.fmean(routed_after(task)[mode]) for task in range(tasks)],
                "newest": [routed_after(task)[mode][-1] for task in range(tasks)],
            }
            for mode in MODE_SCALES
        },
        "unknown": {"odd": 0.887, "energy": 0.731},
        "sweeps": {
            "sizes": sizes,
            "size": {"cosine": [70.0 + 3 * i for i in range(8)], "fused": [94.0 + i / 8 for i in range(8)]},
            "purities": purities,
            "purity": {"cosine": {"pooled": [94.0, 69.0, 31.0], "alone": [70.0, 70.5, 71.0]}, "fused": rules},
        },
        "drift": [[0.25 * (i - t) + 0.5 for t in range(i + 1)] for i in range(tasks)],
    }


def make_memory(tasks: int, least: float, gpu: bool = False) -> dict[str, Any]:
    phases = ("evaluate", "train", "task_end")
    rss = {phase: [least + 50 * i + 5 * t for t in range(tasks)] for i, phase in enumerate(phases)}
    return {"rss": rss, "gpu": {phase: [mib / 10 for mib in mibs] for phase, mibs in rss.items()} if gpu else {}}


def make_geometry(tasks: int, threshold: float | None = None) -> dict[str, Any]:
    epsilon = threshold or 0.7
    mean = [None, *(1.1 - epsilon - 0.03 * t for t in range(1, tasks))]
    beta = [[(1 - epsilon) / (2 + t - tau) if tau < t else None for tau in range(tasks)] for t in range(tasks)]
    known = [value for row in beta for value in row if value is not None]
    return {
        "rho": [value and value - 0.05 for value in mean],
        "rho_mean": mean,
        "beta": beta,
        "beta_bar": statistics.fmean(known) if known else None,
        "gradient_bound_G2": 12.5,
        "smoothness_L": 8.0,
        "ft_loss": 0.01,
        "threshold": epsilon,
        "bounds": {
            "taskwise": [40.0 + t for t in range(tasks)],
            "forgetting": [900.0 / (t + 1) for t in range(tasks - 1)],
            "taskwise_canonical": [math.inf, *(90.0 + t for t in range(1, tasks))],
            "forgetting_canonical": [700.0 / (t + 1) for t in range(tasks - 1)],
            "round_increase": [[value and 60 * value for value in row] for row in beta],
            "drift": [5.0] * tasks,
            "ft_loss_canonical": 31.0,
        },
        "measured": {
            "gradient_sq_mean": [0.02 + 0.01 * t for t in range(tasks)],
            "loss_increase": [0.01 - 0.02 * (t % 2) for t in range(tasks - 1)],
            "round_increase": [[value and 0.02 * (value - 0.05) for value in row] for row in beta],
            "round_increase_mean": [[value and 0.01 * (value - 0.06) for value in row] for row in beta],
            "drift": [0.4 / (t + 1) for t in range(tasks)],
        },
    }


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def links(html: str) -> list[str]:
    return re.findall(r"""(?:src|href)\s*=\s*["']?([^"'\s>]+)""", html)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("summary.json", '{"method": ', "not valid JSON"),
        ("summary.json", '{"method": "fedavg"}', "scenario: Field required"),
        ("summary.json", "[]", "is damaged"),
        ("manifest.json", None, "is missing"),
        ("settings.toml", "[data\n", "is damaged"),
        ("settings.toml", "data = 3\n", "data stands outside of all sections"),
        ("settings.toml", b"\xff\xfe", "not text in UTF-8"),
        ("ledger.jsonl", '{"task": 0, "round": null, "client": 1}\n', "line 1: LedgerLine.direction: Field required"),
        ("events.jsonl", '{"event": "mine"}\n{"event": "ta', "line 2 is not a JSON object"),
        ("events.jsonl", '{"event": "mine"}\n{"event": "round"}', "line 2: RoundDone.task: Field required"),
        ("events.jsonl", '{"event": "task", "task": 0, "ranks": {"conv1": 3}}', "dims has no width of conv1"),
        ("geometry.json", '{"rho": [], "rho_mean": [], "beta": [[1, 2]]}', "a row that is too long"),
        ("geometry.json", '{"rho": 3}', "rho: Input should be a valid list"),
        (
            "geometry.json",
            '{"rho": [], "rho_mean": [], "beta": [[null]], "measured": {"round_increase": [[1], [2]]}}',
            "round_increase is not a table of 1 by 1 tasks",
        ),
        ("memory.json", '{"rss": {"train": ["much"]}}', "rss.train.0: Input should be a valid number"),
    ],
)
def test_damaged_run_is_one_clear_sentence(tmp_path: Path, name: str, content: str | bytes | None, words: str) -> None:
    folder = make_run(tmp_path / "run", tasks=1)
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(RunError) as caught:
        write_report(folder)
    message = str(caught.value)
    assert words in message
    assert name in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("key", "mode", "words"),
    [
        ("matrix", "aware", "matrix.aware has 2 numbers after task 3"),
        ("confusion", "single", "is not square"),
    ],
)
def test_table_with_a_short_row_is_damaged(tmp_path: Path, key: str, mode: str, words: str) -> None:
    folder = make_run(tmp_path / "run")
    summary = json.loads((folder / "summary.json").read_text())
    summary[key][mode][2].pop()
    (folder / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(RunError, match=words):
        RunData.load(folder)
