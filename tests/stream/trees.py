"""Small trees in the official layouts, and a folder of one's own, made for tests."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedprotip.stream.datasets.domainnet import DOMAINS


def picture(path, size=(12, 10), mode="RGB", seed=0, **options):
    """An image file of blocks that differ by seed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    blocks = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    image = Image.fromarray(blocks).resize(size, Image.Resampling.NEAREST).convert(mode)
    image.save(path, **options)
    return path


def cifar_binary(root, train=300, test=200):
    """Records with labels 0…99 in turn; returns pixels and labels by part."""
    folder, made = root / "cifar-100-binary", {}
    folder.mkdir(parents=True)
    for part, n in (("train", train), ("test", test)):
        pixels = np.random.default_rng(n).integers(0, 256, (n, 3072), dtype=np.uint8)
        labels = (np.arange(n) % 100).astype(np.uint8)
        np.concatenate([labels[:, None] // 5, labels[:, None], pixels], axis=1).tofile(folder / f"{part}.bin")
        made[part] = pixels, labels
    (folder / "fine_label_names.txt").write_text("\n".join(f"name_{i}" for i in range(100)) + "\n\n")
    return made


def cifar_python(root, made):
    """The same as pickles, with the module names that the official archive has."""
    folder = root / "cifar-100-python"
    folder.mkdir(parents=True)
    for part, (pixels, labels) in made.items():
        content = {
            b"filenames": [b"x.png"] * len(labels),
            b"batch_label": b"training batch 1 of 1",
            b"fine_labels": labels.tolist(),
            b"coarse_labels": (labels // 5).tolist(),
            b"data": pixels,
        }
        raw = pickle.dumps(content, protocol=3)
        (folder / part).write_bytes(raw.replace(b"numpy._core.multiarray", b"numpy.core.multiarray"))
    (folder / "meta").write_bytes(pickle.dumps({b"fine_label_names": [b"name_%d" % i for i in range(100)]}, protocol=3))


def imagenet_r(root, per_class=6):
    folder = root / "imagenet-r"
    first = picture(folder / "n00000000" / "art_0.jpg", seed=1)
    for label in range(200):
        for number in range(per_class):
            path = folder / f"n{label:08d}" / f"art_{number}.jpg"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(first.read_bytes())
    (folder / "README.txt").write_text("n00000000 goldfish\n")
    return folder


def domainnet(root, train=2, test=1):
    """Every class in every list; all lines name one small JPEG of their own class and domain."""
    folder = root / "domainnet"
    raw = picture(folder / "seed.jpg").read_bytes()
    for domain in DOMAINS:
        lines = {"train": [], "test": []}
        for label in range(345):
            for part, n in (("train", train), ("test", test)):
                for number in range(n):
                    name = f"{domain}/kind {label} é/{domain}_{part}_{number}.jpg"
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                    (folder / name).write_bytes(raw)
                    lines[part].append(f"{name} {label}")
        for part, listed in lines.items():
            (folder / f"{domain}_{part}.txt").write_text("\n".join(listed) + "\n", encoding="utf-8")
    return folder


def class_folders(root, classes=("cat", "dog", "økse"), per_class=10, size=(12, 10), **options):
    for label, name in enumerate(classes):
        for number in range(per_class):
            picture(root / name / f"{number:03d}.png", size, seed=100 * label + number, **options)
    return root


def digit_files(root, n=30):
    rng = np.random.default_rng(0)
    for name, side in (("mnist", 28), ("usps", 16)):
        arrays = {}
        for part in ("train", "test"):
            arrays[f"x_{part}"] = rng.integers(0, 256, (n, side, side), dtype=np.uint8)
            arrays[f"y_{part}"] = (np.arange(n) % 10).astype(np.uint8)
        np.savez(root / f"{name}.npz", **arrays)
    return root


def shared_data(*needed):
    """The real datasets, where they are: FEDPROTIP_DATA, or shared/data beside the repository."""
    beside = Path(__file__).resolve().parents[3] / "shared" / "data"
    root = Path(os.environ.get("FEDPROTIP_DATA") or beside)
    for name in needed:
        if not (root / name).exists():
            pytest.skip(f"needs the real {name} in FEDPROTIP_DATA or {beside}")
    return root
