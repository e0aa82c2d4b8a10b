"""Several runs side by side: labels, mean ± std over seeds, the page."""

import json
import math
import re
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
from scipy import stats

from fedprotip.errors import UsageError
from fedprotip.report import comparison_rows, comparison_text, plots_comparison, style, write_comparison
from fedprotip.report.alike import differences, other_questions
from fedprotip.report.comparison import comparison_reading, comparison_sections
from fedprotip.report.formats import latex_text
from fedprotip.report.rundata import RunData
from fedprotip.report.significance import TITLE, may_be_chance, verdicts
from fedprotip.report.tables import aggregate, labels, other_differences
from fedprotip.report.text import plus_minus
from fedprotip.store.results import MODES
from tests.report.test_rundata import links, make_run, read_csv
from tests.small import forged


def with_reports(folders: list[Path]) -> list[Path]:
    """Stand-ins for the runs' own pages, so that a comparison does not draw them all."""
    for folder in folders:
        (folder / "report.html").write_text("own page")
    return folders


def test_mean_and_sample_std_over_seeds(tmp_path: Path) -> None:
    folders = []
    for seed, aware in enumerate((90.0, 92.0, 97.0)):
        folders.append(make_run(tmp_path / str(seed), tasks=2, seed=seed))
        path = folders[-1] / "summary.json"
        summary = json.loads(path.read_text())
        summary["accuracy"]["aware"] = aware
        path.write_text(json.dumps(summary))
    (row,) = comparison_rows(folders)
    assert (row["label"], row["n"], row["seeds"]) == ("fedprotip", 3, [0, 1, 2])
    assert row["accuracy"]["aware"]["mean"] == pytest.approx(93.0)
    assert row["accuracy"]["aware"]["std"] == pytest.approx(math.sqrt((9 + 1 + 16) / 2))
    assert row["seconds"] == {"mean": pytest.approx(23.4), "std": pytest.approx(0.0)}
    (alone,) = comparison_rows([folders[0], folders[0]])  # the same folder twice is one run
    assert alone["n"] == 1
    assert alone["accuracy"]["aware"] == {"mean": 90.0, "std": None}
    json.dumps(row)


def test_labels_name_the_settings_that_differ(tmp_path: Path) -> None:
    specs: list[tuple[str, dict[str, dict[str, Any]]]] = [
        ("fedprotip", {"method": {"threshold": 0.9}, "train": {"lr": 0.1}}),
        ("fedprotip", {"method": {"threshold": 0.5}, "train": {"lr": 0.1}}),
        ("fedavg", {"train": {"lr": 0.01}, "run": {"checkpoint": 7}, "evaluate": {"examples": 0}}),
    ]
    runs = [
        RunData.load(make_run(tmp_path / str(i), method, tasks=1, seed=i, settings=settings))
        for i, (method, settings) in enumerate(specs)
    ]
    assert labels(runs) == ["fedprotip threshold=0.9", "fedprotip threshold=0.5", "fedavg"]
    html = write_comparison(with_reports([run.folder for run in runs]), tmp_path / "out").read_text()
    assert "The methods were also run with different train.lr." in html
    assert "none of them is called ahead" in html
    assert "is ahead" not in html


def test_a_setting_that_only_one_method_varies_is_a_difference(tmp_path: Path) -> None:
    """Its label names it, but that of the other method does not."""
    specs = [("fedprotip", 0.1), ("fedprotip", 0.5), ("fedavg", 0.01)]
    folders = [
        make_run(tmp_path / str(i), method, tasks=1, settings={"train": {"lr": lr}})
        for i, (method, lr) in enumerate(specs)
    ]
    assert other_differences([RunData.load(folder) for folder in folders]) == ["train.lr"]
    html = write_comparison(with_reports(folders), tmp_path / "out").read_text()
    assert "The methods were also run with different train.lr." in html


def test_who_is_ahead_does_not_depend_on_how_fast_it_ran(tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path / method, method, settings={"run": {"threads": threads}})
        for threads, method in enumerate(("fedprotip", "fedavg"))
    ]
    html = write_comparison(with_reports(folders), tmp_path / "out").read_text()
    assert "The methods were also run with different run.threads." in html
    assert "fedprotip is ahead with" in html


def test_comparison_page(tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path / f"runs here/{method}-{seed}", method, seed=seed)
        for method in ("fedprotip", "fedavg")
        for seed in (0, 1)
    ]
    out = tmp_path / "out"
    html = write_comparison([*with_reports(folders[:3]), folders[3]], out).read_text()
    targets = [link for link in links(html) if not link.startswith("data:")]
    assert targets == [f"../runs%20here/{folder.name}/report.html" for folder in folders]
    assert (folders[0] / "report.html").read_text() == "own page"
    assert "FedAvg" in (folders[3] / "report.html").read_text()  # was missing and is made
    assert len(re.findall(r"<img ", html)) == len(list((out / "plots").glob("*.png"))) == 7
    assert "Peak memory by phase" in html
    assert "488 MB ± 7.41 MB" in html  # training: 460 and 470 MiB
    rows = read_csv(out / "comparison.csv")
    assert [row["label"] for row in rows] == ["fedprotip", "fedavg"]
    assert [row["seeds"] for row in rows] == ["0 1", "0 1"]
    summaries = {
        method: [json.loads((folder / "summary.json").read_text()) for folder in folders if method in folder.name]
        for method in ("fedprotip", "fedavg")
    }
    for row in rows:  # cell by cell, from the runs
        runs = summaries[row["label"]]
        values = {
            f"{kind}_{mode}": [run[kind][mode] for run in runs if mode in run[kind]]
            for kind in ("accuracy", "forgetting")
            for mode in ("aware", "agnostic", "single", "batch64")
        }
        values |= {f"bytes_{way}": [sum(run["bytes"][way].values()) for run in runs] for way in ("up", "down")}
        values["seconds"] = [run["seconds"]["total"] for run in runs]
        assert set(row) == {"label", "method", "n", "seeds"} | {f"{key}_{p}" for key in values for p in ("mean", "std")}
        for key, numbers in values.items():
            cells = [float(row[f"{key}_{part}"]) if row[f"{key}_{part}"] else None for part in ("mean", "std")]
            wanted = [pytest.approx(fmean(numbers)), pytest.approx(stdev(numbers))] if numbers else [None, None]
            assert cells == wanted
    assert "fedprotip is ahead with" in html
    first = html
    assert write_comparison(folders, out).read_text() == first


def test_every_cell_of_the_page_is_that_of_its_method_and_mode(tmp_path: Path) -> None:
    methods = ("fedprotip", "fedavg")
    folders = [make_run(tmp_path / f"{method}-{seed}", method, seed=seed) for method in methods for seed in (0, 1)]
    runs = [RunData.load(folder) for folder in folders]
    grids = {grid.title: grid for section in comparison_sections(aggregate(runs)) for grid in section.grids}
    for title, kind, better in (("Accuracy (%)", "accuracy", max), ("Forgetting (points)", "forgetting", min)):
        grid = grids[title]
        assert grid.columns == ["method", *MODES, "seeds"]
        best = set()
        for column, mode in enumerate(MODES, start=1):
            figures = [[getattr(run.summary, kind) for run in pair] for pair in (runs[:2], runs[2:])]
            stands_in = [mode == "single" and mode not in pair[0] for pair in figures]
            shown_modes = ["agnostic" if instead else mode for instead in stands_in]
            values = [[one.get(other) for one in pair] for pair, other in zip(figures, shown_modes, strict=True)]
            shown = [plus_minus(fmean(pair), stdev(pair)) if None not in pair else "–" for pair in values]
            marks = ["*" if instead else "" for instead in stands_in]
            assert [row[column] for row in grid.rows] == [cell + mark for cell, mark in zip(shown, marks, strict=True)]
            if "–" not in shown:
                best.add((values.index(better(values, key=fmean)), column))
        assert grid.best == best
        assert [(row[0], row[-1]) for row in grid.rows] == [("fedprotip", "2"), ("fedavg", "2")]
        assert grid.note.startswith("* This method does not look for the task")


def test_comparison_refuses_to_overwrite_a_run_and_needs_runs(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", tasks=1)
    with pytest.raises(UsageError, match="is a run folder"):
        write_comparison([folder], folder)
    with pytest.raises(UsageError, match="nothing to compare"):
        comparison_rows([])


def test_repeated_seeds_are_remarked(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / name, tasks=1) for name in ("a", "b")]
    assert "seed 0 occurs more than once" in write_comparison(with_reports(folders), tmp_path / "out").read_text()


def test_geometry_over_threshold(tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path / f"{epsilon}", geometry=True, settings={"method": {"threshold": epsilon}})
        for epsilon in (0.5, 0.7, 0.9)
    ]
    (by_threshold,) = plots_comparison.thresholds([RunData.load(folder) for folder in folders]).values()
    assert list(by_threshold) == [0.5, 0.7, 0.9]
    rho, _ = plots_comparison.rho_and_beta(by_threshold[0.7])
    assert rho.mean == pytest.approx(1.1 - 0.7 - 0.03 * 1.5)
    by_task = [stat.mean for stat in plots_comparison.rho_by_task(by_threshold[0.7])]
    assert by_task == [None, pytest.approx(0.37), pytest.approx(0.34)]
    write_comparison(with_reports(folders), tmp_path / "out")
    for name in ("geometry_over_threshold", "geometry_rho_by_threshold"):
        assert (tmp_path / f"out/plots/{name}.png").exists()
    assert plots_comparison.thresholds([RunData.load(folders[0])]) == {}


def test_single_of_every_method_stands_beside_the_others(tmp_path: Path) -> None:
    """A method that looks for no task answers agnostically: hatched, marked, and a line of its own."""
    folders = [make_run(tmp_path / method, method) for method in ("fedprotip", "fedavg")]
    groups = aggregate([RunData.load(folder) for folder in folders])
    bars = plots_comparison.bars(groups, "accuracy").axes[0]
    widths = [patch.get_width() for patch in bars.patches if patch.get_hatch()]
    assert widths == [groups[1].accuracy["agnostic"].mean]
    drawn = {str(line.get_label()): line for line in plots_comparison.curves(groups, "single").axes[0].lines}
    assert list(drawn) == ["fedprotip", "fedavg*"]
    assert list(drawn["fedavg*"].get_ydata())[-1] == pytest.approx(groups[1].accuracy["agnostic"].mean)
    (alone,) = aggregate([RunData.load(folders[1])])
    assert "single" not in comparison_sections([alone])[0].grids[0].columns  # nobody to stand beside


@pytest.mark.parametrize(
    ("single", "samples", "sentence"),
    [
        (80.0, 10_000, "Training is worth 15.0 points here: lda, which trains nothing, has 80.0 %, fedprotip 95.0 %."),
        (97.0, 10_000, "Training is not worth it here: lda, which trains nothing, has 97.0 %, fedprotip 95.0 %."),
        (97.0, 100, "Training makes no difference here that could be told: lda, which trains nothing, has 97.0 %"),
        (95.2, 10**9, "Training makes no difference here that could be told: lda, which trains nothing, has 95.2 %"),
    ],
)
def test_whether_training_is_worth_it(tmp_path: Path, single: float, samples: int, sentence: str) -> None:
    """Compared with what chance does to so many test samples."""
    folders = [make_run(tmp_path / method, method) for method in ("lda", "fedprotip")]
    for folder, accuracy in zip(folders, (single, 95.0), strict=True):
        path = folder / "summary.json"
        summary = json.loads(path.read_text())
        summary["accuracy"]["single"] = accuracy
        path.write_text(json.dumps(summary))
        (folder / "answers.json").write_text(json.dumps({"classes": ["a"], "taken": [[0, 0, samples]]}))
    reading = comparison_reading(aggregate([RunData.load(folder) for folder in folders]))
    assert sentence in reading
    assert ("lda (97.0 %) and fedprotip (95.0 %) are too close to call" in reading) == (samples == 100)


@pytest.mark.parametrize(
    ("trained", "sentence"),
    [
        (62.5, "Training is not worth it here: class statistics of fedprotip, trained minus frozen, −13.4"),
        (89.3, "Training is worth 13.4 points here: class statistics of fedprotip, trained minus frozen, +13.4"),
        (76.0, "Training makes no difference here that could be told: class statistics of fedprotip"),
    ],
)
def test_training_is_compared_with_the_same_network_untrained(tmp_path: Path, trained: float, sentence: str) -> None:
    """Where the untrained one answers, FedProTIP is level with LDA whatever training did."""
    folders = [make_run(tmp_path / method, method) for method in ("lda", "fedprotip")]
    for folder in folders:
        path = folder / "summary.json"
        summary = json.loads(path.read_text())
        summary["accuracy"]["single"] = 75.9
        if folder.name == "fedprotip":
            ways = {"birth": {"single": 75.9}, "statistics": {"single": trained}}
            summary |= {"router": "birth", "routers": ways}
        path.write_text(json.dumps(summary))
        (folder / "answers.json").write_text(json.dumps({"classes": ["a"], "taken": [[0, 0, 10_000]]}))
    assert sentence in comparison_reading(aggregate([RunData.load(folder) for folder in folders]))


def test_one_colour_per_meaning() -> None:
    """On the page of a run and on that of several; strangers get a colour that nobody on the page has."""
    modes, phases = set(style.MODE_COLOURS.values()), set(style.PHASE_COLOURS.values())
    ways = {colour for colour, _ in style.WAY_LOOKS.values()}
    kinds, layers = set(style.shades("YlOrBr", 8)), set(style.shades("Purples", 8))
    run = [modes, phases, ways, kinds, layers]
    several = [modes, phases, set(style.METHOD_COLOURS.values())]
    for families in (run, several):
        assert len(set.union(*families)) == sum(map(len, families))
    assert len(ways) == len(style.WAY_LOOKS)
    first, second, other, stranger = style.looks(["fedprotip", "fedprotip", "fedavg", "mine"])
    assert first["color"] == second["color"] == style.METHOD_COLOURS["fedprotip"]
    assert first["linestyle"] != second["linestyle"]
    assert other["color"] == style.METHOD_COLOURS["fedavg"]
    assert stranger["color"] not in {first["color"], other["color"]}
    assert len({look["color"] for look in style.looks(["fedprotip"] * 3)}) == 3


def changed(folder: Path, **entries: Any) -> Path:
    """The run with other entries of its summary; dictionaries are joined."""
    path = folder / "summary.json"
    summary = json.loads(path.read_text())
    for name, values in entries.items():
        summary[name] = {**summary.get(name, {}), **values}
    path.write_text(json.dumps(summary))
    return folder


def bounded(tmp_path: Path, joint: float = 90.0) -> list[Path]:
    """FedAvg at 50 % agnostic and 80 % aware, joint training above it, and a method in between."""
    figures = {
        "fedavg": {"agnostic": 50.0, "aware": 80.0},
        "joint": {"agnostic": joint, "aware": 80.2},
        "fedprotip": {"single": 80.0, "agnostic": 60.0, "aware": 79.0, "batch64": 85.0},
    }
    made = []
    for method, accuracy in figures.items():
        folder = changed(make_run(tmp_path / method, method), accuracy=accuracy)
        if method == "joint":
            summary = json.loads((folder / "summary.json").read_text())
            for part in ("accuracy", "forgetting", "matrix"):
                summary[part] = {mode: summary[part][mode] for mode in ("agnostic", "aware")}
            summary["samples"] = {"raw": 1437}
            (folder / "summary.json").write_text(json.dumps(summary))
        made.append(folder)
    return made


def test_how_much_of_the_way_to_joint_training(tmp_path: Path) -> None:
    """By what stands for `single`; not where both ends are alike (aware), nor where one has no figure (batch64)."""
    folders = with_reports(bounded(tmp_path))
    rows = {row["label"]: row["way"] for row in comparison_rows(folders)}
    assert rows["fedavg"] == {"single": 0.0, "agnostic": 0.0}
    assert rows["joint"] == {"single": 100.0, "agnostic": 100.0}
    assert rows["fedprotip"] == {"single": pytest.approx(75.0), "agnostic": pytest.approx(25.0)}
    reading = comparison_reading(aggregate([RunData.load(folder) for folder in folders]))
    assert "Of the way from FedAvg to joint training, which keeps all data, fedprotip goes 75 %." in reading
    assert "fedprotip is ahead with 80.0 %" in reading  # joint training is no competitor
    write_comparison(folders, tmp_path / "out")
    (row,) = (row for row in read_csv(tmp_path / "out/comparison.csv") if row["label"] == "fedprotip")
    assert (float(row["way_single"]), float(row["way_agnostic"])) == (pytest.approx(75.0), pytest.approx(25.0))
    grids = {g.title: g for s in comparison_sections(aggregate([RunData.load(f) for f in folders])) for g in s.grids}
    assert grids["Of the way from FedAvg to joint training"].rows[2] == ["fedprotip", "75.0 %", "25.0 %"]


def test_no_way_without_both_ends_or_between_ends_that_are_alike(tmp_path: Path) -> None:
    lower, upper, method = with_reports(bounded(tmp_path / "a"))
    for folders in ([lower, method], [upper, method], with_reports(bounded(tmp_path / "b", joint=50.2))):
        assert all(row["way"] == {} for row in comparison_rows(folders))
        html = write_comparison(folders, tmp_path / "out").read_text()
        assert "the way from FedAvg" not in html
        assert not any(name.startswith("way") for name in read_csv(tmp_path / "out/comparison.csv")[0])


def test_trained_minus_frozen_is_against_the_twin_that_trains_nothing(tmp_path: Path) -> None:
    """Seed by seed, by class statistics alone, and only where nothing but the training differs."""

    def made(name: str, method: str, seed: int, single: float, **settings: Any) -> Path:
        folder = make_run(tmp_path / name, method, seed=seed, settings=settings)
        way = {"single": single, "batch64": single, "routing_single": 0.9, "routing_batch64": 0.9}
        return changed(folder, routers={"statistics": way}, accuracy={"single": 99.0})

    frozen = [made(f"lda{seed}", "lda", seed, 80.0 + seed) for seed in (0, 1)]
    trained = [made(f"ours{seed}", "fedprotip", seed, 85.0 - seed, train={"lr": 0.2}) for seed in (0, 1, 2)]
    other = made("other", "fedprotip", 0, 90.0, model={"width": 3})
    rows = {row["label"]: row["trained_minus_frozen"] for row in comparison_rows([*frozen, *trained])}
    assert rows["lda"] == {}
    assert rows["fedprotip"]["single"] == {"mean": pytest.approx(4.0), "std": pytest.approx(math.sqrt(2))}  # 5 and 3
    groups = aggregate([RunData.load(folder) for folder in [*frozen, *trained]])
    grids = {grid.title: grid for section in comparison_sections(groups) for grid in section.grids}
    assert grids["Trained minus frozen (points)"].rows == [["fedprotip", "+4.0 ± 1.4", "+4.0 ± 1.4"]]
    assert all(not row["trained_minus_frozen"] for row in comparison_rows([*frozen, other]))


def test_a_run_that_knows_its_network_at_birth_is_its_own_twin(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r", "fedprotip", seed=0)
    ways = {
        name: {"single": single, "batch64": single, "routing_single": 0.9, "routing_batch64": 0.9}
        for name, single in (("birth", 88.0), ("statistics", 91.5))
    }
    twin = changed(make_run(tmp_path / "lda", "lda", seed=0), routers={"statistics": {**ways["birth"], "single": 10.0}})
    (row, _) = comparison_rows([changed(folder, routers=ways), twin])
    assert row["trained_minus_frozen"]["single"]["mean"] == pytest.approx(3.5)


def test_samples_that_are_kept_stand_beside_the_cost(tmp_path: Path) -> None:
    folders = with_reports(bounded(tmp_path))
    rows = {row["label"]: row["samples"] for row in comparison_rows(folders)}
    assert rows == {"fedavg": {}, "joint": {"raw": {"mean": 1437, "std": None}}, "fedprotip": {}}
    sections = {s.title: s for s in comparison_sections(aggregate([RunData.load(folder) for folder in folders]))}
    grid = sections["Cost"].grids[0]
    assert grid.columns[-1] == "raw samples kept"
    assert [row[-1] for row in grid.rows] == ["–", "1,437", "–"]
    without = {s.title: s for s in comparison_sections(aggregate([RunData.load(folders[0])]))}
    assert without["Cost"].grids[0].columns == ["method", "up", "down", "time"]


# Whether the best is really better


def with_accuracy(folder: Path, method: str, seed: int, single: float, **more: Any) -> Path:
    return changed(make_run(folder, method, tasks=2, seed=seed, **more), accuracy={"single": single})


def series(tmp_path: Path, name: str, method: str, values: list[float], first: int = 0, **more: Any) -> list[Path]:
    return [
        with_accuracy(tmp_path / f"{name}{seed}", method, seed, value, **more)
        for seed, value in enumerate(values, start=first)
    ]


def single_of(folders: list[Path]) -> dict[str, dict[str, Any]]:
    return {row["label"]: row["behind"].get("single", {}) for row in comparison_rows(folders)}


def test_significance_is_paired_by_seed_where_seeds_coincide(tmp_path: Path) -> None:
    """Seeds that are good for one are good for the other: only the pairs show that one is always ahead."""
    ours, theirs = [60.0, 70.0, 80.0, 90.0], [58.9, 69.1, 78.8, 89.2]
    folders = [*series(tmp_path, "o", "fedprotip", ours), *series(tmp_path, "t", "lda", theirs)]
    found = single_of(folders)
    assert (found["fedprotip"], found["lda"]["best"], found["lda"]["paired"]) == ({}, "fedprotip", True)
    expected = stats.ttest_rel(ours, theirs).pvalue
    assert found["lda"]["p"] == pytest.approx(expected)
    assert expected < 0.01
    apart = [*folders[:4], *series(tmp_path, "u", "lda", theirs, first=4)]  # other seeds: Welch's test
    alone = single_of(apart)["lda"]
    assert (alone["paired"], alone["seeds"]) == (False, 4)
    assert alone["p"] == pytest.approx(stats.ttest_ind(ours, theirs, equal_var=False).pvalue)
    assert alone["p"] > 0.9


def test_two_seeds_say_nothing_and_equal_differences_neither(tmp_path: Path) -> None:
    few = [*series(tmp_path, "a", "fedprotip", [90.0, 91.0]), *series(tmp_path, "b", "lda", [80.0, 82.0])]
    assert single_of(few)["lda"]["p"] is None
    alike = [*series(tmp_path, "c", "fedprotip", [90.0, 91.0, 92.0]), *series(tmp_path, "d", "lda", [80.0, 81.0, 82.0])]
    assert single_of(alike)["lda"]["p"] is None
    groups = aggregate([RunData.load(folder) for folder in few])
    assert all(grid.title != TITLE for section in comparison_sections(groups) for grid in section.grids)


def test_several_comparisons_are_corrected_after_holm(tmp_path: Path) -> None:
    ours = [90.0, 91.0, 92.5]
    others = {"lda": [80.0, 82.0, 82.1], "fedprox": [88.0, 90.5, 91.0], "gpm": [89.0, 88.0, 92.0]}
    folders = series(tmp_path, "ours", "fedprotip", ours)
    for method, values in others.items():
        folders += series(tmp_path, method, method, values)
    raw = {method: stats.ttest_rel(ours, values).pvalue for method, values in others.items()}
    found = {label: one["p"] for label, one in single_of(folders).items() if one}
    first, second, third = sorted(raw, key=lambda method: raw[method])
    assert found[first] == pytest.approx(3 * raw[first])
    assert found[second] == pytest.approx(max(3 * raw[first], 2 * raw[second]))
    assert found[third] == pytest.approx(max(found[second], raw[third]))
    groups = aggregate([RunData.load(folder) for folder in folders])
    (grid,) = [grid for section in comparison_sections(groups) for grid in section.grids if grid.title == TITLE]
    assert ["single", "fedprotip", "lda", "+9.8", f"{found['lda']:.3f}", "3, paired"] in grid.rows
    assert "paired by seed" in grid.note


def test_who_is_ahead_comes_with_its_test(tmp_path: Path) -> None:
    folders = [*series(tmp_path, "a", "fedprotip", [90, 91, 92.5]), *series(tmp_path, "b", "lda", [80, 82, 82.1])]
    reading = comparison_reading(aggregate([RunData.load(folder) for folder in folders]))
    assert re.search(
        r"fedprotip is ahead with .*; over 3 seeds chance is an unlikely reason \(p = 0\.00\d\)\.", reading
    )


def test_whoever_is_behind_in_common_seeds_is_not_called_ahead_by_them(tmp_path: Path) -> None:
    """A lucky seed that the other has not makes it the best; the seeds of both say otherwise."""
    folders = [*series(tmp_path, "a", "fedprotip", [70, 71, 72, 99]), *series(tmp_path, "b", "lda", [75, 76.5, 77])]
    groups = aggregate([RunData.load(folder) for folder in folders])
    assert "unlikely reason" not in comparison_reading(groups)
    (grid,) = [grid for section in comparison_sections(groups) for grid in section.grids if grid.title == TITLE]
    (row,) = [row for row in grid.rows if row[0] == "single"]
    assert row[3] == "−5.2"
    assert may_be_chance(verdicts(groups), "single", "fedprotip", "lda").endswith("it is behind")


OTHER: dict[str, tuple[dict[str, Any], str]] = {
    "data": ({"settings": {"data": {"name": "cifar100"}}}, "data.name (digits, cifar100)"),
    "tasks": ({"tasks": 3}, "stream.tasks (2, 3)"),
    "order": ({"settings": {"stream": {"order": "random"}}}, "stream.order (natural, random)"),
}


@pytest.mark.parametrize("other", OTHER)
@pytest.mark.parametrize("method", ["fedprotip", "lda"])
def test_what_cannot_be_compared_is_said_and_not_ranked(tmp_path: Path, other: str, method: str) -> None:
    """Whether the methods are the same or not."""
    more, said = OTHER[other]
    folders = [
        *(make_run(tmp_path / f"a{s}", tasks=2, seed=s, settings={"stream": {"order": "natural"}}) for s in range(3)),
        *(
            make_run(
                tmp_path / f"b{s}", method, seed=s, **{"tasks": 2, "settings": {"stream": {"order": "natural"}}} | more
            )
            for s in range(3)
        ),
    ]
    html = write_comparison(with_reports(folders), tmp_path / "out").read_text()
    assert f"These runs cannot be compared as they stand: they differ in {said}." in html
    assert "none of them is called ahead" in html
    assert "<strong>" not in html
    assert TITLE not in html
    assert all(row["best"] == [] and row["behind"] == {} for row in comparison_rows(folders))


def test_other_test_samples_are_noticed_whatever_the_data_is_called(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / name, method, tasks=1) for name, method in (("a", "fedprotip"), ("b", "lda"))]
    for folder, digest in zip(folders, ("11", "22"), strict=True):
        with forged(folder) as manifest:
            manifest["data"] = {"hash": "0", "shape": [1, 8, 8], "tasks": [{"train": "0", "test": digest}]}
    assert other_questions(aggregate([RunData.load(folder) for folder in folders])) == ["test samples (seed 0)"]
    with forged(folders[1]) as manifest:
        manifest["data"]["tasks"][0]["test"] = "11"
    assert other_questions(aggregate([RunData.load(folder) for folder in folders])) == []


def test_the_same_samples_may_be_asked_for_in_other_words(tmp_path: Path) -> None:
    sizes: list[Any] = [2, [2, 2]]
    folders = [
        make_run(tmp_path / str(place), method, tasks=2, settings={"stream": {"task_size": size}})
        for place, (method, size) in enumerate(zip(("fedprotip", "lda"), sizes, strict=True))
    ]
    assert other_questions(aggregate([RunData.load(folder) for folder in folders])) == ["stream.task_size (2, [2, 2])"]
    tasks = [{"train": "0", "test": "1"}, {"train": "2", "test": "3"}]
    for folder in folders:
        with forged(folder) as manifest:
            manifest["data"] = {"hash": "0", "shape": [1, 8, 8], "tasks": tasks}
    assert other_questions(aggregate([RunData.load(folder) for folder in folders])) == []


def test_differences_in_settings_are_a_table(tmp_path: Path) -> None:
    first = make_run(tmp_path / "a", settings={"method": {"threshold": 0.9}, "train": {"lr": 0.1}, "run": {"out": "a"}})
    second = make_run(tmp_path / "b", "lda", settings={"train": {"lr": 0.5}, "run": {"out": "b"}})
    grid = differences(aggregate([RunData.load(folder) for folder in (first, second)]))
    assert grid is not None
    assert grid.columns == ["setting", "fedprotip", "lda"]
    assert ["train.lr", "0.1", "0.5"] in grid.rows
    assert not [row for row in grid.rows if row[0] in ("method.threshold", "run.out", "method.name")]


def test_tables_for_pages_and_papers(tmp_path: Path) -> None:
    label = "a_b|*c* & 5 % <b>"
    folders = [make_run(tmp_path / "a"), make_run(tmp_path / "b", label)]
    write_comparison(with_reports(folders), tmp_path / "out")
    best = comparison_rows(folders)[0]["best"]
    for kind in ("csv", "md", "tex"):
        assert (tmp_path / f"out/comparison.{kind}").read_text() == comparison_text(folders, kind)
    markdown, latex = comparison_text(folders, "md"), comparison_text(folders, "tex")
    assert r"| a\_b\|\*c\* &amp; 5 % &lt;b> |" in markdown
    rows = [line for line in markdown.splitlines() if line.startswith("| fedprotip")]
    assert rows[0].count("**") == 2 * len(best)
    assert r"a\_b\textbar{}*c* \& 5 \% \textless{}b\textgreater{}" in latex
    assert latex.count(r"\begin{tabular}") == latex.count(r"\end{tabular}") == 2
    assert "\\textbf{" in latex
    assert latex_text("[mine]") == "{}[mine]"  # else the end of the row before takes it for a length
    body = [line for line in latex.splitlines() if not line.startswith("%")]
    assert all(ord(letter) < 128 for line in body for letter in line)
