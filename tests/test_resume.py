"""Interrupted anywhere, a run ends with the same bytes as one that was never interrupted."""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import fedprotip
from fedprotip.report import write_report
from fedprotip.settings import to_toml
from fedprotip.store import folder as runs
from fedprotip.store.events import TaskDone, read_events
from tests.sites import through
from tests.small import forged, quick, results, small
from tests.stream.trees import class_folders, picture

LONG = {"train": {"rounds": 12, "epochs": 2, "batch": 16}, "run": {"threads": 1, "geometry": 4}}


def whole(folder, *overrides):
    fedprotip.run(small(*overrides, **LONG), out=folder)
    found = results(folder)
    found["geometry"] = (folder / "geometry.json").read_text()
    return found


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return whole(tmp_path_factory.mktemp("whole") / "r")


@pytest.fixture(scope="module")
def seldom_saved(tmp_path_factory):
    return whole(tmp_path_factory.mktemp("seldom") / "r", "run.checkpoint=5")


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


@pytest.mark.slow
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


@pytest.mark.parametrize(
    "stop",
    [signal.SIGTERM, *(pytest.param(stop, marks=pytest.mark.slow) for stop in (signal.SIGINT, signal.SIGHUP))],
    ids=lambda stop: stop.name,
)
def test_a_signal_says_how_to_go_on_and_nothing_is_lost(tmp_path, uninterrupted, stop):
    """Ctrl-C, the end of a job's time, a closed terminal: a word, a checkpoint, and the same bytes after resuming."""
    folder, settings = tmp_path / "r", tmp_path / "settings.toml"
    settings.write_text(to_toml(small(**LONG)))
    process = command("run", settings, "--out", folder)
    wait_for_news(folder, process, [])
    process.send_signal(stop)
    output = process.communicate()[0]
    assert process.returncode == 1
    assert f"fedprotip resume {folder}" in output.replace("\n", "")
    assert "Traceback" not in output
    assert checkpoints(folder)
    assert not (folder / "summary.json").exists()
    fedprotip.resume(folder)
    found = results(folder)
    found["geometry"] = (folder / "geometry.json").read_text()
    assert found == uninterrupted


def stop_after(monkeypatch, calls, verb="train"):
    """Let the n-th answer of clients stop the run, as Ctrl-C would; verb: train, or summarise for all others."""
    seen = []

    def counted(answer, local, name):
        seen.append(1)
        if len(seen) == calls:
            raise KeyboardInterrupt
        return answer()

    through(monkeypatch, counted, verb)


@pytest.mark.parametrize(("verb", "calls"), [("train", 2), ("train", 40), ("summarise", 2), ("summarise", 11)])
@pytest.mark.parametrize("every", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_stopped_in_the_middle_of_anything(tmp_path, monkeypatch, uninterrupted, seldom_saved, verb, calls, every):
    folder = tmp_path / "r"
    with monkeypatch.context() as patch:
        stop_after(patch, calls, verb)
        with pytest.raises(KeyboardInterrupt):
            fedprotip.run(small(f"run.checkpoint={every}", **LONG), out=folder)
    fedprotip.resume(folder)
    found = results(folder)
    found["geometry"] = (folder / "geometry.json").read_text()
    assert found == (uninterrupted if every == 1 else seldom_saved)
    tasks = [event.seconds["train"] for event in read_events(folder / "events.jsonl") if isinstance(event, TaskDone)]
    assert sum(tasks) == pytest.approx(json.loads((folder / "summary.json").read_text())["seconds"]["train"])


def test_how_often_a_run_is_saved_changes_nothing_but_how_long_clients_are_to_remember(uninterrupted, seldom_saved):
    """A question says how far back the server may go: that number is longer or shorter."""
    ours, theirs = ({**found, "ledger": sizes(found["ledger"])} for found in (uninterrupted, seldom_saved))
    for found in (ours, theirs):
        found["summary"] = {**found["summary"], "bytes": found["summary"]["bytes"]["up"]}
    assert ours == theirs


def sizes(ledger):
    """Every line of a ledger, without the bytes of questions."""
    lines = map(json.loads, ledger.splitlines())
    return [{**line, "bytes": 0 if line["kind"] == "ask" else line["bytes"]} for line in lines]


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
        patch.setattr("os.fsync", full)
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
    written = runs.FORMAT
    monkeypatch.setattr(runs, "FORMAT", 99)
    with pytest.raises(fedprotip.UsageError, match=rf"has format {written}, this fedprotip continues format 99"):
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


@pytest.mark.slow
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
    assert results(tmp_path / "r", without=["plan"]) == results(tmp_path / "three", without=["plan"])


def test_other_versions_are_warned_about(tmp_path):
    fedprotip.run(small(), out=tmp_path / "r")
    with forged(tmp_path / "r") as manifest:
        manifest["versions"]["torch"] = "1.0"
    said = []
    fedprotip.resume(tmp_path / "r", observers=[lambda event: said.append(getattr(event, "text", ""))])
    assert any("another version of torch" in text for text in said)


@pytest.mark.slow
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


@pytest.fixture
def photos(tmp_path):
    """Settings of a run on a folder of six classes in three tasks, which has a test part of its own."""
    for part, count in (("train", 6), ("test", 2)):
        class_folders(tmp_path / "photos" / part, "bcdefg", count, size=(8, 8))
    return small(data={"name": "own", "source": str(tmp_path / "photos")}, clients={"count": 2}, train={"rounds": 2})


def interrupted(settings, folder, monkeypatch, calls):
    with monkeypatch.context() as patch:
        stop_after(patch, calls)
        with pytest.raises(KeyboardInterrupt):
            fedprotip.run(settings, out=folder)


def test_new_samples_of_a_task_to_come_are_noticed_refused_and_accepted(tmp_path, monkeypatch, photos):
    """Interrupted in the second task, a sample for the third: as if it had been there from the start."""
    quick(monkeypatch)
    interrupted(photos, tmp_path / "r", monkeypatch, 6)
    before = (tmp_path / "r" / "manifest.json").read_text()
    picture(tmp_path / "photos" / "train" / "g" / "9.png", size=(8, 8), seed=9)
    with pytest.raises(fedprotip.UsageError, match=r"samples of 'g': 1 added \(train/g/9.png\).*--accept-data"):
        fedprotip.resume(tmp_path / "r")
    assert (tmp_path / "r" / "manifest.json").read_text() == before
    fedprotip.resume(tmp_path / "r", accept_data=True)
    fedprotip.run(photos, out=tmp_path / "whole")
    assert results(tmp_path / "r") == results(tmp_path / "whole")
    ours, theirs = (runs.RunFolder.open(tmp_path / name) for name in ("r", "whole"))
    (accepted,) = ours.manifest().data.accepted
    assert accepted.model_dump() == {
        "task": 1,
        "round": 0,
        "changes": ["training samples of 'g': 1 added (train/g/9.png)"],
    }
    assert ours.manifest().data.hash == theirs.manifest().data.hash
    assert set(ours.verify().values()) == {"intact"}
    write_report(tmp_path / "r")
    page = (tmp_path / "r" / "report.html").read_text()
    assert "The data changed before round 1 of task 2, and the run went on with it: training samples of" in page


def test_other_test_samples_of_a_learned_task_are_said(tmp_path, monkeypatch, photos):
    interrupted(photos, tmp_path / "r", monkeypatch, 6)
    picture(tmp_path / "photos" / "test" / "b" / "000.png", size=(8, 8), seed=9)
    said = []
    fedprotip.resume(tmp_path / "r", observers=[lambda event: said.append(getattr(event, "text", ""))])
    told = "test samples of 'b': 1 changed (test/b/000.png); accuracies on task 1 from before and from now on cannot be"
    assert sum(told in text for text in said) == 1
    assert told in (tmp_path / "r" / "report.html").read_text().replace("&#39;", "'")


def test_data_that_moved_is_the_same_data(tmp_path, monkeypatch, photos):
    quick(monkeypatch)
    fedprotip.run(photos, out=tmp_path / "whole")
    monkeypatch.chdir(tmp_path)
    moving = photos.model_copy(update={"data": photos.data.model_copy(update={"source": "photos"})})
    interrupted(moving, tmp_path / "r", monkeypatch, 6)
    shutil.copytree(tmp_path / "photos", tmp_path / "elsewhere" / "photos", copy_function=shutil.copyfile)
    shutil.rmtree(tmp_path / "photos")
    monkeypatch.chdir(tmp_path / "elsewhere")
    fedprotip.resume(tmp_path / "r", overrides=["data.source=photos"])
    assert results(tmp_path / "r") == results(tmp_path / "whole")
    assert runs.RunFolder.open(tmp_path / "r").manifest().data.accepted == []


def test_a_lost_table_costs_only_the_names(tmp_path, monkeypatch, photos):
    quick(monkeypatch)
    interrupted(photos, tmp_path / "r", monkeypatch, 6)
    (tmp_path / "r" / "data.safetensors").write_bytes(b"damaged")
    (tmp_path / "photos" / "train" / "g" / "001.png").unlink()
    with pytest.raises(fedprotip.UsageError, match="is not what it was: training samples of task 3; put it back"):
        fedprotip.resume(tmp_path / "r")
    assert fedprotip.resume(tmp_path / "r", accept_data=True)["tasks"] == 3
    assert set(runs.RunFolder.open(tmp_path / "r").verify().values()) == {"intact"}


def test_a_run_of_an_earlier_version_gets_its_fingerprint_when_it_goes_on(tmp_path, monkeypatch, photos):
    quick(monkeypatch)
    interrupted(photos, tmp_path / "r", monkeypatch, 6)
    folder = runs.RunFolder.open(tmp_path / "r")
    with forged(folder.path) as manifest:
        del manifest["data"]
    said = []
    fedprotip.resume(tmp_path / "r", observers=[lambda event: said.append(getattr(event, "text", ""))])
    assert sum("does not say which data it began with" in text for text in said) == 1
    assert len(folder.manifest().data.tasks) == 3
