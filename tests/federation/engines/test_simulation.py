"""Flower's simulation gives the bytes of the local engine: weights, metrics, ledger, events. And its load."""

import json
import os
import shutil
import signal

import pytest

import fedprotip
from fedprotip.envelopes import require_flower
from fedprotip.federation.engines.simulation import started
from fedprotip.store.memory import status_mb, watched
from tests.flower.loopback import children, listening
from tests.small import REDUCED, quick, results, small
from tests.watchdog import in_time

pytest.importorskip("flwr", reason="the extra flower")
pytest.importorskip("ray", reason="the extra flower")
pytestmark = pytest.mark.slow  # Ray is started: half a minute

CASES = {
    "fedavg": {},
    "fedprotip": {"train": {"head_start": "closed"}, "clients": {"count": 3, "held_back": 0.1}},
    "fot": {},
    "scr": {},
}
"""The last one keeps samples for itself."""


def settings(method, *overrides):
    sections = {name: dict(part) for name, part in CASES[method].items()}
    if method != "fedprotip":
        sections["method"] = {"name": method, **REDUCED.get(method, {})}
    return small("stream.tasks=2", "train.rounds=2", *overrides, **sections)


@pytest.mark.parametrize("method", CASES)
def test_the_same_bytes_as_in_one_process(tmp_path, monkeypatch, method):
    quick(monkeypatch)
    with in_time(600):
        fedprotip.run(settings(method), out=tmp_path / "local")
        fedprotip.run(settings(method, "run.engine=flower"), out=tmp_path / "flower")
    assert results(tmp_path / "flower") == results(tmp_path / "local")
    assert sorted(path.name for path in (tmp_path / "flower" / "clients").iterdir()) == ["0", "1", "2"]


def test_a_client_that_fails_is_left_out_and_a_run_goes_on_after_an_interruption(tmp_path, monkeypatch):
    """The folder of a client is a file, so that it cannot keep anything; then the user stops the run."""
    quick(monkeypatch)
    rounds = []

    def stop(event):
        rounds.append(event["event"])
        if rounds.count("round") == 2:
            raise KeyboardInterrupt

    folder = tmp_path / "r"
    with in_time(600):
        with pytest.raises(KeyboardInterrupt):
            fedprotip.run(settings("fedavg", "run.engine=flower"), out=folder, observers=[stop])
        for path in sorted((folder / "clients" / "1").rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        (folder / "clients" / "1").rmdir()
        (folder / "clients" / "1").write_text("in the way")
        summary = fedprotip.resume(folder)
    assert summary["tasks"] == 2
    failures = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines() if "failure" in line]
    assert {event["client"] for event in failures} == {1}


def test_a_process_of_ray_that_dies_costs_nothing(tmp_path, monkeypatch):
    """Killed by its id after every round, as Ray does where memory runs short: another one goes on."""
    quick(monkeypatch)
    killed = []

    def kill(event):
        if event["event"] == "round":
            killed.append(next(pid for pid, name in children(os.getpid()) if name.startswith("ray::ClientAppActor")))
            os.kill(killed[-1], signal.SIGKILL)

    with in_time(600):
        fedprotip.run(settings("fedavg"), out=tmp_path / "local")
        fedprotip.run(settings("fedavg", "run.engine=flower"), out=tmp_path / "flower", observers=[kill])
    assert len(set(killed)) == 4
    assert results(tmp_path / "flower") == results(tmp_path / "local")


def test_nobody_else_can_reach_its_processes(monkeypatch):
    """Whoever reaches Ray can run programs: all that it listens on is loopback, whatever cluster is somewhere else."""
    from flwr.clientapp import ClientApp

    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.1:6379")
    require_flower()
    with in_time(600):
        simulation = started(ClientApp(), 1, 1)
        try:
            found = listening(os.getpid())
        finally:
            simulation.close()
    assert len(found) > 3
    assert not [address for address in found if not address.is_loopback]


def test_a_hundred_clients_with_messages_of_a_resnet_do_not_fill_the_server(tmp_path, monkeypatch):
    """One round of 100 clients, each with a model of 44 MB both ways: far less than their models in this process.

    Beside replies that are about to be taken it holds the model several times, and pages that it shares with Ray: 20
    messages here, with 12 clients as with 100.
    """
    quick(monkeypatch)
    folder, began = tmp_path / "r", []
    given = small(
        "stream.tasks=1",
        "run.engine=flower",
        clients={"count": 100, "partition": "iid"},
        model={"width": 3300},
        train={"rounds": 1, "steps": 1},
        method={"name": "fedavg"},
    )
    try:
        with in_time(1800), watched() as peak:
            summary = fedprotip.run(given, out=folder, observers=[lambda event: began.append(status_mb("VmRSS"))])
        ledger = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # what clients keep: 4.5 GB
    sizes = [line["bytes"] / 2**20 for line in ledger if (line["direction"], line["kind"]) == ("up", "model")]
    assert summary["failures"]["count"] == 0
    assert len(sizes) == 100
    assert min(sizes) > 40
    assert peak.mb - began[0] < 30 * max(sizes)
