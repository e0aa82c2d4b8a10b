"""Every block of docs/serve.md, in its order, as a reader would run it."""

import re
import shlex
import shutil
import subprocess
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import fedprotip
from tests.serve.asking import picture
from tests.serve.processes import serving

DOCUMENT = Path(__file__).parents[2] / "docs" / "serve.md"


def assert_answers_agree(names, predictor, folder):
    """What the example of ONNX makes of files of all shapes, colours and sides is what `predict` answers."""
    assert predictor.plan.pixels.fit == "crop"
    folder.mkdir()
    drawn = np.random.default_rng(0)
    for number in range(60):
        height, width = drawn.integers(6, 90, 2)
        small = drawn.integers(0, 256, (4, 4, 3), dtype=np.uint8)
        image = Image.fromarray(small if number % 2 else small[..., 0]).resize((int(width), int(height)))
        path = folder / f"{number}.png"
        exif = Image.Exif()
        exif[0x0112] = 1 + number % 8
        image.save(path, exif=exif)
        given = {"images": names["brought_to_size"](path)}
        label, sure = names["session"].run(["label", "probability"], given)
        (answer,) = predictor.predict(path)
        assert np.array_equal(given["images"], predictor.read([path]).numpy())
        assert names["told"]["fedprotip.classes"][label[0]] == answer.label
        assert sure[0] == pytest.approx(answer.probability, abs=1e-4)


@pytest.mark.slow
def test_every_block_of_the_document_runs(made, tmp_path, monkeypatch, capsys, call):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(made, tmp_path / "runs" / "mine")
    (tmp_path / "photos").mkdir()
    for seed, name in enumerate(("one", "two")):
        (tmp_path / "photos" / f"{name}.png").write_bytes(picture(seed, (20, 30)))
    blocks = re.findall(r"```(\w+)\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    assert [kind for kind, _ in blocks] == ["sh", "python", "sh", "python", "sh", "sh", "python"]
    address = "http://127.0.0.1:8000"
    with ExitStack() as stack:
        for kind, text in blocks:
            text = text.replace("http://127.0.0.1:8000", address)
            if kind == "python":
                names = {}
                exec(text, names)
                if "brought_to_size" in names:
                    assert_answers_agree(names, fedprotip.load("runs/mine"), tmp_path / "shapes")
                assert capsys.readouterr().out.strip()
                continue
            for line in text.splitlines():
                program, *arguments = shlex.split(line)
                if arguments[0] == "serve":
                    _, address = stack.enter_context(serving(arguments[1]))
                elif program == "fedprotip":
                    code, printed, _ = call(*(arguments[: arguments.index(">")] if ">" in arguments else arguments))
                    assert code == 0, line
                    assert printed
                else:
                    assert shutil.which(program), f"{program} is missing"
                    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=True)
                    assert '"answers"' in done.stdout
    assert (tmp_path / "mine.onnx").exists()
