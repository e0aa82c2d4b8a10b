"""Verbs that use a finished run: `predict` and `export`.

fedprotip predict runs/mine photos/ --json
fedprotip export runs/mine mine.onnx
"""

import csv
import glob
import io
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Timer
from typing import Annotated, Any, TypeVar

import torch
import typer
from rich.progress import Progress
from rich.table import Column, Table

from fedprotip.cli.display import Console, plain, print_json
from fedprotip.cli.options import Imports, Json
from fedprotip.errors import UsageError
from fedprotip.inference.predictor import Answer, Predictor, load
from fedprotip.stream.images import Unreadable, is_image, is_no_image

AT_ONCE = 64
"""Files that are read and answered together."""
SHOWN = 2.0
"""Seconds after which a progress bar is shown."""
WIDEST = 16
"""Letters of the name of a task, which may be all of its classes."""
UNUSUAL = 0.95
"""What is stranger than this share of held-back samples is better called unknown."""

T = TypeVar("T")
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

    def line(self, predictor: Predictor) -> dict[str, Any]:
        """The same for people, whose tasks count from 1."""
        return self.record(predictor) | ({} if self.answer is None else {"task": self.answer.task + 1})


def predict(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A finished run folder.", show_default=False)],
    images: Annotated[
        list[str],
        typer.Argument(metavar="IMAGE…", help="Image files, folders of them, or patterns.", show_default=False),
    ],
    task: Annotated[int | None, typer.Option(help="The task of all images, counted from 1, if it is known.")] = None,
    together: Annotated[bool, typer.Option("--together", help="The images came together: one task for all.")] = False,
    imports: Imports = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print a table for spreadsheets; tasks count from 1.")] = False,
    as_json: Json = False,
) -> None:
    """What the model of a run says about image files; no training data is needed.

    What cannot be read, or holds no image, is named and does not stop the rest; the exit code is then 1.

    Example: [bold]fedprotip predict runs/mine photo.jpg holiday/ 'more/*.png' --csv > answers.csv[/bold]
    """
    if task is not None and task < 1:
        raise UsageError(f"--task {task}: tasks count from 1.")
    if as_json and as_csv:
        raise UsageError("--json and --csv: choose one of them.")
    files = found_files(images)
    predictor = load(folder)
    learned = len(predictor.plan.tasks)
    if task is not None and task > learned:
        raise UsageError(f"--task {task}: this run has learned {learned}; the nearest valid value is {learned}.")
    rows = list(answered(predictor, files, None if task is None else task - 1, together))
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


def found_files(given: Sequence[str]) -> list[tuple[str, str]]:
    """Files, the images within folders, and what patterns match, in their order, each with "".

    A folder or pattern without any is there as well, with what is wrong with it; if nothing else is, it is refused.
    """
    found: list[tuple[str, str]] = []
    for name in given:
        if os.path.isdir(name):
            inside = sorted(str(path) for path in Path(name).rglob("*") if is_image(path) or is_no_image(path))
            fault = "it holds no image files"
        elif os.path.exists(name) or not glob.has_magic(name):
            inside, fault = [name], ""
        else:
            inside = sorted(path for path in glob.glob(name, recursive=True) if os.path.isfile(path))
            fault = "it matches no file"
        found += [(path, "") for path in inside] or [(name, fault)]
    if all(fault for _, fault in found):
        raise UsageError(f"{found[0][0]}: {found[0][1]}.")
    return found


def answered(predictor: Predictor, files: Sequence[tuple[str, str]], task: int | None, together: bool) -> Iterator[Row]:
    """A row for every file that was found, in order, each read once; with a progress bar where it takes a while."""
    size = len(files) if together else AT_ONCE
    rows, images = list[Row](), list[torch.Tensor]()
    for number, (path, fault) in enumerate(_watched(files), 1):
        if not fault:
            try:
                images.append(predictor.read([path]))
            except Unreadable as error:
                fault = f"it cannot be read as an image ({error.why})"
        rows.append(Row(path, None, fault))
        if number % size == 0 or number == len(files):
            answers = iter(predictor.predict(torch.cat(images), group=together, task=task) if images else [])
            yield from (row if row.error else replace(row, answer=next(answers)) for row in rows)
            rows, images = [], []


def as_table(rows: Sequence[Row], predictor: Predictor) -> str:
    """CSV with a line for every file."""
    text = io.StringIO()
    columns = ["file", "label", "probability", "task", "task_name", "task_probability", "unusual", "error"]
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow(row.line(predictor))
    return text.getvalue()


def _watched(files: Sequence[T]) -> Iterator[T]:
    """The same, with a progress bar after a while."""
    if not err.is_terminal:
        yield from files
        return
    bar = Progress(console=err, transient=True)
    line = bar.add_task("answering", total=len(files))
    timer = Timer(SHOWN, bar.start)
    timer.start()
    try:
        for one in files:
            yield one
            bar.advance(line)
    finally:
        timer.cancel()
        timer.join()
        bar.stop()


def _number(value: Any) -> Any:
    """JSON has no NaN: a run that cannot tell what is unusual says nothing."""
    return None if value != value else value


def _show(rows: Sequence[Row], predictor: Predictor) -> None:
    name_of_task = Column("task", no_wrap=True, max_width=WIDEST)
    table = Table(Column("file", overflow="fold"), Column("class", overflow="fold"), "sure", name_of_task, "sure", "")
    for row in rows:
        if (answer := row.answer) is not None:
            name = predictor.plan.tasks[answer.task].name
            strange = "[yellow]unusual" if answer.unusual > UNUSUAL else ""
            sure = f"{answer.probability:.0%}", f"{answer.task + 1} {plain(name)}", f"{answer.task_probability:.0%}"
            table.add_row(plain(row.file), f"[bold green]{plain(answer.label)}", *sure, strange)
    if table.row_count:
        out.print(table)


def export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A finished run folder.", show_default=False)],
    target: Annotated[Path, typer.Argument(metavar="FILE.onnx", help="Where it goes.", show_default=False)],
    imports: Imports = None,
) -> None:
    """Write one ONNX file that does features, routing and heads, for onnxruntime without this package.

    Names of classes and tasks, the image size and how to get there are in its metadata. It is tried before it is
    written: onnxruntime must answer as the run does.

    Example: [bold]fedprotip export runs/mine mine.onnx[/bold]
    """
    from fedprotip.inference.export import export as write

    write(load(folder), target)
    out.print(plain(str(target)), soft_wrap=True)
