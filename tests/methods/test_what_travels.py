"""docs/methods.md says what every method sends and keeps: compared with the ledgers of small runs."""

import json
import re
from pathlib import Path

import pytest

import fedprotip
from fedprotip.methods import base, create_method
from tests.conformance.test_methods import REDUCED, REGISTERED
from tests.small import quick, small

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
QUICK = ("fedavg", "fedprotip", "fot", "scr", "target")
METHODS = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow, id=name) for name in REGISTERED]
ALWAYS = {"ask", "plan", "presence", "start"}
"""Of the loop itself, whatever the method."""


def rows(heading):
    """The first table below a heading: the methods of a row, and its cells."""
    table = re.search(r"(?:^\|.*\n)+", TEXT.partition(heading)[2], re.MULTILINE)
    assert table
    for line in table[0].splitlines()[2:]:
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        yield re.findall(r"`(\w+)`", cells[0]), cells[1:]


def kinds(cell):
    """`basis` (each), `model` (mean) → {"basis": "each", "model": "mean"}"""
    return dict(re.findall(r"`(\w+)`(?: \((\w+)\))?", cell))


def run(folder, method):
    """Two tasks, so that what the first one leaves has to travel in the second; its settings and summary."""
    clients = {"count": 1 if method == "gpm" else 3, "held_back": 0.1}
    train = {"rounds": 2, "head_start": "closed"}
    chosen = small(
        method={"name": method, **REDUCED.get(method, {})}, clients=clients, train=train, stream={"tasks": 2}
    )
    return chosen, fedprotip.run(chosen, out=folder)


def ledger(folder):
    return [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("method", METHODS)
def test_the_table_says_what_the_ledger_says(tmp_path, monkeypatch, method):
    quick(monkeypatch)
    chosen, summary = run(tmp_path / "r", method)
    lines = [line for line in ledger(tmp_path / "r") if line["bytes"]]
    crossed = {way: {line["kind"] for line in lines if line["direction"] == way} - ALWAYS for way in ("up", "down")}
    ((up, down, raw, synthetic),) = [cells for names, cells in rows("## What travels") if names == [method]]
    exchanges = {exchange.name: exchange.combine for exchange in create_method(chosen).exchanges}
    assert kinds(up) == {kind: exchanges[kind] for kind in crossed["up"]}
    assert set(kinds(down)) == crossed["down"]
    assert [raw == "yes", synthetic == "yes"] == [kind in summary["samples"] for kind in ("raw", "synthetic")]
    assert {raw, synthetic} <= {"yes", "no"}


WIDTHS, IMAGE, CLASSES, FEATURES = (64, 24), 64, 2, 24
"""Inputs of the layers of the small perceptron, pixels, classes of a task, final features."""
ENCODER = 12 * 25 + 12 + 2 * (12 * 12 * 25 + 12)  # without its last layer


def formulas(chosen):
    """Method → kind → direction and bytes of the second task, by Table 4 of docs/methods.md."""
    options = chosen.method
    match options.name:
        case "fot":
            yield "sketch", "up", 4 * sum(WIDTHS) * options.width
        case "target" | "lode":
            yield "pool", "down", options.pool * IMAGE
        case "lander":
            kept = options.synthesis_batch * options.synthesis_rounds  # after the warm-up
            yield "pool", "down", min(options.pool, kept) * IMAGE
            yield "text", "down", 4 * CLASSES * options.dim
        case "glfc" | "lga":
            last = 12 * 2 * 2 * 2 * CLASSES + 2 * CLASSES  # 2 × 2 positions; all classes so far
            yield "prototypes", "up", 4 * CLASSES * (ENCODER + last)
        case "scr":
            yield "prototypes", "up", 4 * 2 * CLASSES * FEATURES  # of all classes so far
        case "pec":
            width, outputs = options.width, options.outputs
            yield "students", "up", 4 * CLASSES * (9 * width + 2 * width + 16 * width * outputs + outputs)
        case "stsa":
            features = options.features
            yield "statistics", "up", 4 * (features * (features + 1) // 2 + CLASSES * features)


@pytest.mark.parametrize(
    "method", [pytest.param(m, marks=() if m in QUICK else pytest.mark.slow) for m in sorted(REDUCED)]
)
def test_what_a_task_costs_is_what_the_ledger_says(tmp_path, monkeypatch, method):
    """Up to a few counts and words beside the tensors."""
    quick(monkeypatch)
    chosen, _ = run(tmp_path / "r", method)
    expected = list(formulas(chosen))
    assert expected
    for kind, direction, size in expected:
        found = [
            line["bytes"]
            for line in ledger(tmp_path / "r")
            if (line["kind"], line["direction"], line["task"]) == (kind, direction, 1)
        ]
        assert found
        assert size <= max(found) <= size + 120, (kind, size, found)


def test_bases_cost_a_column_for_every_direction(tmp_path, monkeypatch):
    quick(monkeypatch)
    run(tmp_path / "r", "gpm")
    events = [json.loads(line) for line in (tmp_path / "r" / "events.jsonl").read_text().splitlines()]
    first = next(event for event in events if event["event"] == "task")
    size = 4 * sum(first["dims"][layer] * rank for layer, rank in first["ranks"].items())
    (sent,) = [line["bytes"] for line in ledger(tmp_path / "r") if line["kind"] == "basis" and line["task"] == 0]
    assert size <= sent <= size + 200


@pytest.mark.parametrize("heading", ["# The methods", "## What travels"])
def test_every_method_is_in_the_tables(heading):
    assert sorted(name for names, _ in rows(heading) for name in names) == REGISTERED


def test_the_first_table_says_what_the_methods_say_of_themselves():
    for (name,), (_, kept, routed, domains, page) in rows("# The methods"):
        method = base._methods[name]
        assert (routed == "yes") == method.routes, name
        assert (domains == "yes") == ("domain" in method.scenarios), name
        assert ("raw" in kept) == ("raw" in method.about.stores) == ("may keep" in method.about.needs), name
        assert ("synthetic" in kept) == ("synthetic" in method.about.stores), name
        target = re.search(r"\((.*?)\)$", page)[1]
        if target.startswith("#"):
            titles = [
                re.sub(r"[^\w-]", "", title.lower().replace(" ", "-")) for title in re.findall(r"^## (.*)$", TEXT, re.M)
            ]
            assert target[1:] in titles, name
        else:
            assert (ROOT / "docs" / target).is_file(), name
            assert name in (ROOT / "docs" / target).read_text(encoding="utf-8"), name
