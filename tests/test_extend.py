"""The next task, months later."""

import pytest

import fedprotip
from tests.small import quick, results, small, tensors
from tests.stream.trees import class_folders, picture

PLAN = ["plan"]
"""A run that was extended has told its clients a second, longer plan."""
UNPLANNED = {"budget": "none"}
"""By default room is shared out among the tasks that were announced, and so depends on their number."""


@pytest.mark.parametrize("method", ["fedprotip", "fedavg"])
@pytest.mark.parametrize(
    "stream",
    [{"task_size": 2}, pytest.param({"task_size": [3, 1, 2, 2, 2], "order": "seeded"}, marks=pytest.mark.slow)],
    ids=str,
)
def test_four_tasks_and_one_more_equal_five(tmp_path, method, stream):
    sections = {"method": {"name": method, **UNPLANNED}, "train": {"rounds": 2}}
    fedprotip.run(small(stream={"tasks": 5, **stream}, **sections), out=tmp_path / "five")
    first = stream["task_size"][:4] if isinstance(stream["task_size"], list) else stream["task_size"]
    fedprotip.run(small(stream={"tasks": 4, **stream, "task_size": first}, **sections), out=tmp_path / "four")
    fedprotip.extend(tmp_path / "four", tasks=1)
    assert results(tmp_path / "four", PLAN) == results(tmp_path / "five", PLAN)


@pytest.mark.slow
def test_overlapping_classes_and_made_domains_extend_exactly_too(tmp_path):
    for name, stream in {
        "overlap": {"task_size": 3, "overlap": 1},
        "domain": {"scenario": "domain", "domains": "permute", "task_size": 0},
    }.items():
        for tasks in (2, 3):
            fedprotip.run(small(stream={**stream, "tasks": tasks}, method=UNPLANNED), out=tmp_path / f"{name}-{tasks}")
        fedprotip.extend(tmp_path / f"{name}-2", tasks=1)
        assert results(tmp_path / f"{name}-2", PLAN) == results(tmp_path / f"{name}-3", PLAN)


@pytest.mark.slow
def test_clients_leave_and_join(tmp_path):
    """Clients 0 and 1 stay, 2 leaves, 5 joins: the same as a run that had this plan from the start."""
    fedprotip.run(small(stream={"tasks": 2}, method=UNPLANNED), out=tmp_path / "r")
    fedprotip.extend(tmp_path / "r", tasks=1, clients="0-1,5")
    fedprotip.run(small(clients={"roster": {"2": "0-1,5"}}, method=UNPLANNED), out=tmp_path / "planned")
    assert results(tmp_path / "r", PLAN) == results(tmp_path / "planned", PLAN)
    kept = tensors(tmp_path / "r", "references")
    assert kept["clients"].tolist() == [0, 1, 2, 5]
    counts = kept["counts"]
    assert counts[2, 2] == 0
    assert counts[3, :2].tolist() == [0, 0]
    assert (counts[:2] > 0).all()
    assert counts[3, 2] > 0


@pytest.mark.slow
def test_all_clients_can_be_replaced(tmp_path):
    fedprotip.run(small(stream={"tasks": 2}), out=tmp_path / "r")
    summary = fedprotip.extend(tmp_path / "r", tasks=1, clients="7-9")
    assert summary["tasks"] == 3
    assert all(0 <= share <= 1 for share in summary["routing"]["single_by_task"])


@pytest.mark.slow
def test_an_interrupted_extension_is_resumed(tmp_path, monkeypatch):
    from tests.test_resume import stop_after

    fedprotip.run(small(stream={"tasks": 3}), out=tmp_path / "three")
    fedprotip.run(small(stream={"tasks": 2}), out=tmp_path / "r")
    with monkeypatch.context() as patch:
        stop_after(patch, 4)
        with pytest.raises(KeyboardInterrupt):
            fedprotip.extend(tmp_path / "r", tasks=1)
    with pytest.raises(fedprotip.UsageError, match="not finished"):
        fedprotip.extend(tmp_path / "r", tasks=1)
    fedprotip.resume(tmp_path / "r")
    assert results(tmp_path / "r", PLAN) == results(tmp_path / "three", PLAN)


@pytest.mark.parametrize(
    ("stream", "arguments", "words"),
    [
        ({"tasks": 5}, {"tasks": 1}, "needs 2 class\\(es\\) that no task has yet"),
        ({"tasks": 2, "task_size": 0}, {"tasks": 1}, "none left"),
        ({"tasks": 2}, {"tasks": 0}, "nearest valid value is 1"),
        ({"tasks": 2}, {"clients": "0-x"}, "not a list of client ids"),
    ],
)
def test_impossible_extensions_change_nothing(tmp_path, stream, arguments, words):
    fedprotip.run(small(stream=stream), out=tmp_path / "r")
    before = results(tmp_path / "r"), (tmp_path / "r" / "settings.toml").read_bytes()
    with pytest.raises(fedprotip.UsageError, match=words):
        fedprotip.extend(tmp_path / "r", **arguments)
    assert before == (results(tmp_path / "r"), (tmp_path / "r" / "settings.toml").read_bytes())
    assert fedprotip.resume(tmp_path / "r")["tasks"] == stream["tasks"]


@pytest.fixture
def photos(tmp_path, monkeypatch):
    """Settings of a run on four class folders in two tasks."""
    quick(monkeypatch)
    class_folders(tmp_path / "photos", "bcde", size=(8, 8))
    data = {"name": "own", "source": str(tmp_path / "photos")}
    return small(data=data, stream={"tasks": 2}, clients={"count": 2}, train={"rounds": 1})


def test_data_of_the_next_task_is_new_not_changed(tmp_path, photos):
    fedprotip.run(photos, out=tmp_path / "r")
    class_folders(tmp_path / "photos", "xy", size=(8, 8))
    assert fedprotip.extend(tmp_path / "r")["tasks"] == 3
    record = fedprotip.api.RunFolder.open(tmp_path / "r").manifest().data
    assert (len(record.tasks), record.accepted) == (3, [])


def test_training_samples_of_learned_tasks_may_go(tmp_path, photos):
    fedprotip.run(photos, out=tmp_path / "r")
    class_folders(tmp_path / "photos", "xy", size=(8, 8))
    picture(tmp_path / "photos" / "b" / "008.png", size=(8, 8), seed=99)
    assert fedprotip.extend(tmp_path / "r")["tasks"] == 3
    assert fedprotip.api.RunFolder.open(tmp_path / "r").manifest().data.accepted == []
