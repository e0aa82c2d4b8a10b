"""What changed is said in words, and refused where going on would not be honest."""

import os
import shutil

import numpy as np
import pytest

from fedprotip.errors import UsageError
from fedprotip.settings import load
from fedprotip.stream import build_stream
from fedprotip.stream.changes import Changes, Standing, changes
from fedprotip.stream.fingerprint import take
from fedprotip.stream.kept import NOTHING, Settled
from tests.stream.trees import class_folders, picture

CLASSES = ("bee", "cat", "dog", "eel", "fox", "gnu")


def stream(source, kept=NOTHING, **settings):
    raw = {"data": {"name": "own", "source": str(source)}, "stream": {"tasks": 3, "task_size": 2, **settings}}
    return build_stream(load(raw), kept=kept)


def compared(before, source, at, table=True, **settings):
    """What a run that began with some data finds, when it goes on with other data."""
    record = before.summary()
    now = take(stream(source, Settled.of(record, at.learned), **settings))
    return changes(record, before.table if table else None, now, at)


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
    "test samples of the future": (future_test, ["test samples of 'fox': 1 removed (test/fox/001.png)"]),
    "test samples of now": (now_test, ["test samples of 'eel': 1 changed (test/eel/001.png)"]),
}


@pytest.mark.parametrize("case", ACCEPTABLE)
def test_what_can_be_accepted_is_named(split, case):
    change, said = ACCEPTABLE[case]
    before = take(stream(split))
    change(split)
    assert compared(before, split, IN_THE_SECOND) == Changes(said)


def whole_class(root):
    for part in ("train", "test"):
        shutil.rmtree(root / part / "bee")


def whole_task(root):
    whole_class(root)
    for part in ("train", "test"):
        shutil.rmtree(root / part / "cat")


@pytest.mark.parametrize("change", [old_training, all_old_training_but_one, whole_task])
def test_data_of_learned_tasks_may_go(split, change):
    before = take(stream(split))
    change(split)
    assert compared(before, split, IN_THE_SECOND) == Changes()


def old_test(root):
    picture(root / "test" / "bee" / "001.png", seed=9)


def more_old_test(root):
    picture(root / "test" / "bee" / "9.png", seed=9)


@pytest.mark.parametrize("change", [old_test, more_old_test, whole_class])
def test_other_test_samples_of_a_learned_task_are_said(split, change):
    before = take(stream(split))
    change(split)
    found = compared(before, split, LEARNED_ONE)
    assert (found.ahead, found.never) == ([], "")
    assert found.past[0].startswith("test samples of 'bee': ")
    assert found.past[1] == "accuracies on task 1 from before and from now on cannot be compared"


@pytest.mark.parametrize(("at", "where"), [(LEARNED_ONE, "past"), (Standing(0, rounds=1), "ahead"), (Standing(), "")])
def test_test_samples_that_were_trained_on_are_told(tmp_path, at, where):
    """Without a split of its own, every fifth of the files that are left is another one."""
    class_folders(tmp_path / "own", CLASSES, 10)
    before = take(stream(tmp_path / "own"))
    (tmp_path / "own" / "bee" / "000.png").unlink()
    found = compared(before, tmp_path / "own", at)
    said = {part for part in ("ahead", "past") if any("trained on" in text for text in getattr(found, part))}
    assert said == ({where} if where else set())
    told = "test samples that the model was trained on, which makes accuracies too good: 1"
    assert not where or getattr(found, where)[-1] == told


def test_geometry_needs_the_old_training_samples(split):
    before = take(stream(split))
    old_training(split)
    found = compared(before, split, Standing(1, rereads=True))
    assert found.ahead == ["training samples of 'bee': 1 removed (train/bee/001.png)"]
    assert found.never == "run.geometry measures task 1 on its training samples again"


def new_class(root, name):
    for part, count in (("train", 6), ("test", 2)):
        class_folders(root / part, (name,), count)


@pytest.mark.parametrize("settings", [{}, {"order": [*CLASSES]}, {"task_size": 0}, {"order": "seeded"}], ids=str)
@pytest.mark.parametrize("name", ["ant", "zebra"])
def test_a_new_class_is_no_change_wherever_it_sorts(split, settings, name):
    before = take(stream(split, **settings))
    new_class(split, name)
    assert compared(before, split, Standing(0, rounds=1), **settings) == Changes()
    record = before.summary()
    again = take(stream(split, Settled.of(record, 0), **settings)).summary()
    assert again["tasks"] == record["tasks"]
    assert again["classes"] == [*record["classes"], name]


def test_a_class_that_a_task_still_needs_must_be_there(split):
    before = take(stream(split))
    for part in ("train", "test"):
        shutil.move(split / part / "fox", split / part / "frog")
    with pytest.raises(UsageError, match="Class 'fox' of task 3 has no training samples"):
        compared(before, split, IN_THE_SECOND)


def test_images_of_another_size_are_for_another_model(tmp_path):
    before = take(stream(class_folders(tmp_path / "a", CLASSES)))
    record = before.summary()
    found = changes(
        record, before.table, take(stream(class_folders(tmp_path / "b", CLASSES, size=(14, 11)))), LEARNED_ONE
    )
    assert found.ahead[0] == "images were 3×10×12 and are 3×11×14"
    assert found.never == "its model is for the former"


def test_a_run_that_goes_on_brings_images_to_the_size_it_knows(tmp_path):
    before = take(stream(class_folders(tmp_path / "a", CLASSES)))
    source = class_folders(tmp_path / "b", CLASSES, size=(14, 11))
    assert take(stream(source, Settled.of(before.summary(), 1))).shape == (3, 10, 12)


def test_without_a_table_only_tasks_are_known(split):
    before = take(stream(split))
    add(split)
    assert compared(before, split, LEARNED_ONE, table=False) == Changes(["training samples of task 2"])


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
        (0, 1): Changes(),
        (4, 5): Changes(["training samples are in another order or in other tasks"]),
        (12, 13): Changes(),
        (16, 17): Changes(["test samples are in another order or in other tasks"]),
        (0, 4): Changes(),  # tasks stand in another order in the file, their samples do not
    }
    for (a, b), expected in cases.items():
        changed = list(order)
        changed[a], changed[b] = changed[b], changed[a]
        assert compared(before, rows(split, changed), LEARNED_ONE) == expected, (a, b)


def test_pixels_have_no_names(tmp_path):
    arrays = {"x": np.random.default_rng(0).integers(0, 256, (60, 8, 8), dtype=np.uint8), "y": np.arange(60) % 6}
    np.savez(tmp_path / "d.npz", **arrays)
    before = take(stream(tmp_path / "d.npz"))
    arrays["x"][[2, 8, 5]] ^= 1
    arrays["y"] = np.append(arrays["y"], 5)
    np.savez(tmp_path / "d.npz", x=np.concatenate([arrays["x"], np.zeros((1, 8, 8), np.uint8)]), y=arrays["y"])
    said = ["training samples of '2': 2 changed", "training samples of '5': 1 added, 1 changed"]
    assert compared(before, tmp_path / "d.npz", LEARNED_ONE) == Changes(said)


def test_of_many_classes_the_first_are_named(tmp_path):
    class_folders(tmp_path / "own", CLASSES)
    before = take(stream(tmp_path / "own"))
    for name in CLASSES:
        path = tmp_path / "own" / name / "000.png"
        path.write_bytes(path.read_bytes() + b"x")
        os.utime(path)
    said = compared(before, tmp_path / "own", Standing()).ahead
    assert said[0] == "training samples of 'bee': 1 changed (bee/000.png)"
    assert len(said) == 4
    assert said[3] == "training samples of 3 more classes"
