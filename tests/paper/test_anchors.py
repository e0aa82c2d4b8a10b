"""The published numbers are those of the paper, each in its own cell."""

from collections import Counter
from dataclasses import replace

import pytest

import fedprotip
from fedprotip.paper.anchors import figures, find, published
from fedprotip.paper.finished import CellSummary
from tests.paper.cells import LABELS, TEX, cells, gain, number

COUNTS = dict(zip(LABELS, (84, 96, 42, 14, 22, 22, 24, 40, 45, 54, 36, 36, 57, 12, 41, 48, 15), strict=True))

needs_paper = pytest.mark.skipif(not TEX.exists(), reason=f"the paper's source is not at {TEX}")


def wrong_cells(table, records):
    """Cells of the paper's table that the records have otherwise, and records that no cell has."""
    left, wrong = [record for record in records if record.table == table], []
    for keys, text in cells(table):
        mine = [record for record in left if all(getattr(record, key) == value for key, value in keys.items())]
        printed = [] if number(text) is None else [number(text)]
        if [(record.value, record.std) for record in mine] != printed or any(gain(text) not in r.note for r in mine):
            wrong.append((keys, text, mine))
        left = [record for record in left if record not in mine]
    return wrong + left


@needs_paper
@pytest.mark.parametrize("table", LABELS)
def test_every_cell_of_a_table_is_in_the_data(table):
    assert len(list(cells(table))) >= COUNTS[table]
    assert wrong_cells(table, published()) == []


@needs_paper
@pytest.mark.parametrize("table", LABELS)
def test_two_numbers_in_each_others_place_are_noticed(table):
    first, *others = [record for record in published() if record.table == table]
    other = next(record for record in others if (record.value, record.std) != (first.value, first.std))
    swapped = {
        first: replace(first, value=other.value, std=other.std),
        other: replace(other, value=first.value, std=first.std),
    }
    assert len(wrong_cells(table, [swapped.get(record, record) for record in published()])) == 2


def test_every_table_with_an_experiment_is_complete():
    assert Counter(record.table for record in published()) == COUNTS


def test_no_number_stands_twice_under_the_same_protocol():
    keys = [replace(record, value=0.0, std=None, note="") for record in published()]
    assert len(set(keys)) == len(keys)


def test_fields_and_values_are_in_range():
    for record in published():
        assert record.dataset in ("cifar100", "imagenet_r", "domainnet")
        assert record.metric in ("acc", "ft", "routing", "mib", "hours")
        assert record.mode in (("aware", "agnostic", "batch64") if record.metric in ("acc", "ft", "routing") else ("",))
        assert (record.alpha is None) == (record.partition == "iid")
        assert (record.order is not None) == (record.dataset == "domainnet")
        assert (record.threshold is not None) == (record.method in ("fedprotip", "fot"))
        assert record.fraction == 5 / record.clients
        assert record.task is None or 1 <= record.task <= record.tasks
        assert -3 < record.value < (1.001 if record.metric == "routing" else 400)


@pytest.mark.parametrize(
    ("wanted", "value", "std"),
    [
        ({"table": 1, "partition": "iid", "method": "fedprotip", "mode": "batch64", "metric": "ft"}, 1.30, None),
        ({"table": 17, "partition": "iid", "method": "fedprotip", "mode": "batch64", "metric": "ft"}, 0.34, 0.59),
        ({"table": 3, "clients": 20, "method": "fedprotip", "mode": "batch64", "metric": "acc"}, 81.10, None),
        ({"table": 7, "method": "target", "mode": "aware", "metric": "acc"}, 98.30, 0.12),
        ({"table": 9, "kind": "basis", "task": 3}, 2.841, None),
        ({"table": 11, "dataset": "imagenet_r", "threshold": 0.9, "mode": "batch64", "metric": "ft"}, -2.16, None),
        ({"table": 14, "dataset": "imagenet_r", "tasks": 20, "task": 20}, 0.406, None),
        ({"table": 15, "overlap": 2, "mode": "batch64", "metric": "acc"}, 76.97, None),
        ({"table": 19, "sketch": "64", "metric": "mib"}, 8.1, None),
    ],
)
def test_single_numbers(wanted, value, std):
    records = find(**({"dataset": "cifar100"} | wanted))
    assert [(record.value, record.std) for record in records] == [(value, std)]


def test_find_takes_several_values_and_refuses_unknown_fields():
    assert len(find(table=1, dataset="cifar100", alpha=0.5, method=["fot", "lga"], metric="acc")) == 2
    with pytest.raises(fedprotip.UsageError, match="did you mean 'dataset'"):
        find(datasett="cifar100")


def test_contradictions_of_the_paper_carry_a_note():
    assert "0.34" in find(table=1, partition="iid", method="fedprotip", mode="batch64", metric="ft")[0].note
    assert "22.86" in find(table=16, dataset="cifar100", method="glfc", mode="agnostic")[0].note


def test_figures_of_a_cell_have_the_names_of_the_published_ones():
    summary = {
        "accuracy": {"aware": 90.0, "batch64": 80.0},
        "forgetting": {"aware": 1.0, "batch64": 2.0},
        "routing": {"batch64": 0.95, "batch64_by_task": [0.7, 0.9]},
        "routing_over_tasks": {
            "batch64": {"at_end": [0.7, 0.9], "so_far": [1.0, 0.8], "newest": [1.0, 0.9]},
            "single": {"at_end": [0.6, 0.5], "so_far": [None, 0.55], "newest": [None, 0.5]},
        },
        "mib_by_task": {"basis": [4.0, 2.0]},
        "seconds": {"train": 3600.0, "total": 7200.0},
        "peak_rss_mb": 100.0,
        "peak_gpu_mb": None,
        "geometry": {"rho_mean": [None, 0.5], "beta_bar": 0.1},
        "memory": {"rss": {"train": [90.0, 95.0], "task_end": [None, 80.0]}},
    }
    always = {"method": "fedprotip", "scenario": "class", "tasks": 2, "clients": 5, "seed": 0, "bytes": {}, "curve": {}}
    found = figures(CellSummary.model_validate(summary | always))
    assert [found[find(table=14, dataset="cifar100", task=task)[0].figure] for task in (1, 2)] == [1.0, 0.8]
    assert [found["routing at the end", "batch64", f"task {task}"] for task in (1, 2)] == [0.7, 0.9]
    assert ("routing", "single", "task 1") not in found
    assert found[find(table=9, kind="basis", task=1)[0].figure] == 4.0
    assert found[find(table=8, kind="total", m_s=512)[0].figure] == 2.0
    assert found["mib", "", "basis"] == 3.0
    assert found["rho", "", "task 2"] == 0.5
    assert found["memory", "", "rss train MiB"] == 95.0
    assert found["memory", "", "rss task_end MiB"] == 80.0
    assert ("memory", "", "gpu MiB") not in found


def test_published_routing_by_task_is_over_all_tasks_so_far():
    """Three seeds, 15 whole groups of 64 among the 1,000 test samples of a task."""

    def can_come_of(share, decisions):
        return round(round(share * decisions) / decisions, 3) == share

    shares = [record.value for record in find(table=14, dataset="cifar100")]
    assert all(can_come_of(share, 3 * 15 * task) for task, share in enumerate(shares, 1))
    assert sum(not can_come_of(share, 3 * 15) for share in shares) == 4  # of one task, at whatever time
    assert {record.value for record in find(table=14, task=1)} == {1.0}
