"""What the documents tell a reader to do works."""

import ast
import importlib
import os
import re
import runpy
import subprocess
import sys
import tomllib
from inspect import signature
from pathlib import Path

import pytest
from PIL import Image

import fedprotip
from fedprotip import cli, settings
from fedprotip.inference.parts import ROUTERS
from fedprotip.methods import base
from fedprotip.models.heads import _builders
from fedprotip.stream.datasets import _layouts, _loaders
from tests.conformance import test_methods as conformance
from tests.paper.test_paper_map import names
from tests.small import SMALL, quick, tensors
from tests.test_layers import ORDER

ROOT = Path(__file__).parent.parent
README, CONTRIBUTING, CHANGELOG = (ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG"))
EXTEND, ARCHITECTURE = (ROOT / "docs" / f"{name}.md" for name in ("extend", "architecture"))
DOCUMENTS = [README, CONTRIBUTING, CHANGELOG, *sorted((ROOT / "docs").rglob("*.md"))]


def commands():
    """Every fedprotip command of the README, without its comment."""
    lines = re.findall(r"^(fedprotip .*?)(?:\s+#.*)?$", README.read_text(), re.MULTILINE)
    assert len(lines) >= 7
    return lines


@pytest.fixture
def small_defaults(monkeypatch):
    """The defaults, cut down so that a command takes a second."""
    original = settings.load

    def load(source=None, overrides=(), note=lambda text: None, preset=""):
        quick = [f"{section}.{key}={value}" for section, key, value in quick_values() if section != "method"]
        return original(source, [*overrides, *quick], note, preset)

    monkeypatch.setattr("fedprotip.settings.load", load)


def quick_values():
    yield "train", "rounds", 1
    yield "train", "epochs", 1
    yield "model", "width", SMALL["model"]["width"]


@pytest.mark.slow
def test_every_command_of_the_readme_runs(tmp_path, monkeypatch, capsys, small_defaults):
    """In the order of the README, in an empty folder: what one command makes, the next one uses."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "photos").mkdir()
    Image.new("RGB", (20, 30), "white").save(tmp_path / "photos" / "one.png")
    for command in commands():
        arguments = command.split()
        target = Path(arguments[arguments.index(">") + 1]) if ">" in arguments else None
        arguments = arguments[: arguments.index(">")] if target else arguments
        if "runs/mine" in command and not Path("runs/mine").exists():
            fedprotip.run({"stream": {"tasks": 2, "task_size": 2}}, out="runs/mine")
        if "compare" in command:
            arguments += ["--out", str(tmp_path / f"compare{len(list(tmp_path.iterdir()))}")]
        monkeypatch.setattr(sys, "argv", arguments)
        code = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = stop.code
        printed = capsys.readouterr().out
        assert not code, command
        if target:
            target.write_text(printed)


def test_the_python_example_of_the_readme_runs(tmp_path, monkeypatch, capsys, small_defaults):
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    exec(code, {})
    assert len(capsys.readouterr().out.split()) > 1


def files_of(document):
    """Whole files that a document shows, by their names without .py."""
    return dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", document.read_text(encoding="utf-8"), re.DOTALL))


@pytest.fixture
def extensions(tmp_path, monkeypatch):
    """The files of docs/extend.md in a folder of their own, imported; what they register is forgotten afterwards."""
    code, registries = (
        files_of(EXTEND),
        (base._methods, ROUTERS, _loaders, _layouts, _builders, *settings.KNOWN.values()),
    )
    assert set(code) == {"anchor", "prototypes", "stripes", "patchwork", "try_it"}
    before = [dict(known) for known in registries]
    folder = tmp_path / "extensions"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    for name, text in code.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    for name in code.keys() - {"try_it"}:
        sys.modules.pop(name, None)
        importlib.import_module(name)
    yield folder
    for name in code:
        sys.modules.pop(name, None)
    for known, former in zip(registries, before, strict=True):
        known.clear()
        known.update(former)


def test_a_method_is_one_file(tmp_path, monkeypatch, extensions):
    """The first method of docs/extend.md has settings of its own, is FedAvg without its term, and acts with it."""
    quick(monkeypatch)
    longer = {**SMALL["train"], "rounds": 4, "epochs": 4, "batch": 32, "lr": 0.1}
    chosen = {"fedavg": {"name": "fedavg"}, "off": {"name": "anchor", "strength": 0.0}, "on": {"name": "anchor"}}
    summaries = {
        name: fedprotip.run({**SMALL, "train": longer, "method": method}, out=tmp_path / name)
        for name, method in chosen.items()
    }
    saved = tomllib.loads((tmp_path / "on" / "settings.toml").read_text())["method"]
    assert {name: saved[name] for name in saved if "secure" not in name} == {"name": "anchor", "strength": 1.0}
    models = {name: (tmp_path / name / "model.safetensors").read_bytes() for name in chosen}
    assert models["fedavg"] == models["off"] != models["on"]
    assert summaries["on"]["accuracy"]["agnostic"] > summaries["fedavg"]["accuracy"]["agnostic"]
    with pytest.raises(fedprotip.UsageError, match=r"method.strength = -1.*the nearest valid value is 0"):
        fedprotip.load_settings({"method": {"name": "anchor", "strength": -1}})


def test_a_method_has_its_own_router_and_state(tmp_path, monkeypatch, extensions):
    """The second method of docs/extend.md, on the document's own data and backbone: the run folder answers alone."""
    quick(monkeypatch)
    script = runpy.run_path(str(extensions / "try_it.py"))
    summary = fedprotip.run({**script["SETTINGS"], "method": {"name": "prototypes"}}, out=tmp_path / "r")
    assert summary["accuracy"]["single"] > 90 > summary["accuracy"]["agnostic"]
    assert list(summary["routers"]) == ["nearest"]
    assert {name: tuple(kept.shape) for name, kept in tensors(tmp_path / "r", "prototypes").items()} == {
        str(task): (2, 32) for task in range(3)
    }
    images, labels = sys.modules["stripes"].draw(180, "test")
    answers = fedprotip.load(tmp_path / "r").predict(images)
    names = [f"{30 * label} degrees" for label in labels]
    right = sum(answer.label == name for answer, name in zip(answers, names, strict=True))
    assert 100 * right / len(answers) == pytest.approx(summary["accuracy"]["single"])


ASKED = {
    "engines": ("anchor", conformance.test_all_engines_give_the_same_bytes, {"engine": "apart"}),
    "kill": ("prototypes", conformance.test_killed_and_resumed_is_uninterrupted, {"engine": "apart"}),
    "ledger": ("prototypes", conformance.test_every_message_that_crossed_is_in_the_ledger, {}),
    "shape": ("prototypes", conformance.test_a_bad_client_is_left_out_and_named, {"fault": "other_shape"}),
    "nan": ("prototypes", conformance.test_a_bad_client_is_left_out_and_named, {"fault": "nan"}),
}


@pytest.mark.parametrize("question", ASKED)
def test_the_methods_of_the_document_conform(tmp_path, monkeypatch, extensions, question):
    """Some of what the conformance suite asks of every method."""
    quick(monkeypatch)
    method, check, more = ASKED[question]
    patch = {"monkeypatch": monkeypatch} if "monkeypatch" in signature(check).parameters else {}
    check(tmp_path=tmp_path, method=method, **patch, **more)


@pytest.mark.slow
def test_the_script_of_the_document_runs(tmp_path, extensions):
    """As a process of its own, as a reader would start it: three engines, the same bytes, and answers."""
    path = os.pathsep.join([str(Path(fedprotip.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(extensions / "try_it.py")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "models that differ: 0" in done.stdout
    assert "'0 degrees', '30 degrees'" in done.stdout


def test_a_method_of_the_document_has_at_most_forty_lines():
    lines = [line for line in files_of(EXTEND)["anchor"].splitlines() if line.strip()]
    assert len(lines) <= 40


def test_lines_are_wrapped():
    """Tables, links and commands may be longer."""
    long = [
        (document.name, number)
        for document in DOCUMENTS
        for number, line in enumerate(document.read_text(encoding="utf-8").splitlines(), start=1)
        if len(line) > 120 and not line.startswith(("|", "    ")) and not line.strip("` ").startswith("fedprotip ")
    ]
    assert long == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_files_and_functions_that_a_document_names_exist(document):
    """`folder/file.py`, `file.py::name` and `Class.member`; paths may leave out folders at their beginning."""
    text = document.read_text(encoding="utf-8")
    files = [path for folder in ("src", "tests", "benchmarks", "docs") for path in (ROOT / folder).rglob("*.py")]
    for file, name in set(re.findall(r"`([\w/.-]+\.py)(?:::([\w.]+))?`", text)):
        found = [path for path in files if f"/{path.as_posix()}".endswith(f"/{file}")]
        assert found, file
        assert not name or any(name in names(path) for path in found), (file, name)
    members = {name for path in files for name in names(path)}
    known = {name.partition(".")[0] for name in members}
    for member in set(re.findall(r"`([A-Z]\w+\.[a-z_]+)`", text)) - {"Site.specs", "Progress.version"}:  # set in code
        assert member.partition(".")[0] not in known or member in members, member


def test_the_house_is_shown_in_the_order_of_imports():
    house = ARCHITECTURE.read_text(encoding="utf-8").partition("## The house")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", house, re.MULTILINE)
    shown = [name.removesuffix("/").removesuffix(".py") for row in rows for name in re.findall(r"`([^`]+)`", row)]
    assert shown == ORDER


def test_every_file_of_a_run_folder_is_explained(tmp_path):
    table = ARCHITECTURE.read_text(encoding="utf-8").partition("## The run folder")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    explained = {name.split("/")[0] for row in rows for name in re.findall(r"`([^`]+)`", row)} - {"NAME.safetensors"}
    changes = {"clients": {"count": 2, "held_back": 0.1}, "run": {"engine": "apart", "geometry": 1, "threads": 1}}
    changes |= {"stream": {"tasks": 2, "task_size": 2}, "method": {**SMALL["method"], "router": "auto"}}
    fedprotip.run({**SMALL, **changes}, out=tmp_path / "r")
    assert {path.name for path in (tmp_path / "r").iterdir()} == explained


@pytest.mark.parametrize("picture", ["way", "overview"])
def test_a_picture_is_what_its_script_draws(picture):
    drawn = runpy.run_path(str(ROOT / "docs" / "images" / f"{picture}.py"))["SVG"]
    assert (ROOT / "docs" / "images" / f"{picture}.svg").read_text(encoding="utf-8") == drawn


def test_the_table_of_the_demo_is_what_its_script_writes():
    """Its numbers are checked where the demo runs (`tests/test_demo.py`)."""
    script = runpy.run_path(str(ROOT / "docs" / "images" / "demo.py"))
    figures = {"fedavg": {"agnostic": 28.2}, "fedprotip": {"single": 96.25, "agnostic": 39.9, "batch64": 97.5}}
    rows = [
        {"method": method, "accuracy": {mode: {"mean": value} for mode, value in found.items()}}
        for method, found in figures.items()
    ]
    assert script["table"](rows).splitlines() == [
        "| accuracy % | single | aware | agnostic | batch64 |",
        "|---|---|---|---|---|",
        "| FedAvg | 28.2* | – | 28.2 | – |",
        "| FedProTIP | **96.2** | – | 39.9 | 97.5 |",
    ]
    (shown,) = script["TABLE"].findall(README.read_text(encoding="utf-8"))
    assert re.findall(r"(?m)^\| (\w+) \|", shown) == ["FedAvg", "LDA", "FedProTIP"]
    assert list(script["METHODS"]) == ["fedavg", "lda", "fedprotip"]


# Pages for newcomers

PAGES = {name: ROOT / "docs" / f"{name}.md" for name in ("quickstart", "data", "report", "faq")}


def blocks(page):
    """(language, content) of every block of a page, in order."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def command_line(line, monkeypatch, capsys):
    """Run a line of a page: (exit code, stdout, stderr); what it would write into a file is written."""
    arguments = line.split()
    target = Path(arguments[arguments.index(">") + 1]) if ">" in arguments else None
    arguments = arguments[: arguments.index(">")] if target else arguments
    monkeypatch.setattr(sys, "argv", arguments)
    code = 0
    try:
        cli.main()
    except SystemExit as stop:
        code = stop.code or 0
    printed = capsys.readouterr()
    if target:
        target.write_text(printed.out)
    return code, printed.out, printed.err


@pytest.mark.slow
@pytest.mark.parametrize("name", ["quickstart", "data"])
def test_every_block_of_a_page_runs(name, tmp_path, monkeypatch, capsys, small_defaults):
    """In the order of the page, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    done = 0
    for language, content in blocks(PAGES[name]):
        if language == "python":
            exec(content, {})
            done += 1
            continue
        assert language == "sh"
        for line in content.splitlines():
            assert line.startswith("fedprotip "), line
            code, out, err = command_line(line, monkeypatch, capsys)
            assert code == 0, (line, err)
            assert out, line
            done += 1
    assert done >= 6


def questions():
    """(command or nothing, sentence) of the FAQ: a quoted sentence, and the block before it if there is one."""
    text = PAGES["faq"].read_text(encoding="utf-8")
    found = []
    for part in text.split("\n### ")[1:]:
        sentence = " ".join(re.findall(r"^> (.*)$", part, re.MULTILINE))
        commands = re.findall(r"^```sh\n(.*)\n```$", part, re.MULTILINE)
        found.append((commands[0] if commands else "", sentence))
    return found


def as_pattern(sentence):
    return ".*".join(re.escape(part) for part in sentence.split("…"))


ASKED_FOR = [command for command, _ in questions() if command]


@pytest.mark.slow
@pytest.mark.parametrize("command", ASKED_FOR)
def test_an_error_of_the_faq_is_what_the_program_says(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    if "runs/first" in command:
        (tmp_path / "runs" / "first").mkdir(parents=True)
        (tmp_path / "runs" / "first" / "manifest.json").write_text("{}")
    code, out, err = command_line(command, monkeypatch, capsys)
    (sentence,) = [sentence for asked, sentence in questions() if asked == command]
    assert (code, out) == (2, "")
    assert re.fullmatch(f"fedprotip: {as_pattern(sentence)}", err.rstrip("\n")), err


def templates():
    """Every text of the source, with “…” in place of what is filled in."""
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_every_other_error_of_the_faq_is_in_the_source():
    known = {re.sub("…+", "…", text) for text in templates()}
    sentences = [sentence for command, sentence in questions() if not command]
    assert len(sentences) >= 6
    assert [sentence for sentence in sentences if sentence not in known] == []


def test_the_report_page_names_sections_that_there_are():
    text = PAGES["report"].read_text(encoding="utf-8")
    listed = re.findall(r"\*\*([A-Z][\w ]+)\*\*", text.partition("## Sections")[2].partition("\n## ")[0])
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src/fedprotip/report").glob("*.py"))
    assert len(listed) >= 10
    assert [name for name in listed if f'"{name}"' not in source] == []


def test_every_page_is_in_the_navigation():
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    listed = re.findall(r"^ +- (\S+\.md)$", nav, re.MULTILINE)
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(listed) == sorted(pages)


def test_newcomers_hear_of_serving():
    for name in ("index", "quickstart", "faq"):
        text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
        assert "fedprotip serve" in text, name
        assert "](serve.md)" in text, name


@pytest.mark.slow
def test_the_site_builds_and_loads_nothing_from_elsewhere(tmp_path):
    """`mkdocs build --strict`; every page of docs/ is in it."""
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    pages = [path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")]
    assert [page for page in pages if not (site / page).exists()] == []
    for path in site.rglob("*.html"):
        html = path.read_text(encoding="utf-8")
        assert "mermaid" not in html  # the theme would fetch what draws it
        assert not re.search(r"<(?:script|link|img|iframe|source)\b[^>]*(?:src|href)=\"?(?:https?:)?//", html), path
    for path in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", path.read_text(encoding="utf-8")), path
    reference = (site / "api.html").read_text(encoding="utf-8")
    for name in ("fedprotip.api.run", "fedprotip.inference.predictor.Predictor.predict"):
        assert f'id="{name}"' in reference


def test_pictures_are_small():
    pictures = [*(ROOT / "docs" / "img").iterdir()]
    assert {path.name for path in pictures} >= {"report.png", "watch.png"}
    assert all(path.stat().st_size < 150_000 for path in pictures)


def test_links_and_pictures_exist():
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
            assert (document.parent / target).exists(), (document.name, target)
