"""Bad input as a user meets it: `fedprotip run` says one sentence, its exit code is 2, and nothing is written."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fedprotip.models.resnet import ResNet18
from fedprotip.stream import inspection
from tests.small import results
from tests.stream.trees import cifar_binary, class_folders, digit_files, imagenet_r

QUICK = ["stream.tasks=3", "clients.count=2", "model.name=small_cnn", "model.width=4", "train.rounds=2"]
QUICK += ["train.epochs=1", "run.threads=1"]


def sets(*settings):
    return [word for setting in settings for word in ("--set", setting)]


def own(folder, name=""):
    return ["data.name=own", f"data.source={folder / name if name else folder}"]


def no_class_folders(here):
    class_folders(here / "photos", classes=("cat",))
    return own(here, "photos/cat")


def no_columns(here):
    (here / "t.csv").write_text("picture;kind\n1.png;cat\n")
    return own(here, "t.csv")


def few_wordnet_folders(here):
    class_folders(here / "imagenet-r", classes=("n00000001", "n00000002"))
    return ["data.name=imagenet_r", f"data.root={here}"]


def negative_label(here):
    np.savez(here / "d.npz", x=np.zeros((9, 8, 8), np.uint8), y=np.arange(9) % 3 - 1)
    return own(here, "d.npz")


def label_100(here):
    cifar_binary(here)
    with (here / "cifar-100-binary" / "train.bin").open("r+b") as file:
        file.write(bytes([0, 100]))
    return ["data.name=cifar100", f"data.root={here}"]


def digit_ten(here):
    digit_files(here)
    arrays = dict(np.load(here / "usps.npz"))
    np.savez(here / "usps.npz", **arrays | {"y_test": np.full(30, 10)})
    return ["data.name=digit_domains", f"data.root={here}", "stream.scenario=domain"]


def empty_folder(here):
    class_folders(here / "photos")
    (here / "photos" / "eel").mkdir()
    return own(here, "photos")


def class_only_tested(here):
    class_folders(here / "photos" / "train", classes=("cat", "dog"))
    class_folders(here / "photos" / "test", classes=("cat", "dog", "eel"))
    return own(here, "photos")


def empty_rendition(here):
    folder = imagenet_r(here, per_class=2)
    for path in (folder / "n00000042").iterdir():
        path.unlink()
    return ["data.name=imagenet_r", f"data.root={here}"]


def few_samples(here):
    class_folders(here / "photos", per_class=4)
    return [*own(here, "photos"), "clients.count=4"]


def damaged_picture(here, size):
    class_folders(here / "photos", size=size)
    path = here / "photos" / "dog" / "004.png"
    path.write_bytes(path.read_bytes()[:-30])
    return own(here, "photos")


def weights(change, name):
    def make(here):
        class_folders(here / "photos")
        state = change(ResNet18("cifar", 1, 3).state_dict())
        path = here / name
        save_file(state, path) if path.suffix == ".safetensors" else torch.save(state, path)
        if name.startswith("truncated"):
            path.write_bytes(path.read_bytes()[:-5000])
        return [*own(here, "photos"), "model.name=resnet18", f"model.weights={path}"]

    return make


def other_width(state):
    return state | {"layer4.1.conv2.weight": torch.zeros(512, 256, 3, 3)}


def as_it_is(state):
    return state


BAD = {
    "wrong path": (lambda here: own(here, "gone"), ["data.source = ", "gone' does not exist"]),
    "wrong root": (lambda here: ["data.name=cifar100", f"data.root={here / 'gone'}"], ["gone' is not a folder"]),
    "wrong weights path": (lambda here: [f"model.weights={here / 'gone.pth'}"], ["gone.pth' is not a file"]),
    "empty root": (lambda here: ["data.name=domainnet", f"data.root={here}"], ["has no domainnet/clipart and 17 more"]),
    "no class folders": (no_class_folders, ["has no class folders"]),
    "no columns": (no_columns, ["needs the columns path and label; it has picture, kind"]),
    "few WordNet folders": (few_wordnet_folders, ["has 2 folders of WordNet ids", "200 belong there"]),
    "label below 0": (negative_label, ["label -1 of y is out of range"]),
    "label 100": (label_100, ["train.bin: a label is not a whole number from 0 to 99"]),
    "digit 10": (digit_ten, ["usps.npz: a label of y_test is out of range, 0 to 9"]),
    "empty folder": (empty_folder, ["Class 'eel' is empty"]),
    "class without training": (class_only_tested, ["(eel)", "no training samples"]),
    "empty rendition": (empty_rendition, ["Class n00000042 of ImageNet-R is empty"]),
    "few samples": (few_samples, ["3 training samples for 4 clients", "clients.count = 3"]),
    "damaged small picture": (lambda here: damaged_picture(here, (20, 16)), ["dog/004.png cannot be read"]),
    "damaged large picture": (lambda here: damaged_picture(here, (90, 80)), ["dog/004.png cannot be read"]),
    "another architecture": (
        weights(lambda state: {f"x{name}": tensor for name, tensor in state.items()}, "w.safetensors"),
        ["belongs to another architecture: it lacks conv1.weight, bn1.weight and", "it has xbn1.bias"],
    ),
    "another width": (weights(other_width, "w.pth"), ["layer4.1.conv2.weight has shape (512, 256, 3, 3)"]),
    "truncated safetensors": (weights(as_it_is, "truncated.safetensors"), ["truncated.safetensors' is damaged"]),
    "truncated pth": (weights(as_it_is, "truncated.pth"), ["truncated.pth' is damaged"]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_and_nothing_is_written(case, command, tmp_path, monkeypatch):
    make, words = BAD[case]
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDPROTIP_DATA", raising=False)
    settings = make(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    code, out, err = command("run", *sets(*QUICK, *settings))
    assert (code, out) == (2, "")
    (sentence,) = err.strip().splitlines()
    assert sentence.startswith("fedprotip: ")
    assert sentence.endswith(".")
    for word in words:
        assert word in sentence
    assert sorted(tmp_path.rglob("*")) == before


def test_a_picture_that_breaks_during_a_run_stops_it_and_resume_loses_nothing(command, tmp_path, monkeypatch):
    """A source too large to be read before the run: the file is named when its turn comes, and no client is lost."""
    monkeypatch.setattr(inspection, "CHECKED", 0)
    class_folders(tmp_path / "photos", size=(90, 80))
    settings = sets(*QUICK, *own(tmp_path, "photos"), "train.augment=standard")
    assert command("run", *settings, "--out", tmp_path / "undisturbed")[0] == 0

    broken = tmp_path / "photos" / "dog" / "001.png"  # of the second task
    whole = broken.read_bytes()
    broken.write_bytes(whole[:-30])
    code, out, err = command("run", *settings, "--out", tmp_path / "run")
    assert (code, out) == (2, "")
    *progress, sentence = err.strip().splitlines()
    assert all(line.startswith("run: ") for line in progress)
    assert f"{broken} cannot be read as an image" in sentence
    assert "mend it and run or resume again" in sentence
    assert "failure" not in (tmp_path / "run" / "events.jsonl").read_text()
    assert command("resume", tmp_path / "run")[0] == 2  # still broken

    broken.write_bytes(whole)
    assert "training samples of 'dog': 1 changed (dog/001.png)" in command("resume", tmp_path / "run")[2]
    assert command("resume", tmp_path / "run", "--accept-data")[0] == 0
    assert results(tmp_path / "run") == results(tmp_path / "undisturbed")
