"""What is said about a run folder before, while and after a run works in it."""

import json
import os
import time

import pytest

import fedprotip
from fedprotip.store.folder import RunFolder
from fedprotip.store.tail import Tail
from fedprotip.watch import Watched, view
from tests.report.test_rundata import make_run
from tests.small import forged, quick, small
from tests.test_resume import stop_after


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    quick(monkeypatch)


def test_it_waits_shows_and_keeps_what_a_run_does(tmp_path):
    """One watcher from before the folder is there until the run is finished; observers look through its eyes."""
    folder = tmp_path / "r"
    watched, seen = Watched(folder), []
    before = watched.look()
    assert (before.status, before.tasks) == ("waiting", 0)
    assert "There is no run in" in before.sentence
    fedprotip.run(small(), out=folder, observers=[lambda event: seen.append(watched.look())])
    working = [one for one in seen if one.tasks]
    assert {one.status for one in working} == {"running"}
    assert [one.learned for one in working] == sorted(one.learned for one in working)
    middle = next(one for one in working if one.learned == 1 and one.round == 1)
    assert "Learning task 2 of 3, round 2 of 3" in middle.sentence
    assert middle.left > 0
    assert 1 / 3 < middle.done < 2 / 3
    assert middle.silent < 60
    after = watched.look()
    assert (after.status, after.learned, after.round, after.rounds, after.done) == ("finished", 3, 0, 3, 1.0)
    summary = json.loads((folder / "summary.json").read_text())
    assert {mode: values[-1] for mode, values in after.accuracy.items()} == pytest.approx(summary["accuracy"])
    assert after.by_task == {mode: pytest.approx(rows[-1]) for mode, rows in summary["matrix"].items()}
    assert after.bytes == summary["bytes"]
    assert len(after.loss) == 9
    assert (after.left, after.silent) == (None, None)
    assert Watched(folder).look() == after  # from the files alone


def test_a_run_that_died_is_shown_as_such_until_it_goes_on(tmp_path, monkeypatch):
    watched = Watched(tmp_path / "r")
    with monkeypatch.context() as patch:
        stop_after(patch, 14)
        with pytest.raises(KeyboardInterrupt):
            fedprotip.run(small(), out=tmp_path / "r")
    stopped = watched.look()
    assert stopped.status == "stopped"
    assert f"nobody is at work in it. 1 of 3 tasks are learned, 1 of 3 rounds of the next. Continue with: fedprotip " \
        f"resume {tmp_path / 'r'}" in stopped.sentence  # fmt: skip
    seen = []
    fedprotip.resume(tmp_path / "r", [lambda event: seen.append(watched.look().status)])
    assert "running" in seen
    assert watched.look() == Watched(tmp_path / "r").look()  # lines that a resume cut off are not counted twice


def test_asking_whether_a_folder_is_in_use_disturbs_nobody(tmp_path):
    fedprotip.run(small("train.rounds=1", "stream.tasks=1"), out=tmp_path / "r")
    run, other = RunFolder(tmp_path / "r"), RunFolder(tmp_path / "r")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "r").rglob("*")}
    assert not run.in_use()
    with other.locked():
        assert run.in_use()
    assert not run.in_use()
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "r").rglob("*")} == before


def test_a_method_without_rounds_has_none_to_wait_for(tmp_path):
    folder = tmp_path / "r"
    seen, watched = [], Watched(folder)
    fedprotip.run(small(method={"name": "lda"}), out=folder, observers=[lambda event: seen.append(watched.look())])
    second = next(one for one in seen if one.learned == 1)
    assert second.rounds == 0
    assert second.sentence == "Learning task 2 of 3"
    assert second.left > 0
    assert watched.look().loss == []


def test_a_log_is_read_as_it_grows_and_anew_when_it_was_cut(tmp_path):
    path, tail = tmp_path / "log", Tail(tmp_path, "log", dict)
    path.write_text('{"a": 1}\n{"a": 2')
    assert tail.look() == (False, [{"a": 1}])
    with path.open("a") as file:
        file.write('}\n{"a": 3}\n')
    assert tail.look() == (False, [{"a": 2}, {"a": 3}])
    assert tail.look() == (False, [])
    path.write_text('{"a": 1}\n{"a": 9}\n{"a": 3}\n{"a": 4}\n')
    assert tail.look() == (True, [{"a": 1}, {"a": 9}, {"a": 3}, {"a": 4}])
    path.write_text("")
    assert tail.look() == (True, [])


def test_many_rounds_and_tasks_are_thinned(tmp_path, monkeypatch):
    monkeypatch.setattr(view, "POINTS", 3)
    monkeypatch.setattr(view, "LISTED", 2)
    folder = make_run(tmp_path / "r", tasks=5)
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    for line in lines:
        if line["event"] == "task":
            line |= {"accuracy": {"aware": 50.0 + line["task"]}, "by_task": {"aware": [1.0] * (line["task"] + 1)}}
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "manifest.json").write_text(
        json.dumps({"format": 2, "status": "running", "settings": "[stream]\ntasks = 6\n[train]\nrounds = 1"})
    )
    found = Watched(folder).look()
    assert (found.first, found.accuracy, found.by_task) == (4, {"aware": [53.0, 54.0]}, {"aware": [1.0, 1.0]})
    assert [x for x, _ in found.loss] == [1.0, 3.0, 5.0, 5.0]
    assert found.title == "? on ?"


HARM = {
    "a line that is none": lambda folder: (folder / "events.jsonl").write_text("[]\n"),
    "a record that is none": lambda folder: (folder / "ledger.jsonl").write_text('{"task": "x"}\n'),
    "an endless line": lambda folder: (folder / "events.jsonl").write_bytes(b" " * 5_000_000),
    "a link": lambda folder: ((folder / "events.jsonl").unlink(), (folder / "events.jsonl").symlink_to("/etc/passwd")),
    "a pipe": lambda folder: ((folder / "ledger.jsonl").unlink(), os.mkfifo(folder / "ledger.jsonl")),
    "a manifest that is none": lambda folder: (folder / "manifest.json").write_text("{"),
    "settings that are none": lambda folder: (folder / "manifest.json").write_text(
        json.dumps({"format": 2, "status": "running", "settings": "x = ["})
    ),
}


@pytest.mark.parametrize("harm", HARM)
def test_a_strange_folder_is_a_sentence(tmp_path, harm):
    folder = make_run(tmp_path / "r")
    HARM[harm](folder)
    started, found = time.monotonic(), Watched(folder).look()
    assert found.status == "damaged"
    assert str(folder) in found.sentence
    assert "root:" not in found.model_dump_json()
    assert time.monotonic() - started < 5


def test_texts_of_a_folder_are_cut_and_printable(tmp_path):
    folder = make_run(tmp_path / "r", failures=30)
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({"event": "warning", "text": "<b>\x1b[2J" + "x" * 5000}) + "\n")
    with forged(folder) as manifest:
        manifest["settings"] = '[method]\nname = "' + "m" * 5000 + '"\n[stream]\ntasks = 3\n[train]\nrounds = 1'
    found = Watched(folder).look()
    assert found.failures == 30
    assert len(found.told) == view.TOLD
    assert found.told[0].startswith("<b> [2Jxx")
    assert max(map(len, (*found.told, found.title))) <= 300
