"""Any picture: of any shape, in files and in arrays, learned from and asked about by one rule."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

import fedprotip
from fedprotip.settings import load
from fedprotip.store.folder import RunFolder
from fedprotip.stream import build_stream
from fedprotip.stream.images import FileImages, open_rgb, usual_shape
from fedprotip.stream.transforms import fitted
from tests.stream.trees import class_folders, picture

QUICK = ("stream.tasks=2", "clients.count=2", "model.width=8", "train.rounds=1", "train.epochs=1", "run.threads=1")


@pytest.fixture
def learned(command, tmp_path, monkeypatch):
    """A quick run over a source: its folder."""
    monkeypatch.setattr("fedprotip.api.write_report", lambda path: None)

    def run(source, *more):
        words = [word for one in (*QUICK, f"data.source={source}", *more) for word in ("--set", one)]
        code, _, err = command("run", *words, "--out", tmp_path / "run")
        assert code == 0, err
        return tmp_path / "run"

    return run


def shape_in(folder):
    return json.loads((folder / "plan.json").read_text())["pixels"]["shape"]


# Shapes


@pytest.mark.parametrize(
    ("more", "shape"),
    [((), [3, 17, 23]), (("data.size=12",), [3, 12, 12]), (("data.size=[12, 20]", "data.fit=pad"), [3, 12, 20])],
)
@pytest.mark.parametrize("model", ["small_cnn", "mlp"])
def test_a_picture_of_17_by_23_stays_one(learned, tmp_path, more, shape, model):
    class_folders(tmp_path / "photos", classes=("a", "b", "c", "d"), size=(23, 17))
    folder = learned(tmp_path / "photos", f"model.name={model}", "train.augment=standard", *more)
    assert shape_in(folder) == shape
    assert len(fedprotip.load(folder).predict(torch.zeros(2, *shape, dtype=torch.uint8))) == 2


def test_a_later_picture_of_another_shape_changes_nothing(learned, command, tmp_path):
    class_folders(tmp_path / "photos", classes=("a", "b", "c", "d"), size=(23, 17))
    folder = learned(tmp_path / "photos", "stream.task_size=1")
    for path in (tmp_path / "photos" / "c").iterdir():
        picture(path, (40, 30))
    code, _, err = command("extend", folder)
    assert code == 0, err
    assert shape_in(folder) == [3, 17, 23]


def test_a_run_that_cut_images_in_another_way_is_not_mixed(learned, command, tmp_path):
    """As a folder from before `data.fit` looks: it answers, but sees no images cut in the new way."""
    folder = learned(class_folders(tmp_path / "photos", classes=("a", "b", "c")), "stream.task_size=1")
    run = RunFolder.open(folder)
    former = run.manifest().settings.replace('fit = "crop"\n', "")
    (folder / "settings.toml").write_text(former, encoding="utf-8")
    run.write_manifest("finished", former)
    assert command("resume", folder)[0] == 0
    code, _, err = command("extend", folder)
    assert code == 2
    assert "was begun by a version that cut own images in another way" in err
    run.write_manifest("running", former)
    assert "cut own images in another way" in command("resume", folder)[2]


@pytest.mark.parametrize("fit", ["crop", "pad", "stretch"])
def test_a_wide_picture_becomes_a_square(tmp_path, fit):
    wide = np.zeros((10, 20, 3), np.uint8)
    wide[:, :5], wide[:, 5:15], wide[:, 15:] = 50, 150, 250
    Image.fromarray(wide).save(tmp_path / "wide.png")
    found = FileImages([str(tmp_path / "wide.png")], (10, 10), (10, 10), fit)[torch.tensor([0])]
    given = torch.from_numpy(wide).permute(2, 0, 1)[None].float()
    for image in (found.float(), fitted(given, (10, 10), fit)):
        assert image.shape == (1, 3, 10, 10)
        seen = image[0, 0, 5].tolist()
        if fit == "crop":
            assert set(seen) == {150.0}
        else:
            assert seen[0] == pytest.approx(50, abs=3)
            assert seen[-1] == pytest.approx(250, abs=3)
        assert (image[0, 0, 0].max() == 0) == (fit == "pad")


def test_the_usual_shape_is_that_of_most_pictures(tmp_path):
    paths = [str(picture(tmp_path / f"{i}.png", (23, 17))) for i in range(4)]
    paths += [str(picture(tmp_path / f"other{i}.png", (10, 30 + i))) for i in range(3)]
    assert usual_shape(paths)[0] == (17, 23)
    assert usual_shape(paths[3:])[0] == (17, 17)  # none has half of them
    large = [str(picture(tmp_path / "large.png", (800, 600)))]
    assert usual_shape(large) == ((224, 299), [(224, 299)])
    (tmp_path / "broken.png").write_bytes(b"x")
    assert usual_shape([str(tmp_path / "broken.png"), *paths])[0] == (17, 23)
    assert usual_shape([str(tmp_path / "broken.png")]) == (None, [])


def test_a_picture_on_its_side_has_the_shape_it_is_looked_at(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    path = picture(tmp_path / "turned.jpg", (23, 17), exif=exif)
    assert usual_shape([str(path)])[0] == (23, 17)
    assert open_rgb(str(path)).size == (17, 23)


def test_pictures_of_several_shapes_are_told(command, tmp_path):
    class_folders(tmp_path, classes=("a", "b"), per_class=15)
    picture(tmp_path / "a" / "000.png", (40, 10))
    found = json.loads(command("data", "check", tmp_path, "--json")[1])
    assert any("(10×12, 10×40); all become 10×12, and" in note and "data.fit" in note for note in found["notes"])


def test_a_transformer_says_what_it_needs(command, tmp_path):
    class_folders(tmp_path / "photos", classes=("a", "b", "c", "d"), size=(23, 17))
    words = [w for one in (*QUICK, f"data.source={tmp_path / 'photos'}", "model.name=vit") for w in ("--set", one)]
    code, _, err = command("run", *words)
    assert code == 2
    assert "Images of 17×23 do not divide into patches" in err


@pytest.mark.parametrize("more", [(), ("data.fit=pad",), ("data.size=70",), ("data.size=[12, 20]", "data.fit=stretch")])
def test_files_are_asked_about_as_they_were_learned(learned, tmp_path, more):
    source = class_folders(tmp_path / "photos", classes=("a", "b", "c", "d"), size=(23, 17))
    wide = picture(source / "a" / "000.png", (40, 17))
    folder = learned(source, *more)
    predictor = fedprotip.load(folder)
    stream = build_stream(load(RunFolder.open(folder).settings()))
    images = stream.dataset.train_images
    expected = images[torch.tensor([0])]
    assert torch.equal(predictor.read([wide]), expected)
    assert predictor.predict(predictor.read([wide, wide])) == predictor.predict(torch.cat([expected, expected]))


# Colours


@pytest.mark.parametrize("mode", ["LA", "RGBA", "P"])
def test_what_is_transparent_shows_white(tmp_path, mode):
    image = Image.new("RGBA", (6, 6), (0, 0, 0, 0))
    image.putpixel((0, 0), (0, 0, 0, 255))
    image.convert(mode).save(tmp_path / "clear.png")
    found = np.asarray(open_rgb(str(tmp_path / "clear.png")))
    assert found[0, 0].tolist() == [0, 0, 0]
    assert found[5, 5].tolist() == [255, 255, 255]


@pytest.mark.parametrize("name", ["deep.png", "deep.tif"])
def test_all_of_16_bits_is_used(tmp_path, name):
    deep = (np.arange(256, dtype=np.uint16) * 257).reshape(16, 16)
    Image.fromarray(deep).save(tmp_path / name)
    assert np.array_equal(np.asarray(open_rgb(str(tmp_path / name)))[..., 0], np.arange(256).reshape(16, 16))


# Arrays


def arrays(path, kind):
    x = np.random.default_rng(0).integers(0, 256, (60, 7, 9), dtype=np.uint8)
    forms = {"uint8": x, "uint16": x.astype(np.uint16) * 257, "unit": x / 255, "float": x.astype(np.float32)}
    np.savez(path, x=forms[kind], y=np.arange(60) % 4)
    return {name: torch.from_numpy(form[:5]) for name, form in forms.items()}


@pytest.mark.parametrize("kind", ["uint8", "uint16", "unit", "float"])
def test_arrays_are_learned_and_asked_about_alike(learned, tmp_path, kind):
    asked = arrays(tmp_path / "d.npz", kind)
    folder = learned(tmp_path / "d.npz")
    predictor = fedprotip.load(folder)
    answers = [predictor.predict(form[:, None]) for form in asked.values()]
    answers += [predictor.predict(form) for form in asked.values()]  # grey images need no channel
    assert all(found == answers[0] for found in answers)
    arrays(tmp_path / "plain.npz", "uint8")
    settings = {"data": {"name": "own"}, "stream": {"tasks": 2}}
    one, other = (
        build_stream(load(settings, [f"data.source={tmp_path / name}"])).dataset for name in ("d.npz", "plain.npz")
    )
    assert torch.equal(one.train_images, other.train_images)


def test_a_question_that_cannot_be_told_is_refused(learned, tmp_path):
    asked = arrays(tmp_path / "d.npz", "uint8")["unit"][:, None]
    predictor = fedprotip.load(learned(tmp_path / "d.npz"))
    for wrong, words in (
        (asked * 2.7, "cannot be told"),
        (asked - 0.5, "cannot be told"),
        (asked * torch.nan, "NaN or infinite"),
        (asked.expand(-1, 5, -1, -1), "1 to 4 channels"),
    ):
        with pytest.raises(fedprotip.UsageError, match=words):
            predictor.predict(wrong)


def test_arrays_with_a_fit_are_asked_about_as_they_were_learned(learned, tmp_path):
    asked = arrays(tmp_path / "d.npz", "uint8")["uint8"][:, None]
    folder = learned(tmp_path / "d.npz", "data.size=12", "data.fit=pad")
    pixels = fedprotip.load(folder).plan.pixels
    assert (pixels.shape, pixels.given, pixels.fit) == ((1, 12, 12), (1, 7, 9), "pad")
    seen = pixels.normalised(asked / 255)
    assert seen.shape == (5, 1, 12, 12)
    assert torch.equal(seen[:, :, 0], torch.full((5, 1, 12), -1.0))  # black


def test_files_for_a_run_of_grey_arrays(learned, tmp_path):
    arrays(tmp_path / "d.npz", "uint8")
    found = fedprotip.load(learned(tmp_path / "d.npz")).read([picture(tmp_path / "p.png", (9, 7))])
    with Image.open(tmp_path / "p.png") as image:
        assert np.abs(found[0, 0].numpy().astype(int) - np.asarray(image.convert("L"))).max() <= 1


def test_wide_whole_numbers_that_hold_8_bits_are_refused(command, tmp_path):
    np.savez(tmp_path / "d.npz", x=np.full((60, 7, 9), 200, np.uint16), y=np.arange(60) % 4)
    code, _, err = command("data", "check", tmp_path / "d.npz")
    assert code == 2
    assert "is uint16, but no value is above 255" in err
