"""The one door to the files of a folder: plain files only, and nothing outside."""

import os

import pytest

from fedprotip.errors import RunError
from fedprotip.store.plain import LINE, PlainFolder, plain_name


@pytest.fixture
def victim(tmp_path):
    """A file outside, with a folder around it, that nothing may touch."""
    (tmp_path / "outside").mkdir()
    path = tmp_path / "outside" / "victim"
    path.write_text("precious")
    return path


@pytest.fixture
def folder(tmp_path):
    return PlainFolder(tmp_path / "run").make()


def test_reading_a_file_asks_for_no_more_memory_than_it_has(tmp_path, monkeypatch):
    monkeypatch.setattr("fedprotip.store.plain.machine_bytes", lambda: 2**61)
    (tmp_path / "small").write_bytes(b"few")
    assert PlainFolder(tmp_path).read("small") == b"few"


@pytest.mark.parametrize("name", ["", ".", "..", "../victim", "/victim", "a/b", "a\0b", "a\nb", "\ud800", "x" * 251])
def test_a_name_that_leads_elsewhere_is_none(folder, name):
    with pytest.raises(ValueError, match="not the name of a file of the folder"):
        plain_name(name)
    for touch in (folder.read, folder.remove, folder.hash, folder.inner, lambda name: folder.write(name, "x")):
        with pytest.raises(ValueError, match="not the name"):
            touch(name)
    assert plain_name("whatever a method keeps é.safetensors")


WAYS_IN = {
    "read": lambda folder: folder.read("f"),
    "lines": lambda folder: list(folder.lines("f")),
    "hash": lambda folder: folder.hash("f"),
    "size": lambda folder: folder.size("f", synced=True),
    "append": lambda folder: folder.append("f", ["more"]),
    "cut": lambda folder: folder.cut("f", 0),
    "lock": lambda folder: folder.lockable("f"),
}


@pytest.mark.parametrize("way", WAYS_IN)
@pytest.mark.parametrize("kind", ["link", "dangling", "pipe", "device", "folder"])
def test_what_is_no_plain_file_is_neither_read_nor_written(folder, victim, way, kind):
    place = folder.path / "f"
    if kind == "folder":
        place.mkdir()
    elif kind == "pipe":
        os.mkfifo(place)
    else:
        place.symlink_to({"link": victim, "dangling": victim.with_name("new"), "device": "/dev/zero"}[kind])
    with pytest.raises(RunError, match=r"f is a (link|pipe|folder), where a run has a plain file; it is left alone"):
        WAYS_IN[way](folder)
    assert not folder.has("f")
    assert folder.taken("f")
    assert victim.read_text() == "precious"
    assert os.listdir(victim.parent) == ["victim"]


@pytest.mark.parametrize("where", ["f", "f.tmp"])
@pytest.mark.parametrize("how", ["link", "hard link", "pipe"])
def test_writing_replaces_what_is_in_the_way_and_never_writes_to_it(folder, victim, where, how):
    place = folder.path / where
    if how == "pipe":
        os.mkfifo(place)
    elif how == "link":
        place.symlink_to(victim)
    else:
        os.link(victim, place)
    folder.write("f", "new")
    assert folder.read("f") == b"new"
    assert folder.names() == ["f"]
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("way", ["append", "cut"])
def test_a_file_with_another_name_outside_is_copied_before_it_is_changed(folder, victim, way):
    os.link(victim, folder.path / "f")
    WAYS_IN[way](folder)
    assert folder.read("f") == {"append": b"preciousmore", "cut": b""}[way]
    assert victim.read_text() == "precious"


def test_removing_a_link_leaves_what_it_leads_to(folder, victim):
    (folder.path / "f").symlink_to(victim)
    folder.remove("f")
    folder.remove("f")
    assert folder.names() == []
    assert victim.read_text() == "precious"


def test_no_folder_on_the_way_is_a_link(folder, victim):
    (folder.path / "objects").symlink_to(victim.parent)
    inner = folder.inner("objects")
    deeper = inner.inner("deeper")
    changes = (lambda: inner.remove("victim"), lambda: inner.write("victim", "x"))
    for touch in (inner.make, inner.names, deeper.make, *changes):
        with pytest.raises(RunError, match="objects is a link, where a run has a plain folder"):
            touch()
    assert os.listdir(victim.parent) == ["victim"]
    assert folder.folders() == []


def test_the_folder_itself_may_be_a_link(folder, tmp_path):
    (tmp_path / "short").symlink_to(folder.path)
    PlainFolder(tmp_path / "short").write("f", "here")
    assert folder.read("f") == b"here"


def test_nothing_larger_than_expected_is_read(folder):
    with open(folder.path / "f", "wb") as file:
        file.truncate(2**42)  # a hole
    for limit in (0, 100):
        with pytest.raises(RunError, match=r"f has 4,398,046,511,104 bytes, more than the [\d,]+ that can be read"):
            folder.read("f", limit)
    with pytest.raises(RunError, match="a line has more than"):
        next(folder.lines("f"))
    folder.write("g", "x" * (LINE - 2) + "\ny\n")
    assert [len(line) for line in folder.lines("g")] == [LINE - 1, 2]
