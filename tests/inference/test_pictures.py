"""Whatever is called an image arrives as the same pixels."""

import io
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

import fedprotip
from fedprotip.inference.pictures import as_pixels
from fedprotip.stream.plan import Pixels

GREY = Pixels(shape=(1, 8, 8), given=(1, 8, 8), mean=(0.5,), std=(0.5,))
COLOUR = Pixels(shape=(3, 12, 10), given=(3, 12, 10), mean=(0.5,), std=(0.5,), fit="crop")
ENLARGED = Pixels(shape=(3, 24, 20), given=(3, 12, 10), mean=(0.5,), std=(0.5,), fit="stretch")


@pytest.fixture
def colour():
    return np.random.default_rng(0).integers(0, 256, (12, 10, 3), dtype=np.uint8)


def test_files_arrays_tensors_and_pillow_images_are_the_same_pixels(colour, tmp_path):
    expected = torch.from_numpy(colour).permute(2, 0, 1)[None]
    Image.fromarray(colour).save(tmp_path / "one.png")
    ways = {
        "file": str(tmp_path / "one.png"),
        "path": tmp_path / "one.png",
        "files": [tmp_path / "one.png"],
        "pillow": Image.fromarray(colour),
        "one, channels last": colour,
        "one, channels first": expected[0],
        "batch": expected.numpy(),
        "batch, channels last": colour[None],
        "floats to 1": expected.float() / 255,
        "floats to 255": expected.double(),
        "list of arrays": [colour],
    }
    for name, given in ways.items():
        assert torch.equal(as_pixels(given, COLOUR), expected), name


def test_a_list_may_mix_what_it_holds(colour, tmp_path):
    Image.fromarray(colour).save(tmp_path / "one.png")
    found = as_pixels([tmp_path / "one.png", Image.fromarray(colour), colour, torch.from_numpy(colour)], COLOUR)
    assert found.shape == (4, 3, 12, 10)
    assert (found == found[:1]).all()


def test_grey_runs_take_colour_and_colour_runs_take_grey(colour):
    assert as_pixels(colour, GREY).shape == (1, 1, 8, 8)
    grey = as_pixels(colour[:, :, 0], COLOUR)
    assert grey.shape == (1, 3, 12, 10)
    assert torch.equal(grey[0, 0], grey[0, 2])
    assert as_pixels(np.zeros((5, 8, 8), np.uint8), GREY).shape == (5, 1, 8, 8)
    assert as_pixels(np.zeros((5, 12, 10), np.uint8), COLOUR).shape == (5, 3, 12, 10)
    clear = np.dstack([colour, np.zeros((12, 10), np.uint8)])
    assert (as_pixels(clear, COLOUR) == 255).all()


@pytest.mark.parametrize("pixels", [GREY, COLOUR, ENLARGED], ids=["grey", "crop", "stretch"])
@pytest.mark.parametrize("size", [(40, 30), (5, 7), (1, 1), (12, 100)])
def test_another_size_is_brought_to_that_of_training_as_files_are(tmp_path, pixels, size):
    image = np.random.default_rng(1).integers(0, 256, (*size, 3), dtype=np.uint8)
    Image.fromarray(image).save(tmp_path / "one.png")
    found = as_pixels(tmp_path / "one.png", pixels)
    assert found.shape == (1, *pixels.given)
    assert torch.equal(found, as_pixels(Image.fromarray(image), pixels))
    if min(size) > 4:
        assert torch.equal(found, as_pixels(image, pixels))


@pytest.mark.parametrize("given", [[], np.zeros((0, 8, 8)), torch.zeros(0, 1, 8, 8)])
def test_no_image_is_a_sentence(given):
    with pytest.raises(fedprotip.UsageError, match="no image"):
        as_pixels(given, GREY)


@pytest.mark.parametrize(
    "given", [7, [7], [None], {"a": 1}, [np.zeros((2, 8, 8))], np.full((8, 8), np.nan), ["gone.png"]]
)
def test_what_is_no_image_is_a_sentence(given):
    with pytest.raises(fedprotip.UsageError):
        as_pixels(given, GREY)


@pytest.mark.parametrize("given", [b"\x89PNG", io.BytesIO()])
def test_bytes_and_open_files_are_named_as_what_they_are(given):
    with pytest.raises(fedprotip.UsageError, match=f"not {type(given).__name__}"):
        as_pixels(given, GREY)


@pytest.mark.parametrize("opened", [False, True])
def test_a_broken_file_is_a_sentence_that_speaks_of_no_training(tmp_path, opened):
    path = tmp_path / "a.jpg"
    Image.effect_noise((90, 90), 50).save(path)
    path.write_bytes(path.read_bytes()[:1500])
    with pytest.raises(fedprotip.UsageError, match=r"a\.jpg cannot be read as an image") as told:
        as_pixels(Image.open(path) if opened else path, GREY)
    assert "resume" not in str(told.value)


def test_answering_imports_nothing_that_trains():
    code = (
        "import sys, fedprotip; fedprotip.load;"
        "bad = ('fedprotip.' + n for n in ('methods', 'federation', 'evaluation', 'report', 'api', 'stream.datasets'));"
        "print([n for n in (*bad, 'matplotlib', 'sklearn', 'rich', 'typer') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_is_there():
    assert all(getattr(fedprotip, name) is not None for name in fedprotip.__all__)
    assert set(fedprotip.__all__) <= set(dir(fedprotip))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = fedprotip.nothing
