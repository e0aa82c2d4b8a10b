"""A run folder is not much larger than what it answers with and what resuming needs."""

from pathlib import Path

import pytest

import fedprotip
from tests.small import quick, results

LARGE = {
    "data": {"train_limit": 30, "test_limit": 10},
    "stream": {"tasks": 3, "task_size": 2},
    "clients": {"count": 3},
    "model": {"name": "mlp", "width": 600},
    "train": {"rounds": 3, "epochs": 1},
    "run": {"threads": 1},
}


def size(folder):
    return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())


def answers(folder):
    """Bytes of the files that a finished run answers with: model and knowledge."""
    return sum(path.stat().st_size for path in Path(folder).glob("*.safetensors") if path.name != "data.safetensors")


@pytest.mark.parametrize("method", [pytest.param("fedprotip", marks=pytest.mark.slow), "fedavg"])
def test_a_folder_is_twice_its_tensors_and_four_times_under_way(tmp_path, monkeypatch, method):
    quick(monkeypatch)
    under_way = []
    settings = {**LARGE, "method": {"name": method}}
    fedprotip.run(settings, out=tmp_path / "r", observers=[lambda event: under_way.append(size(tmp_path / "r"))])
    assert size(tmp_path / "r") < 2.2 * answers(tmp_path / "r")
    assert max(under_way) < 4.2 * answers(tmp_path / "r")


@pytest.mark.slow
def test_clients_of_their_own_keep_one_state(tmp_path, monkeypatch):
    """Each is a machine of its own, with a model of its own; and the smaller folders are extended exactly."""
    quick(monkeypatch)
    short = {**LARGE, "run": {"threads": 1, "engine": "apart"}, "stream": {"tasks": 2, "task_size": 2}}
    fedprotip.run(short, out=tmp_path / "r")
    assert size(tmp_path / "r" / "clients") < 3 * 1.2 * answers(tmp_path / "r")
    assert [len(list(path.glob("*.json"))) for path in sorted((tmp_path / "r" / "clients").iterdir())] == [1, 1, 1]
    assert len(list((tmp_path / "r" / "checkpoint").glob("*.json"))) == 1
    fedprotip.extend(tmp_path / "r")
    fedprotip.run({**short, "stream": {"tasks": 3, "task_size": 2}}, out=tmp_path / "whole")
    extended, whole = results(tmp_path / "r", without=("plan",)), results(tmp_path / "whole", without=("plan",))
    assert extended["model.safetensors"] == whole["model.safetensors"]
    assert extended["references.safetensors"] == whole["references.safetensors"]
    assert "lost" not in {event["event"] for event in extended["events"]}
