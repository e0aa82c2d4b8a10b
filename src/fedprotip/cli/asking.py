"""Verbs that use a finished run: `predict`.

fedprotip predict runs/mine photos/ --json
"""

import csv
import glob
import io
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import track
from rich.table import Column, Table

from fedprotip.cli.display import Console, plain, print_json
from fedprotip.cli.options import Imports, Json
from fedprotip.errors import UsageError
from fedprotip.inference.predictor import Answer, Predictor, load
from fedprotip.stream.images import is_image, why_unreadable

AT_ONCE = 64
"""Files that are read and answered together."""
UNUSUAL = 0.95
"""What is stranger than this share of held-back samples is better called unknown."""

out, err = Console(), Console(stderr=True)


@dataclass(frozen=True)
class Row:
    """What is said about one file."""

    file: str
    answer: Answer | None
    error: str = ""

    def record(self, predictor: Predictor) -> dict[str, Any]:
        if self.answer is None:
            return {"file": self.file, "error": self.error}
        known = {name: _number(value) for name, value in asdict(self.answer).items()}
        return {"file": self.file, **known, "task_name": predictor.plan.tasks[self.answer.task].name}


def predict(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A finished run folder.", show_default=False)],
    images: Annotated[
        list[str],
        typer.Argument(metavar="IMAGE…", help="Image files, folders of them, or patterns.", show_default=False),
    ],
    task: Annotated[int | None, typer.Option(help="The task of all images, counted from 1, if it is known.")] = None,
    together: Annotated[bool, typer.Option("--together", help="The images came together: one task for all.")] = False,
    imports: Imports = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print a table for spreadsheets.")] = False,
    as_json: Json = False,
) -> None:
    """What the model of a run says about image files; no training data is needed.

    Files that cannot be read are named and do not stop the rest; the exit code is then 1.

    Example: [bold]fedprotip predict runs/mine photo.jpg holiday/ 'more/*.png' --csv > answers.csv[/bold]
    """
    if task is not None and task < 1:
        raise UsageError(f"--task {task}: tasks count from 1.")
    paths = found_files(images)
    predictor = load(folder)
    rows = list(answered(predictor, paths, None if task is None else task - 1, together))
    if as_json:
        print_json([row.record(predictor) for row in rows])
    elif as_csv:
        sys.stdout.write(as_table(rows, predictor))
    else:
        _show(rows, predictor)
    failed = [row for row in rows if row.answer is None]
    for row in failed:
        err.print(f"[yellow]{plain(row.file)}: {plain(row.error)}", soft_wrap=True)
    if failed:
        raise typer.Exit(1)


def found_files(given: Sequence[str]) -> list[str]:
    """Files, the images within folders, and what patterns match, in their order; what is none of these is refused."""
    found: list[str] = []
    for name in given:
        if os.path.isdir(name):
            inside = sorted(str(path) for path in Path(name).rglob("*") if is_image(path))
            if not inside:
                raise UsageError(f"{name} holds no image files.")
        elif os.path.exists(name) or not glob.has_magic(name):
            inside = [name]
        else:
            inside = sorted(path for path in glob.glob(name, recursive=True) if os.path.isfile(path))
            if not inside:
                raise UsageError(f"{name} matches no file.")
        found += inside
    return found


def answered(predictor: Predictor, paths: Sequence[str], task: int | None, together: bool) -> Iterator[Row]:
    """A row for every file, in order; with a progress bar where there are many."""
    size = max(1, len(paths)) if together else AT_ONCE
    for part in _watched([paths[start : start + size] for start in range(0, len(paths), size)]):
        faults = [why_unreadable(path) for path in part]
        sound = [path for path, fault in zip(part, faults, strict=True) if not fault]
        answers = iter(predictor.predict(sound, group=together, task=task) if sound else [])
        for path, fault in zip(part, faults, strict=True):
            if fault:
                yield Row(path, None, f"it cannot be read as an image ({fault})")
            else:
                yield Row(path, next(answers))


def as_table(rows: Sequence[Row], predictor: Predictor) -> str:
    """CSV with a line for every file."""
    text = io.StringIO()
    columns = ["file", "label", "probability", "task", "task_name", "task_probability", "unusual", "error"]
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow(row.record(predictor))
    return text.getvalue()


def _watched(parts: list[Sequence[str]]) -> Iterator[Sequence[str]]:
    return iter(track(parts, "answering", console=err, transient=True, disable=len(parts) < 2 or not err.is_terminal))


def _number(value: Any) -> Any:
    """JSON has no NaN: a run that cannot tell what is unusual says nothing."""
    return None if value != value else value


def _show(rows: Sequence[Row], predictor: Predictor) -> None:
    table = Table(Column("file", overflow="fold"), "class", "sure", "task", "sure of it", "")
    for row in rows:
        if (answer := row.answer) is not None:
            name = predictor.plan.tasks[answer.task].name
            strange = "[yellow]unlike anything learned" if answer.unusual > UNUSUAL else ""
            sure = f"{answer.probability:.0%}", f"{answer.task + 1} {plain(name)}", f"{answer.task_probability:.0%}"
            table.add_row(plain(row.file), f"[bold green]{plain(answer.label)}", *sure, strange)
    if table.row_count:
        out.print(table)
