"""docs/paper-map.md names only what exists: files, functions, settings, commands; and leaves nothing out."""

import ast
import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from fedprotip import api, cells, settings

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "fedprotip"
TEXT = (ROOT / "docs" / "paper-map.md").read_text(encoding="utf-8")
QUOTED = sorted(set(re.findall(r"`([^`\n]+)`", TEXT)))
PLACES = [text for text in QUOTED if re.fullmatch(r"[\w/.-]+\.py(::[\w.]+)?", text)]
SECTIONS = "|".join(settings.Settings.model_fields)
KEYS = [text for text in QUOTED if re.match(rf"({SECTIONS})\.\w+( = .+)?$", text)]
KEYS = [text for text in KEYS if not text.endswith((".py", ".json", ".jsonl", ".html", ".safetensors"))]
COMMANDS = [text for text in QUOTED if text.startswith("fedprotip ")]


@cache
def names(path: Path) -> set[str]:
    """Functions, classes and assigned names of a file; members as Class.member."""
    found = set()

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            found.update(prefix + target.id for target in targets if isinstance(target, ast.Name))

    visit(ast.parse(path.read_text(encoding="utf-8")).body, "")
    return found


def missing(place: str) -> str:
    """What of `file.py` or `file.py::name` is not there; empty when all is."""
    file, _, name = place.partition("::")
    path = (ROOT if file.startswith("tests/") else PACKAGE) / file
    if not path.is_file():
        return f"no file {file}"
    return f"no {name} in {file}" if name and name not in names(path) else ""


def test_every_file_and_function_exists():
    assert len(PLACES) > 100
    assert [reason for reason in map(missing, PLACES) if reason] == []


@pytest.mark.parametrize("place", ["subspace/no.py", "subspace/rank.py::no", "tests/no.py", "capture.py::Layer.no"])
def test_a_wrong_place_is_found(place):
    assert missing(place)


@pytest.mark.parametrize("text", KEYS)
def test_every_setting_exists_and_takes_the_value(text):
    key, equals, value = text.partition(" = ")
    found = [row for row in settings.documentation() if row["key"] == key]
    assert found
    if equals:
        method = [f"method.name={found[0]['method']}"] if found[0]["method"] and key != "method.name" else []
        settings.load(None, [*method, f"{key}={value}"])


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_would_run(command):
    verb, *rest = shlex.split(command)[1:]
    options: dict[str, list[str]] = {"--set": [], "--vary": [], "--methods": [], "--seeds": []}
    sources = []
    while rest:
        word = rest.pop(0)
        if word in options:
            options[word].append(rest.pop(0))
        else:
            sources.append(word)
    if verb in ("settings", "info"):
        return
    assert verb in ("run", "compare")
    (source,) = sources
    if verb == "run":
        assert not options["--vary"] + options["--methods"] + options["--seeds"]
        api.check(settings.load(ROOT / source, options["--set"]))
    else:
        listed = {key: [part for text in options[key] for part in text.split(",")] for key in ("--methods", "--seeds")}
        seeds = [int(seed) for seed in listed["--seeds"]] or [0, 1, 2]
        assert cells.plan_cells(ROOT / source, options["--set"], listed["--methods"], seeds, options["--vary"])


@pytest.mark.parametrize(
    ("column", "last"), [("Eq.", 41), ("Line", 17), ("Table", 20), ("Figure", 7)], ids=["Eq", "Line", "Table", "Figure"]
)
def test_nothing_numbered_is_left_out(column, last):
    numbers: list[int] = []
    for table in re.findall(rf"^\| {re.escape(column)} \|.*\n((?:\|.*\n)+)", TEXT, flags=re.MULTILINE):
        for first, end in re.findall(r"^\| (\d+)(?:–(\d+))? \|", table, flags=re.MULTILINE):
            numbers += range(int(first), int(end or first) + 1)
    assert numbers == list(range(1, last + 1))


def test_tables_have_no_ragged_rows():
    for table in re.findall(r"(?:^\|.*\n)+", TEXT, flags=re.MULTILINE):
        assert len({row.count("|") for row in table.splitlines()}) == 1
