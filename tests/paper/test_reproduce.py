"""Reproducing a table: missing cells are run once, kept as files, and the table is made from the files alone."""

import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev

import pytest

import fedprotip
from fedprotip.paper import reproduce
from fedprotip.paper.anchors import find
from fedprotip.paper.finished import FORMER, FinishedCell, read_cell
from fedprotip.paper.protocols import PROTOCOLS, Protocol
from fedprotip.paper.rows import Row
from fedprotip.paper.verdicts import departures

TINY = {
    "data": {"name": "digits"},
    "stream": {"tasks": 2, "task_size": 2},
    "clients": {"count": 2},
    "model": {"name": "mlp", "width": 16, "depth": 2},
    "train": {"rounds": 1, "epochs": 1, "batch": 32, "lr": 0.05},
    "run": {"threads": 1, "geometry": 0},
}
PRINTED = {"table": 1, "dataset": "cifar100", "alpha": 0.5}


def tiny_row(name, method, published=None):
    return Row(name, {**TINY, "method": {"name": method}}, published or {})


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    """A table of three rows on the digits, one of a method that nobody has."""
    rows = (
        tiny_row("plain", "fedavg", {**PRINTED, "method": "fedavg"}),
        tiny_row("ours", "fedprotip", {**PRINTED, "method": "fedprotip"}),
        tiny_row("later", "glfc-of-tomorrow", {**PRINTED, "method": "glfc"}),
    )
    monkeypatch.setitem(PROTOCOLS, "tiny", Protocol("tiny", "A tiny table", rows))
    return {"results": tmp_path / "results", "runs": tmp_path / "runs"}


def carry_out(places, **options):
    started = []
    plan = reproduce.make_plan("tiny", "cpu", **{"seeds": 1, **options}, **places)
    reproduce.carry_out(plan, lambda cell: started.append(cell.name) or [])
    return started


PAPER = {
    ("plain", "acc", "agnostic"): 15.35,
    ("plain", "ft", "agnostic"): 62.9,
    ("ours", "acc", "agnostic"): 48.41,
    ("ours", "ft", "agnostic"): 15.59,
    ("ours", "acc", "batch64"): 86.0,
    ("ours", "ft", "batch64"): 0.83,
    ("later", "acc", "agnostic"): 11.86,
    ("later", "ft", "agnostic"): 68.2,
}
"""Table 1, CIFAR-100, α = 0.5."""


def measured(places, row):
    """(metric, mode) → the values of all seeds, from the files of finished cells."""
    found = {}
    for path in sorted((places["results"] / "tiny" / "cpu").glob(f"{row}-s*.json")):
        summary = json.loads(path.read_text())["summary"]
        for metric, part in (("acc", "accuracy"), ("ft", "forgetting")):
            for mode, value in summary[part].items():
                found.setdefault((metric, mode), []).append(value)
    return found


def files(places):
    return sorted(path.name for path in (places["results"] / "tiny" / "cpu").glob("*.json"))


def test_an_interruption_between_cells_loses_nothing(tiny):
    class Stop(Exception):
        pass

    def stop_at_third(cell):
        if cell.name == "ours-s0":
            raise Stop
        return []

    plan = reproduce.make_plan("tiny", "cpu", seeds=2, **tiny)
    assert [cell.name for cell in plan.cells] == ["plain-s0", "plain-s1", "ours-s0", "ours-s1"]
    with pytest.raises(Stop):
        reproduce.carry_out(plan, stop_at_third)
    assert files(tiny) == ["plain-s0.json", "plain-s1.json"]
    assert carry_out(tiny, seeds=2) == ["ours-s0", "ours-s1"]
    assert carry_out(tiny, seeds=2) == []
    assert len(files(tiny)) == 4


def test_an_interruption_within_a_cell_is_resumed(tiny):
    def stop(event):
        if event["event"] == "task":
            raise KeyboardInterrupt

    plan = reproduce.make_plan("tiny", "cpu", 1, ["ours"], **tiny)
    with pytest.raises(KeyboardInterrupt):
        reproduce.carry_out(plan, lambda cell: [stop])
    assert files(tiny) == []
    assert (tiny["runs"] / "tiny" / "cpu" / "ours-s0" / "manifest.json").exists()
    assert carry_out(tiny, only=["ours"]) == ["ours-s0"]
    whole = fedprotip.run(plan.cells[0].settings, out=tiny["runs"] / "whole")
    cell = json.loads((tiny["results"] / "tiny" / "cpu" / "ours-s0.json").read_text())
    assert cell["summary"]["accuracy"] == whole["accuracy"]


def test_the_table_is_made_from_the_files_alone(tiny):
    carry_out(tiny, seeds=2)
    shutil.rmtree(tiny["runs"])
    outcome = reproduce.rebuild("tiny", "cpu", tiny["results"])
    by_figure = {(line.row, line.metric, line.mode): line for line in outcome.lines}
    line = by_figure["ours", "acc", "batch64"]
    assert (line.paper.mean, line.seeds) == (86.0, 2)
    assert line.ours.std is not None
    assert line.verdict == "not comparable"
    assert "train.rounds 1, paper 50; train.epochs 1, paper 5" in line.why
    assert "data.name digits, paper cifar100" in line.why
    assert by_figure["ours", "acc", "single"].verdict == "not published"
    assert by_figure["later", "acc", "agnostic"].verdict == "not run"
    assert outcome.waiting == {"later": "this version lacks the method 'glfc-of-tomorrow'"}
    written = reproduce.write_table(outcome, tiny["results"])
    assert [path.name for path in written] == ["table.md", "table.csv", "table.png"]
    text = written[0].read_text()
    assert "Table 1: cifar100 ×10, α 0.5, 5 clients" in text
    assert "## Text and code" not in text
    printed = [
        row.strip("| ").split(" | ")
        for row in text.partition("| row | figure |")[2].splitlines()
        if row.startswith(("| plain", "| ours", "| later"))
    ]
    with written[1].open(newline="") as file:
        rows = list(csv.DictReader(file))
    for line, row, cells in zip(outcome.lines, rows, printed, strict=True):  # cell by cell
        cell = {key: values for key, values in measured(tiny, line.row).items() if values}
        values = cell.get((line.metric, line.mode), [])
        paper = PAPER.get((line.row, line.metric, line.mode))
        assert (row["row"], row["metric"], row["mode"]) == (line.row, line.metric, line.mode)
        assert row["ours"] == (str(fmean(values)) if values else "")
        assert row["std"] == (str(stdev(values)) if values else "")
        assert (row["seeds"], row["paper"]) == (str(len(values)), str(paper or ""))
        verdict = "not run" if not values else "not comparable" if paper else "not published"
        assert row["verdict"] == line.verdict == verdict
        assert cells[:2] == [line.row, f"{line.metric} {line.mode}"]
        assert cells[2] == (f"{fmean(values):.2f} ± {stdev(values):.2f}" if values else "–")
        assert cells[3:5] == [str(len(values) or "–"), f"{paper:.2f}" if paper else "–"]
        assert cells[5].partition(" [")[0] == verdict
    assert written[2].read_bytes().startswith(b"\x89PNG")
    assert reproduce.rebuild("tiny", "cpu", tiny["results"]) == outcome


def test_a_table_without_a_single_run_shows_what_the_paper_says(tiny):
    outcome = reproduce.rebuild("tiny", "paper", tiny["results"])
    assert {line.verdict for line in outcome.lines} == {"not run"}
    assert set(outcome.waiting) == {"plain", "ours", "later"}
    assert [path.name for path in reproduce.write_table(outcome, tiny["results"])] == ["table.md", "table.csv"]


def test_a_finished_cell_is_small_and_tells_how_it_was_made(tiny):
    carry_out(tiny, only=["ours"])
    path = tiny["results"] / "tiny" / "cpu" / "ours-s0.json"
    cell = json.loads(path.read_text())
    assert path.stat().st_size < 10_000
    assert cell["command"] == "fedprotip reproduce tiny --scale cpu --only ours --seeds 1"
    assert {"matrix", "confusion"}.isdisjoint(cell["summary"])
    assert len(cell["summary"]["curve"]["aware"]) == 2
    assert len(cell["summary"]["mib_by_task"]["basis"]) == 2
    assert cell["settings"]["method"]["name"] == "fedprotip"
    assert cell["versions"]["fedprotip"]
    assert cell["seconds"] > 0
    assert cell["summary"]["cpu_seconds"]["train"] > 0


def test_changed_settings_make_a_row_of_their_own_and_quiet_ones_do_not(tiny):
    carry_out(tiny, only=["plain"])
    assert carry_out(tiny, only=["plain"], overrides=["train.rounds=2", "run.checkpoint=2"]) == ["plain+rounds-2-s0"]
    assert carry_out(tiny, only=["plain"], overrides=["run.state_mb=64"]) == []
    outcome = reproduce.rebuild("tiny", "cpu", tiny["results"])
    rows = list(dict.fromkeys(line.row for line in outcome.lines))
    assert rows == ["plain", "plain+rounds-2", "ours", "later"]
    assert "--set train.rounds=2" in outcome.runs["plain+rounds-2"][0]


def test_what_is_measured_beside_a_run_makes_a_row_of_its_own(tiny):
    measured, quiet = (
        reproduce.make_plan("tiny", "cpu", 1, ["ours"], overrides, **tiny).cells
        for overrides in (["run.geometry=1"], ["data.workers=2", "run.cache_mb=64"])
    )
    assert [cell.name for cell in measured + quiet] == ["ours+geometry-1-s0", "ours-s0"]


def test_a_table_says_why_there_are_rows_of_the_authors_code(tiny):
    outcome = reproduce.rebuild("table1", "paper", tiny["results"])
    text = reproduce.write_table(outcome, tiny["results"])[0].read_text()
    assert "## Text and code" in text
    assert "found in 0.10 of the cases" in text
    assert "| cifar100-a0.5-fedprotip-code | acc batch64 |" in text


def change(places, row, **settings):
    """Rewrite a finished cell as if its run had had other settings; None: as if they had not existed."""
    path = places["results"] / "tiny" / "cpu" / f"{row}-s0.json"
    cell = json.loads(path.read_text())
    for key, value in settings.items():
        section, name = key.split("_", 1)
        cell["settings"][section][name] = value
        if value is None:
            del cell["settings"][section][name]
    path.write_text(json.dumps(cell))


def test_an_outdated_cell_is_named_and_the_others_are_run(tiny):
    carry_out(tiny, only=["plain"])
    change(tiny, "plain", train_lr=0.3)
    plan = reproduce.make_plan("tiny", "cpu", 1, **tiny)
    assert plan.outdated == {"plain-s0": "train.lr 0.3, now 0.05"}
    assert [cell.name for cell in plan.cells] == ["ours-s0"]
    outcome = reproduce.rebuild("tiny", "cpu", tiny["results"])
    assert set(outcome.runs) == {"plain (outdated)"}
    assert outcome.waiting["plain"] == "not yet"
    text = reproduce.write_table(outcome, tiny["results"])[0].read_text()
    assert "- plain-s0.json: train.lr 0.3, now 0.05\n" in text


def test_redo_runs_outdated_cells_again_in_new_folders(tiny):
    carry_out(tiny, only=["plain"], overrides=["train.rounds=2"])
    place = tiny["runs"] / "tiny" / "cpu"
    (place / "plain+rounds-2-s0").rename(place / "plain-s0")  # of a row that had two rounds
    plan = reproduce.make_plan("tiny", "cpu", 1, ["plain"], **tiny)
    assert (plan.cells, plan.outdated) == ([], {"plain-s0": "train.rounds 2, now 1"})
    assert carry_out(tiny, only=["plain"], redo=True) == ["plain-s0"]
    change(tiny, "plain", train_lr=0.3)
    assert carry_out(tiny, only=["plain"]) == []
    assert carry_out(tiny, only=["plain"], redo=True) == ["plain-s0"]
    assert json.loads((tiny["results"] / "tiny/cpu/plain-s0.json").read_text())["settings"]["train"]["lr"] == 0.05
    assert carry_out(tiny, only=["plain"], redo=True) == []


def test_a_setting_that_a_cell_lacks_is_what_was_done_before_it(tiny, monkeypatch):
    """And not today's default: neither a cell that fits is refused, nor one of another method counted with the rest."""
    old = {**TINY, "clients": {"count": 2, "held_back": 0.0}, "train": {**TINY["train"], "fall": "none"}}
    old["train"]["head_start"] = "random"
    rows = (
        replace(Row("then", {**old, "method": {"name": "fedavg"}}), ours=True),
        replace(tiny_row("ours", "fedprotip"), ours=True),
    )
    monkeypatch.setitem(PROTOCOLS, "tiny", Protocol("tiny", "A tiny table", rows))
    carry_out(tiny)
    change(tiny, "then", clients_held_back=None, train_fall=None, train_head_start=None)
    change(tiny, "ours", method_birth=None)
    plan = reproduce.make_plan("tiny", "cpu", 1, **tiny)
    assert plan.outdated == {"ours-s0": "method.birth false, now true"}
    outcome = reproduce.rebuild("tiny", "cpu", tiny["results"])
    assert list(outcome.runs) == ["then", "ours (outdated)"]
    cell = read_cell(tiny["results"] / "tiny" / "cpu" / "then-s0.json")
    (record,) = find(**PRINTED, method="fedavg", metric="acc")
    reasons = " ".join(departures(cell.settings, record))
    assert not any(key in reasons for key in ("held_back", "fall", "head_start"))


def test_the_same_run_in_another_table_is_not_run_again(tiny, monkeypatch):
    carry_out(tiny, only=["plain"])
    rows = (tiny_row("same", "fedavg"), tiny_row("other", "fedprox"))
    monkeypatch.setitem(PROTOCOLS, "twin", Protocol("twin", "Again", rows))
    assert set(reproduce.rebuild("twin", "cpu", tiny["results"]).runs) == {"same"}  # shown without a file of its own
    plan = reproduce.make_plan("twin", "cpu", 1, ["same"], **tiny)
    reproduce.carry_out(plan, lambda cell: pytest.fail("it ran"))
    cell = json.loads((tiny["results"] / "twin" / "cpu" / "same-s0.json").read_text())
    assert (cell["table"], cell["row"], cell["seed"]) == ("twin", "same", 0)
    assert cell["command"].startswith("fedprotip reproduce twin")


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        ({"only": ["later"]}, "tiny later cannot run at scale 'cpu': this version lacks the method 'glfc-of-tomorrow'"),
        ({"only": ["late*"]}, "No row of tiny can run at scale 'cpu'"),
        ({"only": ["plein"]}, "did you mean 'plain'"),
        ({"scale": "gpu"}, "'gpu' is not a scale"),
        ({"seeds": 0}, "nearest valid value is 1"),
        ({"overrides": ["train.round=1"]}, "did you mean 'train.rounds'"),
    ],
)
def test_bad_requests_are_one_sentence_and_write_nothing(tiny, call, sentence):
    with pytest.raises(fedprotip.UsageError) as error:
        reproduce.make_plan("tiny", **{"scale": "cpu", "seeds": 1, **call}, **tiny)
    assert sentence in str(error.value)
    assert not tiny["results"].exists()
    assert not tiny["runs"].exists()


def test_rows_with_pretrained_weights_ask_for_their_file(tiny):
    with pytest.raises(fedprotip.UsageError, match=r"--set model\.weights=FILE"):
        reproduce.make_plan("table1", "cpu", 1, ["cifar100-a0.5-fedavg"], **tiny)


def test_a_damaged_file_is_named(tiny):
    place = tiny["results"] / "tiny" / "cpu"
    place.mkdir(parents=True)
    for content in ("{", "[]", "{}"):
        (place / "plain-s0.json").write_text(content)
        with pytest.raises(fedprotip.RunError, match=r"plain-s0\.json is damaged"):
            reproduce.rebuild("tiny", "cpu", tiny["results"])


def test_figures_that_the_paper_only_draws_are_shown_too(tiny, monkeypatch):
    row = Row("geometry", {**TINY, "run": {"threads": 1, "geometry": 1}, "method": {"name": "fedprotip"}})
    for name in ("fig2", "fig3"):
        monkeypatch.setitem(PROTOCOLS, name, Protocol(name, "Drawn", (row,)))
        reproduce.carry_out(reproduce.make_plan(name, "cpu", 1, **tiny))
    outcome = reproduce.rebuild("fig2", "cpu", tiny["results"])
    assert {"rho", "beta"} <= {line.metric for line in outcome.lines}
    assert {line.verdict for line in outcome.lines} == {"not published"}
    curves = reproduce.rebuild("fig3", "cpu", tiny["results"])
    assert len(curves.curves["geometry aware"]) == 2
    assert (reproduce.write_table(curves, tiny["results"])[-1]).name == "table.png"


def test_the_overview_lists_every_protocol_and_what_hinders_it(tiny):
    carry_out(tiny, only=["plain"])
    listed = {entry["name"]: entry for entry in reproduce.overview("cpu", tiny["results"])}
    assert set(listed) == set(PROTOCOLS)
    assert listed["tiny"]["finished"] == 1
    assert listed["tiny"]["ready"] == 2
    assert listed["tiny"]["rows"]["later"] == "this version lacks the method 'glfc-of-tomorrow'"
    assert listed["table2"]["ready"] == 0


def test_every_result_in_the_repository_is_readable():
    kept = sorted((Path(__file__).parents[2] / "results").glob("*/*/*-s*.json"))
    assert len(kept) > 20
    for path in kept:
        cell = FinishedCell.model_validate_json(path.read_text())
        assert cell.plain() == json.loads(path.read_text())
        assert cell.summary.curve.keys() == cell.summary.accuracy.keys()


RETIRED = {
    *(
        f"fig5/cifar100-a0.05-{side}-fedprotip+rank_rule-energy+routing_rank-20+threshold-0.775-s{seed}"
        for side in ("local", "global")
        for seed in (0, 1)
    ),
    *("rivals/digits-fedprotip-s0", "rivals/digits-fedprotip-s1", "rivals/digits-lander-s0", "rivals/digits-lga-s0"),
    *(
        f"single/cifar100-a0.5-{name}+features-4000-s{seed}"
        for name in ("fedprotip", "lda", "ridge")
        for seed in (0, 1)
    ),
    *("table1/cifar100-a0.5-fedprotip-s0", "table1/cifar100-a0.5-energy-fedprotip+routing_rank-20-s0"),
    *(f"table12/digit_domains-a0.5-fedprotip{which}" for which in ("-s0", "-s1", "-s2", "-t-s0")),
    "table15/cifar100-a0.5-overlap1-fedprotip+rank_rule-energy+routing_rank-20+threshold-0.775-s0",
}
"""Cells of the repository that their rows have left behind: they stay as what was measured once."""
LACKED = {
    *("data.fit", "data.folders", "evaluate.examples", "method.secure", "method.secure_clip", "method.secure_noise"),
    *("method.secure_share", "method.sketch", "run.cache_mb", "run.patience", "run.timeout", "run.track"),
    *("run.workers", "statistics.features", "statistics.minimum", "statistics.rank", "train.aggregate"),
    *("train.autocast", "train.channels_last", "train.heaviest", "train.trim", "train.views", "train.wire"),
}
"""Settings that old cells lack, and whose default is what was done before."""


def test_every_result_in_the_repository_is_of_its_row_or_known_to_be_outdated():
    kept = Path(__file__).parents[2] / "results"
    outdated = {
        f"{name}/{file.removesuffix('.json')}"
        for name in sorted({path.parent.parent.name for path in kept.glob("*/cpu/*.json")})
        for file in reproduce.rebuild(name, "cpu", kept).outdated
    }
    assert outdated <= RETIRED


def test_whoever_adds_a_setting_says_what_was_done_before():
    former = {f"{section}.{key}" for section, values in FORMER.items() for key in values}
    for path in sorted((Path(__file__).parents[2] / "results").glob("*/*/*-s*.json")):
        raw = json.loads(path.read_text())["settings"]
        now = {f"{section}.{key}" for section, values in read_cell(path).settings.items() for key in values}
        assert now - {f"{section}.{key}" for section, values in raw.items() for key in values} <= former | LACKED


def test_training_stands_beside_the_frozen_network(monkeypatch, tmp_path):
    rows = tuple(replace(tiny_row(*row), ours=True) for row in (("frozen", "lda"), ("ours", "fedprotip")))
    monkeypatch.setitem(PROTOCOLS, "tiny", Protocol("tiny", "A tiny table", rows))
    places = {"results": tmp_path / "results", "runs": tmp_path / "runs"}
    carry_out(places)
    cells = {row: json.loads((places["results"] / f"tiny/cpu/{row}-s0.json").read_text()) for row in ("frozen", "ours")}
    single = {row: cell["summary"]["routers"]["statistics"]["single"] for row, cell in cells.items()}
    lines = reproduce.rebuild("tiny", "cpu", places["results"]).lines
    (line,) = (line for line in lines if (line.metric, line.mode) == ("trained − frozen", "single"))
    assert (line.row, line.verdict) == ("ours", "not published")
    assert line.ours.mean == pytest.approx(single["ours"] - single["frozen"])
