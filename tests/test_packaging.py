"""What a stranger gets: a wheel, a citation, a workflow, container files, completion."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import typer.main
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import fedprotip
from fedprotip.cli import app as cli

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONTAINERS = sorted((ROOT / "deploy").glob("Containerfile.*"))


def read_yaml(path):
    return pytest.importorskip("yaml").safe_load(path.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_the_citation_says_what_it_must():
    cited = read_yaml(ROOT / "CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= cited.keys()
    assert (cited["title"], cited["version"], cited["license"]) == (
        PROJECT["name"],
        PROJECT["version"],
        PROJECT["license"],
    )
    paper = cited["preferred-citation"]
    assert {"type", "title", "authors"} <= paper.keys()
    assert all({"given-names", "family-names"} <= author.keys() for author in paper["authors"])


@pytest.mark.slow
def test_the_workflow_runs_the_two_commands():
    flow = read_yaml(ROOT / ".github" / "workflows" / "test.yml")
    (job,) = flow["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands == ["make demo", "make test"]
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {command.split()[1] for command in commands} <= set(targets)


def verbs(command, prefix=""):
    """Every verb of the command line, such as "run" and "data check"."""
    for name, sub in getattr(command, "commands", {}).items():
        yield f"{prefix}{name}"
        yield from verbs(sub, f"{prefix}{name} ")


def container_verb(path):
    """What the last line of a container file has fedprotip do."""
    words = re.findall(r"[\w./$-]+", path.read_text().rpartition("CMD")[2])
    after = words[words.index("fedprotip") + 1 :]
    return " ".join(after[:2]) if after[0] in ("flower", "data") else after[0]


def test_container_files_name_what_is_there():
    assert [path.suffix for path in CONTAINERS] == [".server", ".site"]
    for path in CONTAINERS:
        text = path.read_text()
        copied = [name for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE) for name in line.split()]
        assert {"pyproject.toml", "constraints.txt", "src"} <= set(copied)
        assert all((ROOT / name).exists() for name in copied)
        assert PROJECT["readme"] in copied  # the build reads it
        assert set(PROJECT["license-files"]) <= set(copied)
        (extras,) = re.findall(r"pip install .* '\.\[([\w,]+)\]'", text)
        assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
        assert re.search(r"^USER (?!root)\w+$", text, re.MULTILINE)


def test_container_files_run_verbs_that_we_have():
    """With the page that explains one comes its verb."""
    known = set(verbs(typer.main.get_command(cli.app)))
    for path in CONTAINERS:
        (page,) = re.findall(r"\((docs/\w+\.md)\)", path.read_text())
        assert container_verb(path) in known or not (ROOT / page).exists(), path.name


def needed(requirements):
    """Names of all packages that come with some, as they are installed here."""
    found, left = set(), [Requirement(one) for one in requirements]
    while left:
        one = left.pop()
        name = canonicalize_name(one.name)
        if name not in found and (one.marker is None or one.marker.evaluate({"extra": ""})):
            found.add(name)
            left += map(Requirement, metadata.requires(name) or [])
    return found


def environment(folder):
    """A new environment that has what fedprotip says it depends on, linked from this one, and nothing else."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for name in needed(PROJECT["dependencies"]):
        distribution = metadata.distribution(name)
        for part in {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}:
            if not (site / part).exists():
                (site / part).symlink_to(distribution.locate_file(part))
    return folder / "bin" / "python"


def test_what_is_imported_is_declared():
    """By name: that another package happens to bring it along is no promise."""
    optional = [one for extra in PROJECT["optional-dependencies"].values() for one in extra]
    declared = {canonicalize_name(Requirement(one).name) for one in PROJECT["dependencies"] + optional}
    imported = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {name.name.partition(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add(node.module.partition(".")[0])
    providers = metadata.packages_distributions()
    unknown = {
        name
        for name in imported - set(sys.stdlib_module_names) - {"fedprotip"}
        if name in providers and not declared & set(map(canonicalize_name, providers[name]))
    }
    assert unknown <= {"ray"}  # which is what flwr[simulation] stands for, where it is installed


@pytest.mark.slow
def test_a_wheel_installs_and_runs_the_demo_in_an_empty_environment(tmp_path):
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(tmp_path / "wheels")]
    subprocess.run([*pip, *build, str(ROOT)], check=True)
    (wheel,) = (tmp_path / "wheels").iterdir()
    python = environment(tmp_path / "env")
    subprocess.run([*pip, "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)], check=True)
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}

    def run(*command):
        done = subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = run(python, "-c", "import fedprotip; print(fedprotip.__file__)")
    assert where.startswith(str(tmp_path / "env"))
    fedprotip_ = python.parent / "fedprotip"
    assert run(fedprotip_, "--version") == f"fedprotip {PROJECT['version']}\n"
    run(fedprotip_, "demo", "--out", "demo")
    page = (tmp_path / "demo" / "report.html").read_text(encoding="utf-8")
    assert "fedprotip, seed 0" in page
    assert '"status": "finished"' in run(fedprotip_, "watch", "demo/fedprotip", "--json")


@pytest.mark.slow
def test_the_shell_completes_verbs(tmp_path):
    script = tmp_path / "fedprotip"
    script.write_text("from fedprotip.cli import main\nmain()\n")
    path = os.pathsep.join([str(Path(fedprotip.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    asked = {"_FEDPROTIP_COMPLETE": "complete_bash", "COMP_WORDS": "fedprotip wat", "COMP_CWORD": "1"}
    environ = {**os.environ, "PYTHONPATH": path, **asked}
    done = subprocess.run([sys.executable, script], env=environ, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["watch"]
