"""What a row costs beside FedAvg: ratios need the same conditions and the same seed."""

import json
from pathlib import Path

import pytest

from fedprotip.paper import comparison, costs
from fedprotip.paper.finished import FinishedCell

KEPT = Path(__file__).parents[2] / "results" / "table12" / "cpu" / "digit_domains-a0.5-fedavg-s0.json"
SENT = {"up": {"model": 6 * 2**20}, "down": {"model": 3 * 2**20}}


def cell(method="fedavg", seed=0, train=10.0, task_end=0.0, peak=100.0, rounds=10, single=40.0, **more):
    """A finished cell of three tasks and two clients."""
    raw = json.loads(KEPT.read_text())
    raw |= {"seed": seed, "row": method}
    raw["settings"]["train"]["rounds"], raw["settings"]["method"] = rounds, {"name": method}
    raw["summary"] |= {
        "method": method,
        "tasks": 3,
        "clients": 2,
        "accuracy": {"agnostic": single},
        "forgetting": {"agnostic": 1.0},
        "bytes": SENT,
        "seconds": {"train": train, "task_end": task_end, "evaluate": 99.0, "total": 120.0},
        "memory": {"rss": {"train": [peak, None], "evaluate": [9999.0, 9999.0]}},
        **more,
    }
    return FinishedCell.model_validate(raw)


def test_evaluation_does_not_count_and_ratios_are_of_the_same_seed():
    found = costs.costs(
        {
            "plain": [cell(train=10.0), cell(seed=1, train=20.0)],
            "ours": [cell("fot", train=10.0, task_end=5.0, peak=150.0), cell("fot", seed=1, train=30.0, peak=150.0)],
        }
    )
    assert found["plain"].times.mean == found["plain"].memory.mean == 1.0
    assert found["ours"].times.mean == 1.5
    assert found["ours"].memory.mean == 1.5
    assert found["ours"].seconds.mean == 22.5


@pytest.mark.parametrize("other", [{"seed": 3}, {"rounds": 11}])
def test_without_fedavg_under_the_same_conditions_there_is_no_ratio(other):
    found = costs.costs({"plain": [cell()], "ours": [cell("fot", **other)]})["ours"]
    assert (found.times.mean, found.memory.mean, found.way) == (None, None, None)


def test_seconds_are_of_the_processor_where_all_are_known():
    """Of clients in other processes they are not, and what is divided is of one kind."""
    busy = {"cpu_seconds": {"train": 4.0, "task_end": 1.0, "evaluate": 50.0}}
    rows = {"plain": [cell(**busy)], "ours": [cell("fot", train=40.0, **busy)], "old": [cell("scr", train=20.0)]}
    found = costs.costs(rows)
    assert (found["ours"].seconds.mean, found["ours"].times.mean, found["ours"].wall) == (5.0, 1.0, False)
    assert (found["old"].seconds.mean, found["old"].times.mean, found["old"].wall) == (20.0, 2.0, True)
    assert (costs.columns(found["ours"])[4], costs.columns(found["old"])[4]) == ("5", "20 (wall)")
    elsewhere = cell("fot", train=40.0, **busy)
    elsewhere.settings["run"]["engine"] = "pool"
    assert costs.costs({"plain": [cell(**busy)], "ours": [elsewhere]})["ours"].times.mean == 4.0


def test_bytes_are_of_one_client_and_task():
    found = costs.costs({"plain": [cell(), cell(seed=1)]})["plain"]
    assert (found.sent, found.received) == ({"model": 1.0}, {"model": 0.5})


def test_the_way_from_fedavg_to_joint_training():
    rows = {"plain": [cell()], "joint": [cell("joint", single=90.0)], "ours": [cell("fot", single=65.0)]}
    assert {label: cost.way for label, cost in costs.costs(rows).items()} == {"plain": 0, "joint": 100, "ours": 50}
    near = {"plain": [cell()], "joint": [cell("joint", single=40.4)], "ours": [cell("fot", single=65.0)]}
    assert costs.costs(near)["ours"].way is None


def test_a_cell_from_before_memory_was_measured_has_no_ratio_of_it():
    found = costs.costs({"plain": [cell()], "ours": [cell("fot", memory={})]})["ours"]
    assert (found.times.mean, found.memory.mean) == (1.0, None)


def test_a_line_for_every_row():
    rows = {"plain": [cell()], "ours": [cell("scr", samples={"raw": 1500}, train=25.0)]}
    lines = [
        comparison.Line(row, metric, "agnostic", "", costs.Stat(value, None), 1, costs.Stat(paper, None), "not run")
        for row, metric, value, paper in [
            ("plain", "acc", 40.0, None),
            ("plain", "ft", 1.0, None),
            ("ours", "acc", 51.23, 34.26),
            ("ours", "ft", -0.01, 38.22),
        ]
    ]
    outcome = comparison.Outcome(
        "x", "X", "cpu", lines, {row: ["run"] for row in rows}, {}, {}, [], costs.costs(rows), {}
    )
    headings, shown = comparison.at_a_glance(outcome)
    assert headings == ["row", "agnostic", *costs.HEADINGS]
    assert shown[0] == ["plain", "40.0 (1.0)", "–", "none", "model 1", "model 0.5", "10 (wall)", "1.00", "1.00"]
    line = ["ours", "51.2 (0.0) [34.3 (38.2)]", "–", "1,500 raw", "model 1", "model 0.5", "25 (wall)", "2.50", "1.00"]
    assert shown[1] == line
    assert f"| {' | '.join(line)} |" in comparison.markdown(outcome)


def test_the_picture_has_a_bar_for_every_row_with_a_ratio():
    found = costs.costs({"plain": [cell()], "ours": [cell("fot", train=30.0)], "alone": [cell("lda", rounds=3)]})
    left, right = costs.time_and_memory(found).axes
    assert [bar.get_width() for bar in left.patches] == [1.0, 3.0]
    assert [bar.get_width() for bar in right.patches] == [1.0, 1.0]
    assert [label.get_text() for label in left.get_yticklabels()] == ["plain", "ours"]
