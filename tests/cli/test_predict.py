"""`fedprotip predict`: files, folders and patterns in, answers out."""

import csv
import io
import json

import numpy as np
import pytest
from PIL import Image

import fedprotip
from tests.small import quick

SETTINGS = {
    "stream": {"tasks": 2, "task_size": 2},
    "clients": {"count": 2},
    "model": {"name": "mlp", "width": 32},
    "train": {"rounds": 2, "epochs": 2, "batch": 16},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("asked") / "run"
    with pytest.MonkeyPatch.context() as patch:
        quick(patch)
        fedprotip.run(SETTINGS, out=path)
    return path


@pytest.fixture
def photos(tmp_path):
    folder = tmp_path / "photos"
    (folder / "deeper").mkdir(parents=True)
    chance = np.random.default_rng(0)
    for name in ("a.png", "b.jpg", "deeper/c.png"):
        Image.fromarray(chance.integers(0, 256, (20, 31, 3), dtype=np.uint8)).save(folder / name)
    return folder


def test_folders_patterns_and_files_are_answered_in_their_order(call, run, photos):
    code, text, _ = call("predict", run, photos, photos / "a.png", f"{photos}/*.jpg", "--json")
    rows = json.loads(text)
    assert code == 0
    assert [row["file"].removeprefix(f"{photos}/") for row in rows] == [
        "a.png",
        "b.jpg",
        "deeper/c.png",
        "a.png",
        "b.jpg",
    ]
    answers = fedprotip.load(run).predict([photos / "a.png"])
    assert rows[0] == rows[3]
    assert rows[0]["label"] == answers[0].label
    assert rows[0]["probability"] == pytest.approx(answers[0].probability, abs=1e-5)
    assert rows[0].keys() == {"file", "label", "probability", "task", "task_name", "task_probability", "unusual"}


def test_a_file_that_cannot_be_read_is_named_and_the_rest_is_answered(call, run, photos):
    (photos / "b.jpg").write_bytes((photos / "b.jpg").read_bytes()[:200])
    (photos / "note.txt").write_text("no image")
    code, text, errors = call("predict", run, photos, photos / "note.txt", photos / "gone.png", "--csv")
    rows = list(csv.DictReader(io.StringIO(text)))
    assert code == 1
    assert [bool(row["label"]) for row in rows] == [True, False, True, False, False]
    assert all(bool(row["error"]) != bool(row["label"]) for row in rows)
    assert all(name in errors for name in ("b.jpg", "note.txt", "gone.png"))
    assert "it does not exist" in errors


def test_a_table_for_people(call, run, photos):
    code, text, _ = call("predict", run, photos / "a.png", "--together")
    assert code == 0
    assert "class" in text
    assert "a.png" in "".join(line.split("│")[1].strip() for line in text.splitlines() if "│" in line)


def test_a_known_task_decides(call, run, photos):
    for task in (1, 2):
        rows = json.loads(call("predict", run, photos, "--task", task, "--json")[1])
        assert {row["task"] for row in rows} == {task - 1}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere/*.png"], "matches no file"),
        (["EMPTY"], "holds no image files"),
        (["a.png", "--task", "0"], "tasks count from 1"),
        (["PHOTO", "--task", "3"], "this run has learned 2"),
    ],
)
def test_what_cannot_be_asked_is_one_sentence(call, run, photos, tmp_path, arguments, said):
    (tmp_path / "empty").mkdir()
    names = {"EMPTY": tmp_path / "empty", "PHOTO": photos / "a.png"}
    code, text, errors = call("predict", run, *(names.get(name, name) for name in arguments))
    assert code == 2
    assert said in errors
    assert not text
