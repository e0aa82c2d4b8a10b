"""Files from strangers: what can be read is read right, the rest is one sentence, and nothing fills the memory."""

import os
import pickle
import zipfile

import numpy as np
import pytest
from PIL import Image

import fedprotip
from fedprotip.errors import UsageError
from fedprotip.settings import DataSettings
from fedprotip.stream import images, tables
from fedprotip.stream.datasets import load_dataset
from fedprotip.stream.images import middle, open_rgb, why_unreadable
from fedprotip.stream.tables import read_source
from tests.stream.trees import cifar_binary, cifar_python, class_folders, digit_files, picture
from tests.watchdog import in_time


def refused(source):
    with pytest.raises(fedprotip.UsageError) as caught:
        load_dataset(DataSettings(name="own", source=str(source)))
    sentence = str(caught.value)
    assert sentence.endswith(".")
    assert len(sentence) < 700
    return sentence


# Pictures


@pytest.mark.parametrize("name", ["deep.png", "deep.tif"])
def test_16_bits_are_scaled_however_pillow_reads_them(tmp_path, name):
    deep = np.array([[0, 65535], [32768, 256]], np.uint16)
    Image.fromarray(deep).save(tmp_path / name)
    expected = [[0, 255], [128, 1]]
    assert np.asarray(open_rgb(str(tmp_path / name)))[..., 0].tolist() == expected
    with Image.open(tmp_path / name) as image:
        wide = Image.fromarray(np.asarray(image).astype(np.int32))
    wide.save(tmp_path / "wide.tif")  # mode I, as Pillow before 11 reads 16 bits of PNG
    assert np.asarray(open_rgb(str(tmp_path / "wide.tif")))[..., 0].tolist() == expected


def test_pixels_without_a_known_white_are_refused(tmp_path):
    Image.fromarray(np.array([[0, 70000]], np.int32)).save(tmp_path / "i.tif")
    Image.fromarray(np.array([[0.0, 1.0]], np.float32)).save(tmp_path / "f.tif")
    assert "32 bits; save it with 8 or 16" in why_unreadable(str(tmp_path / "i.tif"))
    assert "floating-point numbers" in why_unreadable(str(tmp_path / "f.tif"))


def test_of_an_animation_the_first_picture_is_read(tmp_path):
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    for name in ("a.gif", "a.webp", "a.tif", "a.png"):
        lossless = {"lossless": True} if name.endswith("webp") else {}
        frames[0].save(tmp_path / name, save_all=True, append_images=frames[1:], **lossless)
        assert np.asarray(open_rgb(str(tmp_path / name)))[0, 0].tolist() == [255, 0, 0]


def test_an_empty_file_is_called_empty(tmp_path):
    (tmp_path / "a.png").touch()
    with pytest.raises(fedprotip.UsageError, match=r"a\.png cannot be read as an image \(it is empty\)"):
        open_rgb(str(tmp_path / "a.png"))


def test_a_picture_that_is_a_program_is_not_run(tmp_path):
    path = tmp_path / "a.jpg"
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n")
    assert why_unreadable(str(path)) == "unknown or damaged format"


def test_a_bomb_of_pixels_is_not_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10_000)
    Image.new("1", (400, 100)).save(tmp_path / "a.png")
    assert "exceeds limit" in why_unreadable(str(tmp_path / "a.png"))


@pytest.mark.parametrize("shape", [(40_000, 1), (1, 40_000), (30_000, 2)])
def test_a_thread_of_pixels_is_cut_before_it_is_scaled(shape, monkeypatch):
    """Scaled to a shorter side of 256 it would have gigabytes."""
    resized = []
    real = Image.Image.resize
    monkeypatch.setattr(
        Image.Image, "resize", lambda self, size, *a, **k: resized.append(size) or real(self, size, *a, **k)
    )
    thread = Image.new("RGB", shape, "red")
    assert middle(thread, (32, 32), (28, 28)).shape == (3, 28, 28)
    assert middle(thread, (32, 32), (28, 28))[0].min() == 255
    assert max(map(max, resized)) <= 32 * images.LONGEST


# Folders


def test_a_folder_that_holds_itself_is_refused(tmp_path):
    class_folders(tmp_path / "photos", size=(8, 8))
    (tmp_path / "photos" / "again").symlink_to(tmp_path / "photos")
    assert "'again' is a link to where" in refused(tmp_path / "photos")
    (tmp_path / "photos" / "again").unlink()
    (tmp_path / "photos" / "second").symlink_to("dog")
    assert "'second' is a link to where" in refused(tmp_path / "photos")
    (tmp_path / "photos" / "second").unlink()
    (tmp_path / "photos" / "self").symlink_to("self")
    (tmp_path / "photos" / "dog" / "up").symlink_to("..")
    (tmp_path / "photos" / "dog" / "folder.png").mkdir()
    assert len(load_dataset(DataSettings(name="own", source=str(tmp_path / "photos"))).classes) == 3


def test_images_that_are_no_files_are_not_passed_over(tmp_path):
    class_folders(tmp_path / "photos", size=(8, 8))
    odd = tmp_path / "photos" / "dog" / "odd.png"
    for make in (
        lambda: odd.symlink_to("odd.png"),
        lambda: odd.symlink_to("nowhere"),
        lambda: odd.symlink_to("/dev/zero"),
        lambda: os.mkfifo(odd),
    ):
        make()
        assert "odd.png is called an image but is no file" in refused(tmp_path / "photos")
        odd.unlink()


@pytest.mark.parametrize("kind", ["csv", "npz", "parquet"])
def test_a_pipe_or_a_device_keeps_nobody_waiting(tmp_path, kind):
    pipe, zeros = tmp_path / f"pipe.{kind}", tmp_path / f"zeros.{kind}"
    os.mkfifo(pipe)
    zeros.symlink_to("/dev/zero")
    for source in (pipe, zeros):
        with in_time(20):
            assert "is a pipe or a device, no plain file" in refused(source)


def test_a_pipe_among_the_files_of_a_dataset_counts_as_missing(tmp_path):
    (tmp_path / "cifar-100-python").mkdir()
    for name in ("train", "test", "meta"):
        os.mkfifo(tmp_path / "cifar-100-python" / name)
    with in_time(20), pytest.raises(UsageError, match="has no cifar-100"):
        load_dataset(DataSettings(name="cifar100", root=str(tmp_path)))


def test_a_class_may_be_a_link_to_another_place(tmp_path):
    class_folders(tmp_path / "photos", size=(8, 8))
    class_folders(tmp_path / "elsewhere", classes=("eel",), size=(8, 8))
    (tmp_path / "photos" / "eel").symlink_to(tmp_path / "elsewhere" / "eel")
    assert "eel" in load_dataset(DataSettings(name="own", source=str(tmp_path / "photos"))).classes


# Tables


def npz(path, **arrays):
    np.savez(path, **({"x": np.zeros((8, 4, 4), np.uint8), "y": np.arange(8) % 2} | arrays))
    return path


ODD = {
    "objects": (
        {"y": np.array([0, 1, "a", None] * 2, object)},
        "plain arrays (it holds Python objects; save names as text",
    ),
    "not a number": ({"x": np.full((8, 4, 4), np.nan)}, "holds NaN or infinite values"),
    "complex": ({"x": np.zeros((8, 4, 4), complex)}, "must be images of whole numbers or floats"),
    "records": ({"x": np.zeros((8, 4, 4), [("a", "u1")])}, "must be images of whole numbers or floats"),
    "no pixels": ({"x": np.zeros((8, 0, 4), np.uint8)}, "have no pixels"),
    "no task": ({"task": np.array([0, np.nan] * 4)}, "has no task"),
    "half a character": ({"y": np.array(["a", "\ud800"] * 4)}, "not text in UTF-8"),
    "half a client": ({"client": np.array(["a", "\udfff"] * 4)}, "not text in UTF-8"),
    "NUL": ({"y": np.array(["a", "a\0b"] * 4)}, "not text in UTF-8 without NUL"),
    "no label": ({"y": np.array(["a", ""] * 4)}, "has no label"),
    "another split": ({"split": np.array(["train", "x" * 9999] * 4)}, "has split 'xxx"),
    "numbers": ({"y": np.linspace(0, 1, 8)}, "whole numbers or names"),
    "times": ({"y": np.array(["2020-01-01"] * 8, "M8[D]")}, "whole numbers or names"),
    "a single number": ({"y": np.array(3)}, "one per image"),
}


@pytest.mark.parametrize("case", ODD)
def test_odd_arrays_are_refused(tmp_path, case):
    arrays, words = ODD[case]
    assert words in refused(npz(tmp_path / "d.npz", **arrays))


def test_labels_of_both_parts_are_checked(tmp_path):
    x, y = np.zeros((4, 4, 4), np.uint8), np.array(["a", "a", "", ""])
    np.savez(tmp_path / "d.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    assert "has no label" in refused(tmp_path / "d.npz")


def test_a_label_of_many_digits_is_a_name(tmp_path):
    npz(tmp_path / "d.npz", y=np.array(["9" * 5000, "10"] * 4))
    assert load_dataset(DataSettings(name="own", source=str(tmp_path / "d.npz"))).classes == ["10", "9" * 5000]


def header(shape):
    text = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


def test_arrays_that_claim_or_unpack_to_more_than_there_is_are_refused(tmp_path, monkeypatch):
    path = npz(tmp_path / "d.npz")
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x.npy", header((10**13, 4, 4)))
    assert "not an npz file of plain arrays" in refused(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("x.npy", header((10, 1000, 1000)) + bytes(10**7))
    monkeypatch.setattr(tables, "machine_bytes", lambda: 10**6)
    assert "would unpack to 10,000,1" in refused(path)


def test_tables_that_are_none(tmp_path):
    picture(tmp_path / "a.png")
    for text, words in (
        ("path,label,label\na.png,x,y\n", "two columns that are 'label'"),
        ("path,label\n\0,x\n", "does not exist"),
        ("path,label\n" + "a" * 5000 + ".png,x\n", "File name too long"),
        ("path,label\na.png\n", "has no label"),
        ("path,label\na.png,x,y\n", "more than the 2 entries"),
        ("path,label\n.,x\n", "does not exist"),
        ("path,label\n" + '"' + "a" * 200_000, "not a CSV file"),
        ("\n\n", "needs the columns"),
        ("\npath,label\na.png,x\n", "needs the columns path and label; it has none"),
        ("# mine\npath,label\na.png,x\n", "needs the columns path and label; it has # mine"),
        ("", "needs the columns"),
    ):
        (tmp_path / "t.csv").write_text(text)
        assert words in refused(tmp_path / "t.csv")
    for name in ("t.npz", "t.csv"):
        (tmp_path / name).write_bytes(b"PK\x03\x04" + bytes(range(256)))
        assert refused(tmp_path / name)
    with pytest.raises(fedprotip.UsageError, match=r"needs data\.source"):
        read_source("  ")


# Official files


def test_pickles_of_other_things_are_refused(tmp_path):
    made = cifar_binary(tmp_path / "made")
    cifar_python(tmp_path, made)
    folder = tmp_path / "cifar-100-python"
    pixels = np.zeros((2, 3072), np.uint8)
    good = {name: (folder / name).read_bytes() for name in ("meta", "train")}
    for name, content in (
        ("meta", {b"fine_label_names": 5}),
        ("meta", {b"fine_label_names": [[b"x"]] * 100}),
        ("meta", {b"fine_label_names": [b"\xff"] * 100}),
        ("meta", [1, 2]),
        ("train", {b"data": pixels, b"fine_labels": [[1], [2, 3]]}),
        ("train", {b"data": pixels, b"fine_labels": [[1], [2]]}),
        ("train", {b"data": pixels, b"fine_labels": [1, 10**30]}),
        ("train", {b"data": pixels[:0], b"fine_labels": []}),
        ("train", {b"data": 5, b"fine_labels": 5}),
    ):
        raw = pickle.dumps(content, protocol=3).replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
        (folder / name).write_bytes(raw)
        with pytest.raises(fedprotip.UsageError):
            load_dataset(DataSettings(name="cifar100", root=str(tmp_path)))
        (folder / name).write_bytes(good[name])
    load_dataset(DataSettings(name="cifar100", root=str(tmp_path)))


def test_digits_without_pixels_are_refused(tmp_path):
    digit_files(tmp_path)
    arrays = dict(np.load(tmp_path / "usps.npz"))
    np.savez(tmp_path / "usps.npz", **arrays | {"x_test": np.zeros((30, 0, 16), np.uint8)})
    with pytest.raises(fedprotip.UsageError, match="x_test must be uint8"):
        load_dataset(DataSettings(name="digit_domains", root=str(tmp_path)))
