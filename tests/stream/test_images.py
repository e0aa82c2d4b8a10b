"""Image files: every kind becomes RGB, a broken one is one sentence, and threads change nothing."""

import subprocess
import sys
import time
from zlib import crc32

import numpy as np
import pytest
import torch
from PIL import Image

from fedprotip.errors import UsageError
from fedprotip.settings import load
from fedprotip.stream import build_stream, images
from fedprotip.stream.datasets import Dataset
from fedprotip.stream.images import FileImages, ahead, open_rgb, photos
from fedprotip.stream.transforms import LARGE_PHOTOS, draw
from tests.stream.trees import picture


def test_every_kind_of_file_becomes_rgb(tmp_path):
    kinds = {"RGB": "a.jpg", "L": "b.jpg", "CMYK": "c.jpg", "P": "d.png", "1": "e.png", "RGBA": "f.png", "LA": "g.png"}
    for mode, name in kinds.items():
        image = open_rgb(str(picture(tmp_path / name, mode=mode)))
        assert (image.mode, image.size) == ("RGB", (12, 10))
    plain = np.asarray(open_rgb(str(picture(tmp_path / "h.png")))).astype(int)
    cmyk = np.asarray(open_rgb(str(picture(tmp_path / "i.jpg", mode="CMYK", quality=100)))).astype(int)
    assert np.abs(plain - cmyk).mean() < 12  # not inverted


def test_sixteen_bits_and_transparent_palettes(tmp_path):
    deep = np.array([[0, 65535], [32768, 256]], np.uint16)
    Image.fromarray(deep).save(tmp_path / "deep.png")
    assert np.asarray(open_rgb(str(tmp_path / "deep.png")))[:, :, 0].tolist() == [[0, 255], [128, 1]]
    picture(tmp_path / "p.png", mode="P", transparency=b"\x00\x80")
    assert open_rgb(str(tmp_path / "p.png")).mode == "RGB"


UNTURN = [Image.Transpose.FLIP_LEFT_RIGHT, Image.Transpose.ROTATE_180, Image.Transpose.FLIP_TOP_BOTTOM]
UNTURN += [Image.Transpose.TRANSPOSE, Image.Transpose.ROTATE_90, Image.Transpose.TRANSVERSE, Image.Transpose.ROTATE_270]


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "cannot be written again"])
@pytest.mark.parametrize("turn", range(1, 9))
def test_exif_says_how_to_turn(tmp_path, monkeypatch, turn, whole):
    """Pillow turns, and then writes EXIF without the turn; when that fails the image is turned all the same."""
    upright = picture(tmp_path / "upright.png", (12, 8))
    exif = Image.Exif()
    exif[0x0112] = turn
    stored = Image.open(upright)
    if turn > 1:
        stored = stored.transpose(UNTURN[turn - 2])
    stored.save(tmp_path / "stored.png", exif=exif)
    if not whole:
        monkeypatch.delattr(Image.Exif, "tobytes")
    assert np.array_equal(np.asarray(open_rgb(str(tmp_path / "stored.png"))), np.asarray(open_rgb(str(upright))))


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
@pytest.mark.parametrize("rest", [b"MM\x00*\x00\x00\x00\x08\xff\xff\x01\x12", b"garbage and more"])
def test_broken_exif_does_not_cost_the_image(tmp_path, rest):
    path = picture(tmp_path / "a.jpg", exif=b"Exif\x00\x00" + rest)
    assert open_rgb(str(path)).size == (12, 10)


@pytest.mark.parametrize("damage", ["truncated", "text", "empty", "missing", "folder"])
def test_a_file_that_cannot_be_decoded_is_one_sentence_with_its_name(tmp_path, damage):
    path = picture(tmp_path / "ünlesbar.jpg", (64, 64))
    raw = path.read_bytes()
    path.write_bytes({"truncated": raw[: len(raw) // 2], "text": b"hello"}.get(damage, b""))
    if damage in ("missing", "folder"):
        path.unlink()
    if damage == "folder":
        path.mkdir()
    with pytest.raises(UsageError) as caught:
        FileImages([str(path)], (8, 8), (8, 8))[torch.tensor([0])]
    sentence = str(caught.value)
    assert sentence.startswith(f"{path} cannot be read as an image (")
    assert sentence.endswith(".")
    assert "\n" not in sentence
    assert images.why_unreadable(str(path)) in sentence
    assert images.why_unreadable(str(picture(tmp_path / "fine.png"))) == ""


def test_the_middle_is_what_resize_and_centre_crop_give(tmp_path):
    path = picture(tmp_path / "wide.png", (400, 300))
    found = photos([str(path)], None, 2)[torch.tensor([0])]
    assert found.shape == (1, 3, 224, 224)
    resized = Image.open(path).resize((341, 256), Image.Resampling.BILINEAR)
    expected = np.asarray(resized)[16:240, 58:282].transpose(2, 0, 1)
    assert np.array_equal(found[0].numpy(), expected)
    tiny = photos([str(picture(tmp_path / "tiny.png", (3, 200)))], None, 1)
    assert tiny[torch.tensor([0])].shape == (1, 3, 224, 224)


def test_it_is_indexed_like_a_tensor(tmp_path):
    paths = [str(picture(tmp_path / f"{i}.png", seed=i)) for i in range(5)]
    files = FileImages(paths, (6, 6), (8, 8), workers=3)
    every = files[torch.arange(5)]
    assert files.shape == every.shape == (5, 3, 6, 6)
    assert len(files) == 5
    chosen = torch.tensor([3, 0, 3])
    assert torch.equal(files[chosen], every[chosen])
    assert torch.equal(files.take(np.array([4, 1]))[torch.tensor([1])], every[[1]])
    assert files[chosen[:0]].shape == (0, 3, 6, 6)


def dataset_of(paths, size=16):
    files, labels = photos(paths, (size, size), 4), torch.arange(len(paths)) % 2
    return Dataset("files", ["a", "b"], files, labels, files, labels, (0.5,) * 3, (0.5,) * 3, augmentation=LARGE_PHOTOS)


def test_results_do_not_depend_on_threads_or_on_their_timing(tmp_path, monkeypatch):
    paths = [str(picture(tmp_path / f"{i}.jpg", (40, 30), seed=i)) for i in range(12)]
    settings = load({"stream": {"tasks": 1}, "train": {"augment": "standard"}})
    batches = [np.array(part) for part in ([0, 5, 2, 9], [1, 3], [11, 10, 4, 6, 7])]

    def run(workers, slow):
        plain = open_rgb

        def late(path):
            time.sleep(crc32(path.encode()) % 7 / 500 if slow else 0)
            return plain(path)

        dataset = dataset_of(paths)
        object.__setattr__(dataset.train_images, "workers", workers)
        with monkeypatch.context() as patch:
            patch.setattr(images, "open_rgb", late)
            generator = torch.Generator().manual_seed(3)
            return list(build_stream(settings, dataset).train_batches(0, batches, generator))

    first = run(1, False)
    for other in (run(4, True), run(3, True)):
        assert all(torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in zip(first, other, strict=True))
    generator = torch.Generator().manual_seed(3)
    one_by_one = [build_stream(settings, dataset_of(paths)).train_batch(0, batch, generator) for batch in batches]
    assert all(torch.equal(a, c) for (a, _), (c, _) in zip(first, one_by_one, strict=True))


def test_a_random_resized_crop_is_that_of_its_box(tmp_path):
    path = str(picture(tmp_path / "a.png", (40, 30)))
    draws = draw(1, torch.Generator().manual_seed(0))
    found = FileImages([path], (16, 16), (18, 18)).request(torch.tensor([0]), draws)()
    box = images.resized_box(40, 30, draws.position[0].tolist(), draws.boxes[0].tolist())
    expected = Image.open(path).resize((16, 16), Image.Resampling.BILINEAR, box=box)
    assert np.array_equal(found[0].numpy(), np.asarray(expected).transpose(2, 0, 1))


def test_all_formats_are_known_before_threads_open_files():
    """Else Pillow looks for them at the first WebP, and a thread that asks meanwhile takes its file for damaged."""
    code = (
        "from PIL import Image; from fedprotip.stream import images; before = 'WEBP' in Image.ID; "
        "images._pool(2); print(before, 'WEBP' in Image.ID)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["False", "True"]


def test_the_next_is_begun_before_this_one_is_used():
    begun = []

    def requests():
        for i in range(3):
            begun.append(i)
            yield lambda i=i: i

    results = ahead(requests())
    assert next(results) == 0
    assert begun == [0, 1]
    assert list(results) == [1, 2]
    assert list(ahead(iter([]))) == []
