"""Every run of several has a process of its own: its memory is its own, and it ends with whoever started it."""

import json
import os

import pytest

import fedprotip
from fedprotip.cells import Cell, apart, run_cells
from fedprotip.errors import UsageError
from fedprotip.settings import load, to_toml
from fedprotip.store.folder import RunFolder
from fedprotip.store.memory import status_mb
from tests.small import results, small

METHOD = {"name": "fedavg"}


@pytest.fixture(autouse=True)
def _apart(monkeypatch, _in_this_process):
    monkeypatch.setattr("fedprotip.cells.apart", apart)


@pytest.mark.slow
def test_a_cell_runs_in_a_process_of_its_own_with_the_same_result_and_is_resumed_after_an_interruption(tmp_path):
    """What this process holds is not in its memory; Ctrl-C here ends it after its last checkpoint."""
    cell = Cell("one", small("stream.tasks=2", method=METHOD))
    ballast = bytearray(os.urandom(2**20)) * 600  # MiB that a run in this process would have
    events = []

    def stop(event):
        events.append(event)
        if event["event"] == "task":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_cells([cell], tmp_path, lambda cell: [stop])
    assert [event["event"] for event in events][-1] == "task"
    assert json.loads((tmp_path / "one" / "manifest.json").read_text())["status"] != "finished"
    (folder,) = run_cells([cell], tmp_path, lambda cell: [events.append])
    assert [event["event"] for event in events].count("start") == 2
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["peak_rss_mb"] < len(ballast) / 2**20 + 100
    assert status_mb("VmRSS") > len(ballast) / 2**20 + 100
    assert summary["cpu_seconds"]["train"] > 0
    fedprotip.run(cell.settings, out=tmp_path / "here")
    assert results(folder) == results(tmp_path / "here")


def test_an_error_of_the_other_process_is_the_same_sentence_here(tmp_path, capfd):
    settings = small("data.source=nowhere.npz", "data.name=own", method=METHOD)
    with pytest.raises(fedprotip.UsageError) as there:
        apart(settings, tmp_path / "there", [])
    with pytest.raises(fedprotip.UsageError) as here:
        fedprotip.run(settings, out=tmp_path / "here")
    assert str(there.value) == str(here.value)
    assert capfd.readouterr().err == ""


def test_a_comparison_goes_on_with_another_number_of_workers_and_with_no_other_settings(tmp_path, monkeypatch):
    settings, went_on = small("run.workers=2", method=METHOD), []
    with RunFolder.create(tmp_path / "one", to_toml(settings)).locked():
        pass
    monkeypatch.setattr("fedprotip.cells.apart", lambda settings, folder, observers: went_on.append(folder.name))
    run_cells([Cell("one", load(settings, ["run.workers=3"]))], tmp_path, lambda cell: [])
    assert went_on == ["one"]
    with pytest.raises(UsageError, match=r"a run with train.lr = .*, not 0.5; remove it or choose another --out"):
        run_cells([Cell("one", load(settings, ["train.lr=0.5"]))], tmp_path, lambda cell: [])
