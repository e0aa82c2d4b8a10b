"""How far a run is, with and without a terminal."""

import io
import json
import re

import pytest

from fedprotip.cli import progress as shown
from fedprotip.cli.display import Console
from fedprotip.settings import to_toml
from fedprotip.store.events import RoundDone, Started, TaskDone
from tests.small import small
from tests.stream.trees import class_folders


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is moved."""
    now = [0.0]
    monkeypatch.setattr(shown, "monotonic", lambda: now[0])
    return now


def lines_of(events, clock, seconds, runs=1):
    """What is shown of events that come every so many seconds."""
    written = io.StringIO()
    with shown.ProgressDisplay(Console(file=written, width=80), runs) as progress:
        observer = progress.of("run")
        for event in events:
            observer(event)
            clock[0] += seconds
    return written.getvalue().splitlines()


def events(tasks, rounds, first=0, begun=0):
    yield Started(folder="r", tasks=tasks, rounds=rounds, done=first)
    for task in range(first, tasks):
        for round_ in range(begun if task == first else 0, rounds):
            yield RoundDone(task=task, round=round_, loss=0.25, clients=2, seconds=1.0)
        yield TaskDone(task=task, accuracy={"aware": 90.0, "single": 50.0})


def test_without_a_terminal_a_line_for_each_task(clock):
    assert lines_of(events(2, 3), clock, 1) == [
        "run: 2 tasks of 3 rounds; in r",
        "run: task 1 of 2 learned: single 50.0 % · aware 90.0 %; about 4 s left",
        "run: task 2 of 2 learned: single 50.0 % · aware 90.0 %",
    ]


def test_without_a_terminal_now_and_then_a_round(clock):
    """Rounds of ten seconds: every third has a line, or the next task."""
    lines = lines_of(events(1, 8), clock, 10)
    assert lines[1:3] == [
        "run: task 1 of 1, round 3 of 8, loss 0.250, about 50 s left",
        "run: task 1 of 1, round 6 of 8, loss 0.250, about 20 s left",
    ]
    assert len(lines) == 4
    assert "run (1/2): " in lines_of(events(1, 1), clock, 1, runs=2)[0]


def test_the_time_left_of_a_resumed_run_counts_its_own_rounds(clock):
    """98 rounds were done before: the two of now took 40 s."""
    lines = lines_of(events(2, 100, begun=98), clock, 40)
    assert lines[1] == "run: task 1 of 2, round 99 of 100, loss 0.250, about 67 min left"
    assert lines_of(events(2, 3, first=1), clock, 1)[0] == "run: 2 tasks of 3 rounds, 1 of them learned before; in r"


def test_a_terminal_has_a_bar_and_no_lines(clock):
    written = io.StringIO()
    with shown.ProgressDisplay(Console(file=written, force_terminal=True, width=200)) as progress:
        for event in events(2, 1):
            progress(event)
    assert "task 2 of 2" in written.getvalue()
    assert "learned" not in written.getvalue()


def test_people_count_tasks_from_1_and_programs_from_0(tmp_path, call):
    """Two tasks: nobody who reads meets a task 0 or a task 3, in the terminal, in errors or in the report."""
    folder, settings = tmp_path / "r", tmp_path / "small.toml"
    settings.write_text(to_toml(small()))
    short = ["--set", "train.rounds=1", "--set", "stream.tasks=2", "--set", "clients.count=2"]
    _, out, err = call("run", settings, *short, "--out", folder)
    assert re.findall(r"task (\d+) of 2", err) == ["1", "2"]
    page = re.sub(r'src="data:[^"]*"', "", (folder / "report.html").read_text())
    assert set(re.findall(r"\b[Tt]ask (\d+)", out + err + page)) == {"1", "2"}
    for table in (folder / "tables").glob("*.csv"):
        head, *rows = (line.split(",") for line in table.read_text().splitlines())
        if head[0] == "task":
            assert {row[0] for row in rows} <= {"1", "2"}, table.name
    checked = call("data", "check", "digits", *short)[1]
    assert re.findall(r"^│ (\d) +│ .*│.*│.*│.*│", checked, re.MULTILINE)[-2:] == ["1", "2"]
    few = class_folders(tmp_path / "photos", "bc", per_class=4, size=(8, 8))
    own = ["--set", "data.name=own", "--set", f"data.source={few}", "--set", "clients.count=9"]
    assert "Task 1 (" in call("run", *own, "--set", "stream.tasks=2", "--out", tmp_path / "n")[2]

    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert {line["task"] for line in lines if "task" in line} == {0, 1}
    assert {json.loads(line)["task"] for line in (folder / "ledger.jsonl").read_text().splitlines()} == {0, 1}
