"""200 clients: it works, and memory does not grow with them."""

import gc
import json
import subprocess
import sys

import pytest
import torch

import fedprotip
from fedprotip.settings import to_toml
from tests.sites import through
from tests.small import results, small

PEAK = """
import sys, json, fedprotip
summary = fedprotip.run(sys.argv[1], out=sys.argv[2])
print(json.dumps([summary["peak_rss_mb"], summary["tasks"], summary["failures"]["count"]]))
"""
WIDE = {
    "model": {"width": 512},
    "train": {"rounds": 1},
    "stream": {"tasks": 2},
    "method": {"merge": "energy"},  # a union has directions of every client
    "run": {"threads": 1, "state_mb": 1},
}


def peak(tmp_path, clients):
    """Peak memory of a process of its own; one model of 512 units is 1.2 MB, one client's moment 2 MB."""
    settings = tmp_path / f"{clients}.toml"
    settings.write_text(to_toml(small(clients={"count": clients, "partition": "iid"}, **WIDE)))
    command = [sys.executable, "-c", PEAK, str(settings), str(tmp_path / f"r{clients}")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.slow
def test_memory_is_flat_in_the_number_of_clients(tmp_path):
    """Of the whole process, on a machine that may be busy: the exact measure is the test below."""
    few, many = peak(tmp_path, 10), peak(tmp_path, 200)
    assert many[1:] == [2, 0]
    assert many[0] <= few[0] + 80  # 190 more models would be 230 MB, their moments 400 MB


def live_bytes():
    """Memory of all tensors that anything in Python still holds."""
    found = (thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter))
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found}.values())


def most_alive(folder, clients, monkeypatch):
    """The largest number of bytes in tensors right after any answer of a client."""
    alive = []

    def counted(answer, local, name):
        message = answer()
        alive.append(live_bytes())
        return message

    with monkeypatch.context() as patch:
        for verb in ("train", "summarise"):
            through(patch, counted, verb)
        gc.collect()
        gc.freeze()  # what is there before the run is neither looked through nor counted
        try:
            fedprotip.run(small(clients={"count": clients, "partition": "iid"}, **WIDE), out=folder)
        finally:
            gc.unfreeze()
    assert len(alive) == 2 * 4 * clients
    return max(alive)


@pytest.mark.slow
def test_no_tensor_of_a_client_outlives_its_turn(tmp_path, monkeypatch):
    few, many = (most_alive(tmp_path / str(clients), clients, monkeypatch) for clients in (5, 40))
    assert few > 2**21
    assert many <= few + 2**20  # 35 more models would be 42 MB; references and counts of clients are small


@pytest.mark.slow
def test_state_on_disk_gives_the_same_result_as_in_memory(tmp_path):
    for budget in (0, 64):
        fedprotip.run(small(clients={"count": 30}, run={"state_mb": budget}), out=tmp_path / str(budget))
    assert results(tmp_path / "0") == results(tmp_path / "64")
