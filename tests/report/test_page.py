"""The report of synthetic run folders: right numbers, whole pages, the same bytes every time."""

import io
import json
import math
import re
import statistics
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from matplotlib.colors import to_rgb
from PIL import Image

from fedprotip.errors import RunError
from fedprotip.report import comparison_rows, plots, style, text, write_report
from fedprotip.report.rundata import RunData
from fedprotip.report.tables import aggregate
from tests.report.test_rundata import links, make_memory, make_run, read_csv


def titles(html: str) -> list[str]:
    return re.findall(r"<h2>(.*?)</h2>", html)


CASES: dict[str, dict[str, Any]] = {
    "routed": {"geometry": True},
    "finding": {"finding": True},
    "fedavg": {"method": "fedavg"},
    "one_task": {"tasks": 1, "geometry": True},
    "twelve_tasks": {"tasks": 12, "layers": 20},
    "crowded": {"tasks": 22, "method": "fedavg"},
    "many_clients": {"clients": 200, "failures": 40, "tasks": 2},
    "everything": {"tasks": 20, "layers": 20, "finding": True, "geometry": True, "failures": 9},
}


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[pytest.mark.slow] if name == "everything" else []) for name in CASES]
)
def test_page_is_whole_and_needs_nothing_else(tmp_path: Path, case: str) -> None:
    folder = make_run(tmp_path / "run", **CASES[case])
    page = write_report(folder)
    html = page.read_text(encoding="utf-8")
    assert page == folder / "report.html"
    assert not [link for link in links(html) if not link.startswith("data:")]
    assert "@import" not in html
    assert "url(" not in html
    assert "<script" not in html
    assert len(html) < 1_500_000
    images = re.findall(r"<img [^>]*>", html)
    assert len(images) == len(list((folder / "plots").glob("*.png"))) >= 3
    assert all(re.search(r'alt="[^"]{20,}"', image) for image in images)
    assert not [path for path in folder.rglob(".*") if path.is_file()]  # no temporary file stays behind


def test_sections_without_data_are_left_out(tmp_path: Path) -> None:
    full = titles(write_report(make_run(tmp_path / "a", failures=3, geometry=True)).read_text())
    assert full == [
        "Accuracy over tasks",
        "Accuracy matrix",
        "Finding the task",
        "Protected subspace",
        "Bytes",
        "Time",
        "Memory",
        "Clients left out",
        "Geometry of projection",
        "Settings",
        "Versions",
    ]
    plain = titles(write_report(make_run(tmp_path / "b", method="fedavg")).read_text())
    assert plain == ["Accuracy over tasks", "Accuracy matrix", "Bytes", "Time", "Memory", "Settings", "Versions"]
    first = titles(write_report(make_run(tmp_path / "c", tasks=1)).read_text())
    assert first == ["Protected subspace", "Bytes", "Time", "Memory", "Settings", "Versions"]
    (tmp_path / "c" / "memory.json").unlink()  # a run of an older version
    assert "Memory" not in titles(write_report(tmp_path / "c").read_text())


def test_csv_numbers_are_those_of_the_run(tmp_path: Path) -> None:
    """Every cell of every table that is not about finding the task."""
    folder = make_run(tmp_path / "run", geometry=True, failures=2)
    write_report(folder)
    summary = json.loads((folder / "summary.json").read_text())
    tables = {path.stem: read_csv(path) for path in folder.glob("tables/*.csv")}

    modes = ["single", "aware", "agnostic", "batch64"]
    assert tables["headline"] == [
        {"mode": m, "accuracy": str(summary["accuracy"][m]), "forgetting": str(summary["forgetting"][m])} for m in modes
    ]
    for mode in modes:
        rows = summary["matrix"][mode]
        padded = [[*map(str, row), *[""] * (3 - len(row))] for row in rows]
        named = [dict(zip(("task_1", "task_2", "task_3"), row, strict=True)) for row in padded]
        assert tables[f"matrix_{mode}"] == [{"after_task": str(i), **row} for i, row in enumerate(named, 1)]
    for mode in ("single", "batch64"):
        assert [row[mode] for row in tables["routing"]] == list(map(str, summary["routing"][f"{mode}_by_task"]))
    assert [row["task"] for row in tables["routing"]] == ["1", "2", "3"]
    assert tables["routers"] == [
        {"router": name, **{key: str(value) for key, value in found.items()}}
        for name, found in summary["routers"].items()
    ]

    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    learned = [event for event in events if event["event"] == "task"]
    assert tables["ranks"] == [
        {"task": str(event["task"] + 1), "layer": layer, "rank": str(rank), "dim": str(event["dims"][layer])}
        for event in learned
        for layer, rank in event["ranks"].items()
    ]
    assert tables["seconds"] == [
        {"task": str(event["task"] + 1), "phase": phase, "seconds": str(spent)}
        for event in learned
        for phase, spent in event["seconds"].items()
    ]
    sent: dict[tuple[int, str, str], int] = {}
    for line in map(json.loads, (folder / "ledger.jsonl").read_text().splitlines()):
        key = (line["task"] + 1, line["direction"], line["kind"])
        sent[key] = sent.get(key, 0) + line["bytes"]
    assert {(int(r["task"]), r["direction"], r["kind"]): int(r["bytes"]) for r in tables["bytes"]} == sent
    assert len(tables["bytes"]) == len(sent)

    measured = json.loads((folder / "geometry.json").read_text())
    columns = {
        "rho_min": measured["rho"],
        "rho_mean": measured["rho_mean"],
        "gradient_sq_mean": measured["measured"]["gradient_sq_mean"],
        "bound_eq13": measured["bounds"]["taskwise"],
        "bound_eq15": measured["bounds"]["taskwise_canonical"],
        "loss_increase": [*measured["measured"]["loss_increase"], None],
        "bound_eq14": [*measured["bounds"]["forgetting"], None],
    }
    for name, values in columns.items():
        found = [row[name] for row in tables["geometry"]]
        assert found == ["" if value is None else str(value) for value in values], name
    geometry = read_csv(folder / "tables/geometry.csv")
    assert [float(geometry[0][name]) for name in ("bound_eq31", "drift_sq", "bound_lemma3")] == [700.0, 0.4, 5.0]
    rounds, made = read_csv(folder / "tables/geometry_rounds.csv"), json.loads((folder / "geometry.json").read_text())
    assert [(row["task"], row["old_task"]) for row in rounds] == [("2", "1"), ("3", "1"), ("3", "2")]
    assert float(rounds[1]["beta"]) == made["beta"][2][0]
    assert float(rounds[1]["increase_mean"]) == made["measured"]["round_increase_mean"][2][0]
    assert float(rounds[1]["increase_largest"]) == made["measured"]["round_increase"][2][0]
    assert float(rounds[1]["bound_eq25"]) == made["bounds"]["round_increase"][2][0]
    memory = read_csv(folder / "tables/memory.csv")
    assert [(row["task"], row["phase"]) for row in memory[:4]] == [
        ("1", "evaluate"),
        ("1", "task_end"),
        ("1", "train"),
        ("2", "evaluate"),
    ]
    assert [float(row["rss_mb"]) for row in memory[:4]] == [400.0, 500.0, 450.0, 405.0]
    assert memory[0]["gpu_mb"] == ""


def test_output_is_deterministic(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", tasks=2, geometry=True)
    written = []
    for _ in range(2):
        write_report(folder)
        paths = [folder / "report.html", *sorted(folder.glob("plots/*")), *sorted(folder.glob("tables/*"))]
        written.append({path.name: path.read_bytes() for path in paths})
    assert written[0] == written[1]


def test_reading_says_what_the_numbers_say(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", tasks=5)
    path = folder / "summary.json"
    summary = json.loads(path.read_text())
    summary["accuracy"] = {"aware": 97.1, "agnostic": 44.0, "single": 60.2, "batch64": 80.1}
    summary["forgetting"] = {"aware": -0.2, "agnostic": 30.0, "single": 20.0, "batch64": 8.25}
    path.write_text(json.dumps(summary))
    assert text.reading(RunData.load(folder)) == (
        "After 5 tasks FedProTIP answers 60.2 % of test samples correctly "
        "when samples come one at a time and nobody tells the task, 97.1 % when told the task "
        "and 80.1 % when it has to find the task from 64 samples; "
        "it forgot 20.0 points (one at a time) and nothing (task given)."
    )
    first = text.reading(RunData.load(make_run(tmp_path / "first", tasks=1)))
    assert first.startswith("After 1 task FedProTIP answers")
    assert "forgot" not in first
    plain = text.reading(RunData.load(make_run(tmp_path / "plain", method="fedavg")))
    assert re.search(r"correctly when not told the task and [\d.]+ % when told the task; it forgot", plain)


def test_unfinished_run_says_so_and_is_not_compared(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", "fedavg", tasks=1, status="running")
    assert "This run is not finished" in write_report(folder).read_text()
    with pytest.raises(RunError, match="is not finished"):
        comparison_rows([folder])


def test_text_of_a_run_is_escaped(tmp_path: Path) -> None:
    html = write_report(make_run(tmp_path / "run", "fedavg", tasks=1, failures=4)).read_text()
    assert "&lt;timeout&gt; after 30 s" in html
    assert "1–3" in html  # clients that were not there


def test_no_folder_and_no_permission(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no such directory"):
        write_report(tmp_path / "nowhere")
    folder = make_run(tmp_path / "run", tasks=1)
    (folder / "tables").write_text("a file where a folder should be")
    with pytest.raises(RunError, match="is a file, where a run has a plain folder"):
        write_report(folder)


def test_curve_is_the_mean_over_tasks_seen(tmp_path: Path) -> None:
    run = RunData.load(make_run(tmp_path / "run"))
    rows = run.summary.matrix["aware"]
    assert run.summary.over_tasks("aware") == pytest.approx([statistics.fmean(row) for row in rows])
    lines = plots.accuracy_over_tasks(run).axes[0].lines
    (line,) = (line for line in lines if line.get_label() == "aware")
    assert list(line.get_ydata()) == pytest.approx(run.summary.over_tasks("aware"))
    (group,) = aggregate([run])
    assert [stat.mean for stat in group.curve("aware")] == pytest.approx(run.summary.over_tasks("aware"))


def test_plots_ignore_the_readers_matplotlib_settings(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", "fedavg", tasks=1)
    write_report(folder)
    before = (folder / "plots/bytes.png").read_bytes()
    with matplotlib.rc_context({"font.size": 30, "savefig.facecolor": "red", "axes.grid": True}):
        write_report(folder)
    assert (folder / "plots/bytes.png").read_bytes() == before


def test_a_picture_is_small_and_keeps_its_colours(tmp_path: Path) -> None:
    """Few colours, and those of the modes among them but for a shade."""
    run = RunData.load(make_run(tmp_path / "run"))
    drawn = style.png(plots.accuracy_over_tasks(run))
    image = Image.open(io.BytesIO(drawn))
    assert image.mode == "P"
    assert len(drawn) < 25_000
    colours = {colour for _, colour in image.convert("RGB").getcolors() or []}
    for wanted in style.MODE_COLOURS.values():
        red, green, blue = (round(255 * part) for part in to_rgb(wanted))
        assert min(max(abs(r - red), abs(g - green), abs(b - blue)) for r, g, b in colours) <= 8


def test_numbers_as_text() -> None:
    assert text.number(-0.04) == "0.0"
    assert text.number(math.nan) == "–"
    assert text.number(math.inf) == "∞"
    assert text.significant(1234567.0) == "1.23·10^6"
    assert text.bytes_text(999) == "999 B"
    assert text.bytes_text(2_500_000_000) == "2.50 GB"
    assert text.seconds_text(90) == "90.0 s"
    assert text.seconds_text(7200) == "2.0 h"
    assert text.ids_text([4, 0, 1, 2]) == "0–2, 4"
    assert text.method_name("fot") == "FOT"


def test_memory_by_phase_with_and_without_a_gpu(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    html = write_report(folder).read_text()
    assert all(f"<td>{size} MB</td>" in html for size in (482, 535, 430))
    assert "GPU memory" not in html
    (folder / "memory.json").write_text(json.dumps(make_memory(3, 400.0, gpu=True)))
    assert "GPU memory" in write_report(folder).read_text()
    assert (folder / "plots/memory.png").exists()


def test_samples_that_are_kept_are_shown_task_by_task(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    path = folder / "events.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    for event in events:
        if event["event"] == "task":
            event["samples"] = {"raw": 1000 * (event["task"] + 1), "synthetic": 50}
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    html = write_report(folder).read_text()
    assert "Samples kept" in titles(html)
    assert "3,000 raw samples and 50 synthetic samples" in html
    table = read_csv(folder / "tables/samples.csv")
    assert [row["samples"] for row in table if row["kind"] == "raw"] == ["1000", "2000", "3000"]
