"""The published numbers are those of the paper, and verdicts on ours compare only what can be compared."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

import fedprotip
from fedprotip.paper.anchors import departures, figures, find, judge, published
from fedprotip.paper.finished import CellSummary
from fedprotip.paper.protocols import protocol

TEX = Path(__file__).parents[3] / "shared" / "paper" / "fedprotip.tex"
LABELS = {
    1: "tab: cif-dom-main",
    2: "table2",
    3: "tab:num-client",
    5: "tab:TIP-compare",
    6: "tab:resnet-scratch",
    7: "tab:vit-cifar100",
    8: "tab:abl-sampling",
    9: "tab:comm-cost-compare",
    10: "app-tab2",
    11: "tab:dom-imgnet-threshold",
    12: "tab:app-domain-full",
    13: "tab:app-domain-full-order2",
    14: "tab:task_pred",
    15: "tab:class-overlap",
    16: "tab:oracle-agnostic-full",
    17: "tab:app-cifar100-full",
    19: "tab:sketch_ablation",
}
COUNTS = dict(zip(LABELS, (84, 96, 42, 14, 22, 22, 24, 40, 45, 54, 36, 36, 57, 12, 41, 48, 15), strict=True))
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?![\w.])")


def tabular(label):
    """The text between \\begin{tabular} and \\end{tabular} that a label belongs to."""
    text = TEX.read_text(encoding="utf-8")
    place = text.index(f"\\label{{{label}}}")
    inside = text.rfind("\\begin{tabular}", 0, place) > text.rfind("\\end{tabular}", 0, place)
    before = label == "app-tab2" or label == "tab:oracle-agnostic-full"  # labelled below their tabular
    start = text.rfind("\\begin{tabular}", 0, place) if inside or before else text.index("\\begin{tabular}", place)
    return text[start : text.index("\\end{tabular}", start)]


def printed(label):
    """Every cell with a measured number, loosely parsed: (value, ±) and the Δ that Table 5 prints below a number."""
    values, gains = [], []
    for line in tabular(label).replace(r"\text{-}", "-").splitlines():
        if "&" not in line or "multicolumn" in line or "cmidrule" in line or line.startswith("Task &"):
            continue
        for cell in line.split("&")[1:]:
            cell = cell.split(r"\\")[0].replace("$-$", "-")
            gains += [float(gain) for gain in re.findall(r"arrow ([\d.]+)", cell)]
            cell = re.sub(r"_\{\\textcolor.*", "", cell)
            found = NUMBER.findall(re.sub(r"[{}$]|\\[a-z]+|_", " ", cell.replace("textbf", "")))
            if found and not re.search(r"[A-Za-z]", re.sub(r"\\[a-z]+", "", cell)):
                values.append((float(found[0]), float(found[1]) if len(found) > 1 else None))
    return values, gains


needs_paper = pytest.mark.skipif(not TEX.exists(), reason=f"the paper's source is not at {TEX}")


@needs_paper
@pytest.mark.parametrize("table", LABELS)
def test_every_number_of_a_table_is_in_the_data(table):
    values, gains = printed(LABELS[table])
    if table == 11:  # its second column holds the thresholds
        values = [pair for index, pair in enumerate(values) if index % 7]
    stored = Counter((record.value, record.std) for record in find(table=table))
    assert Counter(values) == stored
    notes = " ".join(record.note for record in find(table=table))
    assert all(str(gain) in notes or f"{gain:.2f}" in notes for gain in gains)


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


def paper_settings(**sections):
    """Settings of a row of Table 1 at the paper's scale, as they stand in a finished cell."""
    raw = protocol("table1").row("cifar100-a0.5-fedprotip").at("paper")
    raw["model"] |= {"weights": "resnet18.safetensors"}
    for name, values in sections.items():
        raw[name] |= values
    return fedprotip.load_settings(raw).model_dump()


PRINTED = {"table": 1, "dataset": "cifar100", "alpha": 0.5, "method": "fedprotip", "mode": "batch64"}


def test_the_same_protocol_is_judged_by_its_value():
    (acc,), (ft,) = find(**PRINTED, metric="acc"), find(**PRINTED, metric="ft")
    ours = paper_settings()
    assert departures(ours, acc) == []
    assert judge([86.5, 85.9], [ours, ours], acc) == ("beats", "")
    assert judge([85.0], [ours], acc) == ("below", "")
    assert judge([0.5], [ours], ft) == ("beats", "")
    assert judge([], [], acc) == ("not run", "")
    assert judge([1.0], [ours], None) == ("not published", "")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"train": {"rounds": 3, "epochs": 1}}, "rounds × epochs 3 × 1, paper 50 × 5"),
        ({"model": {"weights": ""}}, "weights random, paper ImageNet"),
        ({"model": {"weights": "a/resnet18-rebuilt.safetensors"}}, "weights resnet18-rebuilt.safetensors"),
        ({"model": {"freeze_from": "start"}}, "frozen layer2 from start"),
        ({"clients": {"alpha": 0.1}}, "partition α 0.1, paper α 0.5"),
        ({"train": {"steps": 4}}, "4 steps a round"),
    ],
)
def test_another_protocol_is_not_comparable_however_good(change, reason):
    (record,) = find(**PRINTED, metric="acc")
    verdict, why = judge([99.0], [paper_settings(**change)], record)
    assert verdict == "not comparable"
    assert reason in why


def test_options_of_the_method_are_not_protocol():
    (record,) = find(**PRINTED, metric="acc")
    assert departures(paper_settings(method={"rank_rule": "energy"}), record) == []


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
    assert ("memory", "", "gpu MiB") not in found


def test_published_routing_by_task_is_over_all_tasks_so_far():
    """Three seeds, 15 whole groups of 64 among the 1,000 test samples of a task."""

    def can_come_of(share, decisions):
        return round(round(share * decisions) / decisions, 3) == share

    shares = [record.value for record in find(table=14, dataset="cifar100")]
    assert all(can_come_of(share, 3 * 15 * task) for task, share in enumerate(shares, 1))
    assert sum(not can_come_of(share, 3 * 15) for share in shares) == 4  # of one task, at whatever time
    assert {record.value for record in find(table=14, task=1)} == {1.0}
