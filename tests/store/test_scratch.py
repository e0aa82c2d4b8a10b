"""What a kill leaves behind goes with the next command; what is somebody's stays."""

import os
import signal

import pytest

import fedprotip
from fedprotip.store.plain import PlainFolder
from fedprotip.store.scratch import Scratch, sweep
from tests.small import quick, small


def left_by_a_kill(folder):
    """The name of what a process leaves that is killed while it has rows on disk."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            outer = Scratch(folder)
            inner = Scratch(outer.path)
            (inner.path / "train-0-2").write_bytes(b"rows")
            os.write(writing, outer.path.name.encode())
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.close(writing)
    os.waitpid(child, 0)
    return os.read(reading, 100).decode()


def test_only_what_a_dead_process_left_is_removed(tmp_path):
    name = left_by_a_kill(tmp_path)
    assert (tmp_path / name).is_dir()
    busy = Scratch(tmp_path)
    foreign = {"fedprotip-notes": "mine.txt", "fedprotip-abcd1234": "mine.txt", "fedprotip-mine": "train-0-0"}
    for folder, file in foreign.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / file).write_text("mine")
    (tmp_path / "fedprotip-0000aaaa").symlink_to(tmp_path / "fedprotip-notes")
    (tmp_path / "fedprotip-0000bbbb").mkdir()  # as an earlier version left it
    (tmp_path / "fedprotip-0000bbbb" / "test-3-1").write_bytes(b"rows")
    sweep(PlainFolder(tmp_path))
    assert sorted(os.listdir(tmp_path)) == sorted([*foreign, "fedprotip-0000aaaa", busy.path.name])
    assert (tmp_path / "fedprotip-notes" / "mine.txt").read_text() == "mine"
    busy.close()
    assert busy.path.name not in os.listdir(tmp_path)


@pytest.mark.parametrize("engine", ["local", "apart"])
def test_the_next_command_removes_what_a_kill_left(tmp_path, monkeypatch, engine):
    quick(monkeypatch)
    settings = small("train.rounds=1", stream={"tasks": 1}, run={"engine": engine})
    fedprotip.run(settings, out=tmp_path / "r")
    places = [tmp_path / "r"]
    if engine == "apart":
        places += [tmp_path / "r" / "clients", tmp_path / "r" / "clients" / "0"]
    left = [place / left_by_a_kill(place) for place in places]
    fedprotip.api.inspect(tmp_path / "r")
    assert all(path.exists() for path in left)  # looking changes nothing
    fedprotip.resume(tmp_path / "r")
    assert not any(path.exists() for path in left)
