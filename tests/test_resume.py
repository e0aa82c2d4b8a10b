"""Interrupted anywhere, a run ends with the same bytes as one that was never interrupted."""

import errno
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import fedprotip
from fedprotip.federation.client import Workspace
from fedprotip.settings import to_toml
from fedprotip.store import folder as runs
from tests.small import results, small

LONG = {"train": {"rounds": 12, "epochs": 2, "batch": 16}, "run": {"threads": 1, "geometry": 4}}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "r"
    fedprotip.run(small(**LONG), out=folder)
    found = results(folder)
    found["geometry"] = (folder / "geometry.json").read_text()
    return found


def command(*arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "fedprotip", *map(str, arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def checkpoints(folder: Path):
    return sorted(folder.glob("checkpoint/*.json"))


def wait_for_news(folder: Path, process, known):
    """Until the run has written another checkpoint than the known ones, or has ended."""
    while process.poll() is None and checkpoints(folder) == known:
        time.sleep(0.002)


def test_killed_at_random_moments_it_ends_with_the_same_bytes(tmp_path, uninterrupted):
    """SIGKILL of a real process, again and again, a random moment after it made some progress."""
    folder, settings = tmp_path / "r", tmp_path / "settings.toml"
    settings.write_text(to_toml(small(**LONG)))
    moments, kills = random.Random(5), 0
    process = command("run", settings, "--out", folder)
    while kills < 5:
        wait_for_news(folder, process, checkpoints(folder))
        time.sleep(moments.uniform(0, 0.3))
        if process.poll() is not None:
            break
        process.send_signal(signal.SIGKILL)
        process.wait()
        kills += 1
        process = command("resume", folder)
    output = process.communicate()[0]
    assert process.returncode == 0, output
    assert kills >= 3
    found = results(folder)
    found["geometry"] = (folder / "geometry.json").read_text()
    assert found == uninterrupted


def test_ctrl_c_says_how_to_go_on(tmp_path):
    folder, settings = tmp_path / "r", tmp_path / "settings.toml"
    settings.write_text(to_toml(small(**LONG)))
    process = command("run", settings, "--out", folder)
    wait_for_news(folder, process, [])
    process.send_signal(signal.SIGINT)
    output = process.communicate()[0]
    assert process.returncode == 1
    assert f"fedprotip resume {folder}" in output.replace("\n", "")
    assert "Traceback" not in output


def stop_after(monkeypatch, calls, verb="train"):
    """Let the n-th call of a client's verb stop the run, as Ctrl-C would."""
    original, seen = getattr(Workspace, verb), []

    def counted(self, *arguments):
        seen.append(1)
        if len(seen) == calls:
            raise KeyboardInterrupt
        return original(self, *arguments)

    monkeypatch.setattr(Workspace, verb, counted)


@pytest.mark.parametrize(("verb", "calls"), [("train", 2), ("train", 40), ("summarise", 2), ("summarise", 11)])
@pytest.mark.parametrize("every", [1, 5])
def test_stopped_in_the_middle_of_anything(tmp_path, monkeypatch, uninterrupted, verb, calls, every):
    folder = tmp_path / "r"
    with monkeypatch.context() as patch:
        stop_after(patch, calls, verb)
        with pytest.raises(KeyboardInterrupt):
            fedprotip.run(small(f"run.checkpoint={every}", **LONG), out=folder)
    fedprotip.resume(folder)
    found = results(folder)
    found["geometry"] = (folder / "geometry.json").read_text()
    assert found == uninterrupted


@pytest.mark.parametrize("writes", [3, 10, 25, 60])
def test_a_full_disk_loses_nothing(tmp_path, monkeypatch, uninterrupted, writes):
    folder, seen = tmp_path / "r", []
    real = os.fsync

    def full(descriptor):
        seen.append(1)
        if len(seen) >= writes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr("fedprotip.store.files.os.fsync", full)
        with pytest.raises(fedprotip.RunError, match="No space left"):
            fedprotip.run(small(**LONG), out=folder)
    if runs.is_run(folder):
        fedprotip.resume(folder)
    else:  # the disk was full before there was a run: the same command starts it
        fedprotip.run(small(**LONG), out=folder)
    found = results(folder)
    found["geometry"] = (folder / "geometry.json").read_text()
    assert found == uninterrupted


def test_a_damaged_checkpoint_is_noticed_and_the_one_before_is_used(tmp_path, monkeypatch, uninterrupted):
    folder = tmp_path / "r"
    with monkeypatch.context() as patch:
        stop_after(patch, 40)
        with pytest.raises(KeyboardInterrupt):
            fedprotip.run(small(**LONG), out=folder)
    newest = checkpoints(folder)[-1]
    newest.write_bytes(newest.read_bytes()[:-20])
    said = []
    fedprotip.resume(folder, observers=[lambda event: said.append(event) if event["event"] == "warning" else None])
    assert len(said) == 1
    assert newest.name in said[0]["text"]
    assert "the one before it is used" in said[0]["text"]
    found = results(folder)
    found["geometry"] = (folder / "geometry.json").read_text()
    assert found == uninterrupted


def test_a_finished_run_is_left_alone(tmp_path):
    fedprotip.run(small(), out=tmp_path / "r")
    before = {path: path.read_bytes() for path in (tmp_path / "r").rglob("*") if path.is_file()}
    fedprotip.resume(tmp_path / "r")
    assert before == {path: path.read_bytes() for path in (tmp_path / "r").rglob("*") if path.is_file()}


def test_nothing_of_another_format_is_continued(tmp_path, monkeypatch):
    fedprotip.run(small(), out=tmp_path / "r")
    monkeypatch.setattr(runs, "FORMAT", 99)
    with pytest.raises(fedprotip.UsageError, match=r"has format 1, this fedprotip reads format 99"):
        fedprotip.resume(tmp_path / "r")


def test_two_processes_cannot_continue_one_run(tmp_path):
    fedprotip.run(small(), out=tmp_path / "r")
    with (
        runs.RunFolder.open(tmp_path / "r").locked(),
        pytest.raises(fedprotip.RunError, match="in use by another fedprotip"),
    ):
        fedprotip.resume(tmp_path / "r")


def test_edited_settings_are_not_taken_over_silently(tmp_path):
    fedprotip.run(small(), out=tmp_path / "r")
    path = tmp_path / "r" / "settings.toml"
    path.write_text(path.read_text().replace("lr = 0.05", "lr = 0.5"))
    with pytest.raises(fedprotip.UsageError, match="was changed since the run began"):
        fedprotip.resume(tmp_path / "r")


def test_an_extension_cut_off_before_it_wrote_the_settings_goes_on(tmp_path, monkeypatch):
    fedprotip.run(small(), out=tmp_path / "three")
    fedprotip.run(small(stream={"tasks": 2}), out=tmp_path / "r")
    with monkeypatch.context() as patch:
        original = runs.RunFolder.write

        def crash(self, name, data):
            if name == "settings.toml":
                raise KeyboardInterrupt
            original(self, name, data)

        patch.setattr(runs.RunFolder, "write", crash)
        with pytest.raises(KeyboardInterrupt):
            fedprotip.extend(tmp_path / "r", tasks=1)
    assert fedprotip.resume(tmp_path / "r")["tasks"] == 3
    assert results(tmp_path / "r") == results(tmp_path / "three")


def test_other_versions_are_warned_about(tmp_path):
    fedprotip.run(small(), out=tmp_path / "r")
    manifest = (tmp_path / "r" / "manifest.json").read_text()
    (tmp_path / "r" / "manifest.json").write_text(manifest.replace(__import__("torch").__version__, "1.0"))
    said = []
    fedprotip.resume(tmp_path / "r", observers=[lambda event: said.append(getattr(event, "text", ""))])
    assert any("another version of torch" in text for text in said)


def test_clients_without_data_are_reported_once(tmp_path, monkeypatch):
    """150 clients share 135 samples of a class, so some have none; a resume within the task does not say it again."""
    settings = small(clients={"count": 150, "alpha": 0.05}, stream={"tasks": 1}, train={"rounds": 2})
    fedprotip.run(settings, out=tmp_path / "whole")
    present = next(event["clients"] for event in results(tmp_path / "whole")["events"] if event["event"] == "round")
    with monkeypatch.context() as patch:
        stop_after(patch, present + 2)  # in the second round
        with pytest.raises(KeyboardInterrupt):
            fedprotip.run(settings, out=tmp_path / "r")
    fedprotip.resume(tmp_path / "r")
    assert results(tmp_path / "r") == results(tmp_path / "whole")
    assert [event["event"] for event in results(tmp_path / "r")["events"]].count("absent") == 1
