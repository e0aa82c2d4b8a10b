"""What the documents tell a reader to do works."""

import importlib
import re
import sys
import tomllib
from pathlib import Path

import pytest

import fedprotip
from fedprotip import cli, settings
from tests.small import SMALL

ROOT = Path(__file__).parent.parent
README, CONTRIBUTING = (ROOT / name for name in ("README.md", "CONTRIBUTING.md"))


def commands():
    """Every fedprotip command of the README, without its comment."""
    lines = re.findall(r"^(fedprotip .*?)(?:\s+#.*)?$", README.read_text(), re.MULTILINE)
    assert len(lines) >= 7
    return lines


@pytest.fixture
def small_defaults(monkeypatch):
    """The defaults, cut down so that a command takes a second."""
    original = settings.load

    def load(source=None, overrides=(), note=lambda text: None):
        quick = [f"{section}.{key}={value}" for section, key, value in quick_values() if section != "method"]
        return original(source, [*overrides, *quick], note)

    monkeypatch.setattr("fedprotip.settings.load", load)


def quick_values():
    yield "train", "rounds", 1
    yield "train", "epochs", 1
    yield "model", "width", SMALL["model"]["width"]


def test_every_command_of_the_readme_runs(tmp_path, monkeypatch, capsys, small_defaults):
    """In the order of the README, in an empty folder: what one command makes, the next one uses."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
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


def test_a_method_is_one_file(tmp_path, monkeypatch):
    """The example of CONTRIBUTING, as a file, is a method with its own settings that really acts."""
    (code,) = re.findall(r"```python\n(.*?)```", CONTRIBUTING.read_text(), re.DOTALL)
    (tmp_path / "mine_method.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("fedprotip.settings.KNOWN", {k: dict(v) for k, v in settings.KNOWN.items()})
    importlib.import_module("mine_method")
    for decay in (0.0, 0.5):
        chosen = {**SMALL, "method": {"name": "mine", "decay": decay}}
        fedprotip.run(chosen, out=tmp_path / str(decay))
    assert tomllib.loads((tmp_path / "0.5" / "settings.toml").read_text())["method"] == {"name": "mine", "decay": 0.5}
    models = [(tmp_path / str(decay) / "model.safetensors").read_bytes() for decay in (0.0, 0.5)]
    assert models[0] != models[1]


def test_links_and_pictures_exist():
    for document in [README, CONTRIBUTING, *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
            assert (document.parent / target).exists(), (document.name, target)
