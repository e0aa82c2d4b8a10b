"""Two streams have the same fingerprint exactly when a run would do the same with them."""

import os
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load, save

from fedprotip.errors import UsageError
from fedprotip.settings import load as load_settings
from fedprotip.stream import build_stream, fingerprint
from fedprotip.stream.fingerprint import Inventory, take
from tests.stream.samples import made_dataset
from tests.stream.trees import class_folders, picture


def made(dataset, **stream):
    return take(build_stream(load_settings({"stream": {"tasks": 3, **stream}, "clients": {"count": 2}}), dataset))


def of_folder(path, known=None, size=0, tasks=3):
    settings = {"data": {"name": "own", "source": str(path), "size": size}, "stream": {"tasks": tasks}}
    return take(build_stream(load_settings(settings | {"clients": {"count": 2}})), known)


def test_it_is_the_same_on_every_machine():
    digits = take(build_stream(load_settings({"stream": {"tasks": 5}})))
    assert digits.summary()["hash"] == "3380feb1b4d04382c095e2dcb2ba5741"
    assert len(digits.summary()["tasks"]) == 5


def shuffled(dataset, order):
    return replace(dataset, train_images=dataset.train_images[order], train_labels=dataset.train_labels[order])


def pixel(dataset):
    images = dataset.train_images.clone()
    images[-1, 0, 0, 0] ^= 1
    return replace(dataset, train_images=images)


def test_what_differs_is_told_by_task_and_part():
    before, dataset = made(made_dataset()).summary(), made_dataset()
    swapped = torch.arange(21)
    swapped[[0, 1]] = swapped[[1, 0]]
    cases = {
        "pixel": (pixel(dataset), {2: {"train"}}),
        "order within a task": (shuffled(dataset, swapped), {0: {"train"}}),
        "order between tasks": (shuffled(dataset, torch.arange(21).roll(3)), {}),
        "name": (replace(dataset, classes=["zero", *dataset.classes[1:]]), {0: {"name", "train", "test"}}),
    }
    for case, (other, expected) in cases.items():
        after = made(other).summary()
        found = {
            task: {kind for kind in was if was[kind] != now[kind]}
            for task, (was, now) in enumerate(zip(before["tasks"], after["tasks"], strict=True))
        }
        assert {task: kinds for task, kinds in found.items() if kinds} == expected, case
        assert (before["hash"] == after["hash"]) == (not expected), case


def test_samples_of_no_task_do_not_count():
    dataset = made_dataset()
    first = made(dataset, tasks=2, task_size=2)
    assert first.summary() == made(pixel(dataset), tasks=2, task_size=2).summary()
    assert len(first.table.parts["train"].hashes) == 18
    assert len(first.of_tasks("train", [0], 2).hashes) == 11


def test_clients_count_where_the_data_says_them():
    dataset = made_dataset()
    dataset = replace(dataset, train_clients=torch.arange(21) % 2)
    other = replace(dataset, train_clients=(torch.arange(21) + 1) % 2)
    assert made(dataset).summary() == made(other).summary()
    assert made(dataset, source="columns").summary() != made(other, source="columns").summary()


def test_made_domains_have_every_sample_once_in_the_table():
    several = made(made_dataset(), scenario="domain", domains="permute")
    assert len(several.table.parts["train"].hashes) == 21
    assert len({task["train"] for task in several.summary()["tasks"]}) == 1


@pytest.mark.parametrize("size", [0, 80])  # decoded into memory, and left in files
def test_files_are_known_by_content_wherever_they_are(tmp_path, size):
    first = of_folder(class_folders(tmp_path / "here"), size=size)
    assert first.table.parts["test"].files[0][0] == "cat/004.png"
    shutil.copytree(tmp_path / "here", tmp_path / "a" / "there", copy_function=shutil.copyfile)
    (tmp_path / "a" / "there" / "cat" / "000.png").rename(tmp_path / "a" / "there" / "cat" / "0000.png")
    assert of_folder(tmp_path / "a" / "there", size=size).summary() == first.summary()
    picture(tmp_path / "here" / "dog" / "003.png", seed=7)
    tasks = of_folder(tmp_path / "here", size=size).summary()["tasks"]
    assert [was["train"] == now["train"] for was, now in zip(first.summary()["tasks"], tasks, strict=True)] == [
        True,
        False,
        True,
    ]


def test_a_file_that_looks_the_same_is_not_read_again(tmp_path, monkeypatch):
    folder = class_folders(tmp_path / "here")
    first = of_folder(folder)
    table = Inventory.of(load(save(first.table.tensors())))
    read, original = [], fingerprint._content

    def watched(path):
        read.append(path)
        return original(path)

    monkeypatch.setattr(fingerprint, "_content", watched)
    assert of_folder(folder, table).summary() == first.summary()
    assert read == []
    touched = folder / "cat" / "001.png"
    os.utime(touched, ns=(1, 1))
    assert of_folder(folder, table).summary() == first.summary()
    assert read == [str(touched)]


def test_the_table_survives_its_file(tmp_path):
    table = of_folder(class_folders(tmp_path / "here", classes=("é", "b", "c"))).table
    again = Inventory.of(load(save(table.tensors())))
    assert again.classes == table.classes
    for part, samples in table.parts.items():
        assert again.parts[part].files == samples.files
        assert np.array_equal(again.parts[part].hashes, samples.hashes)
        assert np.array_equal(again.parts[part].labels, samples.labels)


def test_of_large_files_size_and_pieces_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprint, "WHOLE", 100)
    monkeypatch.setattr(fingerprint, "PIECE", 10)
    path, contents = tmp_path / "x", {"plain": bytes(1000), "longer": bytes(1001)}
    contents["end"] = bytes(999) + b"x"
    contents["first"] = b"x" + bytes(999)
    hashes = set()
    for content in contents.values():
        path.write_bytes(content)
        hashes.add(fingerprint._content(str(path)))
    assert len(hashes) == len(contents)


def test_the_user_is_told_when_much_must_be_read(tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprint, "LONG", 0)
    settings = load_settings({"data": {"name": "own", "source": str(class_folders(tmp_path))}, "stream": {"tasks": 3}})
    said = []
    take(build_stream(settings), note=said.append)
    assert [text.split()[0] for text in said] == ["24", "6"]


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"gone\.png cannot be read: No such file"):
        fingerprint._content(str(tmp_path / "gone.png"))


@pytest.mark.parametrize(
    ("name", "wrong"), [("train/hashes", torch.tensor(3)), ("test/tasks", torch.zeros(2)), ("train/labels", None)]
)
def test_a_forged_table_is_none(name, wrong):
    tensors = made(made_dataset()).table.tensors()
    tensors[name] = tensors[name] + 10 if wrong is None else wrong
    assert Inventory.recall(tensors) is None
