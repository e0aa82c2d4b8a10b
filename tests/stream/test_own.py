"""The user's own data: folders, CSV, Parquet, NPZ, with and without columns for split, task and client."""

import csv
import json
import os
import sys

import numpy as np
import pytest
import torch

import fedprotip
from fedprotip.errors import UsageError
from fedprotip.settings import load
from fedprotip.stream import build_stream, check_clients
from fedprotip.stream.datasets import index_dataset, load_dataset
from fedprotip.stream.datasets.own import client_ids
from fedprotip.stream.images import FileImages
from fedprotip.stream.kept import NOTHING, Settled
from tests.stream.trees import class_folders, picture

ON_PICTURES = [
    word
    for setting in (
        "data.name=own", "stream.tasks=3", "clients.count=2", "model.name=small_cnn", "model.width=8",
        "train.rounds=1", "train.epochs=1", "train.augment=standard", "run.threads=1",
    )
    for word in ("--set", setting)
]  # fmt: skip


HIDDEN = os.path.join("cat", ".ipynb_checkpoints")


def own(source, **more):
    return load_dataset(load({"data": {"name": "own", "source": str(source), **more}}).data)


def stream(place, clients=None, **settings):
    raw = {"data": {"name": "own", "source": str(place)}, "stream": settings, "clients": clients or {}}
    return build_stream(load(raw))


def refused(call, *words):
    with pytest.raises(UsageError) as caught:
        call()
    sentence = str(caught.value)
    assert sentence.endswith(".")
    assert "\n" not in sentence
    for word in words:
        assert word in sentence, sentence


def write_csv(path, rows):
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def listed(folder, per_class=10, **columns):
    """Rows of a folder per class; a column is a function of (class, number)."""
    class_folders(folder / "pics", per_class=per_class)
    rows = []
    for name in ("cat", "dog", "økse"):
        for number in range(per_class):
            row = {"path": f"pics/{name}/{number:03d}.png", "label": name}
            rows.append(row | {column: make(name, number) for column, make in columns.items()})
    return rows


# Folders


def test_a_folder_per_class(tmp_path):
    found = own(class_folders(tmp_path))
    assert found.classes == ["cat", "dog", "økse"]
    assert found.image_shape == (3, 10, 12)
    assert isinstance(found.train_images, torch.Tensor)
    assert np.bincount(found.train_labels).tolist() == [8] * 3
    assert np.bincount(found.test_labels).tolist() == [2] * 3
    assert torch.equal(own(tmp_path).test_images, found.test_images)


def test_train_and_test_folders(tmp_path):
    class_folders(tmp_path / "train", per_class=4)
    class_folders(tmp_path / "test", per_class=3)
    found = own(tmp_path)
    assert np.bincount(found.train_labels).tolist() == [4] * 3
    assert np.bincount(found.test_labels).tolist() == [3] * 3


def test_large_images_stay_in_their_files(tmp_path):
    class_folders(tmp_path, per_class=2, size=(300, 260))
    found = own(tmp_path)
    assert isinstance(found.train_images, FileImages)
    assert found.image_shape == (3, 224, 258)
    assert found.augmentation.resized
    assert own(tmp_path, size=128).image_shape == (3, 128, 128)
    small = own(tmp_path, size=20)
    assert small.train_images.shape == (3, 3, 20, 20)


def test_other_files_and_hidden_folders_are_left_alone(tmp_path):
    class_folders(tmp_path)
    (tmp_path / "cat" / "Thumbs.db").write_bytes(b"x")
    (tmp_path / "cat" / "._000.png").write_bytes(b"what macOS leaves in archives")
    (tmp_path / ".git").mkdir()
    picture(tmp_path / "cat" / ".ipynb_checkpoints" / "000-checkpoint.png")
    assert len(own(tmp_path).classes) == 3
    assert len(own(tmp_path).train_labels) == 24
    assert own(tmp_path).notes == (f"{tmp_path}: hidden folders, or links, whose images are not read: {HIDDEN}.",)


def test_files_that_are_not_read_are_named(tmp_path):
    class_folders(tmp_path)
    (tmp_path / "labels.csv").write_text("x")
    (tmp_path / "dog" / "deep").mkdir()
    (tmp_path / "dog" / "deep" / "photo.heic").write_bytes(b"x")
    (tmp_path / "dog" / "more").symlink_to(tmp_path / "cat", target_is_directory=True)
    picture(tmp_path / ".bird" / "000.png")
    files, folders = own(tmp_path).notes
    assert "files that are not read: 2 (dog/deep/photo.heic, labels.csv); images end in .jpg, " in files
    assert folders.endswith("images are not read: .bird, dog/more.")
    assert len(own(tmp_path).train_labels) == 24


def test_wrong_folders_are_one_sentence(tmp_path):
    refused(lambda: own(""), "data.source", ".npz")
    refused(lambda: own(tmp_path / "gone"), "gone", "does not exist")
    refused(lambda: own(tmp_path), "no class folders")
    class_folders(tmp_path / "a")
    (tmp_path / "a" / "empty").mkdir()
    refused(lambda: own(tmp_path / "a"), "Class 'empty' is empty")
    class_folders(tmp_path / "b" / "train")
    refused(lambda: own(tmp_path / "b"), "'train' only", "'test'", "data.folders = 'class' where it is a class")
    class_folders(tmp_path / "b" / "test", classes=("cat", "dog"))
    refused(lambda: stream(tmp_path / "b", tasks=1), "Class 'økse'", "no test samples")
    class_folders(tmp_path / "c", per_class=1)
    refused(lambda: own(tmp_path / "c"), "Class 'cat' has one sample")
    (tmp_path / "notes.txt").write_text("x")
    refused(lambda: own(tmp_path / "notes.txt"), "notes.txt", ".csv")


@pytest.mark.parametrize("wrong", [b"d\xf8g", b"dog/\xf8.png"])
def test_names_that_are_no_text_are_one_sentence(tmp_path, wrong):
    class_folders(tmp_path)
    try:
        os.rename(tmp_path / ("dog/000.png" if b"/" in wrong else "dog"), os.fsencode(tmp_path) + b"/" + wrong)
    except OSError:
        pytest.skip("this file system has names in UTF-8 only")
    refused(lambda: own(tmp_path), "\\udcf8", "is not text in UTF-8; rename it")


def test_a_corrupt_image_is_named_before_anything_is_written(tmp_path):
    class_folders(tmp_path / "data")
    broken = tmp_path / "data" / "dog" / "004.png"
    broken.write_bytes(broken.read_bytes()[:50])
    settings = {"data": {"name": "own", "source": str(tmp_path / "data")}, "stream": {"tasks": 3}}
    refused(lambda: fedprotip.run(settings, out=tmp_path / "run"), str(broken), "cannot be read as an image")
    assert not (tmp_path / "run").exists()
    for path in (tmp_path / "data").rglob("*.png"):
        path.write_bytes(b"no image")
    refused(lambda: own(tmp_path / "data"), "none of the 30 files")


# Tables


def test_csv_with_a_split(tmp_path):
    rows = listed(tmp_path, split=lambda name, number: "test" if number < 3 else "train")
    found = own(write_csv(tmp_path / "tabelle.csv", rows))
    assert found.classes == ["cat", "dog", "økse"]
    assert np.bincount(found.test_labels).tolist() == [3] * 3
    plain = own(tmp_path / "pics")
    assert sorted(map(bytes, found_bytes(found))) == sorted(map(bytes, found_bytes(plain)))
    other = write_csv(tmp_path / "other.csv", [row | {"split": f"{row['split'].upper()} "} for row in rows])
    assert found_bytes(own(other)) == found_bytes(found)


def found_bytes(dataset):
    return [image.numpy().tobytes() for image in torch.cat([dataset.train_images, dataset.test_images])]


def test_numbers_as_labels_are_in_numerical_order(tmp_path):
    rows = listed(tmp_path)
    for row in rows:
        row["label"] = {"cat": "10", "dog": "9", "økse": "100"}[row["label"]]
    assert own(write_csv(tmp_path / "t.csv", rows)).classes == ["9", "10", "100"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda rows: [{"name": "x", "label": "y"}], ["needs the columns path and label", "name, label"]),
        (lambda rows: [{**rows[0], "label": " "}, *rows[1:]], ["sample 1 has no label"]),
        (lambda rows: [*rows, {"path": "pics/gone.png", "label": "cat"}], ["sample 31", "pics/gone.png", "not exist"]),
        (lambda rows: [{**row, "split": "val"} for row in rows], ["sample 1", "'val'", "train and test"]),
        (
            lambda rows: [{**row, "split": "train"} for row in rows],
            ["Task 1 (cat, dog)", "no test samples; the data has none"],
        ),
    ],
    ids=range(5),
)
def test_wrong_tables_are_one_sentence(tmp_path, change, words):
    path = write_csv(tmp_path / "t.csv", change(listed(tmp_path)))
    refused(lambda: stream(path, tasks=2), *words)


def test_an_empty_or_unreadable_table_is_one_sentence(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("")
    refused(lambda: own(path), "path and label", "none")
    path.write_text("path,label\n")
    refused(lambda: own(path), "no samples")
    path.write_bytes(b"path,label\n\xff\xfe,cat\n")
    refused(lambda: own(path), "UTF-8")


def test_a_table_from_a_spreadsheet(tmp_path):
    """Byte order mark, Windows line ends, spaces after commas, blank lines, absolute paths, further columns."""
    rows = listed(tmp_path)
    lines = [f"{row['label']}, {tmp_path / row['path']}, 7" for row in rows]
    text = "\r\n".join(["label, path, weight", *lines[:15], "", *lines[15:], ""])
    (tmp_path / "t.csv").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert own(tmp_path / "t.csv").classes == ["cat", "dog", "økse"]
    assert found_bytes(own(tmp_path / "t.csv")) == found_bytes(own(write_csv(tmp_path / "plain.csv", rows)))


def test_headings_have_any_case(tmp_path):
    rows = listed(tmp_path, split=lambda name, number: "test" if number < 3 else "train")
    wanted = own(write_csv(tmp_path / "plain.csv", [row | {"client": 0} for row in rows]))
    lines = [f"{row['path']},{row['label']},{row['split']},0" for row in rows]
    for head in ("Path,Label,SPLIT,CLIENT", " File ,Class, Split,client ", '"file",label,split,"Client"'):
        (tmp_path / "t.csv").write_text("\n".join([head, *lines]), encoding="utf-8")
        found = own(tmp_path / "t.csv")
        assert found.notes == ()
        assert found_bytes(found) == found_bytes(wanted)
        assert found.test_clients.tolist() == wanted.test_clients.tolist()
    (tmp_path / "t.csv").write_text("\n".join(["path,label,Label,client", *lines]), encoding="utf-8")
    refused(lambda: own(tmp_path / "t.csv"), "two columns that are 'label': 'label' and 'Label'; keep one")
    (tmp_path / "t.csv").write_text("\n".join(["path,label,split,file", *lines]), encoding="utf-8")
    assert own(tmp_path / "t.csv").notes[0].endswith("columns that are not used: file.")


def test_a_line_with_too_many_entries_is_one_sentence(tmp_path):
    rows = listed(tmp_path)
    (tmp_path / "t.csv").write_text(f"path,label\n{rows[0]['path']},cat\n{rows[1]['path']},salad, green\n")
    refused(lambda: own(tmp_path / "t.csv"), "sample 2 has more than the 2 entries")


def test_what_is_listed_twice_is_not_both_learned_and_tested(tmp_path):
    rows = listed(tmp_path, split=lambda name, number: "test" if number < 3 else "train")
    twice = write_csv(tmp_path / "twice.csv", [*rows, rows[7], rows[7]])
    assert len(own(twice).train_labels) == 23
    leak = write_csv(tmp_path / "leak.csv", [*rows, {**rows[0], "split": "train"}])
    refused(lambda: own(leak), "leak.csv lists", "pics/cat/000.png twice", "for training and for testing")
    for other in ("pics/../pics/cat/000.png", str(tmp_path / "pics" / "cat" / "000.png")):
        spelled = write_csv(tmp_path / "spelled.csv", [*rows, {**rows[0], "path": other, "split": "train"}])
        refused(lambda path=spelled: own(path), "for training and for testing")


def test_one_picture_in_two_folders_by_a_link_is_listed_twice(tmp_path):
    for part in ("train", "test"):
        class_folders(tmp_path / "own" / part, per_class=5)
    link = tmp_path / "own" / "test" / "cat" / "link.png"
    link.symlink_to("../../train/cat/001.png")
    refused(lambda: own(tmp_path / "own"), "train/cat/001.png and the same file as", "link.png", "for training and")
    link.unlink()
    (tmp_path / "own" / "train" / "dog" / "link.png").symlink_to("../cat/001.png")
    refused(lambda: own(tmp_path / "own"), "as 'cat' and as 'dog'", "one label")


def test_a_file_with_two_labels_is_refused_and_one_listed_again_is_told(tmp_path):
    rows = listed(tmp_path, split=lambda name, number: "test" if number < 3 else "train")
    assert own(write_csv(tmp_path / "once.csv", rows)).notes == ()
    (note,) = own(write_csv(tmp_path / "again.csv", [*rows, rows[7]])).notes
    assert "samples that are listed twice count twice: 1." in note
    both = write_csv(tmp_path / "both.csv", [*rows, {**rows[7], "label": "dog"}])
    refused(lambda: own(both), "pics/cat/007.png twice, as 'cat' and as 'dog'", "one label")
    tasked = [row | {"task": "coarse"} for row in rows] + [row | {"task": "fine", "label": "x"} for row in rows]
    assert "x" in own(write_csv(tmp_path / "tasks.csv", tasked)).classes


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace(",", ";"),
        lambda text: text.replace(",", "\t"),
        lambda text: text + ",\n,\n",
        lambda text: text.replace("/", "\\"),
    ],
    ids=["semicolons", "tabs", "empty rows", "from Windows"],
)
def test_tables_as_spreadsheets_write_them(tmp_path, change):
    table = write_csv(tmp_path / "t.csv", listed(tmp_path))
    wanted = own(table)
    table.write_text(change(table.read_text(encoding="utf-8")), encoding="utf-8-sig")
    found = own(table)
    assert found.classes == wanted.classes
    assert torch.equal(found.train_labels, wanted.train_labels)


def test_files_that_a_table_lacks_are_counted(tmp_path):
    rows = listed(tmp_path)
    gone = [{**row, "path": f"elsewhere/{row['path']}"} for row in rows[:3]]
    table = write_csv(tmp_path / "t.csv", [*rows[3:], *gone])
    refused(lambda: own(table), "sample 28 names 'elsewhere/pics", "(nor do the files of 2 others)", "relative to the")
    refused(lambda: own(write_csv(tmp_path / "u.csv", [*rows, {**rows[0], "path": ""}])), "sample 31 has no path")


def test_parts_may_be_capitalised_and_a_class_may_be_called_train(tmp_path):
    for part in ("Train", "Test"):
        class_folders(tmp_path / "a" / part)
    assert len(own(tmp_path / "a").train_labels) == len(own(tmp_path / "a").test_labels) == 30
    for part in ("train", "val"):
        class_folders(tmp_path / "b" / part)
    refused(lambda: own(tmp_path / "b"), "'train' only", "rename 'val'")
    class_folders(tmp_path / "c", classes=("bus", "train"))
    refused(lambda: own(tmp_path / "c"), "data.folders = 'class'")
    assert own(tmp_path / "c", folders="class").classes == ["bus", "train"]
    (tmp_path / "c" / "__MACOSX").mkdir()
    assert own(tmp_path / "c", folders="class").classes == ["bus", "train"]


def test_labels_in_a_column_of_their_own_are_labels(tmp_path):
    x, y = np.zeros((40, 6, 6), np.uint8), np.arange(40) % 4
    np.savez(tmp_path / "d.npz", x=x, y=y[:, None])
    assert own(tmp_path / "d.npz").classes == ["0", "1", "2", "3"]
    np.savez(tmp_path / "e.npz", x=x, y=np.eye(4)[y])
    refused(lambda: own(tmp_path / "e.npz"), "it is float64 (40, 4)")


def test_client_numbers_stand_and_long_ones_are_numbered():
    assert client_ids(["7", "0", "10"])[1].tolist() == [7, 0, 10]
    assert client_ids(["7", "0", "10"])[0] == [str(number) for number in range(11)]
    assert client_ids(["north", "0", "10"])[1].tolist() == [2, 0, 1]
    assert client_ids(["98765432109876543210", "5", "1234567890"])[1].tolist() == [2, 0, 1]


def test_clients_that_are_no_numbers_stay_apart():
    """1 and 01 are two, and post codes are no reason for ten thousand clients."""
    assert client_ids(["1", "01", "1", "2"]) == (["01", "1", "2"], pytest.approx([1, 0, 1, 2]))
    assert client_ids(["10115", "01067", "80331"])[0] == ["01067", "10115", "80331"]
    assert client_ids(["80331", "10115"])[1].tolist() == [1, 0]


def test_clients_keep_their_ids_when_others_come_or_go(tmp_path):
    rows = listed(tmp_path, per_class=12)
    for first, then, wanted in (
        (("1", "2"), ("1", "2", "north"), {"1": 1, "2": 2, "north": 3}),
        (("01", "1"), ("1", "2"), {"1": 1, "2": 2}),
        (("north", "south"), ("south", "0"), {"south": 1, "0": 2}),
    ):
        kept = NOTHING
        for names in (first, then):
            for number, row in enumerate(rows):
                row["client"] = names[number % len(names)]
            source = write_csv(tmp_path / "t.csv", rows)
            settings = load({"data": {"name": "own", "source": str(source)}}).data
            found = index_dataset(settings, kept)
            kept = Settled(tuple(found.classes), (), found.clients)
        assert {found.clients[place] for place in found.train_clients.tolist()} == set(then)
        assert all(found.clients[place] == name for name, place in wanted.items())


# Parquet


def test_parquet_without_pyarrow_is_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "t.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    refused(lambda: own(tmp_path / "t.parquet"), "t.parquet needs pyarrow", "pip install pyarrow")


def write_parquet(path, rows):
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.mark.slow
def test_parquet_holds_the_same_as_csv(tmp_path):
    rows = listed(
        tmp_path, client=lambda name, number: number % 2, split=lambda name, number: ("train", "test")[number > 7]
    )
    plain = own(write_csv(tmp_path / "t.csv", rows))
    found = own(write_parquet(tmp_path / "t.parquet", [{**row, "thumbnail": b"x" * 99} for row in rows]))
    assert found.classes == plain.classes
    assert found_bytes(found) == found_bytes(plain)
    assert found.train_clients.tolist() == plain.train_clients.tolist()


@pytest.mark.slow
def test_parquet_with_numbers_and_gaps(tmp_path):
    rows = listed(tmp_path, client=lambda name, number: float(number % 2))
    for row in rows:
        row["label"] = {"cat": 10, "dog": 9, "økse": 100}[row["label"]]
    found = own(write_parquet(tmp_path / "t.parquet", rows))
    assert found.classes == ["9", "10", "100"]
    assert set(found.train_clients.tolist()) == {0, 1}
    for missing in (None, float("nan")):
        rows[4]["client"] = missing
        path = write_parquet(tmp_path / "gap.parquet", rows)
        refused(lambda path=path: own(path), "gap.parquet: sample 5 has no client")


@pytest.mark.slow
def test_parquet_with_bytes_and_lists(tmp_path):
    rows = listed(tmp_path)
    plain = [{key: value.encode() for key, value in row.items()} for row in rows]
    found = own(write_parquet(tmp_path / "t.parquet", plain))
    assert (found.classes, len(found.train_labels)) == (["cat", "dog", "økse"], 24)
    broken = write_parquet(tmp_path / "broken.parquet", [{**plain[0], "label": b"\xff"}, *plain[1:]])
    refused(lambda: own(broken), "the label", "not text in UTF-8")
    several = write_parquet(tmp_path / "several.parquet", [row | {"label": [row["label"]]} for row in rows])
    refused(lambda: own(several), "column 'label' has lists or tables in its cells")


@pytest.mark.slow
def test_a_damaged_parquet_is_one_sentence(tmp_path):
    path = write_parquet(tmp_path / "t.parquet", listed(tmp_path))
    whole = path.read_bytes()
    for content in (b"", b"PAR1", b"no table at all", whole[: len(whole) // 2]):
        path.write_bytes(content)
        refused(lambda: own(path), "t.parquet is not a Parquet file")
    refused(lambda: own(write_parquet(path, [{"name": "x", "label": "y"}])), "needs the columns path and label")


@pytest.mark.slow
def test_a_run_from_parquet(tmp_path, command):
    path = write_parquet(tmp_path / "t.parquet", listed(tmp_path, client=lambda name, number: number % 2))
    code, out, _ = command("run", *ON_PICTURES, "--set", f"data.source={path}", "--out", tmp_path / "run")
    assert code == 0
    assert "aware" in out


# NPZ


def pixels(n=20, shape=(8, 8)):
    return np.random.default_rng(n).integers(0, 256, (n, *shape), dtype=np.uint8)


def npz(path, **arrays):
    np.savez(path, **arrays)
    return path


@pytest.mark.parametrize(
    ("shape", "expected"), [((8, 6), (1, 8, 6)), ((8, 6, 3), (3, 8, 6)), ((3, 8, 6), (3, 8, 6)), ((8, 6, 1), (1, 8, 6))]
)
def test_npz_with_parts(tmp_path, shape, expected):
    y = np.arange(20) % 4
    path = npz(tmp_path / "d.npz", x_train=pixels(20, shape), y_train=y, x_test=pixels(8, shape), y_test=y[:8])
    found = own(path)
    assert found.image_shape == expected
    assert found.classes == ["0", "1", "2", "3"]
    assert (len(found.train_labels), len(found.test_labels)) == (20, 8)
    assert len(found.mean) == expected[0]


@pytest.mark.parametrize("kind", [str, bytes])
def test_npz_in_one_piece_with_columns(tmp_path, kind):
    y = np.array(["a", "b"] * 10).astype(kind)
    split = np.array(["train"] * 14 + ["test"] * 6).astype(kind)
    path = npz(tmp_path / "d.npz", x=pixels(), y=y, split=split, task=np.arange(20) % 2, client=np.arange(20) % 3)
    found = own(path)
    assert found.classes == ["a", "b"]
    assert found.train_clients.tolist() == [i % 3 for i in range(14)]
    assert found.test_domains.tolist() == [i % 2 for i in range(14, 20)]
    assert np.bincount(own(npz(tmp_path / "e.npz", x=pixels(), y=y)).test_labels).tolist() == [2, 2]


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"x": pixels()}, ["x and y", "it has x"]),
        ({"x": pixels() / 99, "y": np.zeros(20, int)}, ["x is float64 with values from 0 to 2.", "cannot be told"]),
        ({"x": pixels(20, (8, 8, 5)), "y": np.zeros(20, int)}, ["1 to 4 channels"]),
        ({"x": pixels(), "y": np.zeros(19, int)}, ["y must be 20 whole numbers"]),
        ({"x": pixels(), "y": np.zeros(20)}, ["y must be 20 whole numbers"]),
        ({"x": pixels(), "y": np.full(20, -3)}, ["label -3", "out of range"]),
        ({"x": pixels(), "y": np.arange(20) % 2, "task": np.zeros(3)}, ["task has 3 entries"]),
        ({"x": pixels(), "y": np.arange(20) % 2, "task": np.array(["a"] * 19 + [""])}, ["sample 20 has no task"]),
        ({"x": pixels(), "y": np.arange(20) % 2, "split": np.array(["x"] * 20)}, ["split 'x'"]),
        ({"x": pixels(0), "y": np.zeros(0, int)}, ["no samples"]),
        ({"x": pixels(), "y": np.array([object()] * 20)}, ["plain arrays"]),
        (
            {"x_train": pixels(), "y_train": np.arange(20) % 2, "x_test": pixels(4), "y_test": np.arange(4)},
            ["Class '2'", "no training samples"],
        ),
        (
            {
                "x_train": pixels(),
                "y_train": np.zeros(20, int),
                "x_test": pixels(4, (9, 9)),
                "y_test": np.zeros(4, int),
            },
            ["differ in shape"],
        ),
    ],
    ids=range(13),
)
def test_wrong_npz_is_one_sentence(tmp_path, arrays, words):
    path = npz(tmp_path / "d.npz", **arrays)
    refused(lambda: stream(path, tasks=1), *words)


def test_a_damaged_npz_is_one_sentence(tmp_path):
    path = tmp_path / "d.npz"
    np.savez_compressed(path, x=pixels() % 3, y=np.arange(20) % 2)
    whole = path.read_bytes()
    alone = tmp_path / "alone.npy"
    np.save(alone, pixels())
    flipped = whole[:60] + bytes(255 - byte for byte in whole[60:90]) + whole[90:]
    for content in (b"PK\x03\x04 and no more", whole[:-50], flipped, alone.read_bytes(), b""):
        path.write_bytes(content)
        refused(lambda: own(path), "not an npz file")


# Tasks and clients from columns


def columns_csv(tmp_path, **more):
    """Task `first` has cat and dog, `second` dog and økse; clients are hospitals."""
    columns = {
        "task": lambda name, number: {"cat": "first", "økse": "second"}.get(name, ("first", "second")[number % 2]),
        "client": lambda name, number: ("north", "south")[number % 2] if name == "cat" else "south",
    }
    return write_csv(tmp_path / "t.csv", listed(tmp_path, per_class=20, **columns | more))


def test_tasks_and_clients_come_from_columns(tmp_path):
    found = stream(columns_csv(tmp_path), {"count": 2, "held_back": 0.0}, source="columns", tasks=2)
    assert [task.name for task in found.tasks] == ["first", "second"]
    assert [task.classes for task in found.tasks] == [(0, 1), (1, 2)]
    assert [len(task.train) for task in found.tasks] == [24, 24]
    for task in found.tasks:
        owners = found.dataset.train_clients[task.train].tolist()
        for client in (0, 1):
            held = found.client_samples(task.index, client)
            assert len(held) == owners.count(client)
            assert set(held) <= set(task.train)
            assert (found.dataset.train_clients[held] == client).all()
    assert found.client_names is found.client_names  # once for all clients
    check_clients(found)


def test_the_order_and_number_of_tasks_are_settings(tmp_path):
    path = columns_csv(tmp_path)
    found = stream(path, {"count": 2}, source="columns", tasks=1, order=["second"])
    assert [task.name for task in found.tasks] == ["second"]
    domain = stream(path, {"count": 2}, source="columns", tasks=2, scenario="domain")
    assert [task.classes for task in domain.tasks] == [(0, 1, 2)] * 2
    refused(lambda: stream(path, {"count": 2}, source="columns", tasks=3), "stream.tasks = 3", "names 2 tasks")
    refused(lambda: stream(path, {"count": 2}, source="columns", tasks=1, order=["thrid"]), "'thrid'", "not a task")


def test_settings_decide_what_has_no_column(tmp_path):
    path = write_csv(tmp_path / "t.csv", listed(tmp_path, client=lambda name, number: number % 3))
    found = stream(path, {"count": 3}, source="columns", tasks=3)
    assert [task.name for task in found.tasks] == ["cat", "dog", "økse"]
    assert (found.dataset.train_clients[found.client_samples(1, 2)] == 2).all()
    # columns are there, but nobody asks for them
    made = stream(columns_csv(tmp_path), {"count": 4, "partition": "iid", "held_back": 0.0}, tasks=3)
    assert [task.name for task in made.tasks] == ["cat", "dog", "økse"]
    assert [len(made.client_samples(0, client)) for client in range(4)] == [4] * 4


def test_a_client_that_left_keeps_its_samples_for_itself(tmp_path):
    clients = {"count": 2, "roster": {"1": "0"}}
    found = stream(columns_csv(tmp_path), clients, source="columns", tasks=1)
    assert len(found.client_samples(0, 1))
    late = stream(columns_csv(tmp_path), clients, source="columns", tasks=2)
    refused(lambda: check_clients(late), "Task 2 (second)", "none of its 1 clients")


def test_columns_that_do_not_fit_are_one_sentence(tmp_path):
    plain = write_csv(tmp_path / "p.csv", listed(tmp_path))
    refused(lambda: stream(plain, source="columns"), "says nothing about tasks or clients")
    path = columns_csv(tmp_path)
    refused(lambda: stream(path, {"count": 1}, source="columns", tasks=2), "names client 1", "nearest valid value is 2")
    refused(lambda: stream(path, {"count": 2}, source="columns", tasks=2, overlap=1), "stream.overlap")
    split = {"split": lambda name, number: "train" if name == "cat" or number < 15 else "test"}
    wrong = columns_csv(tmp_path, **split, task=lambda name, number: "a" if number < 17 and name != "cat" else "b")
    rows = list(csv.DictReader(wrong.open(encoding="utf-8")))
    rows[0]["split"] = "test"
    refused(
        lambda: stream(write_csv(wrong, rows), {"count": 2}, source="columns", tasks=2),
        "Task 'b' tests class 'dog'",
        "no training samples",
    )


def test_fewer_samples_than_clients_is_refused(tmp_path):
    class_folders(tmp_path, ("cat" * 50, "dog", "økse"), per_class=4)
    refused(
        lambda: check_clients(stream(tmp_path, {"count": 5}, tasks=3)),
        "…) has 3 training samples for 5 clients",
        "= 3",
    )
    check_clients(stream(tmp_path, {"count": 3}, tasks=3))


def test_many_sites_of_the_data_may_have_nothing_of_a_task(tmp_path, command):
    """Of forty sites all but two have the second task alone."""
    site = np.concatenate([np.arange(40) % 2, np.arange(80) % 40])
    y, split = np.repeat(np.arange(6), 20), np.array(["test", *["train"] * 4] * 24)
    path = npz(tmp_path / "d.npz", x=pixels(120), y=y, client=site, task=np.minimum(y // 2, 1), split=split)
    found = stream(path, {"count": 40}, source="columns", tasks=2)
    assert len(found.tasks[0].train) < 40
    check_clients(found)
    few = ("--set", "train.rounds=1", "--set", "train.epochs=1", "--set", "model.width=8")
    code, _, err = command("run", "--set", f"data.source={path}", *few, "--out", tmp_path / "run")
    assert (code, "clients.count = 40: the data names them." in err) == (0, True), err


# The whole way


def test_a_new_folder_of_pictures_one_command_and_a_report(tmp_path, command):
    class_folders(tmp_path / "photos", per_class=30, size=(20, 16))
    code, out, err = command(
        "run", *ON_PICTURES, "--set", f"data.source={tmp_path / 'photos'}", "--out", tmp_path / "run"
    )
    assert (code, err.count("run: ")) == (0, 4)  # the start and three tasks
    assert "report.html" in out
    assert "own" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["tasks"] == 3


def test_lazy_files_run_too_and_twice_alike(tmp_path):
    class_folders(tmp_path / "photos", per_class=6, size=(90, 80))
    picture(tmp_path / "photos" / "cat" / "extra.jpg", (90, 80), "CMYK")
    settings = {
        "data": {"name": "own", "source": str(tmp_path / "photos"), "size": 72},
        "stream": {"tasks": 3},
        "clients": {"count": 2},
        "model": {"name": "small_cnn", "width": 4},
        "train": {"rounds": 1, "epochs": 1, "augment": "standard"},
        "run": {"threads": 1},
    }
    for name in ("one", "two"):
        fedprotip.run(settings, out=tmp_path / name)
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two"))
    assert first == second
