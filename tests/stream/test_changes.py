"""What changed is said in words, and refused where going on would not be honest."""

import os
import shutil

import numpy as np
import pytest

from fedprotip.settings import load
from fedprotip.stream import build_stream
from fedprotip.stream.changes import Standing, changes
from fedprotip.stream.fingerprint import take
from tests.stream.trees import class_folders, picture

CLASSES = ("bee", "cat", "dog", "eel", "fox", "gnu")


def stream(source, **settings):
    return build_stream(
        load({"data": {"name": "own", "source": str(source)}, "stream": {"tasks": 3, "task_size": 2, **settings}})
    )


def compared(before, source, at, table=True, **settings):
    now = take(stream(source, **settings))
    return changes(before.summary(), before.table if table else None, now, at)


@pytest.fixture
def split(tmp_path):
    """Six classes with a training and a test part of their own: a new file stays in its part."""
    for part, count in (("train", 6), ("test", 2)):
        class_folders(tmp_path / "own" / part, CLASSES, count)
    return tmp_path / "own"


LEARNED_ONE = Standing(1)
IN_THE_SECOND = Standing(1, rounds=2)


def add(root):
    picture(root / "train" / "eel" / "1.png", seed=1)
    picture(root / "train" / "eel" / "2.png", seed=2)


def several(root):
    (root / "train" / "dog" / "001.png").unlink()
    picture(root / "train" / "dog" / "002.png", seed=9)
    for number in range(5):
        picture(root / "train" / "gnu" / f"9{number}.png", seed=number)


def old_training(root):
    (root / "train" / "bee" / "001.png").unlink()


def all_old_training_but_one(root):
    for path in sorted((root / "train" / "cat").iterdir())[1:]:
        path.unlink()


def future_test(root):
    (root / "test" / "fox" / "001.png").unlink()


def now_test(root):
    picture(root / "test" / "eel" / "001.png", seed=9)


ACCEPTABLE = {
    "added": (add, ["training samples of 'eel': 2 added (train/eel/1.png, train/eel/2.png)"]),
    "several": (
        several,
        [
            "training samples of 'dog': 1 removed (train/dog/001.png), 1 changed (train/dog/002.png)",
            "training samples of 'gnu': 5 added (train/gnu/90.png, train/gnu/91.png, train/gnu/92.png and 2 more)",
        ],
    ),
    "training samples of a learned task": (
        old_training,
        ["training samples of 'bee': 1 removed (train/bee/001.png)"],
    ),
    "most of them": (
        all_old_training_but_one,
        ["training samples of 'cat': 5 removed (train/cat/001.png, train/cat/002.png, train/cat/003.png and 2 more)"],
    ),
    "test samples of the future": (future_test, ["test samples of 'fox': 1 removed (test/fox/001.png)"]),
    "test samples of now": (now_test, ["test samples of 'eel': 1 changed (test/eel/001.png)"]),
}


@pytest.mark.parametrize("case", ACCEPTABLE)
def test_what_can_be_accepted_is_named(split, case):
    change, said = ACCEPTABLE[case]
    before = take(stream(split))
    change(split)
    assert compared(before, split, IN_THE_SECOND) == (said, "")


def old_test(root):
    picture(root / "test" / "bee" / "001.png", seed=9)


def more_old_test(root):
    picture(root / "test" / "bee" / "9.png", seed=9)


@pytest.mark.parametrize("change", [old_test, more_old_test])
def test_two_test_sets_are_not_mixed(split, change):
    before = take(stream(split))
    change(split)
    assert compared(before, split, Standing())[1] == ""
    said, never = compared(before, split, LEARNED_ONE)
    assert said[0].startswith("test samples of 'bee': 1 ")
    assert never == "task 1 was tested with others, and one table would mix two test sets"


def test_geometry_needs_the_old_training_samples(split):
    before = take(stream(split))
    old_training(split)
    _, never = compared(before, split, Standing(1, rereads=True))
    assert never == "run.geometry measures task 1 on its training samples again"


def new_class(root, name):
    for part, count in (("train", 6), ("test", 2)):
        class_folders(root / part, (name,), count)


@pytest.mark.parametrize("order", ["natural", [*CLASSES]], ids=["natural", "listed"])
def test_a_class_that_sorts_first_is_never_accepted_once_a_task_began(split, order):
    """With the order listed, tasks have the same names; but the model knows their numbers, and those shifted."""
    before = take(stream(split, order=order))
    new_class(split, "ant")
    said, never = compared(before, split, Standing(0, rounds=1), order=order)
    assert said == ["new classes: ant"]
    assert never == "task 1 began with other classes, and answers would have wrong names"
    assert compared(before, split, Standing(), order=order)[1] == ""


def test_a_class_that_sorts_last_is_no_change(split):
    before = take(stream(split))
    new_class(split, "zebra")
    assert compared(before, split, Standing(3)) == ([], "")
    assert compared(before, split, Standing(3), tasks=3, task_size=[2, 2, 2]) == ([], "")


def test_classes_of_the_future_may_change_those_of_the_past_not(split):
    before = take(stream(split))
    for part in ("train", "test"):
        shutil.move(split / part / "fox", split / part / "frog")
    said, never = compared(before, split, IN_THE_SECOND)
    assert (said[0], never) == ("new classes: frog and classes that are gone: fox", "")
    for part in ("train", "test"):
        shutil.move(split / part / "bee", split / part / "bear")
    said, never = compared(before, split, IN_THE_SECOND)
    assert said == ["new classes: bear, frog and classes that are gone: bee, fox"]
    assert "wrong names" in never


def test_shared_out_evenly_a_new_class_changes_the_tasks(split):
    before = take(stream(split, task_size=0))
    new_class(split, "zebra")
    assert "task 1 began with other classes" in compared(before, split, LEARNED_ONE, task_size=0)[1]


def test_images_of_another_size_are_for_another_model(tmp_path):
    before = take(stream(class_folders(tmp_path / "a", CLASSES)))
    source = class_folders(tmp_path / "b", CLASSES, size=(14, 11))
    said, never = compared(before, source, LEARNED_ONE)
    assert said[0] == "images were 3×10×12 and are 3×11×14"
    assert never == "its model is for the former"


def test_without_a_table_only_tasks_are_known(split):
    before = take(stream(split))
    add(split)
    assert compared(before, split, LEARNED_ONE, table=False) == (["training samples of task 2"], "")


def rows(root, order):
    lines = [
        f"own/{part}/{name}/{k:03d}.png,{name},{part}" for part in ("train", "test") for name in CLASSES for k in (0, 1)
    ]
    (root.parent / "t.csv").write_text("path,label,split\n" + "\n".join(lines[i] for i in order) + "\n")
    return root.parent / "t.csv"


def test_order_counts_where_it_decides_something(split):
    """Rows 0, 1: training samples of the first task; 4, 5: of the second; 12, 13: test samples of the first."""
    order = list(range(24))
    before = take(stream(rows(split, order)))
    cases = {
        (0, 1): ([], False),
        (4, 5): (["training samples are in another order or in other tasks"], False),
        (12, 13): (["test samples are in another order or in other tasks"], True),
        (0, 4): ([], False),  # tasks stand in another order in the file, their samples do not
    }
    for (a, b), (expected, refused) in cases.items():
        changed = list(order)
        changed[a], changed[b] = changed[b], changed[a]
        said, never = compared(before, rows(split, changed), LEARNED_ONE)
        assert (said, bool(never)) == (expected, refused), (a, b)


def test_pixels_have_no_names(tmp_path):
    arrays = {"x": np.random.default_rng(0).integers(0, 256, (60, 8, 8), dtype=np.uint8), "y": np.arange(60) % 6}
    np.savez(tmp_path / "d.npz", **arrays)
    before = take(stream(tmp_path / "d.npz"))
    arrays["x"][[2, 8, 5]] ^= 1
    arrays["y"] = np.append(arrays["y"], 5)
    np.savez(tmp_path / "d.npz", x=np.concatenate([arrays["x"], np.zeros((1, 8, 8), np.uint8)]), y=arrays["y"])
    said, never = compared(before, tmp_path / "d.npz", LEARNED_ONE)
    assert said == ["training samples of '2': 2 changed", "training samples of '5': 1 added, 1 changed"]
    assert never == ""


def test_of_many_classes_the_first_are_named(tmp_path):
    class_folders(tmp_path / "own", CLASSES)
    before = take(stream(tmp_path / "own"))
    for name in CLASSES:
        path = tmp_path / "own" / name / "000.png"
        path.write_bytes(path.read_bytes() + b"x")
        os.utime(path)
    said, _ = compared(before, tmp_path / "own", Standing())
    assert said[0] == "training samples of 'bee': 1 changed (bee/000.png)"
    assert len(said) == 4
    assert said[3] == "training samples of 3 more classes"
