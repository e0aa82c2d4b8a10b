"""`fedprotip predict`: files, folders and patterns in, answers out."""

import csv
import io
import json
import os
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import fedprotip
from fedprotip.cli import asking
from fedprotip.inference.predictor import Predictor
from fedprotip.stream import images
from tests.small import used


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return used(tmp_path_factory.mktemp("asked") / "run")


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
    for task in (1, 2):  # counted as --task does, and as the report's tables do
        _, text, _ = call("predict", run, photos / "a.png", "--csv", "--task", task)
        assert [row["task"] for row in csv.DictReader(io.StringIO(text))] == [str(task)]
    assert "it does not exist" in errors


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes")
def test_pipes_and_links_to_nothing_are_named_and_nobody_waits_for_them(call, run, photos):
    os.mkfifo(photos / "pipe.png")
    (photos / "link.png").symlink_to("nowhere")
    code, text, _ = call("predict", run, photos, "--json")
    assert code == 1
    faults = {Path(row["file"]).name: row["error"] for row in json.loads(text) if "error" in row}
    assert "a pipe or a device" in faults["pipe.png"]
    assert "it does not exist" in faults["link.png"]
    assert len(faults) == 2


def test_a_folder_or_pattern_without_images_is_named_and_the_rest_is_answered(call, run, photos, tmp_path):
    (tmp_path / "empty").mkdir()
    code, text, errors = call("predict", run, tmp_path / "empty", photos / "a.png", "nowhere/*.png", "--json")
    assert code == 1
    assert [row.get("error", "") for row in json.loads(text)] == ["it holds no image files", "", "it matches no file"]
    assert "empty" in errors
    assert "nowhere/*.png" in errors


@pytest.mark.parametrize("options", [[], ["--together"]])
def test_a_file_is_decoded_once_and_may_vanish_between_two(call, run, photos, monkeypatch, options):
    opened, real = [], images._open

    def once(source, *rest):
        opened.append(source)
        (photos / "b.jpg").unlink(missing_ok=True)
        return real(source, *rest)

    monkeypatch.setattr(images, "_open", once)
    code, text, _ = call("predict", run, photos, "--json", *options)
    assert code == 1
    assert [bool(row.get("label")) for row in json.loads(text)] == [True, False, True]
    assert sorted(opened) == [str(photos / name) for name in ("a.png", "b.jpg", "deeper/c.png")]


@pytest.mark.parametrize("options", [[], ["--together"]])
@pytest.mark.parametrize("slow", [False, True])
def test_a_bar_is_shown_where_it_takes_a_while(call, run, photos, monkeypatch, options, slow):
    """Of three files as well."""
    told = io.StringIO()
    monkeypatch.setattr(asking, "err", asking.Console(file=told, force_terminal=True, width=100))
    monkeypatch.setattr(asking, "SHOWN", 0.05 if slow else 60.0)
    real = Predictor.read

    def read(self, paths):
        until = time.monotonic() + 20
        while slow and "answering" not in told.getvalue() and time.monotonic() < until:
            time.sleep(0.01)
        return real(self, paths)

    monkeypatch.setattr(Predictor, "read", read)
    assert call("predict", run, photos, "--json", *options)[0] == 0
    assert ("answering" in told.getvalue()) == slow


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
        (["a.png", "--json", "--csv"], "choose one"),
        (["PHOTO", "--task", "3"], "--task 3: this run has learned 2"),
    ],
)
def test_what_cannot_be_asked_is_one_sentence(call, run, photos, tmp_path, arguments, said):
    (tmp_path / "empty").mkdir()
    names = {"EMPTY": tmp_path / "empty", "PHOTO": photos / "a.png"}
    code, text, errors = call("predict", run, *(names.get(name, name) for name in arguments))
    assert code == 2
    assert said in errors
    assert not text
