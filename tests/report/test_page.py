"""The report of synthetic run folders: right numbers, whole pages, the same bytes every time."""

import json
import math
import re
import statistics
from pathlib import Path
from typing import Any

import matplotlib
import pytest

from fedprotip.errors import RunError
from fedprotip.report import comparison_rows, plots, text, write_report
from fedprotip.report.rundata import RunData
from fedprotip.report.tables import aggregate
from tests.report.test_rundata import links, make_run, read_csv


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
}


@pytest.mark.parametrize("case", CASES)
def test_page_is_whole_and_needs_nothing_else(tmp_path: Path, case: str) -> None:
    folder = make_run(tmp_path / "run", **CASES[case])
    page = write_report(folder)
    html = page.read_text(encoding="utf-8")
    assert page == folder / "report.html"
    assert not [link for link in links(html) if not link.startswith("data:")]
    assert "@import" not in html
    assert "url(" not in html
    assert "<script" not in html
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
        "Clients left out",
        "Geometry of projection",
        "Settings",
        "Versions",
    ]
    plain = titles(write_report(make_run(tmp_path / "b", method="fedavg")).read_text())
    assert plain == ["Accuracy over tasks", "Accuracy matrix", "Bytes", "Time", "Settings", "Versions"]
    first = titles(write_report(make_run(tmp_path / "c", tasks=1)).read_text())
    assert first == ["Protected subspace", "Bytes", "Time", "Settings", "Versions"]


def test_csv_numbers_are_those_of_the_run(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", geometry=True)
    write_report(folder)
    summary = json.loads((folder / "summary.json").read_text())
    for row in read_csv(folder / "tables/headline.csv"):
        assert float(row["accuracy"]) == summary["accuracy"][row["mode"]]
        assert float(row["forgetting"]) == summary["forgetting"][row["mode"]]
    matrix = read_csv(folder / "tables/matrix_single.csv")
    assert float(matrix[2]["task_1"]) == summary["matrix"]["single"][2][0]
    assert matrix[0]["task_2"] == ""
    routing = read_csv(folder / "tables/routing.csv")
    assert [float(row["batch64"]) for row in routing] == summary["routing"]["batch64_by_task"]
    traffic = read_csv(folder / "tables/bytes.csv")
    for direction, kinds in summary["bytes"].items():
        for kind, total in kinds.items():
            found = [int(r["bytes"]) for r in traffic if (r["direction"], r["kind"]) == (direction, kind)]
            assert sum(found) == total
    spent = [float(row["seconds"]) for row in read_csv(folder / "tables/seconds.csv") if row["phase"] == "train"]
    assert sum(spent) == pytest.approx(summary["seconds"]["train"])
    ranks = read_csv(folder / "tables/ranks.csv")
    assert ranks[-1] == {"task": "3", "layer": "backbone.2.weight", "rank": "19", "dim": "192"}
    geometry = read_csv(folder / "tables/geometry.csv")
    assert geometry[0]["rho_min"] == ""
    assert float(geometry[1]["bound_eq13"]) == 41.0


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
