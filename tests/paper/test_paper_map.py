"""docs/paper-map.md names only what exists: files, functions, settings, commands; and leaves nothing out."""

import ast
import re
import shlex
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import pytest

from fedprotip import api, cells, settings
from fedprotip.paper.protocols import PROTOCOLS
from fedprotip.paper.rows import SCALES, Row
from fedprotip.stream import datasets

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "fedprotip"
TEXT = (ROOT / "docs" / "paper-map.md").read_text(encoding="utf-8")
QUOTED = sorted(set(re.findall(r"`([^`\n]+)`", TEXT)))
PLACES = [text for text in QUOTED if re.fullmatch(r"[\w/.-]+\.py(::[\w.]+)?", text)]
SECTIONS = "|".join(settings.Settings.model_fields)
KEYS = [text for text in QUOTED if re.match(rf"({SECTIONS})\.\w+( = .+)?$", text)]
KEYS = [text for text in KEYS if not text.endswith((".py", ".json", ".jsonl", ".html", ".safetensors"))]
OURS = ("single", "defaults", "rivals")
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


@pytest.mark.parametrize("place", ["subspace/no.py", "subspace/rank.py::no", "tests/no.py", "models/heads.py::no"])
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


def assert_data(words: list[str], flags: list[str]) -> None:
    action, *names = words
    assert action in ("list", "check", "get")
    assert not flags
    assert len(names) == (action != "list")
    assert set(names) <= set(datasets.layouts())


def assert_reproduce(tables: list[str], flags: list[str], options: dict[str, list[str]]) -> None:
    """The table and its rows exist, and unless it only lists or shows, some of them can run."""
    assert set(flags) <= {"--list", "--show"}
    assert set(options["--scale"]) <= set(SCALES)
    for table in tables:
        rows = [row for row in PROTOCOLS[table].rows if all(fnmatchcase(row.name, p) for p in options["--only"])]
        ready = [row for scale in options["--scale"] for row in rows if can_run(row, scale)]
        assert ready or flags
        for row in ready:
            settings.load(row.at(options["--scale"][0]), options["--set"])
    assert tables or flags or not any(options.values())


def can_run(row: Row, scale: str) -> bool:
    return not row.why_not(scale) and not row.missing(scale)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_would_run(command):
    verb, *rest = shlex.split(command)[1:]
    valued = ("--set", "--vary", "--methods", "--seeds", "--scale", "--only", "--root")
    options: dict[str, list[str]] = {option: [] for option in valued}
    flags = []
    sources = []
    while rest:
        word = rest.pop(0)
        if word in options:
            options[word].append(rest.pop(0))
        elif word.startswith("--"):
            flags.append(word)
        else:
            sources.append(word)
    if verb in ("settings", "info"):
        return
    if verb == "data":
        assert_data(sources, flags)
        return
    if verb == "reproduce":
        assert_reproduce(sources, flags, options)
        return
    if verb == "compare" and not sources:  # named, not to be typed
        return
    assert verb in ("run", "compare")
    assert not flags
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


@pytest.mark.parametrize("name", [name for name in PROTOCOLS if name not in OURS])
def test_every_protocol_has_its_command_and_the_rows_that_can_run(name):
    column = {"t": "Table", "f": "Figure"}[name[0]]
    (table,) = re.findall(rf"^\| {column} \|.*\n((?:\|.*\n)+)", TEXT, flags=re.MULTILINE)
    (line,) = re.findall(rf"^\| {re.sub(r'[a-z]', '', name)} \|.*$", table, flags=re.MULTILINE)
    assert f"`fedprotip reproduce {name} " in line
    rows = PROTOCOLS[name].rows
    paper, cpu = (sum(can_run(row, scale) for row in rows) for scale in SCALES)
    assert f"| {paper} and {cpu} of {len(rows)} |" in line
    lacking = {row.method for row in rows if row.method not in settings.KNOWN["method.name"]}
    assert [method for method in lacking if method.upper() not in line.split("|")[-2]] == []


@pytest.mark.parametrize("name", OURS)
def test_a_protocol_that_is_not_in_the_paper_has_its_command(name):
    beyond = TEXT.partition("## Beyond the paper")[2].partition("\n## ")[0]
    assert re.search(rf"`fedprotip reproduce {name} --scale cpu\b", beyond)


def test_tables_have_no_ragged_rows():
    for table in re.findall(r"(?:^\|.*\n)+", TEXT, flags=re.MULTILINE):
        assert len({row.count("|") for row in table.splitlines()}) == 1
