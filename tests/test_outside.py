"""Methods, models and datasets from outside the package, as a user brings them: `--import`, and installed packages."""

import json
import sys
from pathlib import Path

import pytest

import fedprotip
from fedprotip import settings
from fedprotip.inference.parts import ROUTERS
from fedprotip.methods import base
from fedprotip.models.heads import _builders
from fedprotip.settings import names
from fedprotip.stream.datasets import _layouts, _loaders
from tests.small import forged, quick
from tests.test_documents import EXTEND, files_of

QUICK = ["stream.tasks=2", "stream.task_size=2", "clients.count=2", "train.rounds=1", "train.epochs=1", "model.width=8"]
OURS = ["data.name=stripes", "model.name=patchwork", "method.name=prototypes"]
FILES = ("prototypes", "stripes", "patchwork")


def options(*assignments):
    return [word for one in assignments for word in ("--set", one)]


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """The files of docs/extend.md in a folder that Python does not look into; all traces go after the test."""
    quick(monkeypatch)
    registries = (base._methods, ROUTERS, _loaders, _layouts, _builders, *settings.KNOWN.values())
    for name in FILES:  # of another test that imported files of the same names
        sys.modules.pop(name, None)
    before, modules = [dict(known) for known in registries], set(sys.modules)
    monkeypatch.setattr(names, "_given", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    for name, text in files_of(EXTEND).items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")

    def forget():
        for known, former in zip(registries, before, strict=True):
            known.clear()
            known.update(former)
        for module in set(sys.modules) - modules:
            if Path(getattr(sys.modules[module], "__file__", None) or "/").parent == folder:
                del sys.modules[module]
        names._given.clear()

    yield folder, forget
    forget()


def imports(folder, *modules):
    return [word for module in modules or FILES for word in ("--import", folder / f"{module}.py")]


def test_files_given_on_the_command_line(tmp_path, call, elsewhere):
    """Run, look, resume and extend; without the files one sentence names them, and the report needs none."""
    folder, forget = elsewhere
    run = tmp_path / "r"
    code, out, err = call("run", *options(*QUICK, *OURS), *imports(folder), "--out", run)
    assert code == 0, err
    assert "nearest" in json.loads((run / "summary.json").read_text())["routers"]
    assert json.loads((run / "manifest.json").read_text())["needs"] == sorted(FILES)
    forget()
    for verb in ("info", "resume", "extend"):
        code, out, err = call(verb, run)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert "needs method.name = 'prototypes', which is not registered here" in err
        assert "the run had patchwork, prototypes, stripes: give each with --import" in err
    assert call("report", run)[0] == 0
    code, out, err = call("info", run, *imports(folder), "--json")
    assert json.loads(out)["method"] == "prototypes"
    assert json.loads(out)["modules"] == "patchwork, prototypes, stripes"
    assert call("resume", run, *imports(folder))[0] == 0
    assert call("extend", run, *imports(folder))[0] == 0
    assert json.loads((run / "manifest.json").read_text())["needs"] == sorted(FILES)


def test_settings_and_data_of_given_files(call, elsewhere):
    folder, _ = elsewhere
    assert "strength = 1.0" in call("settings", "--method", "anchor", *imports(folder, "anchor"))[1]
    assert "stripes" in call("data", "list", *imports(folder, "stripes"))[1]
    code, out, _ = call("data", "check", "stripes", *options(*QUICK), *imports(folder, "stripes"), "--json")
    assert (code, json.loads(out)["train"]) == (0, 600)


BAD = {
    "no such file": ("nowhere.py", "there is no such file"),
    "no such module": ("nowhere_at_all", "ModuleNotFoundError"),
    "the name of another module": ("json.py", "another module is called 'json' already; rename the file"),
    "not a name": ("my-method.py", "'my-method' cannot be the name of a module; rename the file"),
    "broken": ("broken.py", "ZeroDivisionError: division by zero"),
    "ends": ("ends.py", "SystemExit: 3"),
    "a file, not a module": ("broken", "for the file of that name: --import broken.py"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_imported_is_one_sentence(case, call, elsewhere, monkeypatch):
    folder, _ = elsewhere
    monkeypatch.chdir(folder)
    contents = {"json": "", "my-method": "", "broken": "1 / 0", "ends": "raise SystemExit(3)"}
    for name, text in contents.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    given, words = BAD[case]
    code, out, err = call("run", "--import", given)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"--import {given}" in err
    assert words in err


@pytest.fixture
def installed(elsewhere):
    """The same files as an installed package with entry points, beside two that cannot be loaded."""
    folder, forget = elsewhere
    points = EXTEND.read_text(encoding="utf-8").partition("```toml\n")[2].partition("```")[0]
    points = points.replace('[project.entry-points."', "[").replace('"]', "]").replace('"', "")
    broken = "[fedprotip.methods]\nbroken = broken_plugin\nempty = anchor\n"
    broken += "[fedprotip.datasets]\nburnt = broken_plugin\n"
    (folder / "broken_plugin.py").write_text("raise RuntimeError('out of order')")
    for package, text in {"good": points, "bad": broken}.items():
        facts = folder / f"{package}-1.0.dist-info"
        facts.mkdir()
        (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (facts / "entry_points.txt").write_text(text)
    sys.path.append(str(folder))
    return folder, forget


def test_an_installed_package(tmp_path, call, installed):
    """Nobody gives anything; the predictor finds the router by its method."""
    _, forget = installed
    run = tmp_path / "r"
    code, _, err = call("run", *options(*QUICK, *OURS), "--out", run)
    assert code == 0, err
    assert "broken_plugin" not in sys.modules
    assert "anchor" not in sys.modules
    forget()
    assert call("resume", run)[0] == 0
    forget()
    assert call("info", run)[0] == 0
    forget()
    predictor = fedprotip.load(run)
    assert list(predictor.inference.ways) == ["nearest"]
    assert "stripes" not in sys.modules  # answers need no data


def test_a_broken_package_is_named_and_stops_nobody_else(tmp_path, call, installed):
    code, out, err = call("run", "--set", "method.name=broken", "--out", tmp_path / "r")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "method.name = 'broken' of the installed package bad cannot be loaded: RuntimeError: out of order" in err
    code, out, err = call("run", "--set", "method.name=empty", "--out", tmp_path / "r")
    assert "anchor registers nothing of that name" in err
    code, out, err = call("data", "list")
    assert (code, err.count("\n")) == (0, 1)
    assert "data.name = 'burnt' of the installed package bad" in err
    assert "stripes" in out
    code, out, err = call("settings", "--json")
    assert (code, err.count("\n")) == (0, 2)
    assert "prototypes" in {row["method"] for row in json.loads(out)}
    assert call("run", *options(*QUICK), "--out", tmp_path / "r")[0] == 0


def test_built_in_names_look_at_no_packages(monkeypatch):
    monkeypatch.setattr(names, "entry_points", lambda group: pytest.fail(f"looked at {group}"))
    fedprotip.load_settings({"method": {"name": "fedavg"}, "model": {"name": "small_cnn"}})


def test_nothing_is_imported_because_a_folder_names_it(tmp_path, call, elsewhere):
    """Not even when Python would find it."""
    folder, forget = elsewhere
    assert call("run", *options(*QUICK, *OURS), *imports(folder), "--out", tmp_path / "r")[0] == 0
    forget()
    (folder / "evil.py").write_text("open('evil.txt', 'w')")
    sys.path.append(str(folder))
    with forged(tmp_path / "r") as manifest:
        manifest["needs"] = ["evil", "\x1b[2J" + "x" * 1000]
    for verb in ("info", "resume", "extend", "report"):
        _, _, err = call(verb, tmp_path / "r")
        assert verb == "report" or "the run had evil" in err
        assert len(err) < 600
        assert "\x1b" not in err
    with pytest.raises(fedprotip.UsageError, match="'patchwork' is not registered in this process"):
        fedprotip.load(tmp_path / "r")
    assert "evil" not in sys.modules
    assert "prototypes" not in sys.modules


@pytest.mark.slow
def test_worker_processes_have_given_files_too(tmp_path, call, elsewhere):
    folder, _ = elsewhere
    for engine in ("local", "pool"):
        code, _, err = call(
            "run", *options(*QUICK, *OURS, f"run.engine={engine}"), *imports(folder), "--out", tmp_path / engine
        )
        assert code == 0, err
    assert (tmp_path / "local" / "model.safetensors").read_bytes() == (
        tmp_path / "pool" / "model.safetensors"
    ).read_bytes()
