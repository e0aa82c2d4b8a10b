"""What a summary says about routing comes from the evaluations after all tasks."""

import json

import pytest

import fedprotip
from fedprotip.evaluation.summary import routing_over_tasks
from fedprotip.store.events import TaskDone, read_events
from fedprotip.store.objects import sealed, unsealed
from tests.small import quick, small


def done(task, *shares, router="fused"):
    other = [0.0] * (task + 1)
    return TaskDone(task=task, router=router, routing={"cosine": {"single": other}, "fused": {"single": list(shares)}})


def test_the_configured_router_is_read_from_the_events():
    (found,) = routing_over_tasks({0: done(0, 1.0), 1: done(1, 0.5, 1.0)}, 2).values()
    assert (found.at_end, found.so_far, found.newest) == ([0.5, 1.0], [1.0, 0.75], [1.0, 1.0])


def test_what_was_not_recorded_is_unknown_and_without_routing_there_is_nothing():
    found = routing_over_tasks({0: TaskDone(task=0), 1: done(1, 0.5, 1.0)}, 2)
    assert found["single"].so_far == [None, 0.75]
    assert routing_over_tasks({0: TaskDone(task=0), 1: TaskDone(task=1)}, 2) == {}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "r"
    with pytest.MonkeyPatch.context() as patch:
        quick(patch)
        return folder, fedprotip.run(small(), out=folder)


def test_every_evaluation_of_a_run_is_kept_for_every_router_and_mode(run):
    folder, summary = run
    tasks = [event for event in read_events(folder / "events.jsonl") if isinstance(event, TaskDone)]
    assert [event.task for event in tasks] == [0, 1, 2]
    for event in tasks:
        assert event.router == "fused"
        assert event.routing.keys() == summary["routers"].keys()
        for by_mode in event.routing.values():
            assert {mode: len(by_task) for mode, by_task in by_mode.items()} == {
                "single": event.task + 1,
                "batch64": event.task + 1,
            }
    last = {way: by_mode["single"] for way, by_mode in tasks[-1].routing.items()}
    shares = {way: figures["routing_single"] for way, figures in summary["routers"].items()}
    assert {way: sum(by_task) / 3 for way, by_task in last.items()} == shares


def test_the_readings_of_a_run_fit_its_other_figures(run):
    _, summary = run
    for mode in ("single", "batch64"):
        readings = summary["routing_over_tasks"][mode]
        assert readings["at_end"] == summary["routing"][f"{mode}_by_task"]
        assert readings["so_far"][0] == readings["newest"][0] == 1.0  # one task cannot be confused with another
        assert readings["so_far"][-1] == summary["routing"][mode]
        assert readings["newest"][-1] == readings["at_end"][-1]


def test_the_seconds_of_all_tasks_add_up_to_those_of_the_run(run):
    """Meeting a task that is not learned yet is part of that task's evaluation."""
    folder, summary = run
    tasks = [event.seconds for event in read_events(folder / "events.jsonl") if isinstance(event, TaskDone)]
    for phase in ("train", "task_end", "evaluate"):
        assert sum(seconds[phase] for seconds in tasks) == pytest.approx(summary["seconds"][phase])


def test_a_run_that_was_begun_before_evaluations_were_kept_can_be_extended(tmp_path, monkeypatch):
    quick(monkeypatch)
    fedprotip.run(small(stream={"tasks": 2}), out=tmp_path / "r")
    log = tmp_path / "r" / "events.jsonl"
    lines = log.read_text().splitlines()
    for number, line in enumerate(lines):
        kept = {key: value for key, value in json.loads(line).items() if key not in ("router", "routing")}
        lines[number] = json.dumps(kept).ljust(len(line))  # as long as the checkpoint says
    log.write_text("\n".join(lines) + "\n")
    for path in (tmp_path / "r" / "checkpoint").glob("*.json"):  # nor did checkpoints know how logs end
        path.write_text(sealed({key: value for key, value in unsealed(path.read_bytes()).items() if key != "ends"}))
    found = fedprotip.extend(tmp_path / "r", tasks=1)["routing_over_tasks"]["single"]
    assert found["so_far"][:2] == found["newest"][:2] == [None, None]
    assert all(share is not None for share in [*found["at_end"], found["so_far"][2]])
