"""Where the official files of the datasets are, with their checksums; fetched only by `fedprotip data get NAME`.

A checksum stands here only if it is published or widely pinned. Where none is, the official page is named instead.
"""

import bz2
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedprotip.errors import RunError, UsageError, nearest
from fedprotip.stream.datasets import layouts, missing
from fedprotip.stream.download import OnBytes, fetch, unpack


@dataclass(frozen=True)
class File:
    """One official file: where, its checksum, and the folder it unpacks to (empty: it stays as it is)."""

    url: str
    checksum: str
    folder: str = ""

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]


TORONTO = "https://www.cs.toronto.edu/~kriz"
LIBSVM = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass"
USPS = {
    "train": File(f"{LIBSVM}/usps.bz2", "md5:ec16c51db3855ca6c91edd34d0e9b197"),
    "test": File(f"{LIBSVM}/usps.t.bz2", "md5:8ea070ee2aca1ac39742fdd1ef5ed118"),
}
ARCHIVES: dict[str, list[File]] = {
    "cifar100": [
        File(f"{TORONTO}/cifar-100-binary.tar.gz", "md5:03b5dce01913d631647c71ecec9e9cb8", "cifar-100-binary")
    ],
    "digit_domains": [
        File(
            "https://storage.googleapis.com/tensorflow/tf-keras-datasets/mnist.npz",
            "sha256:731c5ac602752760c8e48fbffcf8c3b850d9dc2a2aedcf2cc48468fc17b673d1",
        ),
        *USPS.values(),
    ],
}
PAGES = {
    "imagenet_r": "https://github.com/hendrycks/imagenet-r (unpack imagenet-r.tar: ROOT/imagenet-r/n01443537 …)",
    "domainnet": "https://ai.bu.edu/M3SDA (unpack the six cleaned domains and their lists into ROOT/domainnet)",
}


def get(name: str, root: Path, progress: Callable[[str], OnBytes] = lambda label: lambda done, total: None) -> str:
    """Fetch a dataset into a data root and return a sentence; `progress` makes an observer for each file."""
    known = layouts()
    if name not in known:
        raise UsageError(f"{name!r} is not a dataset; {nearest(name, known)}.")
    if not known[name]:
        raise UsageError(f"{name!r} needs nothing to be downloaded.")
    if root.exists() and any(not missing(root, layout) for layout in known[name]):
        return f"{name} is in {root} already."
    if name in PAGES:
        raise UsageError(
            f"{name!r} has no published checksum, so it is not fetched for you; its official page is {PAGES[name]}."
        )
    try:
        for file in ARCHIVES[name]:
            path = fetch(file.url, root / file.name, file.checksum, progress(file.name))
            if file.folder:
                unpack(path, root, file.folder)
                path.unlink()
        if name == "digit_domains":
            convert_usps(root)
    except OSError as error:
        raise RunError(f"{root} cannot be written: {error.strerror}.") from None
    return f"{name} is in {root}; runs find it with data.root = {str(root)!r} or FEDPROTIP_DATA={root}."


def convert_usps(root: Path) -> None:
    """usps.bz2 and usps.t.bz2 (lines of label 1…10 and 256 index:value pairs in −1…1) → usps.npz."""
    arrays: dict[str, np.ndarray] = {}
    for part, file in USPS.items():
        rows = [line.split() for line in bz2.decompress((root / file.name).read_bytes()).decode().splitlines()]
        values = np.array([[float(pair.partition(":")[2]) for pair in row[1:]] for row in rows])
        arrays[f"x_{part}"] = ((values + 1) / 2 * 255).round().astype(np.uint8).reshape(-1, 16, 16)
        arrays[f"y_{part}"] = np.array([int(float(row[0])) - 1 for row in rows], np.uint8)
    partial = root / "usps.npz.part"
    with partial.open("wb") as out:
        np.savez_compressed(out, **arrays)  # type: ignore[arg-type]
    os.replace(partial, root / "usps.npz")
    for file in USPS.values():
        (root / file.name).unlink()
