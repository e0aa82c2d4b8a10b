"""A client's folder: every state since the server's last checkpoint, whole or absent."""

import errno
from contextlib import nullcontext

import pytest
import torch

from fedprotip.store.clients import StoreError
from fedprotip.store.site import SiteFolder
from tests.store.test_files import crash_at


def save(folder, step, keep=0, own=None):
    """The state after a question: its number, in everything."""
    if own is not None:
        folder.store.put(3, "memory", {"m": torch.full((2,), own)})
    groups = {"model": {"w": torch.full((2,), float(step))}, "still": {"s": torch.ones(4)}}
    folder.save(step, {"at": step}, groups, keep)


def made(path, steps=4):
    folder = SiteFolder(path)
    for step in range(1, steps + 1):
        save(folder, step, own=10 * step)
    return folder


def own(folder):
    found = folder.store.get(3, "memory")
    return None if found is None else found["m"].tolist()


@pytest.mark.parametrize("step", [1, 3, 4])
def test_another_process_finds_the_state_after_any_question(tmp_path, step):
    made(tmp_path)
    folder = SiteFolder(tmp_path)
    state, groups = folder.restore(step)
    assert state == {"at": step}
    assert groups["model"]["w"].tolist() == [step, step]
    assert groups["still"]["s"].tolist() == [1, 1, 1, 1]
    assert own(folder) == [10 * step, 10 * step]


def test_going_back_forgets_what_came_later(tmp_path):
    folder = made(tmp_path)
    assert folder.restore(2)
    assert folder.steps() == [1, 2]
    assert folder.restore(4) is None
    save(folder, 3, own=99)
    assert SiteFolder(tmp_path).restore(3)[0] == {"at": 3}


def test_no_more_is_kept_than_the_server_can_ask_for(tmp_path):
    """It may go back to question 3; this client was asked 2 last before that."""
    folder = SiteFolder(tmp_path)
    for step in (1, 2, 5):
        save(folder, step)
    save(folder, 6, keep=3)
    assert folder.steps() == [2, 5, 6]
    assert folder.restore(2)
    save(folder, 7, keep=7)
    assert folder.steps() == [7]
    objects = list((tmp_path / "objects").iterdir())
    assert len(objects) == 2  # one model, and what never changed


def test_what_did_not_change_is_one_object(tmp_path):
    folder = made(tmp_path)
    assert len(folder.steps()) == 4
    assert len(list((tmp_path / "objects").iterdir())) == 4 + 1 + 4  # models, the still group, private states


def damage(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("how", [damage, lambda path: path.unlink(), lambda path: path.write_bytes(b"")])
def test_a_damaged_state_is_not_there(tmp_path, how):
    made(tmp_path)
    how(tmp_path / "00000004.json")
    folder = SiteFolder(tmp_path)
    assert folder.restore(4) is None
    assert folder.restore(3)[0] == {"at": 3}


def test_a_state_with_any_damaged_object_is_not_there(tmp_path):
    made(tmp_path)
    before = {path.name for path in (tmp_path / "objects").iterdir()}
    save(SiteFolder(tmp_path), 5, own=50)
    new = sorted({path.name for path in (tmp_path / "objects").iterdir()} - before)
    assert len(new) == 2  # the model and the private state
    for name in new:
        whole = (tmp_path / "objects" / name).read_bytes()
        damage(tmp_path / "objects" / name)
        assert SiteFolder(tmp_path).restore(5) is None
        (tmp_path / "objects" / name).write_bytes(whole)
    assert SiteFolder(tmp_path).restore(5)


def test_private_state_outlives_what_the_client_was_told(tmp_path):
    made(tmp_path)
    (tmp_path / "00000004.json").unlink()
    folder = SiteFolder(tmp_path)
    folder.keep_private(before=9)
    assert own(folder) == [30, 30]


def test_private_state_that_is_damaged_is_left_for_an_older_one(tmp_path):
    made(tmp_path, 2)
    before = {path.name for path in (tmp_path / "objects").iterdir()}
    folder = SiteFolder(tmp_path)
    folder.store.put(3, "memory", {"m": torch.full((2,), 77)})
    folder.save(3, {}, {}, 0)
    (new,) = {path.name for path in (tmp_path / "objects").iterdir()} - before
    damage(tmp_path / "objects" / new)
    folder = SiteFolder(tmp_path)
    folder.keep_private(before=9)
    assert own(folder) == [20, 20]


def test_private_state_of_questions_that_never_were_is_forgotten(tmp_path):
    """The server begins again, or stands before what this client remembers."""
    made(tmp_path)
    folder = SiteFolder(tmp_path)
    folder.keep_private(before=3)
    assert own(folder) == [20, 20]
    assert folder.steps() == [1, 2]
    folder.keep_private(before=1)
    assert own(folder) is None
    assert folder.steps() == []


WRITES = {"fsync": 6, "replace": 3}
"""Of one state: the model, the private state and the index, each with the folder it lies in."""


@pytest.mark.parametrize("call", WRITES)
@pytest.mark.parametrize("number", range(7))
def test_a_full_disk_is_a_problem_of_this_machine_and_loses_no_state(tmp_path, monkeypatch, call, number):
    folder = made(tmp_path, 2)
    with monkeypatch.context() as patch:
        crash_at(patch, call, number, OSError(errno.ENOSPC, "No space left on device"))
        with pytest.raises(StoreError, match="No space left") if number < WRITES[call] else nullcontext():
            save(folder, 3, own=30)
    folder = SiteFolder(tmp_path)
    assert folder.restore(2)[0] == {"at": 2}
    assert own(folder) == [20, 20]
