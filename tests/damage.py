"""Ways in which a run folder can be damaged, or made by a stranger; all drawn from a seed."""

import json
import os
import random
import shutil
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import load, save

from fedprotip.store.files import hash_of
from fedprotip.store.objects import sealed
from tests.small import forged

VALUES = [
    *(None, True, -1, 0, 2**63, 10**30, 1e308, 0.5, "", "x", "\0", "\ud800", "../../outside/victim", "/dev/zero"),
    *([], [[]], {}, {"a": {}}, [None] * 50, ["x"], [-1], {"x": 1e308}),
]


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "lock")


# Damage: hashes tell


def truncated(folder, rng):
    path = rng.choice(files_of(folder))
    os.truncate(path, rng.randrange(path.stat().st_size + 1))


def flipped(folder, rng):
    path = rng.choice([path for path in files_of(folder) if path.stat().st_size])
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice([1, 1, 1, 20])):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def deleted(folder, rng):
    path = rng.choice([*files_of(folder), folder / "checkpoint", folder / "checkpoint" / "objects"])
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def swapped(folder, rng):
    one, other = rng.sample(files_of(folder), 2)
    mine, theirs = one.read_bytes(), other.read_bytes()
    one.write_bytes(theirs)
    other.write_bytes(mine)


def overwritten(folder, rng):
    deep = b"[" * 200_000
    contents = [b"", deep, b'{"a":' * 100_000, b'{"format": ' + b"9" * 6000 + b"}", b"\xff" * 50, b"null", b"\0" * 4096]
    rng.choice(files_of(folder)).write_bytes(rng.choice(contents))


def mistyped(folder, rng):
    """Another value somewhere in a JSON file, as an editor would leave it."""
    path = rng.choice([path for path in files_of(folder) if path.suffix in (".json", ".jsonl")])
    text = path.read_text()
    head, _, body = text.rpartition("\n") if path.name[:8].isdigit() else ("", "", text)
    if path.suffix == ".jsonl":
        lines = body.splitlines()
        number = rng.randrange(len(lines))
        lines[number] = json.dumps(changed(json.loads(lines[number]), rng))
        body = "\n".join(lines) + "\n"
    else:
        body = json.dumps(changed(json.loads(body), rng))
    path.write_text(f"{head}\n{body}" if head else body)


def grown(folder, rng):
    """A hole of a terabyte at the end."""
    os.truncate(rng.choice([path for path in files_of(folder) if path.suffix in (".json", "")]), 2**40)


# Strangers: hashes fit, or do not matter


def changed(value, rng):
    """The value with another one somewhere inside."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(sorted(value))
        if rng.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        return value | {key: changed(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.85:
        place = rng.randrange(len(value))
        return [*value[:place], changed(value[place], rng), *value[place + 1 :]]
    return rng.choice(VALUES)


def forged_manifest(folder, rng):
    with forged(folder) as manifest:
        found = changed(manifest, rng)
        manifest.clear()
        manifest.update(found if isinstance(found, dict) else {})


def vouched(folder, name, data):
    (folder / name).write_bytes(data)
    with forged(folder) as manifest:
        manifest["files"][name] = hash_of(data)


def forged_record(folder, rng):
    found = [name for name in ("plan.json", "plan.json", "summary.json", "geometry.json") if (folder / name).exists()]
    name = rng.choice(found or ["settings.toml"])
    if name.endswith(".json"):
        data = json.dumps(changed(json.loads((folder / name).read_text()), rng)).encode()
    else:
        data = b"[train]\nrounds = " + b"[" * 50_000
    vouched(folder, name, data)


def forged_tensors(folder, rng):
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    name = rng.choice(names)
    tensors = load((folder / name).read_bytes())
    key = rng.choice(sorted(tensors))
    tensors |= bad_tensor(key, tensors[key], rng)
    if rng.random() < 0.2:
        del tensors[key]
    vouched(folder, name, save(tensors))


def bad_tensor(key, tensor, rng):
    flat = tensor.flatten()
    ways = [
        lambda: tensor.new_zeros(()),
        lambda: flat[: len(flat) // 2].clone(),
        lambda: torch.cat([flat, flat]),
        lambda: tensor[None].clone(),
        lambda: tensor.new_zeros((0, *tensor.shape[1:])),
        lambda: tensor.to(rng.choice([torch.int8, torch.float16, torch.bool, torch.float64, torch.complex64])),
        lambda: torch.full_like(tensor.float(), rng.choice([torch.nan, torch.inf, -torch.inf, 1e38, -1.0])),
        lambda: tensor.new_zeros(1),
    ]
    return {key: rng.choice(ways)()}


def forged_index(folder, rng):
    """A checkpoint with a seal that fits: names of objects, lengths of logs, numbers of the run."""
    indices = sorted(folder.glob("checkpoint/*.json"))
    for path in indices if rng.random() < 0.5 else indices[-1:]:
        index = json.loads(path.read_text().partition("\n")[2])
        part = rng.choice(["state", "groups", "clients", "logs"])
        if part == "state":
            key = rng.choice(sorted(index["state"].keys() - {"routing", "geometry"}))
            index["state"][key] = rng.choice(VALUES)
        else:
            index[part] = changed(index[part], rng)
        if rng.random() < 0.2:
            index["logs"]["../../outside/victim"] = 0
        with suppress(UnicodeEncodeError):
            path.write_text(sealed(index))


def forged_object(folder, rng):
    """A group of a checkpoint with other tensors, under the hash they have."""
    for path in sorted(folder.glob("checkpoint/*.json")):
        index = json.loads(path.read_text().partition("\n")[2])
        group = rng.choice(sorted(index["groups"]))
        tensors = load((path.parent / "objects" / index["groups"][group]).read_bytes())
        if tensors:
            key = rng.choice(sorted(tensors))
            tensors |= bad_tensor(key, tensors[key], rng)
        data = save(tensors)
        index["groups"][group] = hash_of(data)
        (path.parent / "objects" / hash_of(data)).write_bytes(data)
        path.write_text(sealed(index))


def foreign(folder, rng):
    """A link, a pipe or a second name of a file outside, somewhere in the folder."""
    outside = folder.parent / "outside"
    names = [
        "events.jsonl",
        "ledger.jsonl",
        "manifest.json",
        "settings.toml",
        "summary.json",
        "plan.json",
        "report.html",
    ]
    names += ["checkpoint", "checkpoint/lock", "checkpoint/objects", "checkpoint/objects-copy", "clients", "tables"]
    names += ["plots", "geometry.json", "data.safetensors", "fedprotip-0123abcd", "clients/0"]
    names += [path.relative_to(folder).as_posix() for path in files_of(folder)]
    place = folder / (rng.choice(names) + rng.choice(["", "", ".tmp"]))
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    place.unlink(missing_ok=True)
    place.parent.mkdir(exist_ok=True, parents=True)
    whole = {"folder": outside, "file": outside / "victim", "new": outside / "new", "zero": "/dev/zero", "loop": place}
    kind = rng.choice([*whole, "pipe", "hard link"])
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "hard link":
        os.link(outside / "victim", place)
    else:
        place.symlink_to(whole[kind])


DAMAGES = [truncated, flipped, deleted, swapped, overwritten, mistyped, grown]
FORGERIES = [forged_manifest, forged_record, *[forged_tensors] * 2, forged_index, forged_object, *[foreign] * 2]


def damage(folder: Path, seed: int):
    """Do something to a folder; what."""
    rng = random.Random(seed)
    how = rng.choice([*DAMAGES, *FORGERIES])
    how(folder, rng)
    return how
