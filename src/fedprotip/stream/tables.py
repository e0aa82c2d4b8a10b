"""The user's own data as a table: which image has which label, and maybe task, client and split.

Read from a folder per class, a CSV or Parquet file, or an NPZ file. Nothing is decoded here.
"""

import csv
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from fedprotip.errors import UsageError, looked_for, shortened
from fedprotip.store.memory import machine_bytes
from fedprotip.stream.pixels import as_images
from fedprotip.stream.trees import PARTS, read_tree

OPTIONAL = ("task", "client", "split")
COLUMNS = ("path", "label", *OPTIONAL)
BETWEEN = ",;\t"
PAIRS = ("x_train", "y_train", "x_test", "y_test")
CALLED = {"file": "path", "class": "label"}
"""What others call a column."""


@dataclass(frozen=True)
class Table:
    """Samples of a source: paths or pixels, labels as text, and the columns that are there."""

    images: list[str] | np.ndarray  # paths, or uint8 (n, c, h, w)
    labels: list[str]
    columns: dict[str, list[str]] = field(default_factory=dict)  # of task, client, split
    notes: tuple[str, ...] = ()  # what of the source is not used


def read_source(source: str, folders: str = "auto") -> Table:
    """The table of `data.source`; a wrong path or layout is a UsageError. `folders`: `data.folders`."""
    path = Path(source)
    if not source.strip():
        raise UsageError("data.name = 'own' needs data.source: a folder, a .csv, a .parquet or an .npz file.")
    if not path.exists():
        raise UsageError(f"data.source = {source!r} does not exist{looked_for(source)}.")
    if path.is_dir():
        return read_folder(path, folders)
    if folders != "auto":
        raise UsageError(f"data.folders = {folders!r} is for folders, and data.source = {source!r} is a file.")
    if not path.is_file():
        raise UsageError(f"data.source = {source!r} is a pipe or a device, no plain file; save it as one.")
    readers = {".csv": read_csv, ".parquet": read_parquet, ".npz": read_npz}
    if path.suffix.lower() not in readers:
        raise UsageError(f"data.source = {source!r} must be a folder, a .csv, a .parquet or an .npz file.")
    return readers[path.suffix.lower()](path)


def read_folder(folder: Path, folders: str = "auto") -> Table:
    """As `data.folders` says; see `read_tree`."""
    samples, notes = read_tree(folder, folders)
    for sample in samples:
        if not _is_utf8(sample["path"]):
            raise UsageError(f"{sample['path']!r} is not text in UTF-8; rename it.")
    columns = {name: [sample[name] for sample in samples] for name in COLUMNS if name in samples[0]}
    return Table(columns.pop("path"), columns.pop("label"), columns, tuple(notes))


def read_csv(path: Path) -> Table:
    """Columns path and label, and maybe task, client and split; paths are relative to the file.

    The first line may have any case. Between two columns is whichever of `BETWEEN` stands first in it: spreadsheets of
    many countries write semicolons. Rows of empty cells, which they leave below a table, are none.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            between = next((mark for mark in file.readline() if mark in BETWEEN), BETWEEN[0])
            file.seek(0)
            reader = csv.DictReader(file, skipinitialspace=True, delimiter=between)
            reader.fieldnames = names = _meant(path, "columns", reader.fieldnames or [], COLUMNS)
            rows = [row for row in reader if any(row.values())]
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{path} is not a CSV file in UTF-8: {error}; save it as one.") from None
    _refuse_unnamed(path, names)
    for number, row in enumerate(rows, 1):
        if None in row:
            raise UsageError(f"{path}: sample {number} has more than the {len(names)} entries of the first line.")
    return _from_rows(path, names, rows)


def read_parquet(path: Path) -> Table:
    """As `read_csv`; needs pyarrow."""
    try:
        parquet, types = import_module("pyarrow.parquet"), import_module("pyarrow.types")
    except ImportError:
        raise UsageError(f"Reading {path} needs pyarrow; install it with: pip install pyarrow.") from None
    try:
        with parquet.ParquetFile(path) as file:
            given = file.schema_arrow.names
            names = _meant(path, "columns", given, COLUMNS)
            read = {name: here for name, here in zip(given, names, strict=True) if here in COLUMNS}
            several = [name for name in read if types.is_nested(file.schema_arrow.field(name).type)]
            if several:
                raise UsageError(f"{path}: column {several[0]!r} has lists or tables in its cells; it needs one value.")
            found = file.read(list(read)).to_pylist()
            rows = [{read[name]: value for name, value in row.items()} for row in found]
    except UsageError:
        raise
    except Exception as error:  # pyarrow has many kinds of errors for a damaged file
        raise UsageError(f"{path} is not a Parquet file: {str(error).splitlines()[0].rstrip('.')}.") from None
    return _from_rows(path, names, rows)


def read_npz(path: Path) -> Table:
    """x_train, y_train, x_test, y_test, or x, y and maybe task, client, split; `as_images` says what x may be."""
    arrays = read_arrays(path)
    found = dict(zip(_meant(path, "arrays", list(arrays), (*PAIRS, "x", "y", *OPTIONAL)), arrays.values(), strict=True))
    if set(PAIRS) <= set(found):
        parts = [(_pixels(path, f"x_{part}", found), _labels(path, part, found)) for part in PARTS]
        (train, train_labels), (test, test_labels) = parts
        if train.shape[1:] != test.shape[1:]:
            raise UsageError(f"{path}: the images of x_train and x_test differ in shape.")
        split = ["train"] * len(train) + ["test"] * len(test)
        pixels, labels, columns = np.concatenate([train, test]), train_labels + test_labels, {"split": split}
        return _checked(path, Table(pixels, labels, columns, _unused(path, "arrays", found, PAIRS)))
    if not {"x", "y"} <= set(found):
        have = shortened(", ".join(sorted(found))) or "nothing"
        raise UsageError(f"{path} needs x_train, y_train, x_test, y_test, or x and y; it has {have}.")
    pixels = _pixels(path, "x", found)
    columns = {name: [_text(value) for value in found[name].ravel()] for name in OPTIONAL if name in found}
    for name, column in columns.items():
        if len(column) != len(pixels):
            raise UsageError(f"{path}: {name} has {len(column)} entries, x has {len(pixels)} images.")
    unused = _unused(path, "arrays", found, ("x", "y", *OPTIONAL))
    return _checked(path, Table(pixels, _labels(path, "", found), columns, unused))


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
    except Exception as error:  # numpy, zipfile and zlib each have their own errors for a damaged file
        objects = (
            " (it holds Python objects; save names as text: y.astype(str))" if "allow_pickle" in str(error) else ""
        )
        raise UsageError(f"{path} is not an npz file of plain arrays{objects}.") from None


def _meant(path: Path, what: str, names: Sequence[str], known: Sequence[str]) -> list[str]:
    """Names of columns or arrays, the known ones as they are called here: Label and FILE are label and path."""
    plain = [str(name).strip().casefold() for name in names]
    called = [CALLED[name] if CALLED.get(name) in known and CALLED[name] not in plain else name for name in plain]
    twice = next((name for name in known if called.count(name) > 1), "")
    if twice:
        theirs = " and ".join(repr(name) for name, here in zip(names, called, strict=True) if here == twice)
        raise UsageError(f"{path} has two {what} that are {twice!r}: {shortened(theirs)}; keep one of them.")
    return [here if here in known else name for name, here in zip(names, called, strict=True)]


def _from_rows(path: Path, names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Table:
    _refuse_unnamed(path, names)
    columns = {name: [_text(row[name]).strip() for row in rows] for name in COLUMNS if name in names}
    given = columns.pop("path")
    if "" in given:
        raise UsageError(f"{path}: sample {given.index('') + 1} has no path.")
    images = [_beside(path, name) for name in given]
    gone = [place for place, image in enumerate(images) if not image.is_file()]
    if gone:
        more = f" (nor do the files of {len(gone) - 1} others)" if len(gone) > 1 else ""
        raise UsageError(
            f"{path}: sample {gone[0] + 1} names {shortened(given[gone[0]])!r}, which does not exist{more}; paths are "
            "relative to the table: mend them, or leave these samples out."
        )
    unused = _unused(path, "columns", names, COLUMNS)
    return _checked(path, Table([str(image) for image in images], columns.pop("label"), columns, unused))


def _refuse_unnamed(path: Path, names: Sequence[str]) -> None:
    if not {"path", "label"} <= set(names):
        have = shortened(", ".join(names)) or "none"
        raise UsageError(f"{path} needs the columns path and label; it has {have}.")


def _beside(table: Path, name: str) -> Path:
    """The file of that name, relative to a table; tables from Windows have backslashes in between."""
    file = table.parent / name
    return file if file.is_file() else table.parent / name.replace("\\", "/")


def _unused(path: Path, what: str, names: Iterable[str], used: Iterable[str]) -> tuple[str, ...]:
    """A sentence about columns or arrays that mean nothing here: task may be called Tasks, and would be missed."""
    others = [str(name) for name in names if name not in used and str(name).strip()]
    return (f"{path}: {what} that are not used: {shortened(', '.join(others))}.",) if others else ()


def _checked(path: Path, table: Table) -> Table:
    if not table.labels:
        raise UsageError(f"{path} holds no samples.")
    for name, column in {"label": table.labels, **table.columns}.items():
        if "" in column:
            raise UsageError(f"{path}: sample {column.index('') + 1} has no {name}.")
        broken = next((text for text in column if not _is_utf8(text) or "\0" in text), "")
        if broken:
            raise UsageError(f"{path}: the {name} {shortened(broken)!r} is not text in UTF-8 without NUL; rename it.")
    if "split" not in table.columns:
        return table
    parts = [part.strip().lower() for part in table.columns["split"]]
    wrong = next((number for number, part in enumerate(parts) if part not in PARTS), None)
    if wrong is not None:
        given = shortened(table.columns["split"][wrong])
        raise UsageError(f"{path}: sample {wrong + 1} has split {given!r}; valid are train and test.")
    return replace(table, columns=table.columns | {"split": parts})


def _pixels(path: Path, name: str, found: Mapping[str, np.ndarray]) -> np.ndarray:
    """Images (n, c, h, w) uint8."""
    images, what = found[name], f"{path}: {name}"
    if images.ndim in (3, 4) and images.size == 0 and len(images):
        raise UsageError(f"{path}: the images of {name} have no pixels, {images.shape}.")
    if images.dtype == np.uint16 and images.size and images.max() <= 255:
        raise UsageError(f"{what} is uint16, but no value is above 255; save it as uint8, or scale white to 65535.")
    return as_images(images, what)


def _labels(path: Path, part: str, found: Mapping[str, np.ndarray]) -> list[str]:
    x, y = (f"{kind}_{part}" if part else kind for kind in "xy")
    labels = found[y]
    if labels.shape == (len(found[x]), 1):
        labels = labels[:, 0]  # as Keras has them
    if labels.shape != found[x].shape[:1] or labels.dtype.kind not in "iuUS":
        raise UsageError(
            f"{path}: {y} must be {len(found[x])} whole numbers or names, one per image of {x}; it is {labels.dtype} "
            f"{labels.shape}."
        )
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
    if isinstance(value, bytes):
        return value.decode("utf-8", "surrogateescape")
    if isinstance(value, float | np.floating):
        return "" if np.isnan(value) else f"{value:.15g}"
    return "" if value is None else str(value)
