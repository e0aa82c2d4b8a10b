"""The user's own data as a table: which image has which label, and maybe task, client and split.

Read from a folder per class, a CSV or Parquet file, or an NPZ file. Nothing is decoded here.
"""

import csv
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from fedprotip.errors import UsageError, looked_for, shortened
from fedprotip.store.memory import machine_bytes
from fedprotip.stream.images import SUFFIXES, is_image, is_no_image

PARTS = ("train", "test")
OPTIONAL = ("task", "client", "split")
COLUMNS = ("path", "label", *OPTIONAL)


@dataclass(frozen=True)
class Table:
    """Samples of a source: paths or pixels, labels as text, and the columns that are there."""

    images: list[str] | np.ndarray  # paths, or uint8 (n, c, h, w)
    labels: list[str]
    columns: dict[str, list[str]] = field(default_factory=dict)  # of task, client, split


def read_source(source: str) -> Table:
    """The table of `data.source`; a wrong path or layout is a UsageError."""
    path = Path(source)
    if not source.strip():
        raise UsageError("data.name = 'own' needs data.source: a folder, a .csv, a .parquet or an .npz file.")
    if not path.exists():
        raise UsageError(f"data.source = {source!r} does not exist{looked_for(source)}.")
    if path.is_dir():
        return read_folder(path)
    readers = {".csv": read_csv, ".parquet": read_parquet, ".npz": read_npz}
    if path.suffix.lower() not in readers:
        raise UsageError(f"data.source = {source!r} must be a folder, a .csv, a .parquet or an .npz file.")
    return readers[path.suffix.lower()](path)


def read_folder(folder: Path) -> Table:
    """A folder per class, or `train` and `test` with a folder per class in each."""
    names = {path.name for path in _folders(folder)}
    if names & set(PARTS) and not names >= set(PARTS):
        raise UsageError(f"{folder} has a folder {(names & set(PARTS)).pop()!r} only; it needs 'train' and 'test'.")
    if not names >= set(PARTS):
        paths, labels = _read_classes(folder)
        return Table(paths, labels)
    parts = {part: _read_classes(folder / part) for part in PARTS}
    return Table(
        [path for paths, _ in parts.values() for path in paths],
        [label for _, labels in parts.values() for label in labels],
        {"split": [part for part, (paths, _) in parts.items() for _ in paths]},
    )


def read_csv(path: Path) -> Table:
    """Columns path and label, and maybe task, client and split; paths are relative to the file."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, skipinitialspace=True)
            rows = list(reader)
            names = list(reader.fieldnames or [])
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{path} is not a CSV file in UTF-8: {error}.") from None
    twice = next((name for name in COLUMNS if names.count(name) > 1), "")
    if twice:
        raise UsageError(f"{path} has two columns {twice!r}; keep one of them.")
    for number, row in enumerate(rows, 1):
        if None in row:
            raise UsageError(f"{path}: sample {number} has more than the {len(names)} entries of the first line.")
    return _from_rows(path, names, rows)


def read_parquet(path: Path) -> Table:
    """As `read_csv`; needs pyarrow."""
    try:
        parquet = import_module("pyarrow.parquet")
    except ImportError:
        raise UsageError(f"Reading {path} needs pyarrow; install it with: pip install pyarrow.") from None
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            rows = file.read([name for name in names if name in COLUMNS]).to_pylist()
    except Exception as error:  # pyarrow has many kinds of errors for a damaged file
        raise UsageError(f"{path} is not a Parquet file: {str(error).splitlines()[0].rstrip('.')}.") from None
    return _from_rows(path, names, rows)


def read_npz(path: Path) -> Table:
    """x_train, y_train, x_test, y_test, or x, y and maybe task, client, split; x is uint8."""
    found = read_arrays(path)
    if {"x_train", "y_train", "x_test", "y_test"} <= set(found):
        parts = [(_pixels(path, f"x_{part}", found), _labels(path, part, found)) for part in PARTS]
        (train, train_labels), (test, test_labels) = parts
        if train.shape[1:] != test.shape[1:]:
            raise UsageError(f"{path}: the images of x_train and x_test differ in shape.")
        split = ["train"] * len(train) + ["test"] * len(test)
        return _checked(path, Table(np.concatenate([train, test]), train_labels + test_labels, {"split": split}))
    if not {"x", "y"} <= set(found):
        have = shortened(", ".join(sorted(found))) or "nothing"
        raise UsageError(f"{path} needs x_train, y_train, x_test, y_test, or x and y; it has {have}.")
    pixels = _pixels(path, "x", found)
    columns = {name: [_text(value) for value in found[name].ravel()] for name in OPTIONAL if name in found}
    for name, column in columns.items():
        if len(column) != len(pixels):
            raise UsageError(f"{path}: {name} has {len(column)} entries, x has {len(pixels)} images.")
    return _checked(path, Table(pixels, _labels(path, "", found), columns))


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """All arrays of an npz file; one that is damaged or holds Python objects is a UsageError."""
    most = machine_bytes()
    try:
        with zipfile.ZipFile(path) as packed:
            unpacked = sum(entry.file_size for entry in packed.infolist())
        if unpacked > most:
            raise UsageError(
                f"{path} would unpack to {unpacked:,} bytes, and this machine has {most:,}; make it smaller."
            )
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except UsageError:
        raise
    except Exception:  # numpy, zipfile and zlib each have their own errors for a damaged file
        raise UsageError(f"{path} is not an npz file of plain arrays.") from None


def _folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _read_classes(folder: Path) -> tuple[list[str], list[str]]:
    """Paths and class names of a folder per class."""
    paths: list[str] = []
    labels: list[str] = []
    root = folder.resolve()
    places = dict.fromkeys((root, *root.parents), folder)
    for one in _folders(folder):
        same = places.setdefault(one.resolve(), one)
        if same is not one:
            raise UsageError(f"Class {one.name!r} is a link to where {same} is: its images would have two labels.")
        entries = sorted(one.rglob("*"))
        wrong = next(filter(is_no_image, entries), None)
        if wrong is not None:
            raise UsageError(f"{wrong} is called an image but is no file (a link to nothing, a device); remove it.")
        found = sorted(str(path) for path in entries if is_image(path))
        if not found:
            raise UsageError(f"Class {one.name!r} is empty: {one} holds no images ({', '.join(SUFFIXES)}).")
        paths += found
        labels += [one.name] * len(found)
    if not paths:
        raise UsageError(f"{folder} has no class folders; images belong into one folder per class.")
    for path in paths:
        if not _is_utf8(path):
            raise UsageError(f"{path!r} is not text in UTF-8; rename it.")
    return paths, labels


def _from_rows(path: Path, names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Table:
    if not {"path", "label"} <= set(names):
        raise UsageError(f"{path} needs the columns path and label; it has {', '.join(map(str, names)) or 'none'}.")
    columns = {name: [_text(row[name]).strip() for row in rows] for name in COLUMNS if name in names}
    images = []
    for number, name in enumerate(columns.pop("path"), 1):
        image = path.parent / name
        if not image.is_file():
            raise UsageError(f"{path}: sample {number} names {shortened(name)!r}, which does not exist.")
        images.append(str(image))
    return _checked(path, Table(images, columns.pop("label"), columns))


def _checked(path: Path, table: Table) -> Table:
    if not table.labels:
        raise UsageError(f"{path} holds no samples.")
    for name, column in {"label": table.labels, **table.columns}.items():
        if "" in column:
            raise UsageError(f"{path}: sample {column.index('') + 1} has no {name}.")
        broken = next((text for text in column if not _is_utf8(text) or "\0" in text), "")
        if broken:
            raise UsageError(f"{path}: the {name} {shortened(broken)!r} is not text in UTF-8 without NUL; rename it.")
    for number, part in enumerate(table.columns.get("split", []), 1):
        if part not in PARTS:
            raise UsageError(f"{path}: sample {number} has split {shortened(part)!r}; valid are train and test.")
    return table


def _pixels(path: Path, name: str, found: Mapping[str, np.ndarray]) -> np.ndarray:
    """Images (n, c, h, w) uint8 of (n, h, w), (n, h, w, c) or (n, c, h, w)."""
    images = found[name]
    if images.ndim in (3, 4) and images.size == 0 and len(images):
        raise UsageError(f"{path}: the images of {name} have no pixels, {images.shape}.")
    if images.dtype == np.uint8 and images.ndim == 3:
        return images[:, None]
    if images.dtype == np.uint8 and images.ndim == 4 and images.shape[3] in (1, 3):
        return np.ascontiguousarray(images.transpose(0, 3, 1, 2))
    if images.dtype == np.uint8 and images.ndim == 4 and images.shape[1] in (1, 3):
        return images
    raise UsageError(
        f"{path}: {name} must be uint8 (n, h, w), (n, h, w, c) or (n, c, h, w) with 1 or 3 channels; "
        f"it is {images.dtype} {images.shape}."
    )


def _labels(path: Path, part: str, found: Mapping[str, np.ndarray]) -> list[str]:
    x, y = (f"{kind}_{part}" if part else kind for kind in "xy")
    labels = found[y]
    if labels.shape != found[x].shape[:1] or labels.dtype.kind not in "iuU":
        raise UsageError(f"{path}: {y} must be {len(found[x])} whole numbers or names, one per image of {x}.")
    if labels.dtype.kind == "i" and len(labels) and labels.min() < 0:
        raise UsageError(f"{path}: label {labels.min()} of {y} is out of range, 0 is the smallest.")
    return [_text(value) for value in labels]


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half a character
        return False
    return True


def _text(value: Any) -> str:
    """A cell as text; tables with gaps hold whole numbers as 3.0, and NaN for what is missing."""
    if isinstance(value, float | np.floating):
        return "" if np.isnan(value) else f"{value:.15g}"
    return "" if value is None else str(value)
