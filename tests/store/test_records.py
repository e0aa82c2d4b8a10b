"""Records: what is written is what is read, wrong ones are one sentence, and no client can blow up a line."""

import json
import math

import pytest

from fedprotip.errors import RunError
from fedprotip.store import events
from fedprotip.store.records import BadRecord, LedgerLine, Manifest, Record, finite, one_line, read_ledger, read_record
from fedprotip.store.results import Geometry, RoutingOverTasks, Summary

SUMMARY = {
    "method": "fedavg",
    "scenario": "class",
    "tasks": 1,
    "clients": 2,
    "seed": 0,
    "accuracy": {"aware": 90.0},
    "forgetting": {"aware": 0.0},
    "routing": {},
    "routing_over_tasks": {"single": {"at_end": [0.5], "so_far": [1.0], "newest": [None]}},
    "routers": {},
    "confidence": {},
    "unknown": {},
    "sweeps": {},
    "drift": [],
    "matrix": {"aware": [[90.0]]},
    "confusion": {},
    "bytes": {"up": {"model": 12}, "down": {}},
    "seconds": {"total": 1.5},
    "peak_rss_mb": 100.25,
    "peak_gpu_mb": None,
    "failures": {"count": 0, "by_reason": {}},
}
IMPOSSIBLE = [
    *({"tasks": n} for n in (0, -1, True, 10**30)),
    *({"clients": n} for n in (-1, True, 10**7)),
    *({"seed": n} for n in (-1, True, 0.5)),
    *({"accuracy": {"aware": n}} for n in (-1, 101, 1e308, True, "90")),
    *({"forgetting": {"aware": n}} for n in (-101, 101, True)),
    *({"matrix": {"aware": [[n]]}} for n in (-1, 101, True)),
    *({"routing": {"single": n}} for n in (-1, 2, True)),
    *({"routing_over_tasks": {"single": {"at_end": [n]}}} for n in (-1, 2, True)),
    *({"routers": {"fused": {"routing_single": n}}} for n in (-1, 2, True)),
    *({"confusion": {"aware": [[n]]}} for n in (-1, 10**30, True)),
    *({"bytes": {"up": {"model": n}, "down": {}}} for n in (-1, 10**30, True)),
    *({"seconds": {"total": n}} for n in (-1, 1e30, True)),
    *({"peak_rss_mb": n} for n in (-1, 1e30, True)),
    *({"failures": {"count": n}} for n in (-1, 10**30, True)),
    *({"sweeps": {"sizes": [n], "size": {"fused": [1.0]}}} for n in (-1, 10**30, True)),
]
"""Numbers that no run can have."""
LEDGER = {
    "task": 0,
    "round": None,
    "client": 3,
    "direction": "up",
    "kind": "model",
    "bytes": 12,
    "status": "ok",
    "reason": "",
}
LINES = [
    {"event": "round", "task": 0, "round": 1, "loss": 0.25, "clients": 3, "seconds": 1e-05},
    {"event": "round", "task": 0, "round": 1, "loss": None, "clients": 0, "seconds": 1.0},
    {
        "event": "task",
        "task": 0,
        "seconds": {"train": 2.0},
        "accuracy": {"aware": 99.0},
        "by_task": {"aware": [99.0]},
        "router": "fused",
        "routing": {"fused": {"single": [1.0], "batch64": [0.5]}},
        "ranks": {"é": 3},
        "dims": {"é": 9},
        "samples": {"raw": 4},
    },
    {"event": "absent", "task": 0, "clients": [1, 2], "reason": "no data of this task"},
    {"event": "failure", "task": 0, "round": None, "client": 1, "reason": "OSError: unplugged"},
    {"event": "withheld", "task": 0, "client": 1, "kind": "statistics", "classes": 2},
]


def text(value):
    return json.dumps(value, ensure_ascii=False)


@pytest.mark.parametrize("change", IMPOSSIBLE, ids=str)
def test_numbers_that_no_run_can_have_are_refused(change):
    with pytest.raises(BadRecord, match=rf"^Summary\.{next(iter(change))}"):
        Summary.model_validate(SUMMARY | change)


@pytest.mark.parametrize("line", LINES, ids=lambda line: line["event"])
def test_events_are_read_as_they_were_written(tmp_path, line):
    path = tmp_path / "events.jsonl"
    path.write_text(text(line) + "\n", encoding="utf-8")
    (event,) = events.read_events(path)
    assert type(event) is events.EVENTS[line["event"]]
    assert text(event.plain()) == text(line)  # the same keys in the same order, and the same numbers
    assert event["task"] == event.task == 0


def test_ledger_lines_and_files_are_read_as_they_were_written(tmp_path):
    path = tmp_path / "file"
    path.write_text(text(LEDGER) + "\n")
    assert [text(line.plain()) for line in read_ledger(path)] == [text(LEDGER)]
    manifest = {"format": 1, "status": "running", "versions": {"torch": "2"}, "threads": 1, "settings": "", "files": {}}
    for record, value in ((Summary, SUMMARY), (Manifest, manifest), (Manifest, manifest | {"replaced": "ab"})):
        path.write_text(text(value))
        found = read_record(record, path)
        assert found.plain() == value
        assert record.model_validate(found.plain()) == found
    assert text(Summary.model_validate(SUMMARY).plain()) == text(SUMMARY)


def test_a_summary_of_an_older_run_is_readable():
    new = ("routing_over_tasks", "routers", "confidence", "unknown", "sweeps", "drift", "confusion", "failures")
    old = Summary.model_validate({key: value for key, value in SUMMARY.items() if key not in new})
    assert (old.modes, old.learned, old.routing.shares, old.confidence.bins) == (["aware"], 1, {}, [])


def test_the_modes_stand_in_the_order_of_the_report():
    routing = {"single": 0.5, "batch64": 1.0, "single_by_task": [0.5], "batch64_by_task": [1.0]}
    found = Summary.model_validate(SUMMARY | {"accuracy": dict.fromkeys(("aware", "single"), 1.0), "routing": routing})
    assert found.modes == ["single", "aware"]
    assert found.routing.shares == {"single": 0.5, "batch64": 1.0}
    assert found.routing.by_task == {"single": [0.5], "batch64": [1.0]}


def test_routing_is_read_at_the_end_over_all_tasks_so_far_and_when_a_task_is_new():
    found = RoutingOverTasks.of([[1.0], [0.5, 1.0], [0.25, 0.5, 0.75]])
    assert found.at_end == [0.25, 0.5, 0.75]
    assert found.so_far == [1.0, 0.75, 0.5]
    assert found.newest == [1.0, 1.0, 0.75]
    begun_before = RoutingOverTasks.of([None, [0.5, 1.0]])  # by a version that did not keep it
    assert (begun_before.so_far, begun_before.newest) == ([None, 0.75], [None, 1.0])


def test_a_task_that_is_done_has_shares_of_all_tasks_so_far():
    with pytest.raises(BadRecord, match=r"^routing\.fused does not have a share for each of 2 tasks\.$"):
        events.TaskDone(task=1, routing={"fused": {"single": [1.0, 1.0], "batch64": [1.0]}})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused(value):
    with pytest.raises(BadRecord, match=r"^RoundDone\.loss: Input should be a finite number\.$"):
        events.RoundDone(task=0, round=0, loss=value, clients=1, seconds=1.0)
    with pytest.raises(BadRecord, match=r"^Summary\.matrix\.aware\.0\.0: Input should be a finite number\.$"):
        Summary.model_validate(SUMMARY | {"matrix": {"aware": [[value]]}})
    assert finite(value) is None
    assert finite(0.5) == 0.5
    geometry = Geometry.model_validate({"rho": [], "rho_mean": [], "beta": [], "bounds": {"taskwise": [math.inf]}})
    assert geometry.bounds.taskwise == [math.inf]  # a bound may be


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2 is not a JSON object"),
        ("[]", "line 2 is not a JSON object"),
        ("", "line 2 is not a JSON object"),
        ('{"event": "round", "task": 0}', "line 2: RoundDone.round: Field required"),
        ('{"event": "failure", "task": "x"}', "line 2: Failure.task: Input should be a valid integer"),
        ('{"task": 0}', "line 2: Remark.event: Field required"),
        ('{"event": ["round"]}', "line 2: Remark.event: Input should be a valid string"),
    ],
)
def test_a_wrong_line_is_one_sentence_with_its_number(tmp_path, line, words):
    path = tmp_path / "events.jsonl"
    path.write_text(text(LINES[0]) + "\n" + line + "\n")
    found = events.read_events(path)
    next(found)
    with pytest.raises(RunError) as caught:
        next(found)
    assert str(path) in str(caught.value)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_or_unreadable_file_is_a_sentence(tmp_path):
    with pytest.raises(RunError, match="is missing"):
        list(read_ledger(tmp_path / "ledger.jsonl"))
    (tmp_path / "ledger.jsonl").write_bytes(b"\xff\n")
    with pytest.raises(RunError, match="not text in UTF-8"):
        list(read_ledger(tmp_path / "ledger.jsonl"))
    (tmp_path / "folder").mkdir()
    with pytest.raises(RunError, match="is a folder, where a run has a plain file"):
        read_record(Summary, tmp_path / "folder")


def test_events_of_others_are_remarks(tmp_path):
    path = tmp_path / "events.jsonl"
    said = events.Remark(event="generator", task=1, text="trained for 5 steps")
    path.write_text(text(said.plain()) + "\n" + text({"event": "of a later version", "things": [1]}) + "\n")
    assert [(event.event, type(event)) for event in events.read_events(path)] == [
        ("generator", events.Remark),
        ("of a later version", events.Remark),
    ]
    assert next(events.read_events(path)) == said
    with pytest.raises(BadRecord, match="'round' is another event's name"):
        events.Remark(event="round")


def test_what_a_client_says_is_bounded_and_printable():
    reason = "ValueError: \x1b[2J\r\n\u2028\ud800" + "x" * 10**6
    failure = events.Failure(task=0, round=0, client=1, reason=reason)
    line = LedgerLine(**LEDGER | {"kind": "k" * 10**6, "reason": reason})
    for record in (failure, line):
        written = text(record.plain()).encode()  # a lone surrogate could not be
        assert len(written) < 800
        assert len(record.reason) == 300
        assert record.reason.isprintable()
        assert record.reason.endswith("x…")
    assert line.kind == "k" * 99 + "…"
    assert events.Failure(**failure.plain()) == failure  # reading cuts no further
    assert Summary.model_validate(
        SUMMARY | {"failures": {"count": 1, "by_reason": {reason: 1}}}
    ).failures.by_reason == {failure.reason: 1}


@pytest.mark.parametrize(
    ("given", "kept"), [("", ""), ("abc", "abc"), ("abcd", "ab…"), ("é ü", "é ü"), ("a\tb", "a b")]
)
def test_a_text_is_cut_with_an_ellipsis(given, kept):
    assert one_line(given, 3) == kept


def test_a_record_does_not_change_with_what_it_was_made_of():
    seconds = {"train": 1.0}
    done = events.TaskDone(task=0, seconds=seconds)
    seconds["train"] = 2.0
    assert done.seconds == {"train": 1.0}
    with pytest.raises(ValueError, match="frozen"):
        done.task = 3


def test_every_event_that_is_written_is_known():
    subclasses = [kind for kind in events.Event.__subclasses__() if kind is not events.Remark]
    assert sorted(events.EVENTS.values(), key=str) == sorted(subclasses, key=str)
    assert all(issubclass(kind, Record) for kind in subclasses)
