"""The official layouts of CIFAR-100, ImageNet-R and DomainNet, and the three sources of digits."""

import os
import pickle

import numpy as np
import pytest
import torch

from fedprotip.errors import UsageError
from fedprotip.settings import DataSettings, load
from fedprotip.stream import build_stream
from fedprotip.stream.datasets import load_dataset
from fedprotip.stream.datasets.domainnet import DOMAINS
from fedprotip.stream.images import FileImages
from tests.stream import trees


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    monkeypatch.delenv("FEDPROTIP_DATA", raising=False)


def data(name, root, **more):
    return load_dataset(DataSettings(name=name, root=str(root), **more))


def refused(name, root, *words, **more):
    with pytest.raises(UsageError) as caught:
        data(name, root, **more)
    sentence = str(caught.value)
    assert sentence.endswith(".")
    assert "\n" not in sentence
    for word in words:
        assert word in sentence


# Where the data is


@pytest.mark.parametrize("name", ["cifar100", "imagenet_r", "domainnet", "digit_domains"])
def test_without_a_data_root_the_way_to_one_is_named(name, tmp_path):
    refused(name, "", "FEDPROTIP_DATA", f"fedprotip data get {name}")
    refused(name, tmp_path / "nowhere", "nowhere", "is not a folder")
    refused(name, tmp_path, str(tmp_path), "has no", f"fedprotip data get {name}")


def test_the_environment_names_the_root_and_the_setting_wins(tmp_path, monkeypatch):
    trees.cifar_binary(tmp_path)
    monkeypatch.setenv("FEDPROTIP_DATA", str(tmp_path))
    assert len(load_dataset(DataSettings(name="cifar100")).classes) == 100
    refused("cifar100", tmp_path / "other", "data.root")
    monkeypatch.setenv("FEDPROTIP_DATA", str(tmp_path / "gone"))
    refused("cifar100", "", "FEDPROTIP_DATA = ")


# CIFAR-100


def test_both_layouts_of_cifar_hold_the_same(tmp_path):
    made = trees.cifar_binary(tmp_path / "b")
    trees.cifar_python(tmp_path / "p", made)
    for root in (tmp_path / "b", tmp_path / "p", tmp_path / "b" / "cifar-100-binary"):
        found = data("cifar100", root)
        assert found.image_shape == (3, 32, 32)
        assert found.classes[7] == "name_7"
        for part in ("train", "test"):
            pixels, labels = made[part]
            assert getattr(found, f"{part}_images").numpy().tobytes() == pixels.tobytes()
            assert getattr(found, f"{part}_labels").tolist() == labels.tolist()


class Evil:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("function", [os.system, eval, np.load, np.ones], ids=lambda f: f.__name__)
@pytest.mark.parametrize("place", ["root", "value", "deep"])
def test_an_evil_pickle_is_refused_and_does_nothing(tmp_path, function, place):
    trees.cifar_python(tmp_path, trees.cifar_binary(tmp_path / "b"))
    trace = tmp_path / "trace"
    commands = {os.system: f"touch {trace}", eval: f"open({str(trace)!r}, 'w')", np.load: str(trace), np.ones: 3}
    evil = Evil(function, commands[function])
    content = {"root": evil, "value": {b"data": evil}, "deep": {b"data": [{b"a": (evil,)}]}}[place]
    (tmp_path / "cifar-100-python" / "train").write_bytes(pickle.dumps(content, protocol=3))
    refused("cifar100", tmp_path, "cifar-100-python/train", "is refused", "it asks for", f".{function.__name__}.")
    assert not trace.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x02]q\x00.",
        pickle.dumps({b"data": np.zeros((2, 3072), np.uint8)}, 3),
        pickle.dumps({b"data": np.zeros((2, 3072), np.float32), b"fine_labels": [0, 1]}, 3),
        pickle.dumps({b"data": np.zeros((2, 3000), np.uint8), b"fine_labels": [0, 1]}, 3),
        pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"fine_labels": [0, 100]}, 3),
        pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"fine_labels": [0, "x"]}, 3),
        pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"fine_labels": [0, 1]}, 3)[:400],
        pickle.dumps({b"data": np.array([object()]), b"fine_labels": [0]}, 3),
    ],
    ids=range(9),
)
def test_a_damaged_pickle_is_one_sentence(tmp_path, content):
    trees.cifar_python(tmp_path, trees.cifar_binary(tmp_path / "b"))
    (tmp_path / "cifar-100-python" / "train").write_bytes(content)
    refused("cifar100", tmp_path, "cifar-100-python/train")


def test_damaged_binary_files_are_one_sentence(tmp_path):
    trees.cifar_binary(tmp_path)
    folder = tmp_path / "cifar-100-binary"
    whole = (folder / "train.bin").read_bytes()
    for content, word in ((whole[:-1], "multiple of 3074"), (b"", "multiple"), (b"\x00\x64" + whole[2:], "0 to 99")):
        (folder / "train.bin").write_bytes(content)
        refused("cifar100", tmp_path, "train.bin", word)
    (folder / "train.bin").write_bytes(whole)
    (folder / "fine_label_names.txt").write_text("apple\n")
    refused("cifar100", tmp_path, "names 1 classes")
    (folder / "fine_label_names.txt").write_bytes(b"caf\xe9\n")
    refused("cifar100", tmp_path, "fine_label_names.txt is not text in UTF-8")
    (folder / "test.bin").unlink()
    refused("cifar100", tmp_path, "test.bin")
    (folder / "fine_label_names.txt").write_text("\n".join(f"name_{i}" for i in range(100)))
    (folder / "test.bin").mkdir()
    refused("cifar100", tmp_path, "test.bin cannot be read: Is a directory")


def test_limits_choose_by_their_seed_alone(tmp_path):
    made = trees.cifar_binary(tmp_path, train=400)
    few = data("cifar100", tmp_path, train_limit=2, test_limit=1)
    assert np.bincount(few.train_labels).tolist() == [2] * 100
    assert np.bincount(few.test_labels).tolist() == [1] * 100
    assert torch.equal(data("cifar100", tmp_path, train_limit=2).train_images, few.train_images)
    assert not torch.equal(data("cifar100", tmp_path, train_limit=2, seed=1).train_images, few.train_images)
    assert len(data("cifar100", tmp_path, train_limit=9).train_images) == len(made["train"][1])


def test_the_model_may_see_larger_images(tmp_path):
    trees.cifar_binary(tmp_path)
    settings = load({"data": {"name": "cifar100", "root": str(tmp_path), "size": 48}, "stream": {"tasks": 2}})
    stream = build_stream(settings)
    assert stream.dataset.image_shape == (3, 48, 48)
    batch, _ = stream.test_batch(0, np.arange(4))
    assert batch.shape == (4, 3, 48, 48)
    plain = build_stream(load({"data": {"name": "cifar100", "root": str(tmp_path)}, "stream": {"tasks": 2}}))
    small, _ = plain.test_batch(0, np.arange(4))
    assert torch.allclose(torch.nn.functional.interpolate(batch, 32, mode="area").mean(), small.mean(), atol=0.01)


def test_the_real_cifar():
    found = data("cifar100", trees.shared_data("cifar-100-binary"))
    assert np.bincount(found.train_labels).tolist() == [500] * 100
    assert np.bincount(found.test_labels).tolist() == [100] * 100
    assert found.classes[:2] == ["apple", "aquarium_fish"]
    mean = found.train_images[:5000].double().mean((0, 2, 3)) / 255
    assert mean.tolist() == pytest.approx([0.507, 0.487, 0.441], abs=0.01)


# ImageNet-R


def test_imagenet_r_is_split_by_class_and_always_alike(tmp_path):
    folder = trees.imagenet_r(tmp_path, per_class=11)
    found = data("imagenet_r", tmp_path)
    assert isinstance(found.train_images, FileImages)
    assert found.image_shape == (3, 224, 224)
    assert found.classes[3] == "n00000003"
    assert np.bincount(found.train_labels).tolist() == [9] * 200
    assert np.bincount(found.test_labels).tolist() == [2] * 200
    every = found.train_images.paths + found.test_images.paths
    assert sorted(every) == sorted(str(path) for path in folder.rglob("*.jpg"))
    assert data("imagenet_r", tmp_path).test_images.paths == found.test_images.paths
    batch = found.test_images[torch.tensor([0, 399])]
    assert batch.shape == (2, 3, 224, 224)
    assert found.augmentation.resized
    small = data("imagenet_r", tmp_path, size=32)  # in memory, where a crop cannot be cut while decoding
    assert small.train_images.shape[1:] == (3, 32, 32)
    assert (small.augmentation.resized, small.augmentation.pad) == (False, 4)


@pytest.mark.parametrize("tasks", [5, 10, 20])
def test_imagenet_r_in_tasks(tmp_path, tasks):
    trees.imagenet_r(tmp_path, per_class=2)
    settings = load({"data": {"name": "imagenet_r", "root": str(tmp_path)}, "stream": {"tasks": tasks}})
    assert [len(task.classes) for task in build_stream(settings).tasks] == [200 // tasks] * tasks


def test_an_incomplete_imagenet_r_is_one_sentence(tmp_path):
    folder = trees.imagenet_r(tmp_path, per_class=2)
    (folder / "n00000007" / "art_1.jpg").unlink()
    refused("imagenet_r", tmp_path, "n00000007", "one sample")
    (folder / "n00000007" / "art_0.jpg").unlink()
    refused("imagenet_r", tmp_path, "n00000007", "is empty")
    (folder / "n00000007").rmdir()
    refused("imagenet_r", tmp_path, "has 199 folders", "200 belong")


def test_a_corrupt_rendition_is_named_when_it_is_read(tmp_path):
    trees.imagenet_r(tmp_path, per_class=2)
    found = data("imagenet_r", tmp_path)
    broken = found.train_images.paths[5]
    with open(broken, "r+b") as file:
        file.truncate(60)
    with pytest.raises(UsageError, match=r"n00000005/art_0\.jpg cannot be read"):
        found.train_images[torch.arange(10)]


# DomainNet


@pytest.fixture(scope="module")
def domains(tmp_path_factory):
    root = tmp_path_factory.mktemp("domainnet")
    trees.domainnet(root)
    return root


def test_domainnet_has_labelled_domains_in_both_orders_of_the_paper(domains):
    second = ["clipart", "infograph", "painting", "quickdraw", "real", "sketch"]
    for order, expected in (("natural", list(DOMAINS)), (second, second)):
        stream = {"scenario": "domain", "tasks": 6, "order": order}
        found = build_stream(load({"data": {"name": "domainnet", "root": str(domains)}, "stream": stream}))
        assert [task.name for task in found.tasks] == expected
        for task in found.tasks:
            assert (len(task.train), len(task.test), len(task.classes)) == (690, 345, 345)
            paths = found.dataset.train_images.paths
            assert all(f"/{task.name}/kind " in paths[i] for i in task.train)
    assert found.dataset.classes[12] == "kind 12 é"
    images, labels = found.test_batch(2, found.tasks[2].test[:3])
    assert images.shape == (3, 3, 224, 224)
    assert labels.tolist() == [0, 1, 2]


def test_domainnet_is_limited_by_domain(domains, monkeypatch):
    few = data("domainnet", domains, train_limit=100, test_limit=50)
    assert np.bincount(few.train_domains).tolist() == [100] * 6
    assert np.bincount(few.test_domains).tolist() == [50] * 6
    assert data("domainnet", domains, train_limit=100).train_images.paths == few.train_images.paths
    assert data("domainnet", domains, train_limit=100, seed=1).train_images.paths != few.train_images.paths
    monkeypatch.setattr("fedprotip.stream.datasets.domainnet.TRAIN_LIMIT", 300)
    assert len(data("domainnet", domains).train_labels) == 1800


def test_an_incomplete_domainnet_is_one_sentence(domains, tmp_path):
    root = tmp_path / "domainnet"
    root.mkdir()
    for path in (domains / "domainnet").iterdir():
        (root / path.name).symlink_to(path)
    text = (root / "real_test.txt").read_text(encoding="utf-8")
    (root / "real_test.txt").unlink()
    refused("domainnet", tmp_path, "domainnet/real_test.txt")
    for change, words in (
        (text.replace(" 0\n", " 345\n", 1), ["line 1", "label 345", "0 to 344"]),
        (text.replace(" 0\n", " cat\n", 1), ["line 1", "not a path and a label"]),
        (text.replace("test_0.jpg", "gone.jpg", 1), ["gone.jpg", "does not exist"]),
        ("", ["lists no images"]),
    ):
        (root / "real_test.txt").write_text(change, encoding="utf-8")
        refused("domainnet", tmp_path, "real_test.txt", *words)
    (root / "real_test.txt").write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode() + b"\r\n")
    assert len(data("domainnet", tmp_path).test_labels) == 6 * 345
    (root / "real_test.txt").write_bytes(text.encode("latin-1"))
    refused("domainnet", tmp_path, "real_test.txt is not text in UTF-8")
    (root / "real_test.txt").write_text(text, encoding="utf-8")
    for path in sorted(root.glob("*.txt")):
        rest = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.endswith(" 7")]
        path.unlink()
        path.write_text("\n".join(rest), encoding="utf-8")
    refused("domainnet", tmp_path, "Class 7 of DomainNet is empty")
    (root / "sketch").unlink()
    refused("domainnet", tmp_path, "domainnet/sketch")


# Digits


def test_digit_domains_are_three_sources_of_ten_labels(tmp_path):
    trees.digit_files(tmp_path)
    found = data("digit_domains", tmp_path)
    assert found.domains == ("mnist", "usps", "digits")
    assert found.image_shape == (1, 16, 16)
    assert np.bincount(found.train_domains).tolist() == [30, 30, 1352]
    usps = np.load(tmp_path / "usps.npz")
    assert np.array_equal(found.train_images[30:60, 0].numpy(), usps["x_train"])
    assert not found.augmentation.flip


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"y_train": np.full(30, 10)}, "0 to 9"),
        ({"y_train": np.full(30, -1)}, "0 to 9"),
        ({"y_test": np.zeros(29, int)}, "its n labels"),
        ({"x_test": np.zeros((30, 28, 28))}, "uint8"),
        ({"x_test": None}, "x_test"),
    ],
    ids=str,
)
def test_wrong_digit_files_are_one_sentence(tmp_path, change, word):
    trees.digit_files(tmp_path)
    arrays = dict(np.load(tmp_path / "mnist.npz")) | change
    np.savez(tmp_path / "mnist.npz", **{name: array for name, array in arrays.items() if array is not None})
    refused("digit_domains", tmp_path, "mnist.npz", word)
    (tmp_path / "mnist.npz").write_bytes(b"PK nothing")
    refused("digit_domains", tmp_path, "mnist.npz", "is not an npz file of plain arrays")
    (tmp_path / "mnist.npz").unlink()
    refused("digit_domains", tmp_path, "mnist.npz")


def test_the_real_digits():
    found = data("digit_domains", trees.shared_data("mnist.npz", "usps.npz"))
    assert np.bincount(found.train_domains).tolist() == [60000, 7291, 1352]
    assert np.bincount(found.test_domains).tolist() == [10000, 2007, 445]
    scaled = found.train_images.double() / 255
    assert (found.mean[0], found.std[0]) == pytest.approx((scaled.mean().item(), scaled.std().item()), abs=1e-3)
