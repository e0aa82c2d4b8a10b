"""The page in a real browser: what a person does and sees. Without chromium these tests fail and say so."""

import numpy as np
import pytest
from PIL import Image

import fedprotip
from tests.serve.browser import Browser
from tests.serve.processes import serving
from tests.small import quick

SAY = "document.getElementById('status').textContent"
LABELS = "[...document.querySelectorAll('.card .label')].map((node) => node.textContent)"
COLOURS = {"red & round": (200, 40, 40), "<b>green</b>": (40, 180, 60), "blue": (40, 60, 200), "yellow": (220, 210, 60)}


def paint(path, colour, seed):
    """A noisy square of one colour."""
    noise = np.random.default_rng(seed).integers(-30, 30, (24, 24, 3))
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray((np.array(colour) + noise).clip(0, 255).astype(np.uint8)).save(path)


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A run on a folder of images, one folder a class, as a user has them: two tasks of two colours."""
    place = tmp_path_factory.mktemp("walk")
    for number, (name, colour) in enumerate(COLOURS.items()):
        for copy in range(12):
            paint(place / "photos" / name.replace("/", "∕") / f"{copy}.png", colour, 100 * number + copy)
    settings = {
        "data": {"name": "own", "source": str(place / "photos")},
        "stream": {"tasks": 2, "task_size": 2},
        "clients": {"count": 2},
        "model": {"name": "small_cnn", "width": 16, "depth": 2},
        "train": {"rounds": 2, "epochs": 2, "batch": 8},
        "run": {"threads": 1},
    }
    with pytest.MonkeyPatch.context() as patch:
        quick(patch)
        fedprotip.run(settings, out=place / "run")
    return place / "run"


@pytest.fixture(scope="module")
def browser():
    with Browser() as found:
        yield found


def send(browser, *paths):
    browser.choose("#files", *paths)
    browser.until(f"{SAY}.length > 0")
    browser.until(f"{SAY} === 'Done.'")


@pytest.mark.slow
def test_from_a_folder_of_images_to_the_right_class_in_the_browser(own, browser, tmp_path):
    """Train on one's own images, serve, drop new ones, read their class; names and labels are never HTML."""
    files = []
    for number, colour in enumerate(COLOURS.values()):
        files.append(tmp_path / f"new <i>{number}<u>.png")
        paint(files[-1], colour, 5000 + number)
    with serving(own) as (_, address):
        browser.size(1100, 900)
        browser.open(address)
        browser.until("document.getElementById('model').textContent.startsWith('run: 4 classes, 2 tasks')")
        send(browser, *files)
        expected = [name.replace("/", "∕") for name in COLOURS]
        rows = browser.evaluate("[...document.querySelectorAll('#rows tr')].map((row) => row.children[1].textContent)")
        found = browser.evaluate("[...document.querySelectorAll('#rows tr')].map((row) => row.children[2].textContent)")
        assert dict(zip(rows, found, strict=True)) == dict(zip([file.name for file in files], expected, strict=True))
        assert sorted(browser.evaluate(LABELS)) == sorted(expected)
        assert browser.evaluate("document.querySelectorAll('main b, main i, main u').length") == 0
        bars = (
            "[...document.querySelectorAll('.card:first-child rect')].map((node) => Number(node.getAttribute('width')))"
        )
        widths = browser.evaluate(bars)
        assert len(widths) >= 4 + 2 + 2
        assert max(widths) > 50
        assert browser.complaints() == []
        assert all(url.startswith((address, f"blob:{address}")) for url in browser.requested() if url != "about:blank")
        browser.screenshot(tmp_path / "page.png")
        assert np.asarray(Image.open(tmp_path / "page.png")).std() > 5


@pytest.mark.slow
def test_images_that_are_dropped_are_answered(own, browser, tmp_path):
    """Several at once, as a person drags them from a folder; what misses the place does not replace the page."""
    names = ["red & round", "yellow"]
    for number, name in enumerate(names):
        paint(tmp_path / f"{number}.png", COLOURS[name], 60 + number)
    with serving(own) as (_, address):
        browser.size(1100, 900)
        browser.open(address)
        browser.drop("#drop", tmp_path / "0.png", tmp_path / "1.png")
        browser.until(f"{SAY} === 'Done.'")
        assert sorted(browser.evaluate(LABELS)) == sorted(names)
        titles = browser.evaluate("[...document.querySelectorAll('.card:first-child h3')].map((h) => h.textContent)")
        assert [title.split(",")[0] for title in titles] == ["Class", "Task", "Like each task"]
        shown = browser.evaluate(
            "[...document.querySelectorAll('.card:first-child .near rect')].map((r) => Number(r.getAttribute('width')))"
        )
        assert min(shown) == 0  # bars begin at the least like
        assert max(shown) > 0
        browser.drop("footer", tmp_path / "0.png")
        assert browser.evaluate("location.href") == f"{address}/"
        assert len(browser.evaluate(LABELS)) == 2


@pytest.mark.slow
def test_an_error_is_read_and_the_rest_is_answered(own, browser, tmp_path):
    paint(tmp_path / "good.png", COLOURS["blue"], 7)
    (tmp_path / "bad.png").write_bytes(b"no image")
    with serving(own) as (process, address):
        browser.open(address)
        send(browser, tmp_path / "bad.png", tmp_path / "good.png")
        assert browser.evaluate("document.querySelector('.card.bad').textContent").startswith(
            "Image 1 (bad.png): it cannot"
        )
        assert browser.evaluate("document.querySelector('.card:not(.bad) .label').textContent") == "blue"
        process.terminate()
        process.wait()
        send(browser, tmp_path / "good.png")
        assert browser.evaluate(LABELS)[0] == "The server cannot be reached."


@pytest.mark.slow
def test_with_a_key_by_keyboard_on_a_phone(own, browser, tmp_path):
    paint(tmp_path / "good.png", COLOURS["yellow"], 8)
    with serving(own, FEDPROTIP_API_KEY="open sesame") as (_, address):
        browser.size(360, 700, 2, mobile=True)
        browser.open(address)
        browser.until("!document.getElementById('key-form').hidden && document.activeElement.id === 'key'")
        browser.call("Input.insertText", text="wrong")
        browser.press("Enter")
        browser.until("document.getElementById('model').textContent === 'That is not the key.'")
        browser.call("Input.insertText", text="open sesame")
        browser.press("Enter")
        browser.until("document.getElementById('key-form').hidden")
        browser.evaluate("document.activeElement.blur()")
        browser.press("Tab")
        assert browser.evaluate("document.activeElement.id") == "files"
        send(browser, tmp_path / "good.png")
        assert browser.evaluate(LABELS) == ["yellow"]
        assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
        browser.screenshot(tmp_path / "phone.png")
        assert Image.open(tmp_path / "phone.png").width == 720
        paint(tmp_path / f"{'long-' * 30}.png", COLOURS["yellow"], 9)
        send(browser, tmp_path / f"{'long-' * 30}.png")
        assert browser.evaluate("document.querySelector('#rows tr').offsetHeight") < 200
        assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.slow
def test_without_chromium_the_tests_name_it(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(AssertionError, match="apt-get install -y chromium"):
        Browser().__enter__()
