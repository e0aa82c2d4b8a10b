"""What a person reads first: classes by name, what is taken for what, sites."""

import base64
import html as entities
import json
import random
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

from fedprotip.errors import RunError
from fedprotip.report import classes, text, write_report
from fedprotip.report.classes import class_sections
from fedprotip.report.rundata import RunData
from tests.report.test_rundata import make_run, read_csv

SITES = {"measured": True, "names": ["north", "south"], "accuracy": [90.0, 60.5], "samples": [20, 40]}


def picture(true: int, said: int, side: int = 8, channels: int = 1) -> dict[str, Any]:
    pixels = random.Random(f"{true}{said}").randbytes(side * side * channels)
    shape = [side, side, channels]
    return {"true": true, "said": said, "shape": shape, "pixels": base64.b64encode(pixels).decode()}


def with_answers(folder: Path, method: str = "fedprotip", **changes: Any) -> Path:
    """A run whose three classes are cats, dogs (often taken for cats) and a name that means mischief."""
    record = {
        "classes": ["cat", "dog", "<script>alert(1)</script>"],
        "taken": [[0, 0, 30], [1, 0, 8], [1, 1, 10], [1, 2, 2], [2, 2, 9], [2, 0, 1]],
        "sites": SITES,
        "examples": [picture(1, 0), picture(1, 0, 48, 3), picture(2, 0)],
    }
    make_run(folder, method, tasks=2)
    (folder / "answers.json").write_text(json.dumps(record | changes))
    return folder


def test_classes_by_name_the_hardest_first(tmp_path: Path) -> None:
    by_class, pairs, sites = class_sections(RunData.load(with_answers(tmp_path / "run")))
    assert by_class.grids[0].rows == [
        ["dog", "50.0 %", "20", "cat (8)"],
        ["<script>alert(1)</script>", "90.0 %", "10", "cat (1)"],
        ["cat", "100.0 %", "30", "–"],
    ]
    assert by_class.grids[0].bars == [50.0, 90.0, 100.0]
    assert (
        "The hardest class is “dog” with 50.0 %, the median 90.0 %, the easiest “cat” with 100.0 %." in by_class.intro
    )
    assert pairs.intro.startswith("11 test samples of 60 got a wrong answer.")
    assert [row[1:] for row in pairs.grids[0].rows] == [
        ["cat", "8 (40.0 %)"],
        ["<script>alert(1)</script>", "2 (10.0 %)"],
        ["cat", "1 (10.0 %)"],
    ]
    assert [len(thumbs) for thumbs in pairs.grids[0].thumbs] == [2, 0, 1]
    assert sites.grids[0].rows == [["north", "90.0 %", "20"], ["south", "60.5 %", "40"]]
    assert "test samples that each site holds itself" in sites.intro


def test_the_page_shows_them_and_obeys_none_of_them(tmp_path: Path) -> None:
    folder = with_answers(tmp_path / "run")
    html = write_report(folder).read_text()
    assert "<script" not in html
    assert entities.escape("<script>alert(1)</script>") in html
    assert len(re.findall(r'alt="Test picture of class dog that was taken for cat."', html)) == 2
    order = ["Accuracy by class", "Most confused", "Accuracy by site", "Accuracy over tasks", "Accuracy matrix"]
    assert re.findall(r"<h2>(.*?)</h2>", html)[: len(order)] == order
    for title in order:
        assert (f"<summary><h2>{title}</h2>" in html) == (title == "Accuracy matrix")
    assert html.count("<table") == html.count('<div class="box" tabindex="0" role="region" aria-label=')
    assert len(html) < 1_500_000
    assert [row["class"] for row in read_csv(folder / "tables/classes.csv")] == [
        "cat",
        "dog",
        "<script>alert(1)</script>",
    ]
    assert read_csv(folder / "tables/taken_for.csv")[1] == {"class": "dog", "taken_for": "cat", "samples": "8"}
    assert read_csv(folder / "tables/sites.csv")[1] == {"site": "south", "samples": "40", "accuracy": "60.5"}


def test_pictures_keep_to_their_budget_and_every_pair_has_its_first_one_first(tmp_path: Path) -> None:
    names = [f"class {label}" for label in range(11)]
    taken = [[label, 10, 9] for label in range(10)]
    examples = [picture(label, 10, 48, 3) for label in range(10) for _ in range(3)]  # noise: 9 kB each
    folder = with_answers(tmp_path / "run", classes=names, taken=taken, examples=examples)
    shown = class_sections(RunData.load(folder))[1].grids[0].thumbs
    assert sum(len(thumb.data) for thumbs in shown for thumb in thumbs) <= classes.BUDGET
    assert [len(thumbs) for thumbs in shown] == [1] * 10


def test_many_classes_and_many_sites_are_folded_or_summed_up(tmp_path: Path) -> None:
    names = [f"class {label}" for label in range(100)]
    taken = [[label, label, label + 1] for label in range(100)] + [[label, 99 - label, 1] for label in range(100)]
    accuracy = [float(place % 50) for place in range(100)]
    sites = {"names": [f"client {place}" for place in range(100)], "accuracy": accuracy, "samples": [1] * 100}
    folder = with_answers(tmp_path / "run", classes=names, taken=taken, sites=sites, examples=[])
    by_class, pairs, by_site = class_sections(RunData.load(folder))
    assert [(len(grid.rows), grid.folded) for grid in by_class.grids] == [(12, False), (100, True)]
    assert by_class.grids[0].rows[0][0] == "class 0"
    assert len(pairs.grids[0].rows) == 10
    assert "10.0 % of the mistakes are these" in pairs.intro
    assert pairs.grids[0].thumbs == []
    spread, worst = by_site.grids
    quarters = statistics.quantiles(accuracy, n=4, method="inclusive")
    assert spread.rows == [["100 sites", "0.0 %", *map(text.points, quarters), "49.0 %"]]
    assert [row[0] for row in worst.rows] == [f"client {place}" for place in (0, 50, 1, 51, 2)]
    assert "what to expect at each site's mix of classes" in by_site.intro


def test_an_older_run_has_no_such_section(tmp_path: Path) -> None:
    assert class_sections(RunData.load(make_run(tmp_path / "run"))) == []


def test_a_method_that_looks_for_no_task_says_so(tmp_path: Path) -> None:
    by_class = class_sections(RunData.load(with_answers(tmp_path / "run", "fedavg")))[0]
    assert "this method does not look for the task" in by_class.intro


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"taken": [[0, 3, 1]]}, "class 3 has no name"),
        ({"taken": [[0, 1, -1]]}, "greater than or equal to 0"),
        ({"sites": SITES | {"names": ["north"]}}, "names, accuracy and samples are not of one length"),
        ({"sites": SITES | {"accuracy": [90.0, 101.0]}}, "less than or equal to 100"),
        ({"examples": [picture(0, 1) | {"pixels": "AAAA"}]}, "pixels are not those of a picture of shape (8, 8, 1)"),
        ({"examples": [picture(0, 1) | {"pixels": '"><script>'}]}, "pixels are not those of a picture"),
        ({"examples": [picture(0, 1) | {"shape": [4096, 4096, 1]}]}, "less than or equal to 48"),
        ({"examples": [picture(0, 1)] * 31}, "at most 30 items"),
    ],
)
def test_a_damaged_record_is_one_sentence(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    folder = with_answers(tmp_path / "run", **changes)
    with pytest.raises(RunError) as caught:
        write_report(folder)
    assert words in str(caught.value)
    assert "answers.json is damaged" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_names_are_cut_and_printable(tmp_path: Path) -> None:
    names = ["x" * 1000, "line\nbreak\x1b[2J", "$\\frac{$"]
    run = RunData.load(with_answers(tmp_path / "run", classes=names))
    assert run.answers is not None
    assert run.answers.classes == ["x" * 59 + "…", "line break [2J", "$\\frac{$"]


@pytest.mark.parametrize(
    ("statistics_alone", "sentence"),
    [
        (60.0, "The trained heads add 30.0 points: class statistics of the same features answer 60.0 % alone."),
        (91.0, "The trained heads make no difference that could be told: class statistics of the same features"),
        (99.9, "The trained heads cost 9.9 points: class statistics of the same features answer 99.9 % alone."),
    ],
)
def test_the_head_of_the_page_says_what_training_adds(tmp_path: Path, statistics_alone: float, sentence: str) -> None:
    folder = with_answers(tmp_path / "run")
    path = folder / "summary.json"
    ways = {"fused": {"single": 90.0}, "statistics": {"single": statistics_alone}}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"routers": ways}))
    assert text.worth(RunData.load(folder)).startswith(sentence)
    assert text.other_ways("fused", RunData.load(folder).summary.routers) == (
        f"The way that answers is fused (90.0 %); the others would have had: statistics {statistics_alone} %."
    )
    assert text.worth(RunData.load(make_run(tmp_path / "old"))) == ""
    assert text.worth(RunData.load(make_run(tmp_path / "lda", "lda"))).startswith("Nothing was trained for this")


@pytest.mark.parametrize(
    ("router", "trained", "sentence"),
    [
        (
            "birth",
            62.5,
            "Training costs 13.4 points: the untrained network answers, class statistics of the trained one",
        ),
        (
            "birth",
            89.3,
            "Training adds 13.4 points: the untrained network answers, class statistics of the trained one",
        ),
        ("birth", 76.0, "Training makes no difference that could be told: the untrained network answers"),
        ("statistics", 89.3, "Training adds 13.4 points: class statistics of the untrained network have 75.9 %."),
        ("statistics", 62.5, "Training costs 13.4 points: class statistics of the untrained network have 75.9 %."),
    ],
)
def test_what_training_adds_is_against_the_untrained_network(
    tmp_path: Path, router: str, trained: float, sentence: str
) -> None:
    folder = with_answers(tmp_path / "run")
    path = folder / "summary.json"
    ways = {"birth": {"single": 75.9}, "statistics": {"single": trained}}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"router": router, "routers": ways}))
    assert text.worth(RunData.load(folder)).startswith(sentence)
    page = write_report(folder).read_text()
    top = page[: page.index("<details")]
    assert sentence.split(" points")[0] in top
    assert f"The way that answers is {router}" in top
    assert text.WAYS.keys() >= text.TRAINED.keys() | set(text.TRAINED.values())


def test_no_class_is_the_hardest_where_all_are_alike(tmp_path: Path) -> None:
    run = with_answers(tmp_path / "run", taken=[[0, 0, 30], [1, 1, 10], [2, 2, 9]], examples=[])
    intro = class_sections(RunData.load(run))[0].intro
    assert "All classes are alike, with 100.0 %." in intro
    assert "hardest" not in intro
