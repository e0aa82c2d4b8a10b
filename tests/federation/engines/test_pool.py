"""Clients in worker processes: the bytes of the local engine, whoever trains whom, and nothing is left behind."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import fedprotip
from fedprotip.errors import RunError, UsageError
from fedprotip.federation.engines import pool as workers
from fedprotip.federation.engines.pool import PoolEngine, Worker, likeness
from fedprotip.federation.engines.workplace import useful_workers
from fedprotip.federation.server import Server
from fedprotip.methods import create_method
from fedprotip.models import build_network
from fedprotip.models.heads import _builders
from fedprotip.settings import KNOWN, to_toml
from fedprotip.store.files import hash_of
from fedprotip.stream import build_stream
from tests.sites import through
from tests.small import forged, results, small

pytestmark = pytest.mark.slow  # processes are started again and again; the conformance suite has the pool in short
FIVE = {"count": 5, "alpha": 0.3}  # uneven: clients finish in another order than they begin


def with_workers(count):
    """Overrides for so many workers; 0: everything in this process."""
    return [f"run.workers={count}", "run.engine=pool"] if count else ["run.engine=local"]


def run(folder, settings, count, observers=()):
    """The results of a run with so many workers."""
    fedprotip.run(settings, overrides=with_workers(count), out=folder, observers=observers)
    assert multiprocessing.active_children() == []
    return results(folder)


CASES = {
    "fedavg": {"method": {"name": "fedavg"}, "model": {"freeze": "layer1", "freeze_from": "first"}},
    "fedprotip": {},
    "bf16": {"train": {"wire": "bf16"}},
    "roster": {"clients": {"count": 5, "fraction": 0.6, "roster": {"1": "0-2", "2": "1-3,7"}}},
    "views of a frozen prefix": {
        "model": {"freeze": "layer1", "freeze_from": "start"},
        "train": {"augment": "standard", "views": 2, "steps": 3, "head_start": "closed"},
    },
    "norms": {"model": {"name": "small_cnn", "width": 8, "norm": "track"}, "train": {"rounds": 2}},
}


QUICK = ("fedavg", "fedprotip")


@pytest.mark.parametrize("case", [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in CASES])
def test_the_same_bytes_as_in_one_process(tmp_path, case):
    settings = small(**{"clients": FIVE, **CASES[case]})
    assert run(tmp_path / "workers", settings, 2) == run(tmp_path / "alone", settings, 0)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone") / "r"
    return run(folder, small(clients=FIVE), 0)


def test_observers_see_the_rounds_as_they_end(tmp_path, alone):
    seen = []
    run(tmp_path / "r", small(clients=FIVE), 9, [lambda event: seen.append(event["event"])])
    assert seen.count("round") == 9
    assert results(tmp_path / "r") == alone


def interrupt(after, act):
    """An observer that acts once, after so many rounds."""
    seen = []

    def observe(event):
        seen.append(event["event"])
        if event["event"] == "round" and seen.count("round") == after:
            act()

    return observe


def set_workers(folder, count):
    """As if the run had begun with another number of workers."""
    path = folder / "settings.toml"
    text = path.read_text().replace("\nworkers = 2\n", f"\nworkers = {count}\n")
    assert text != path.read_text()
    path.write_text(text)
    with forged(folder) as manifest:
        manifest["settings"], manifest["files"]["settings.toml"] = text, hash_of(text.encode())


@pytest.mark.slow
@pytest.mark.parametrize("then", [1, 3])
def test_an_interrupted_run_goes_on_with_another_number_of_workers(tmp_path, alone, then):
    def stop():
        assert len(multiprocessing.active_children()) == 2
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "r", small(clients=FIVE), 2, [interrupt(5, stop)])
    assert multiprocessing.active_children() == []
    set_workers(tmp_path / "r", then)
    fedprotip.resume(tmp_path / "r")
    assert results(tmp_path / "r") == alone


def test_a_worker_that_dies_is_named_and_the_run_can_be_resumed(tmp_path, alone):
    def kill():
        multiprocessing.active_children()[0].kill()
        time.sleep(0.2)

    with pytest.raises(RunError, match=r"A worker process died while it .* \(exit code -9\); .*resume"):
        run(tmp_path / "r", small(clients=FIVE), 2, [interrupt(4, kill)])
    assert multiprocessing.active_children() == []
    assert not list((tmp_path / "r").rglob("fedprotip-*"))
    fedprotip.resume(tmp_path / "r")
    assert results(tmp_path / "r") == alone


class Other(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 12)

    def forward(self, images):
        return torch.relu(self.first(images.flatten(1)))


def test_what_only_this_process_knows_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(_builders, "mlp", lambda *_: Other())
    with pytest.raises(UsageError, match=r'"pool": .* another method, model or dataset .* choose "local"\.'):
        run(tmp_path / "other", small(), 2)
    monkeypatch.setitem(KNOWN, "model.name", dict(KNOWN["model.name"]))  # forgotten after this test
    fedprotip.models.register("only_here")(lambda *_: Other())
    with pytest.raises(UsageError, match=r"model.name = 'only_here' is unknown.* is registered in a script"):
        run(tmp_path / "missing", small(model={"name": "only_here"}), 2)
    assert multiprocessing.active_children() == []


def test_no_more_workers_than_clients_of_a_task():
    """All clients of a task are asked for something, whatever share of them trains."""
    counts = [
        useful_workers(settings, build_stream(settings))
        for settings in (
            small(f"run.workers={count}", clients={"count": 6, "fraction": fraction})
            for count, fraction in ((4, 1.0), (9, 1.0), (9, 0.5))
        )
    ]
    assert counts == [4, 6, 6]


def test_another_dataset_or_method_is_recognised():
    def of(settings):
        return likeness(settings, build_stream(settings))

    assert of(small()) == of(small("run.threads=2"))
    others = [small(method={"name": "fedavg"}), small(model={"width": 25}), small(data={"train_limit": 50})]
    assert of(small()) not in [of(settings) for settings in others]


class Threaded(Worker):
    """A worker in a thread of this process, where a test can change what it does."""

    def __init__(self):
        self.busy_with = None
        self.connection, theirs = multiprocessing.Pipe()
        self.process = self
        self._thread = threading.Thread(target=workers.main, args=(theirs,), daemon=True)
        self._thread.start()

    def terminate(self):
        self.connection.close()

    def end(self):
        self._thread.join(5)


@pytest.fixture
def broken(monkeypatch):
    """One worker in a thread; client 1 raises an error in the second task."""

    def install(error):
        def failing(answer, local, name):
            if (local.client, local.task) == (1, 1):
                raise error
            return answer()

        through(monkeypatch, failing)
        monkeypatch.setattr(workers, "Worker", Threaded)

    return install


def test_a_failing_client_is_left_out_as_in_one_process(tmp_path, broken):
    broken(OSError("the disk of this hospital is full"))
    one, other = run(tmp_path / "alone", small(), 0), run(tmp_path / "workers", small(), 1)
    assert one["summary"]["failures"]["by_reason"] == {"OSError: the disk of this hospital is full": 3}
    assert one == other


@pytest.mark.parametrize("kind", [UsageError, RunError])
def test_an_error_of_the_whole_run_stops_it(tmp_path, broken, kind):
    broken(kind("This cannot go on."))
    with pytest.raises(kind, match=r"^This cannot go on\.$"):
        run(tmp_path / "r", small(), 1)


def test_updates_that_are_not_finite_are_rejected_alike(tmp_path):
    said = []
    for name, count in (("alone", 0), ("workers", 2)):
        with pytest.raises(RunError) as error:
            run(tmp_path / name, small("train.lr=1e30", clients=FIVE), count)
        said.append(str(error.value))
    assert said[0] == said[1]
    assert (tmp_path / "alone" / "ledger.jsonl").read_bytes() == (tmp_path / "workers" / "ledger.jsonl").read_bytes()


def test_replies_keep_their_order_and_workers_run_ahead_only_so_far(tmp_path):
    settings = small("run.workers=2", clients={"count": 12, "alpha": 0.3})
    method, stream = create_method(settings), build_stream(settings)
    server = Server(settings, method, build_network(settings, stream.dataset.image_shape, method.routes), stream)
    engine, turn, most = PoolEngine(stream, settings, tmp_path), [], 0
    original = engine._collect

    def counting(answers):
        nonlocal most
        original(answers)
        most = max(most, len(answers))

    def requests(round_):
        server.progress.step += 1
        for client in range(12):
            turn.append(client)
            yield server.request(client, method.exchange("model"), round_, [])

    engine._collect = counting
    server.begin_task(0)
    try:
        for place, reply in enumerate(engine.ask(requests(0))):
            assert reply.client == place
            assert reply.message.kind == "model"
            assert len(turn) <= place + 2 * workers.AHEAD
            if place == 0:
                time.sleep(1)  # a slow server: workers have all the time to run ahead
        assert turn == list(range(12))
        assert most <= 2 * workers.AHEAD
        abandoned = engine.ask(requests(1))
        next(abandoned)
        abandoned.close()
        assert multiprocessing.active_children() == []
    finally:
        engine.close()
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == list(range(12))  # folders of clients alone


SCRIPT = """
import sys
import torch
import fedprotip
from fedprotip.methods.base import Method, register
from fedprotip.settings import MethodSettings

class MoodyOptions(MethodSettings):
    name: str = "moody"

@register
class Moody(Method):
    name, Options = "moody", MoodyOptions

    def loss(self, local, inputs, labels):
        if local.task == 1 and len(labels.unique()) == 1:
            raise ValueError("only one class")
        return super().loss(local, inputs, labels)

{guard}
    settings = {{"stream": {{"tasks": 2, "task_size": 2}}, "clients": {{"count": 5, "alpha": 0.3}},
                "method": {{"name": "moody"}}, "model": {{"width": 16}}, "run": {{"threads": 1}},
                "train": {{"rounds": 2, "epochs": 1, "batch": 4}}}}
    for engine in ("pool", "local"):
        fedprotip.run(settings, ["run.engine=" + engine, "run.workers=2"], out=sys.argv[1] + engine)
"""


@pytest.mark.slow
@pytest.mark.parametrize("guarded", [True, False])
def test_a_script_that_registers_at_its_top(tmp_path, guarded):
    """Workers import it again: what it registers is known there, if its runs stand below the usual guard."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(guard='if __name__ == "__main__":' if guarded else "if True:"))
    done = subprocess.run(
        [sys.executable, script, tmp_path / "r"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if guarded:
        assert done.returncode == 0, done.stderr
        found = results(tmp_path / "rpool")
        assert found == results(tmp_path / "rlocal")
        assert list(found["summary"]["failures"]["by_reason"]) == ["ValueError: only one class"]
    else:
        assert 'below if __name__ == "__main__":' in done.stderr.strip().splitlines()[-1]


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL], ids=lambda s: s.name)
def test_stopped_from_outside_no_process_is_left(tmp_path, stop):
    """All but SIGKILL reach the whole group; after SIGKILL of the run workers see that it is gone."""
    folder, file = tmp_path / "r", tmp_path / "settings.toml"
    file.write_text(to_toml(small(*with_workers(2), clients=FIVE, train={"rounds": 500})))
    process = subprocess.Popen(
        [sys.executable, "-m", "fedprotip", "run", file, "--out", folder],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    while process.poll() is None and not list(folder.glob("checkpoint/*.json")):
        time.sleep(0.01)
    left = children(process.pid)
    assert len(left) >= 2
    if stop != signal.SIGKILL:
        os.killpg(process.pid, stop)
    else:
        os.kill(process.pid, stop)
    output = process.communicate()[0]
    if stop != signal.SIGKILL:
        assert process.returncode == 1
        assert "fedprotip resume" in output.replace("\n", " ")
        assert not list(folder.rglob("fedprotip-*"))
    assert "Traceback" not in output
    end = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in left) and time.monotonic() < end:
        time.sleep(0.05)
    assert not [pid for pid in left if Path(f"/proc/{pid}").exists()]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for processes in /proc")
def test_workers_of_a_killed_run_end_in_the_middle_of_an_answer(tmp_path):
    """Else they would write into the folders of clients while the resumed run does."""
    folder, file = tmp_path / "r", tmp_path / "settings.toml"
    file.write_text(to_toml(small(*with_workers(2), train={"epochs": 10**6})))
    process = subprocess.Popen(
        [sys.executable, "-m", "fedprotip", "run", file, "--out", folder],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while process.poll() is None and len(list(folder.glob("clients/*/*.json"))) < 3:
        time.sleep(0.01)
    time.sleep(0.5)  # they train now, for days
    left = children(process.pid)
    assert len(left) >= 2
    process.kill()
    process.wait()
    end = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in left) and time.monotonic() < end:
        time.sleep(0.05)
    late = [pid for pid in left if Path(f"/proc/{pid}").exists()]
    for pid in late:
        os.kill(pid, signal.SIGKILL)
    assert not late
