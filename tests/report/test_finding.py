"""What the report says about finding the task: samples together, confidence, drift; the figure a user gets first."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from rich.console import Console

from fedprotip.cli import display
from fedprotip.errors import RunError
from fedprotip.report import finding, plots, plots_finding, write_report
from fedprotip.report.rundata import RunData
from fedprotip.report.sections import run_sections
from tests.report.test_rundata import make_run, read_csv

FUSED: dict[str, dict[str, Any]] = {"method": {"router": "fused"}}


def load(folder: Path, **options: Any) -> RunData:
    return RunData.load(make_run(folder, **{"finding": True, "settings": FUSED, **options}))


def change(folder: Path, **values: Any) -> RunData:
    """The run with other values in its summary."""
    path = folder / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return RunData.load(folder)


def lines(axes: Axes) -> dict[str, Any]:
    return {str(line.get_label()): line for line in axes.lines}


def test_sections_come_with_their_data(tmp_path: Path) -> None:
    own = ["How many samples come together", "How sure the answers are", "Drift of class statistics"]
    assert [s.title for s in run_sections(load(tmp_path / "new")) if s.title in own] == own
    assert not {s.title for s in run_sections(load(tmp_path / "old", finding=False))} & set(own)
    measured = run_sections(load(tmp_path / "geometry", geometry=True))[-1]
    names = [picture.name for picture in measured.pictures]
    assert measured.title == "Geometry of projection"
    assert names.index("drift") == names.index("geometry_beta") + 1  # side by side, and only once
    one = [s.title for s in run_sections(load(tmp_path / "one", tasks=1)) if s.title in own]
    assert one == ["How sure the answers are"]  # a single task is neither found nor drifts


def test_csv_numbers_are_those_of_the_run(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", finding=True)
    write_report(folder)
    summary = json.loads((folder / "summary.json").read_text())
    sweeps = summary["sweeps"]
    assert read_csv(folder / "tables/sweep_size.csv") == [
        {"router": way, "size": str(size), "accuracy": str(value)}
        for way, values in sweeps["size"].items()
        for size, value in zip(sweeps["sizes"], values, strict=True)
    ]
    assert read_csv(folder / "tables/sweep_purity.csv") == [
        {"router": way, "rule": rule, "purity": str(purity), "accuracy": str(value)}
        for way, rules in sweeps["purity"].items()
        for rule, values in rules.items()
        for purity, value in zip(sweeps["purities"], values, strict=True)
    ]
    sure = read_csv(folder / "tables/confidence.csv")
    assert [{key: float(value) for key, value in row.items()} for row in sure] == summary["confidence"]["bins"]
    unknown = read_csv(folder / "tables/unknown.csv")
    assert {row["score"]: float(row["auroc"]) for row in unknown} == summary["unknown"]
    drift = read_csv(folder / "tables/drift.csv")
    assert [row.pop("after_task") for row in drift] == ["1", "2", "3"]
    padded = [[*map(str, row), *[""] * (3 - len(row))] for row in summary["drift"]]
    assert [list(row.values()) for row in drift] == padded
    assert list(drift[0]) == ["task_1", "task_2", "task_3"]


def test_the_chosen_way(tmp_path: Path) -> None:
    assert load(tmp_path / "set").chosen == "fused"
    auto = make_run(tmp_path / "auto", finding=True, settings={"method": {"router": "auto"}})
    assert RunData.load(auto).chosen == "fused"  # the last task says so
    ridge = make_run(tmp_path / "ridge", "ridge")
    assert change(ridge, routers={"statistics": {"single": 1.0}, "ridge": {"single": 2.0}}).chosen == "ridge"
    lda = make_run(tmp_path / "lda", "lda")
    assert change(lda, routers={"statistics": {"single": 1.0}}).chosen == "statistics"
    assert RunData.load(make_run(tmp_path / "fedavg", "fedavg", finding=False)).chosen == ""


def test_every_way_has_a_row_and_the_chosen_one_is_marked(tmp_path: Path) -> None:
    section = finding.routing(load(tmp_path / "run"))
    grid = section.grids[0]
    assert grid.rows == [
        ["cosine", "70.5", "72.0", "94.9", "100.0"],
        ["fused (chosen)", "93.8", "98.0", "94.9", "100.0"],
    ]
    assert {row for row, _ in grid.best} == {1}
    assert "finds it by fused" in section.intro
    old = change(make_run(tmp_path / "old"), routers={"residual": {"single": 3.0}})
    assert finding.routing(old).grids[0].rows == [["residual (chosen)", "3.0", "–", "–", "–"]]


def test_routing_by_task_is_shown_at_the_end_and_right_after_each_task(tmp_path: Path) -> None:
    run = load(tmp_path / "run")
    over = run.summary.routing_over_tasks
    axes = plots.routing_by_task(run).axes[0]
    drawn = lines(axes)
    assert list(drawn["batch64, tasks so far"].get_ydata()) == [100 * (share or 0) for share in over["batch64"].so_far]
    assert {str(bars.get_label()) for bars in axes.containers} == {"single, at the end", "batch64, at the end"}
    section = finding.routing(run)
    grid = section.grids[-1]
    assert grid.columns[1:] == [
        "single",
        "batch64",
        "single so far",
        "batch64 so far",
        "single newest",
        "batch64 newest",
    ]
    assert grid.rows[1][3:] == ["90.6 %", "97.7 %", "87.5 %", "96.9 %"]
    assert "compared with these" in section.pictures[-1].caption
    old = RunData.load(make_run(tmp_path / "old"))
    assert finding.routing(old).grids[-1].columns[1:] == ["single", "batch64"]
    assert finding.routing(old).pictures[-1].caption == ""
    assert [name for name in lines(plots.routing_by_task(old).axes[0]) if "so far" in name] == []


def test_every_evaluation_is_in_a_table(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", finding=True)
    write_report(folder)
    rows = read_csv(folder / "tables/routing_after.csv")
    found = {
        (row["router"], row["mode"], int(row["after_task"]), int(row["task"])): float(row["share"]) for row in rows
    }
    assert len(found) == len(rows) == 2 * 2 * (1 + 2 + 3)
    assert found["cosine", "batch64", 3, 1] == 1 - 2 * 1 / 64
    assert found["fused", "single", 2, 2] == 1 - 1 * 2 / 16
    readings = read_csv(folder / "tables/routing.csv")
    assert [float(row["single_newest"]) for row in readings] == [found["fused", "single", t, t] for t in (1, 2, 3)]
    assert not (make_run(tmp_path / "old") / "tables/routing_after.csv").exists()


def test_accuracy_over_size(tmp_path: Path) -> None:
    run = load(tmp_path / "run")
    axes = plots_finding.accuracy_over_size(run).axes[0]
    drawn = lines(axes)
    assert set(drawn) == {"cosine (paper)", "fused (chosen)"}
    assert list(drawn["cosine (paper)"].get_ydata()) == run.summary.sweeps.size["cosine"]
    assert drawn["fused (chosen)"].get_linewidth() > 2 * drawn["cosine (paper)"].get_linewidth()
    assert axes.get_xscale() == "log"
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1", "2", "4", "8", "16", "32", "64", "128"]
    assert axes.get_ylim()[0] == 60
    words = finding.together(run).intro
    assert "with 94.0 % accuracy, 128 samples of one task together with 94.9 %" in words


def test_accuracy_over_purity(tmp_path: Path) -> None:
    run = load(tmp_path / "fused")
    drawn = lines(plots_finding.accuracy_over_purity(run).axes[0])
    assert list(drawn["fused: a mixture of tasks"].get_ydata()) == [94.25, 93.5, 94.0]
    assert list(drawn["cosine: one task for all"].get_ydata()) == [94.0, 69.0, 31.0]
    assert len(drawn) == 4
    settings = {"method": {"router": "cosine"}}
    cosine = load(tmp_path / "cosine", settings=settings)
    assert set(lines(plots_finding.accuracy_over_purity(cosine).axes[0])) == {
        "cosine: one task for all",
        "cosine: each sample alone",
    }
    captions = ["mixture" in finding.together(each).pictures[1].caption for each in (run, cosine)]
    assert captions == [True, False]


def test_reliability_diagram(tmp_path: Path) -> None:
    run = load(tmp_path / "run")
    above, below = plots_finding.reliability(run).axes
    drawn = lines(above)
    assert list(drawn["answers of mode single"].get_xdata()) == pytest.approx([56, 96])
    assert list(drawn["answers of mode single"].get_ydata()) == pytest.approx([75, 99])
    assert list(drawn["as sure as right"].get_xdata()) == list(drawn["as sure as right"].get_ydata())
    assert [bar.get_center()[0] for bar in above.patches] == pytest.approx([55, 95])  # type: ignore[attr-defined]
    assert [text.get_text() for text in below.texts] == ["29", "12k"]
    (picture,) = finding.confidence(run).pictures
    assert "3.0 points off (ECE)" in picture.caption
    assert "Temperature 2.50: probabilities made less sure." in picture.caption


def test_a_sure_answer_is_in_the_last_bin(tmp_path: Path) -> None:
    bins = [{"count": 3, "confidence": 1.0, "accuracy": 1.0}]
    run = change(make_run(tmp_path / "run"), confidence={"bins": bins})
    (bar,) = plots_finding.reliability(run).axes[0].patches
    assert bar.get_center()[0] == pytest.approx(95)  # type: ignore[attr-defined]
    assert "ECE" not in finding.confidence(run).pictures[0].caption


def test_unknown_inputs_are_one_sentence(tmp_path: Path) -> None:
    run = load(tmp_path / "run")
    said = "an AUROC of 0.89 by the distance to all samples where the network sees first and 0.73 by the outputs"
    assert said in finding.confidence(run).intro
    assert "AUROC" not in finding.confidence(change(run.folder, unknown={})).intro


def test_drift_is_a_triangle_of_tasks(tmp_path: Path) -> None:
    run = load(tmp_path / "run")
    axes = plots_finding.drift(run).axes[0]
    assert [text.get_text() for text in axes.texts] == ["0.50", "0.75", "0.50", "1.00", "0.75", "0.50"]
    assert "1.00 on task 1, 0.75 on task 2 and 0.50 on task 3" in finding.drift_picture(run).alt
    late = change(run.folder, drift=run.summary.drift[1:])  # measured from the second task on
    axes = plots_finding.drift(late).axes[0]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["2", "3"]
    assert [text.get_text() for text in axes.texts][:2] == ["0.75", "0.50"]


@pytest.mark.parametrize(
    ("sweeps", "words"),
    [
        ({"sizes": [1, 2], "size": {"cosine": [1.0]}}, "size.cosine has 1 numbers for 2 sizes"),
        ({"purities": [1.0], "purity": {"cosine": {"alone": []}}}, "purity.cosine.alone has 0 numbers for 1 purities"),
    ],
)
def test_a_line_with_a_gap_is_damaged(tmp_path: Path, sweeps: dict[str, Any], words: str) -> None:
    with pytest.raises(RunError, match=words):
        change(make_run(tmp_path / "run"), sweeps=sweeps)


def test_what_a_user_gets_stands_first(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", finding=True)
    html = write_report(folder).read_text()
    modes = ["single", "aware", "agnostic", "batch64"]
    assert re.findall(rf'<th scope="row"><span[^>]*></span>({"|".join(modes)})</th>', html) == modes
    assert re.findall(r'class="first"><th scope="row"><span[^>]*></span>(\w+)<', html) == ["single"]
    assert [row["mode"] for row in read_csv(folder / "tables/headline.csv")] == modes
    plain = write_report(make_run(tmp_path / "plain", "fedavg")).read_text()
    assert re.findall(r'class="first"><th scope="row"><span[^>]*></span>(\w+)<', plain) == ["agnostic"]
    console = Console(width=120, record=True)
    display.print_summary(console, folder, RunData.load(folder).summary)
    printed = console.export_text()
    assert re.findall(rf"│ ({'|'.join(modes)}) \(", printed) == modes
    assert "single (one sample, task unknown)" in printed


def test_a_method_without_routing_has_no_such_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "run", "fedavg")
    display.print_summary(Console(width=120), folder, RunData.load(folder).summary)
    printed = capsys.readouterr().out
    assert "aware (true task given)" in printed
    assert "single" not in printed


def test_a_first_task_that_takes_all_directions_is_told(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", finding=True)
    path = folder / "events.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    for rank, told in ((511, False), (512, True)):
        for event in events:
            if event["event"] == "task":
                event["ranks"]["routing"], event["dims"]["routing"] = (rank if event["task"] == 0 else 512), 512
        path.write_text("".join(json.dumps(event) + "\n" for event in events))
        intro = finding.routing(RunData.load(folder)).intro
        assert ("U_L of the first task spans all 512 features" in intro) == told


def test_classes_that_were_left_out_of_the_statistics_are_told(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", finding=True, settings=FUSED)
    assert "fewer than" not in finding.routing(RunData.load(folder)).intro
    lines_ = [
        {"event": "withheld", "task": 0, "client": 1, "kind": "statistics", "classes": 2},
        {"event": "withheld", "task": 0, "client": 1, "kind": "statistics", "classes": 2},
        {"event": "withheld", "task": 1, "client": 4, "kind": "statistics", "classes": 1},
    ]
    with (folder / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines_)
    assert "3 times a client had fewer than 5 samples of a class" in finding.routing(RunData.load(folder)).intro
