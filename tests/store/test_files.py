"""Files are whole or absent, and a client's state is the same wherever it lives."""

import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedprotip.errors import RunError
from fedprotip.store.clients import ClientStore
from fedprotip.store.files import hash_of, serialise, size_of, write_atomic
from fedprotip.store.objects import ObjectFolder


@pytest.fixture
def objects(tmp_path):
    folder = ObjectFolder(tmp_path / "objects")
    folder.create()
    return folder


def crash_at(monkeypatch, call, number, error=None):
    """Make the `number`-th call (from 0) of os.<call> raise."""
    real, count = getattr(os, call), iter(range(10_000))

    def broken(*args, **kwargs):
        if next(count) == number:
            raise error or OSError("crash")
        return real(*args, **kwargs)

    monkeypatch.setattr(os, call, broken)


@pytest.mark.parametrize(
    ("call", "number", "expected"), [("fsync", 0, "old"), ("replace", 0, "old"), ("fsync", 1, "new")]
)
def test_a_file_is_old_or_new_wherever_the_crash_falls(tmp_path, monkeypatch, call, number, expected):
    path = tmp_path / "file"
    write_atomic(path, "old")
    crash_at(monkeypatch, call, number)
    with pytest.raises(OSError, match="crash"):
        write_atomic(path, "new")
    assert path.read_text() == expected


def test_text_and_bytes_are_written_as_they_are(tmp_path):
    write_atomic(tmp_path / "text", "é\r\n")
    write_atomic(tmp_path / "bytes", b"\x00\xff")
    assert (tmp_path / "text").read_bytes() == "é\r\n".encode()
    assert (tmp_path / "bytes").read_bytes() == b"\x00\xff"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bytes", "text"]


def test_bytes_do_not_depend_on_the_order_or_the_layout():
    square = torch.arange(6.0).view(2, 3)
    one = serialise({"a": square, "b": torch.ones(2)})
    other = serialise({"b": torch.ones(2), "a": square.T.contiguous().T})
    assert one == other
    assert serialise({"a": square + 1, "b": torch.ones(2)}) != one


def test_shared_weights_can_be_written(objects):
    layer = torch.nn.Linear(3, 3)
    network = torch.nn.Sequential(layer, torch.nn.ReLU(), layer)
    again = objects.read(objects.write(network.state_dict()))
    assert torch.equal(again["0.weight"], layer.weight)
    assert torch.equal(again["2.weight"], layer.weight)


# Objects


def test_an_object_is_named_by_its_content_and_written_once(objects):
    name = objects.write({"a": torch.ones(3)})
    path = objects.path / name
    assert hash_of(path.read_bytes()) == name
    before = path.stat().st_mtime_ns, path.stat().st_ino
    assert objects.write({"a": torch.ones(3)}) == name
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == before


def test_every_flipped_byte_of_an_object_is_recognised(objects):
    name = objects.write({"a": torch.ones(2)})
    good = (objects.path / name).read_bytes()
    for place in range(len(good)):
        (objects.path / name).write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        with pytest.raises(RunError, match=name[:12]):
            objects.read(name)
    (objects.path / name).write_bytes(good[:-1])
    with pytest.raises(RunError):
        objects.verify([name])
    (objects.path / name).unlink()
    with pytest.raises(RunError, match="missing"):
        objects.verify([name])


@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(b""), lambda path: path.unlink()])
def test_a_damaged_object_is_mended_from_its_second_copy(objects, damage):
    name = objects.write({"a": torch.arange(4)})
    objects.duplicate([name])
    damage(objects.path / name)
    assert torch.equal(objects.read(name)["a"], torch.arange(4))
    assert hash_of((objects.path / name).read_bytes()) == name


def test_a_damaged_object_is_read_from_its_second_copy_on_a_full_disk(objects, monkeypatch):
    name = objects.write({"a": torch.arange(4)})
    objects.duplicate([name])
    (objects.path / name).write_bytes(b"")
    crash_at(monkeypatch, "fsync", 0)
    assert torch.equal(objects.read(name)["a"], torch.arange(4))


def test_a_damaged_object_is_not_copied(objects):
    name = objects.write({"a": torch.arange(4)})
    (objects.path / name).write_bytes(b"")
    with pytest.raises(RunError):
        objects.duplicate([name])


def test_only_what_is_named_is_kept(objects):
    kept, dropped = objects.write({"a": torch.ones(1)}), objects.write({"a": torch.ones(2)})
    objects.duplicate([kept, dropped])
    (objects.path / "half.tmp").write_bytes(b"x")
    objects.keep_only({kept})
    assert [path.name for folder in objects.path.parent.iterdir() for path in folder.iterdir()] == [kept, kept]


# Client state


def bits(tensors):
    return None if tensors is None else {name: (t.dtype, t.tolist()) for name, t in tensors.items()}


steps = st.lists(
    st.tuples(
        st.sampled_from(["put", "get", "flush", "restore"]),
        st.integers(0, 3),
        st.sampled_from(["moment-0", "moment-1"]),
        st.integers(0, 12),
    ),
    max_size=40,
)


@given(steps)
def test_the_budget_changes_where_state_lives_and_nothing_else(tmp_path_factory, sequence):
    folder = ObjectFolder(tmp_path_factory.mktemp("store") / "objects")
    folder.create()
    budgets = [0, 50, 10**9]
    stores = [ClientStore(folder, budget) for budget in budgets]
    plain, saved = {}, {}
    for action, client, name, size in sequence:
        if action == "put":
            content = {"m": torch.arange(size) * client, "n": torch.tensor(float(size))}
            plain[client, name] = bits(content)
            for store in stores:
                store.put(client, name, content)
        elif action == "get":
            for store in stores:
                assert bits(store.get(client, name)) == plain.get((client, name))
        elif action == "flush":
            assert stores[0].flush() == stores[1].flush() == stores[2].flush()
            saved = dict(plain)
        else:
            indices = [store.flush() for store in stores] if saved == plain else None
            for store, index in zip(stores, indices or [], strict=False):
                store.restore(index)
        for store, budget in zip(stores, budgets, strict=True):
            assert store.cached_bytes <= budget
            assert store.cached_bytes == sum(size_of(entry) for entry in store._cache.values())


@pytest.mark.parametrize("budget", [0, 10**6])
def test_stored_state_is_a_copy(objects, budget):
    store, moment = ClientStore(objects, budget), torch.ones(3)
    store.put(0, "moment", {"m": moment})
    moment.zero_()
    assert store.get(0, "moment")["m"].tolist() == [1, 1, 1]
    store.get(0, "moment")["m"].zero_()
    assert store.get(0, "moment")["m"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("budget", [0, 30, 10**6])
def test_a_store_comes_back_as_it_was_flushed(objects, budget):
    store = ClientStore(objects, budget)
    for client in range(5):
        store.put(client, "m", {"x": torch.full((4,), client)})
    index = store.flush()
    assert list(index) == [f"{client}/m" for client in range(5)]
    store.put(0, "m", {"x": torch.full((4,), 99)})
    store.put(7, "m", {"x": torch.ones(1)})
    store.restore(index)
    assert [store.get(client, "m")["x"][0].item() for client in range(5)] == [0, 1, 2, 3, 4]
    assert store.get(7, "m") is None
    assert store.get(0, "other") is None


def test_only_what_changed_is_written_again(objects):
    store = ClientStore(objects, 10**6)
    for client in range(3):
        store.put(client, "m", {"x": torch.full((4,), client)})
    first = store.flush()
    store.put(1, "m", {"x": torch.full((4,), 50)})
    second = store.flush()
    assert {key for key in first if first[key] != second[key]} == {"1/m"}
    assert len(list(objects.path.iterdir())) == 4


@pytest.mark.parametrize("budget", [0, 10**6])
def test_a_glance_changes_nothing(objects, budget):
    """What is put into a glance is read there and nowhere else, and never written."""
    store = ClientStore(objects, budget)
    store.put(1, "own", {"x": torch.ones(2)})
    index, files = store.flush(), sorted(objects.path.iterdir())
    glance = store.glance()
    assert torch.equal(glance.get(1, "own")["x"], torch.ones(2))
    glance.put(1, "own", {"x": torch.zeros(2)})
    glance.put(2, "own", {"x": torch.zeros(2)})
    assert torch.equal(glance.get(1, "own")["x"], torch.zeros(2))
    assert torch.equal(store.get(1, "own")["x"], torch.ones(2))
    assert store.get(2, "own") is None
    assert (store.flush(), sorted(objects.path.iterdir())) == (index, files)
