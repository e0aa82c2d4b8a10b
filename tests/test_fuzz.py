"""300 inputs that nobody meant: each is taken as it stands or refused in one sentence.

Seeded, so the inputs are the same every time. Whatever leaves the command as an exception, takes longer than PATIENCE
or is understood as something else than it says is a fault; the input stands in the message.
"""

import json
import random
import sys
import tomllib

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import fedprotip
from fedprotip import api, cli
from fedprotip.models.weights import load_weights
from fedprotip.settings import documentation, load, to_toml
from fedprotip.stream.images import is_image, why_unreadable
from tests.small import quick
from tests.stream.trees import class_folders, picture
from tests.watchdog import in_time

pytestmark = pytest.mark.slow

ASSIGNMENTS, RUNS, FILES, SOURCES, WEIGHTS = 110, 15, 50, 75, 50  # 300
PATIENCE = 60
"""Seconds for one input, on a machine that others use too."""
TINY = {
    "data": {"train_limit": 8, "test_limit": 4},
    "stream": {"tasks": 2},
    "clients": {"count": 2},
    "model": {"width": 8},
    "train": {"rounds": 1},
}
NUMBERS = [
    *(
        "-1",
        "0",
        "1",
        "2",
        "3",
        "7",
        "1000003",
        "2147483648",
        "9223372036854775807",
        "1e29",
        "-1e29",
        "1e300",
        "1e-320",
    ),
    *("nan", "inf", "0.5", "1.5", "-0.0", "1_0", "0x7f", "0b11", "10" * 40, "9" * 5000, "true"),
]
TEXTS = [
    *(
        '""',
        '"\\u0000"',
        '"\\u001b[2J"',
        "x",
        '" "',
        "../..",
        "/dev/zero",
        "/proc/self/mem",
        "~",
        '"' + "y" * 5000 + '"',
    ),
    *("[]", "[1, 2]", '["0"]', '["a", "a"]', "{}", '{"0" = "0-1"}', '{"0" = "0-9999999999"}', "{a = 1}", "[[]]", "'''"),
    *(
        "2024-01-01",
        "none",
        "cifar100",
        "own",
        "domain",
        "fedavg",
        "resnet18",
        "pool",
        "apart",
        "track",
        "bf16",
        "Adam",
    ),
]


@pytest.fixture
def command(monkeypatch, capsys):
    """`fedprotip` in this process: (exit code, stdout, sentence); fails on anything but a result or a sentence."""

    def run(*arguments, note=""):
        monkeypatch.setattr(sys, "argv", ["fedprotip", *map(str, arguments)])
        shown, code = f"{arguments!r} {note}"[:600], 0
        try:
            with in_time(PATIENCE):
                cli.main()
        except SystemExit as stop:
            code = stop.code or 0
        except BaseException as error:
            pytest.fail(f"{shown}: {error!r}")
        out, err = capsys.readouterr()
        assert code in (0, 1, 2), shown
        assert "Traceback" not in out + err, shown
        said = err.strip().splitlines()
        if code == 2:
            assert out == "", shown
            assert said[-1].startswith("fedprotip: "), shown
            assert said[-1].endswith("."), (shown, said)
            assert len(said) <= 2, (shown, said)  # a note about options of other methods may come first
            assert len(said[-1]) < 1500, shown
        return code, out, said[-1] if said else ""

    return run


class Enough(fedprotip.RunError):
    """The settings were accepted: the run would begin."""


@pytest.fixture
def begun(monkeypatch, tmp_path):
    """Settings of runs that would begin now; they go no further."""
    found = []

    def begin(folder, settings, observers, accept_data=False):
        found.append(settings)
        raise Enough("Far enough.")

    monkeypatch.setattr(api, "_complete", begin)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDPROTIP_DATA", raising=False)
    return found


def assignments(chance, count):
    keys = sorted({row["key"] for row in documentation()})
    for number in range(count):
        key = keys[number % len(keys)]
        yield key, chance.choice(NUMBERS if chance.random() < 0.6 else TEXTS)


def test_assignments(command, begun, tmp_path):
    chance, accepted = random.Random(1), 0
    (tmp_path / "tiny.toml").write_text(to_toml(load(TINY)))
    for number, (key, value) in enumerate(assignments(chance, ASSIGNMENTS)):
        out = [] if key == "run.out" else ["--out", tmp_path / f"r{number}"]
        begun.clear()
        code, _, said = command("run", tmp_path / "tiny.toml", "--set", f"{key}={value}", *out)
        assert bool(begun) == (said == "fedprotip: Far enough."), (key, value)
        assert begun or code == 2 or key == "run.out", (key, value)
        if begun:
            accepted += 1
            section, name = key.split(".")
            taken = getattr(getattr(begun[0], section), name, None)
            try:
                said = tomllib.loads(f"v = {value}")["v"]
            except ValueError:  # no TOML, or a number of too many digits: a text
                said = value
            foreign = section == "method" and name not in type(begun[0].method).model_fields
            assert foreign or key == "run.out" or taken == said or str(said).startswith("2024"), (key, value, taken)
    assert ASSIGNMENTS / 10 < accepted < ASSIGNMENTS * 0.9


def test_runs(command, monkeypatch, tmp_path):
    """Some that are small enough run to their end."""
    quick(monkeypatch)
    chance, finished = random.Random(2), 0
    (tmp_path / "tiny.toml").write_text(to_toml(load(TINY)))
    rows = [row for row in documentation() if row["method"] in ("", "fedprotip")]
    keys = [row["key"] for row in rows if type(row["default"]) in (int, float)]
    for number in range(RUNS):
        sets = [f"{key}={chance.choice(['1', '2', '3', '0.5', '0.9', '7'])}" for key in chance.sample(keys, 2)]
        words = [word for one in sets for word in ("--set", one)]
        code, _, _ = command("run", tmp_path / "tiny.toml", *words, "--out", tmp_path / f"r{number}")
        if code == 0:
            finished += 1
            assert json.loads((tmp_path / f"r{number}" / "summary.json").read_text())["method"] == "fedprotip"
    assert finished >= 2


def damaged(content, chance):
    """Bytes with a few changes: flipped, cut, doubled, inserted."""
    content = bytearray(content)
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(len(content) + 1)
        match chance.randrange(5):
            case 0 if content:
                content[min(place, len(content) - 1)] = chance.randrange(256)
            case 1:
                del content[place:]
            case 2:
                content[place:place] = content[max(0, place - 40) : place]
            case 3:
                content[place:place] = chance.choice(
                    [b"\0", b"\x1b[2J", b"'", b'"', b"\n", b"[", b"=", b"\xff", b"9" * 400]
                )
            case _:
                del content[place : place + chance.randint(1, 40)]
    return bytes(content)


def test_settings_files(command, begun, tmp_path):
    chance, accepted = random.Random(3), 0
    good = to_toml(load(TINY), documented=True).encode()
    for number in range(FILES):
        path = tmp_path / f"{number}.toml"
        path.write_bytes(damaged(good, chance))
        begun.clear()
        code, _, _ = command("run", path, "--out", tmp_path / f"r{number}")
        assert bool(begun) == (code == 1), path.read_bytes()
        if begun:
            accepted += 1
            for section, values in tomllib.loads(path.read_text()).items():
                for key, value in values.items():
                    if (section, key) != ("run", "out"):
                        assert getattr(getattr(begun[0], section), key) == value, (section, key)
    assert accepted >= 3


def odd_array(chance):
    shape = chance.choice([(12, 6, 6), (12, 6, 6, 3), (12, 3, 6, 6), (12, 0, 6), (0, 6, 6), (12,), (), (12, 6, 6, 4)])
    dtype = chance.choice(["u1", "u1", "u1", "i8", "f4", "f8", "c8", "?", "U3", "M8[D]", "O"])
    return np.full(shape, chance.choice([0, 1, 255]), "u1").astype(dtype)


def odd_labels(chance):
    kinds = [np.arange(12) % 2, np.arange(12) % 3 - 1, np.array(["a", "b\x1b"] * 6), np.full(12, np.nan), np.arange(11)]
    kinds += [np.array([["a"] * 12]), np.array(["\ud800", "b"] * 6), np.array([None] * 12), np.array("a"), np.zeros(0)]
    return chance.choice(kinds)


def odd_source(folder, chance):
    """A folder, table or array file with something wrong in it."""
    kind = chance.choice(["folder", "folder", "csv", "npz", "npz-damaged"])
    if kind == "npz":
        arrays = {"x": odd_array(chance), "y": odd_labels(chance)}
        if chance.random() < 0.5:
            arrays = {"x": np.zeros((12, 6, 6), "u1"), "y": odd_labels(chance)}
        if chance.random() < 0.3:
            arrays[chance.choice(["task", "client", "split", "z"])] = odd_labels(chance)
        np.savez(folder / "d.npz", **arrays)
        return folder / "d.npz"
    if kind == "npz-damaged":
        np.savez(folder / "d.npz", x=np.zeros((12, 6, 6), "u1"), y=np.arange(12) % 2)
        (folder / "d.npz").write_bytes(damaged((folder / "d.npz").read_bytes(), chance))
        return folder / "d.npz"
    names = chance.sample(["cat", "dog\x1b[2J", "[red]", "a\nb", "ü", " ", "$x^", "x" * 200, "9" * 200], 3)
    class_folders(folder / "photos", names, 4, size=(8, 8))
    files = sorted((folder / "photos").rglob("*.png"))
    if kind == "csv":
        rows = "".join(f'"{path}","{path.parent.name}"\n' for path in files)
        (folder / "t.csv").write_bytes(damaged(f"path,label\n{rows}".encode(), chance))
        return folder / "t.csv"
    for path in chance.sample(files, 2):
        match chance.randrange(9):
            case 0:
                path.write_bytes(damaged(path.read_bytes(), chance))
            case 1:
                path.write_bytes(
                    chance.choice([b"", b"GIF89a", b"\xff\xd8\xff", b"%!PS-Adobe-3.0 EPSF-3.0\n", b"BM" * 40])
                )
            case 2:
                path.unlink()
            case 3:
                path.rename(
                    path.with_name(chance.choice(["._x.png", "x.txt", "x\x1b.png", "y" * 240 + ".png", "z.PNG"]))
                )
            case 4:
                picture(path, chance.choice([(1, 1), (1, 3000), (9, 7), (300, 300)]), seed=4)
            case 5:
                picture(path, mode=chance.choice(["L", "1", "P", "RGBA", "LA"]), seed=5)
            case 6:
                path.unlink()
                path.symlink_to(chance.choice([path.name, "nowhere", "/dev/zero", "/etc/hostname"]))
            case 7:
                (path.parent / "loop").unlink(missing_ok=True)
                (path.parent / "loop").symlink_to("..")
            case _:
                (folder / "photos" / "new").mkdir(exist_ok=True)
                if chance.random() < 0.5:
                    (folder / "photos" / "again").unlink(missing_ok=True)
                    (folder / "photos" / "again").symlink_to(path.parent)
    return folder / "photos"


def test_data(command, tmp_path):
    chance, accepted = random.Random(4), 0
    for number in range(SOURCES):
        folder = tmp_path / str(number)
        folder.mkdir()
        source = odd_source(folder, chance)
        sets = ["--set", "stream.tasks=1", "--set", "clients.count=1"]
        code, out, _ = command("data", "check", source, *sets, "--json")
        again, shown, _ = command("data", "check", source, *sets)
        assert (again, "\x1b" in shown, "\x9b" in shown) == (code, False, False)
        if code == 2:
            continue
        facts = json.loads(out)
        assert (code == 1) == bool(facts["problem"])
        if source.is_dir():
            listed = [path for path in source.rglob("*") if is_image(path)]
            assert facts["train"] + facts["test"] == len(listed), source
            assert {row["name"] for row in facts["classes"]} == {path.parent.name for path in listed}
            assert len(facts["unreadable"]) == sum(bool(why_unreadable(str(path))) for path in listed)
        elif source.suffix == ".npz":
            assert facts["train"] + facts["test"] == 12
        accepted += code == 0
    assert accepted >= 8


def backbone():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())


def odd_tensor(tensor, chance):
    changes = [
        *(lambda t, d=d: t.to(d) for d in (torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn)),
        *(lambda t, d=d: t.to(d) for d in (torch.int8, torch.bool, torch.complex64, torch.uint8)),
        *(lambda t, x=x: t * x for x in (float("nan"), 1e30, 0.0)),
        *(torch.Tensor.flatten, lambda t: t[:0], lambda t: t[None], lambda t: t.to("meta"), torch.Tensor.to_sparse),
    ]
    return chance.choice(changes)(tensor)


def test_weights_files(tmp_path):
    chance, accepted = random.Random(5), 0
    for number in range(WEIGHTS):
        path = tmp_path / f"{number}{chance.choice(['.pth', '.safetensors'])}"
        state = backbone().state_dict()
        if chance.random() < 0.6:
            name = chance.choice(list(state))
            state[name] = odd_tensor(state[name], chance)
        if path.suffix == ".pth":
            extra = {"a\x1b": torch.zeros(1)} if chance.random() < 0.1 else {}
            torch.save(chance.choice([state, {"state_dict": state, "n": 3}, {**state, **extra}, [state]]), path)
        else:
            save_file(
                {
                    name: t if t.layout == torch.strided and not t.is_meta else torch.zeros(3)
                    for name, t in state.items()
                },
                path,
            )
        if chance.random() < 0.4:
            path.write_bytes(damaged(path.read_bytes(), chance))
        here, said = backbone(), ""
        try:
            with in_time(PATIENCE):
                load_weights(here, path)
        except fedprotip.UsageError as error:
            said = str(error)
        if said:
            assert (said[:16], said[-1], said.count("\n")) == ("model.weights = ", ".", 0), path
            continue
        accepted += 1
        read = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
        read = read.get("state_dict", read)
        assert all(torch.equal(read[name].float(), tensor) for name, tensor in here.state_dict().items()), path
    assert accepted >= 10


def test_these_are_300():
    assert ASSIGNMENTS + RUNS + FILES + SOURCES + WEIGHTS == 300
