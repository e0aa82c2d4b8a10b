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
ALWAYS = {"ask", "plan", "knowledge", "presence", "start"}
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
    train = {"rounds": 1, "head_start": "closed"}
    chosen = small(
        method={"name": method, **REDUCED.get(method, {})}, clients=clients, train=train, stream={"tasks": 2}
    )
    return chosen, fedprotip.run(chosen, out=folder)


@pytest.mark.parametrize("method", METHODS)
def test_the_table_says_what_the_ledger_says(tmp_path, monkeypatch, method):
    quick(monkeypatch)
    chosen, summary = run(tmp_path / "r", method)
    lines = [json.loads(line) for line in (tmp_path / "r" / "ledger.jsonl").read_text().splitlines()]
    crossed = {way: {line["kind"] for line in lines if line["direction"] == way} - ALWAYS for way in ("up", "down")}
    ((up, down, raw, synthetic),) = [cells for names, cells in rows("## What travels") if names == [method]]
    exchanges = {exchange.name: exchange.combine for exchange in create_method(chosen).exchanges}
    assert kinds(up) == {kind: exchanges[kind] for kind in crossed["up"]}
    assert set(kinds(down)) == crossed["down"]
    assert [raw == "yes", synthetic == "yes"] == [kind in summary["samples"] for kind in ("raw", "synthetic")]
    assert {raw, synthetic} <= {"yes", "no"}


@pytest.mark.parametrize("heading", ["# The methods", "## What travels"])
def test_every_method_is_in_the_tables(heading):
    assert sorted(name for names, _ in rows(heading) for name in names) == REGISTERED


def test_the_first_table_says_what_the_methods_say_of_themselves():
    for (name,), (_, kept, routed, domains, page) in rows("# The methods"):
        method = base._methods[name]
        assert (routed == "yes") == method.routes, name
        assert (domains == "yes") == ("domain" in method.scenarios), name
        assert ("raw" in kept) == ("raw" in method.about.stores or name == "joint"), name
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
