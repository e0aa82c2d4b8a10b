"""Run folders that are damaged or a stranger's: no traceback, no hang, no silent change, nothing outside is touched."""

import json
import os
import random
import shutil
import traceback
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save

import fedprotip
from fedprotip.api import inspect
from fedprotip.methods import base
from fedprotip.report import plots, write_report
from fedprotip.report.rundata import RunData
from fedprotip.store.files import hash_of
from fedprotip.store.objects import sealed, unsealed
from tests import damage
from tests.conformance.test_methods import REDUCED
from tests.sites import through
from tests.small import NOT_EXACT, forged, quick, small
from tests.watchdog import in_time

TINY = {
    "stream": {"tasks": 2, "task_size": 2},
    "clients": {"count": 2, "held_back": 0.15},
    "model": {"width": 8, "depth": 1},
    "train": {"rounds": 2, "epochs": 1, "batch": 64},
}
IMAGES = torch.arange(5 * 64).view(5, 1, 8, 8) % 17 * 15


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Name → a finished run, one that was interrupted in its second task, and one whose clients have folders."""
    place = tmp_path_factory.mktemp("bases")
    with pytest.MonkeyPatch.context() as patch:
        quick(patch)
        fedprotip.run(small("run.geometry=1", **TINY), out=place / "finished")
        fedprotip.run(small("run.engine=apart", **TINY), out=place / "apart")
        seen = []

        def stop(answer, local, name):
            seen.append(name)
            if len(seen) == 7:
                raise KeyboardInterrupt
            return answer()

        with patch.context() as stopping:
            through(stopping, stop, "train")
            with pytest.raises(KeyboardInterrupt):
                fedprotip.run(small("run.geometry=1", **TINY), out=place / "interrupted")
    return place


@pytest.fixture
def copy(bases, tmp_path):
    """Copies of the runs beside a folder that nothing may touch."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "victim").write_text("precious\n")
    return lambda name, to="run": Path(shutil.copytree(bases / name, tmp_path / to))


def outside(folder):
    return {path.name: path.read_text() for path in (folder.parent / "outside").iterdir()}


PRECIOUS = {"victim": "precious\n"}


def told(folder, verb):
    """What a command gives, or the sentence with which it refuses; anything else fails the test."""
    try:
        with in_time(60):
            return verb(folder)
    except fedprotip.FedprotipError as error:
        sentence = str(error)
    assert "\n" not in sentence
    return sentence


def answers(folder):
    return fedprotip.load(folder).predict(IMAGES)


def resumed(folder):
    said = []
    summary = fedprotip.resume(folder, [lambda event: said.append(event) if event["event"] == "warning" else None])
    return {key: value for key, value in summary.items() if key not in NOT_EXACT}, bool(said)


# One by one

WHERE = [
    *("events.jsonl", "ledger.jsonl", "manifest.json", "settings.toml", "summary.json", "model.safetensors"),
    *("statistics.safetensors", "calibration.safetensors", "geometry.json", "answers.json", "plan.json", "checkpoint"),
    *("checkpoint/lock", "checkpoint/objects", "checkpoint/objects-copy", "tables", "plots", "report.html"),
    *("events.jsonl.tmp", "manifest.json.tmp", "checkpoint/00000099.json.tmp", "checkpoint/objects/x.tmp"),
]


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("name", ["finished", pytest.param("interrupted", marks=pytest.mark.slow)])
def test_links_lead_no_command_outside(copy, monkeypatch, where, name):
    quick(monkeypatch)
    folder = copy(name)
    place = folder / where
    shutil.rmtree(place) if place.is_dir() else place.unlink(missing_ok=True)
    place.symlink_to(folder.parent / "outside" / ("" if "." not in where and "lock" not in where else "victim"))
    report = write_report if where in ("tables", "plots", "report.html") else RunData.load
    for verb in (inspect, answers, report, resumed):
        told(folder, verb)
        assert outside(folder) == PRECIOUS


@pytest.mark.parametrize("where", ["events.jsonl", "manifest.json", "model.safetensors", "checkpoint/lock"])
def test_pipes_keep_no_command_waiting(copy, monkeypatch, where):
    quick(monkeypatch)
    folder = copy("finished")
    (folder / where).unlink()
    os.mkfifo(folder / where)
    said = [told(folder, verb) for verb in (inspect, answers, RunData.load, resumed)]
    assert any("is a pipe, where a run has a plain file" in str(text) for text in said) or where == "model.safetensors"


@pytest.mark.parametrize("log", ["../outside/victim", "/etc/hostname", "settings.toml"])
def test_a_checkpoint_cuts_no_other_file_than_its_logs(copy, monkeypatch, log):
    quick(monkeypatch)
    folder = copy("interrupted")
    before = (folder / "settings.toml").read_bytes()
    for path in folder.glob("checkpoint/*.json"):
        index = unsealed(path.read_bytes())
        index["logs"][log] = 0
        path.write_text(sealed(index))
    assert "No checkpoint" in told(folder, resumed)
    assert outside(folder) == PRECIOUS
    assert (folder / "settings.toml").read_bytes() == before


@pytest.mark.parametrize("log", ["events.jsonl", "ledger.jsonl"])
def test_a_checkpoint_belongs_to_the_logs_that_it_was_saved_beside(copy, monkeypatch, log):
    """Those of another run would be cut where no line ends, and a run would go on that neither of both was."""
    quick(monkeypatch)
    folder = copy("interrupted")
    lines = (folder / log).read_text().splitlines(keepends=True)
    (folder / log).write_text("".join([lines[-1], *lines]))
    before = (folder / log).read_bytes()
    states = [state for name, state in inspect(folder)["to continue"].items() if name.startswith("checkpoint/")]
    assert states
    assert all(f"{log} is not the one that it was saved beside" in state for state in states)
    assert "No checkpoint" in told(folder, resumed)
    assert (folder / log).read_bytes() == before


def test_a_log_with_a_second_name_outside_goes_on_in_the_folder_alone(copy, bases, monkeypatch):
    quick(monkeypatch)
    folder = copy("interrupted")
    os.link(folder / "events.jsonl", folder.parent / "outside" / "linked")
    before = outside(folder)
    assert resumed(folder)[0]["tasks"] == 2
    assert outside(folder) == before
    assert len((folder / "events.jsonl").read_text()) > len(before["linked"])


@pytest.mark.parametrize(
    ("file", "where"),
    [
        ("events.jsonl", "files"),
        ("geometry.json", "files"),
        ("answers.json", "files"),
        ("calibration.safetensors", "files"),
        ("checkpoint/objects", "to continue"),
        ("checkpoint/0", "to continue"),
    ],
)
def test_info_report_and_resume_of_a_finished_run_notice_what_changed(copy, monkeypatch, file, where):
    quick(monkeypatch)
    folder = copy("finished")
    assert set(inspect(folder)["files"].values()) == set(inspect(folder)["to continue"].values()) == {"intact"}
    for path in [path for path in damage.files_of(folder) if path.relative_to(folder).as_posix().startswith(file)]:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    assert any(state != "intact" for state in inspect(folder)[where].values())
    assert isinstance(told(folder, resumed), str)
    if file in ("events.jsonl", "geometry.json", "answers.json"):
        assert "was changed since the run ended" in told(folder, write_report)


def test_info_looks_into_the_folders_of_clients(copy):
    folder = copy("apart")
    assert inspect(folder)["to continue"]["clients/1"] == "intact"
    for path in (folder / "clients" / "1" / "objects").iterdir():
        path.write_bytes(b"")
    assert "is missing or does not have its hash" in inspect(folder)["to continue"]["clients/1"]


def test_info_of_a_run_that_is_under_way_reads_its_logs(copy):
    folder = copy("interrupted")
    assert set(inspect(folder)["to continue"].values()) == {"intact"}
    (folder / "ledger.jsonl").write_text("{}\n" + (folder / "ledger.jsonl").read_text())
    assert "damaged in line 1" in inspect(folder)["to continue"]["ledger.jsonl"]


def test_a_log_of_tasks_without_number_keeps_no_report_waiting(copy):
    """No hash vouches for the logs of a run that is under way, or says it is."""
    folder = copy("finished")
    with forged(folder) as manifest:
        manifest["status"] = "running"
    line = json.loads((folder / "ledger.jsonl").read_text().splitlines()[0])
    with (folder / "ledger.jsonl").open("a") as file:
        file.writelines(json.dumps(line | {"task": task}) + "\n" for task in (10**12, 10**30))
    with in_time(60):
        plots.traffic(RunData.load(folder))
    with (folder / "ledger.jsonl").open("a") as file:
        file.write(json.dumps(line | {"task": 10**400}) + "\n")
    assert "ledger.jsonl is damaged" in told(folder, RunData.load)


@pytest.mark.parametrize("key", ["status", "threads", "files", "settings", "versions", "data"])
def test_a_manifest_that_was_edited_is_refused(copy, key):
    folder = copy("finished")
    path = folder / "manifest.json"
    with forged(folder) as manifest:
        seal = manifest["seal"]
        manifest[key] = {"status": "running", "threads": 2, "settings": manifest["settings"] + "\n"}.get(key, {})
    path.write_text(path.read_text().replace(fedprotip.store.records.seal_of(manifest), seal))
    for verb in (inspect, answers, RunData.load, resumed):
        assert "manifest.json is damaged: it was changed since it was written" in told(folder, verb)


def test_half_a_character_is_refused_where_it_is_read(copy, monkeypatch):
    """In names of classes and tasks, and hashes, which an extension would write again."""
    for key, value in (("hash", "\ud800"), ("classes", ["\ud800", *"123456789"])):
        folder = copy("finished", key)
        with forged(folder) as manifest:
            manifest["data"][key] = value
        for verb in (inspect, answers, RunData.load, resumed, fedprotip.extend):
            assert "manifest.json is damaged: it has half a character" in told(folder, verb)


@pytest.mark.parametrize("threads", [0, -1, True, 10**12, 10**30])
def test_threads_that_no_machine_has_are_refused(copy, monkeypatch, threads):
    """What the manifest says of them is what a run goes on with."""
    folder = copy("interrupted")
    with forged(folder) as manifest:
        manifest["threads"] = threads
    assert "manifest.json is damaged: Manifest.threads" in told(folder, resumed)


def test_a_finished_run_without_its_checkpoint_answers_and_is_not_begun_again(copy):
    folder = copy("finished")
    before = answers(folder)
    for path in folder.glob("checkpoint/*.json"):
        path.unlink()
    assert "has no checkpoint: it answers, but cannot be continued" in told(folder, resumed)
    shutil.rmtree(folder / "checkpoint")
    assert "has no checkpoint: it answers, but cannot be continued" in told(folder, resumed)
    assert answers(folder) == before
    assert (folder / "events.jsonl").stat().st_size


# Files of every method

METHODS = sorted(name for name, cls in base._methods.items() if cls.__module__.startswith("fedprotip."))
QUICKLY = ("pec", "scr")


@pytest.mark.parametrize("method", [pytest.param(n, marks=() if n in QUICKLY else pytest.mark.slow) for n in METHODS])
def test_damaged_files_of_any_method_are_refused_in_one_sentence(tmp_path, monkeypatch, method):
    """Students, prototypes, pools, statistics, subspaces: flipped bytes always, forged ones where they cannot be."""
    quick(monkeypatch)
    clients = {"count": 1 if method == "gpm" else 2}
    options = {"name": method, **REDUCED.get(method, {})}
    whole = tmp_path / "whole"
    fedprotip.run(small(**{**TINY, "clients": clients, "method": options}), out=whole)
    expected, chance = answers(whole), random.Random(0)
    assert inspect(whole)["answers"] == "yes"
    for file in sorted(path.name for path in whole.glob("*.safetensors") if path.name != "data.safetensors"):
        folder = Path(shutil.copytree(whole, tmp_path / "run"))
        data = bytearray((folder / file).read_bytes())
        data[-3] ^= 1
        (folder / file).write_bytes(data)
        assert "intact" not in inspect(folder)["files"][file]
        assert file in told(folder, answers)
        assert inspect(folder)["answers"] == told(folder, answers)
        held = load((whole / file).read_bytes())
        for key in sorted(held) if len(held) < 8 else chance.sample(sorted(held), 8):
            for _ in range(3):
                damage.vouched(folder, file, save(held | damage.bad_tensor(key, held[key], chance)))
                found = told(folder, answers)
                assert isinstance(found, str) or len(found) == len(expected)
            read = not key.startswith("extras.")  # which only learning needs
            if file in ("students.safetensors", "prototypes.safetensors", "model.safetensors") and read:
                damage.vouched(folder, file, save(held | {key: torch.cat([held[key], held[key]])}))
                assert isinstance(told(folder, answers), str), key
                assert inspect(folder)["answers"] == told(folder, answers)
        shutil.rmtree(folder)


KNOWN = {"pec": "students/labels", "target": "generator/state", "lander": "text/0", "stsa": "statistics/moment"}


@pytest.mark.parametrize("method", KNOWN)
def test_knowledge_that_no_run_with_these_settings_has_is_refused(tmp_path, monkeypatch, method):
    """Of the right form and under its hash, and yet of another size than whatever learns from it."""
    quick(monkeypatch)
    folder, name = tmp_path / "run", KNOWN[method]
    fedprotip.run(small(**{**TINY, "method": {"name": method, **REDUCED.get(method, {})}}), out=folder)
    for path in folder.glob("checkpoint/*.json"):
        index, group = unsealed(path.read_bytes()), f"known-{name.partition('/')[0]}"
        held = load((folder / "checkpoint" / "objects" / index["groups"][group]).read_bytes())
        data = save(held | {name: held[name][: len(held[name]) // 2].clone()})
        index["groups"][group] = hash_of(data)
        (folder / "checkpoint" / "objects" / hash_of(data)).write_bytes(data)
        path.write_text(sealed(index))
    assert "does not fit its settings" in told(folder, fedprotip.extend)


# Many


@pytest.mark.slow
@pytest.mark.parametrize("part", range(6))
def test_three_hundred_damaged_folders(copy, monkeypatch, part):
    """Damage that hashes tell changes no answer and no result in silence; forgeries are refused or answer somehow."""
    quick(monkeypatch)
    expected = {name: told(copy(name, f"whole-{name}"), answers) for name in ("finished", "apart")}
    results = {name: resumed(copy(name, f"again-{name}"))[0] for name in ("finished", "interrupted", "apart")}
    refused = 0
    for seed in range(50 * part, 50 * (part + 1)):
        name = ("finished", "interrupted", "finished", "apart", "finished")[seed % 5]
        folder = copy(name, f"run-{seed}")
        try:
            how = damage.damage(folder, seed)
            sure = how in damage.DAMAGES
            told(folder, inspect)
            found = told(folder, answers)
            assert isinstance(found, str) or not sure or found == expected[name]
            refused += isinstance(found, str)
            if how is damage.foreign or seed % 10 == 0:
                told(folder, write_report)
            else:
                told(folder, RunData.load)
            found = told(folder, resumed)
            if sure and not isinstance(found, str):
                summary, warned = found
                assert warned or summary == results[name]
            assert outside(folder) == PRECIOUS
        except BaseException as error:
            told_by = "".join(traceback.format_exception(error))
            pytest.fail(f"seed {seed}, {name}, {how.__name__}: {told_by}")
        shutil.rmtree(folder)
    assert refused >= 10  # else the library does no harm, and the test says nothing
