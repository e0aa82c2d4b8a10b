"""Run the rows of a table of the paper, keep each finished run as a small file, put ours beside the published.

    fedprotip reproduce --list
    fedprotip reproduce table1 --scale cpu --seeds 3 --only 'cifar100-a0.5-*' --set model.weights=resnet18.safetensors
    fedprotip reproduce table1 --scale cpu --show           # from the files alone, nothing is run

A finished run is RESULTS/<table>/<scale>/<row>-s<seed>.json; its run folder is RUNS/<table>/<scale>/<row>-s<seed>.
A changed setting makes a row of its own, <row>+<key>-<value>, except what only says where and how fast it runs.
A cell is outdated when its row says other settings today: it is shown apart, and run again with --redo.
"""

import json
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path, PurePath
from typing import Any

from matplotlib.figure import Figure

from fedprotip import settings as settings_file
from fedprotip.api import check
from fedprotip.cells import Cell, run_cells
from fedprotip.errors import UsageError, nearest
from fedprotip.paper import comparison as report
from fedprotip.paper.anchors import GAIN, ROUTING_AT_END, Published, figures, find
from fedprotip.paper.comparison import Line, Outcome
from fedprotip.paper.costs import costs
from fedprotip.paper.finished import CellSummary, FinishedCell, as_then, by_key, read_cell
from fedprotip.paper.protocols import CODE, PROTOCOLS, WHY_CODE, Protocol, protocol
from fedprotip.paper.rows import SCALES, Row
from fedprotip.paper.verdicts import judge
from fedprotip.report.gains import Result, trained_minus_frozen
from fedprotip.report.style import png
from fedprotip.report.tables import QUIET, Stat
from fedprotip.report.text import setting_text
from fedprotip.settings import Settings
from fedprotip.store.events import Observer
from fedprotip.store.files import write_atomic
from fedprotip.store.folder import RunFolder, is_run

RESULTS, RUNS = Path("results"), Path("runs/reproduce")
OUTDATED = " (outdated)"
"""After the name of a row: cells that were made with other settings than the row has today."""
SAME_ROW = QUIET | {"clients.workers", "model.weights"}
"""Settings that do not make another row: where things are, and how fast it goes (clients.workers: in older cells)."""
SHOWN = {"fig2": ("rho", "beta"), "fig6": ("hours", "memory"), "fig7": ("memory",)}
SHOWN |= dict.fromkeys(("fig4", "table14"), ("routing", ROUTING_AT_END))
"""Measured figures that the paper shows without printing a number, or that can be read in another way."""
BARS: dict[str, Callable[[Outcome], Figure]] = {"table.png": report.accuracy_bars}
PICTURES: dict[str, dict[str, Callable[[Outcome], Figure]]] = {
    "fig3": {"table.png": report.accuracy_curves},
    "fig6": {"table.png": report.time_and_memory},
    "rivals": {**BARS, "costs.png": report.time_and_memory},
}
"""Table or figure → file → what is drawn; of all others the accuracies."""


@dataclass(frozen=True)
class Errand:
    """What one call has to do."""

    protocol: Protocol
    scale: str
    results: Path
    runs: Path
    cells: list[Cell]  # not finished yet
    commands: dict[str, str]  # name of a cell → the command that makes it
    skipped: dict[str, str]  # row → why it is left out
    outdated: dict[str, str]  # name of a cell → in what it was made otherwise than it would be now

    def place(self, cell: Cell) -> Path:
        """The run folder of a cell."""
        return self.runs / self.protocol.name / self.scale / cell.name


def overview(scale: str, results: Path = RESULTS) -> list[dict[str, Any]]:
    """Every protocol: its rows, those that can run at this scale, what the others lack, and finished cells."""
    found = []
    for name, known in PROTOCOLS.items():
        reasons = {row.name: reason for row in known.rows if (reason := _hindrance(row, scale))}
        found.append(
            {
                "name": name,
                "title": known.title,
                "rows": {row.name: reasons.get(row.name, "") for row in known.rows},
                "ready": len(known.rows) - len(reasons),
                "finished": len(list((results / name / scale).glob("*-s*.json"))),
            }
        )
    return found


def make_plan(
    name: str,
    scale: str = "paper",
    seeds: int = 3,
    only: Sequence[str] = (),
    overrides: Sequence[str] = (),
    results: Path = RESULTS,
    runs: Path = RUNS,
    redo: bool = False,
) -> Errand:
    """Which cells are missing, all of them checked before the first one starts; outdated ones are named.

    Args:
        seeds: how many; 3 means 0, 1 and 2.
        only: names of rows, or patterns such as "cifar100-*"; empty: all that can run.
        overrides: assignments such as "train.rounds=5" on top of every row.
        redo: run outdated cells again; they and their run folders are replaced.
    """
    if scale not in SCALES:
        raise UsageError(f"--scale {scale!r} is not a scale; {nearest(scale, SCALES)}.")
    if seeds < 1:
        raise UsageError(f"--seeds {seeds} runs nothing; the nearest valid value is 1.")
    known = protocol(name)
    plan = Errand(known, scale, results, runs, [], {}, {}, {})
    for row in _chosen(known, only):
        reason = _hindrance(row, scale)
        if reason and row.name in only:
            raise UsageError(f"{name} {row.name} cannot run at scale {scale!r}: {reason}.")
        if reason:
            plan.skipped[row.name] = reason
            continue
        for seed in range(seeds):
            _add(plan, row, seed, overrides, redo)
    if len(plan.skipped) == len(_chosen(known, only)):
        raise UsageError(f"No row of {name} can run at scale {scale!r}: {next(iter(plan.skipped.values()))}.")
    return plan


def carry_out(plan: Errand, observe: Callable[[Cell], Iterable[Observer]] = lambda cell: []) -> None:
    """Run what is missing, cell by cell; each finished one is a file before the next starts."""
    place = plan.results / plan.protocol.name / plan.scale
    for cell in plan.cells:
        twin = _twin(plan, cell.settings)
        if twin is None:
            if cell.name in plan.outdated and _left(plan.place(cell), cell.settings):
                shutil.rmtree(plan.place(cell))
            (folder,) = run_cells([cell], plan.place(cell).parent, observe)
        measured = dict(twin) if twin else _measured(folder, cell.settings)
        row, _, seed = cell.name.rpartition("-s")
        head = {"table": plan.protocol.name, "scale": plan.scale, "row": row, "seed": int(seed)}
        finished = FinishedCell.model_validate({**measured, **head, "command": plan.commands[cell.name]})
        text = json.dumps(finished.plain(), indent=1, ensure_ascii=False)
        place.mkdir(parents=True, exist_ok=True)
        write_atomic(place / f"{cell.name}.json", text + "\n")


def rebuild(name: str, scale: str, results: Path = RESULTS) -> Outcome:
    """The table as far as it was run, from the files of finished cells alone; also of tables that have the same run.

    Outdated cells make rows of their own.
    """
    known = protocol(name)
    rows = {row.name: row for row in known.rows}
    by_row: dict[str, list[FinishedCell]] = {label: [] for label in rows}
    outdated = {}
    for path in sorted((results / name / scale).glob("*-s*.json")):
        cell = read_cell(path)
        changed = _since(cell, rows)
        if changed:
            outdated[path.name] = "; ".join(changed)
        by_row.setdefault(cell.row + OUTDATED if changed else cell.row, []).append(cell)
    others = _elsewhere(name, scale, results)
    for label, found in by_row.items():
        found.extend([] if found or label not in rows else (cell for cell in others if _is_of(cell, rows[label])))
    notes = [WHY_CODE] if any(label.endswith(CODE) for label in rows) else []
    outcome = Outcome(name, known.title, scale, [], {}, {}, {}, notes, costs(by_row), outdated)
    for label, cells in sorted(by_row.items(), key=lambda item: _rank(item[0], list(rows))):
        row = rows.get(_base(label))
        outcome.lines.extend(_lines(label, cells, find(**row.published) if row and row.published else [], name))
        gained = trained_minus_frozen(map(_told, cells), (_told(cell) for all_ in by_row.values() for cell in all_))
        outcome.lines.extend(
            Line(label, GAIN, mode, "", stat, len(cells), Stat(None, None), "not published")
            for mode, stat in gained.items()
        )
        if cells:
            outcome.runs[label] = list(dict.fromkeys(cell.command for cell in cells))
            for mode in cells[0].summary.curve:
                points = zip(*(cell.summary.curve[mode] for cell in cells), strict=True)
                outcome.curves[f"{label} {mode}"] = [Stat.of(values) for values in points]
        elif row:
            outcome.waiting[label] = _hindrance(row, scale) or "not yet"
    return outcome


def write_table(outcome: Outcome, results: Path = RESULTS) -> list[Path]:
    """table.md, table.csv and, once something was run, its pictures beside the files of the cells."""
    place = results / outcome.name / outcome.scale
    place.mkdir(parents=True, exist_ok=True)
    content: dict[str, str | bytes] = {"table.md": report.markdown(outcome), "table.csv": report.as_csv(outcome)}
    if outcome.runs:
        content |= {file: png(draw(outcome)) for file, draw in PICTURES.get(outcome.name, BARS).items()}
    for file, data in content.items():
        write_atomic(place / file, data)
    return [place / file for file in content]


def _told(cell: FinishedCell) -> Result:
    return cell.settings, cell.summary


def _hindrance(row: Row, scale: str) -> str:
    """Why a row cannot run at a scale; empty when it can."""
    missing = row.why_not(scale) or " and ".join(row.missing(scale))
    return f"this version lacks {missing}" if missing.startswith("the ") else missing


def _chosen(known: Protocol, only: Sequence[str]) -> list[Row]:
    for pattern in only:
        if not any(fnmatchcase(row.name, pattern) for row in known.rows):
            known.row(pattern)  # refuses it with the nearest name
    return [row for row in known.rows if not only or any(fnmatchcase(row.name, pattern) for pattern in only)]


def _add(plan: Errand, row: Row, seed: int, overrides: Sequence[str], redo: bool) -> None:
    """Plan one cell, unless its file is there already, or it is outdated and not wanted anew."""
    settings = settings_file.load(row.at(plan.scale), [*overrides, f"run.seed={seed}"])
    if row.pretrained and not settings.model.weights:
        raise UsageError(f"{row.name} starts from pretrained weights: name their file with --set model.weights=FILE.")
    changes = sorted(entry for entry in overrides if entry.partition("=")[0].strip() not in SAME_ROW)
    label = "+".join([row.name, *(_short(entry) for entry in changes)])
    cell = Cell(f"{label}-s{seed}", settings)
    path = plan.results / plan.protocol.name / plan.scale / f"{cell.name}.json"
    changed = _changed(read_cell(path).settings, settings) if path.exists() else _left(plan.place(cell), settings)
    if changed:
        plan.outdated[cell.name] = "; ".join(changed)
    if not redo if changed else path.exists():
        return
    if seed == 0 or not plan.cells:
        check(settings)
    plan.cells.append(cell)
    words = ["fedprotip", "reproduce", plan.protocol.name, "--scale", plan.scale, "--only", row.name]
    sets = [word for entry in overrides for word in ("--set", _portable(entry))]
    plan.commands[cell.name] = shlex.join([*words, "--seeds", str(seed + 1), *sets])


def _short(entry: str) -> str:
    """train.rounds=5 → rounds-5, safe as a file name"""
    key, _, value = entry.partition("=")
    text = f"{key.strip().rpartition('.')[2]}-{value.strip()}"
    return "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in text)


def _portable(entry: str) -> str:
    """An assignment without the paths of one machine, as it can be published with a result."""
    key, _, value = entry.partition("=")
    places = {"data.root": "DATA", "model.weights": f"DATA/{PurePath(value.strip()).name}"}
    return f"{key}={places.get(key.strip(), value)}"


def _essence(settings: Settings) -> dict[str, Any]:
    """All settings that decide the result; of the weights the file's name."""
    flat = by_key(settings)
    kept = {key: value for key, value in flat.items() if key not in QUIET}
    return {**kept, "model.weights": PurePath(flat["model.weights"]).name}


def _changed(made: Mapping[str, Any], settings: Settings) -> list[str]:
    """In what a run that says it was made so differs from one with these settings; empty: in nothing that counts."""
    try:
        then, now = _essence(as_then(made)), _essence(settings)
    except UsageError as error:
        return [f"this version cannot read its settings: {str(error).rstrip('.')}"]
    keys = [key for key in then | now if then.get(key) != now.get(key)]
    return [f"{key} {setting_text(then.get(key))}, now {setting_text(now.get(key))}" for key in keys]


def _left(folder: Path, settings: Settings) -> list[str]:
    """In what the run that a folder holds differs; empty also where it holds none."""
    if not is_run(folder):
        return []
    return _changed(RunFolder.open(folder).settings(), settings_file.seen_from(settings, folder))


def _since(cell: FinishedCell, rows: Mapping[str, Row]) -> list[str]:
    """What its row says otherwise today than when a cell was made; of rows that are gone nothing is known."""
    row = rows.get(_base(cell.row))
    if row is None:
        return []
    overrides = [after for word, after in pairwise(shlex.split(cell.command)) if word == "--set"]
    given = [f"model.weights={cell.settings['model']['weights']}", *overrides, f"run.seed={cell.seed}"]
    try:
        return _changed(cell.settings, settings_file.load(row.at(cell.scale), given))
    except UsageError as error:
        return [str(error).rstrip(".")]


def _elsewhere(name: str, scale: str, results: Path) -> list[FinishedCell]:
    """Finished cells of other tables."""
    paths = sorted(results.glob(f"*/{scale}/*-s*.json"))
    cells = {
        (cell.row, cell.seed): cell for cell in map(read_cell, paths) if cell.table != name and "+" not in cell.row
    }
    return list(cells.values())


def _is_of(cell: FinishedCell, row: Row) -> bool:
    """Whether a cell of another table is a run of this very row: the paper prints several rows twice."""
    if cell.summary.method != row.method or row.why_not(cell.scale) or row.missing(cell.scale):
        return False
    given = {"model.weights": cell.settings["model"]["weights"], "run.seed": cell.seed}
    wanted = settings_file.load(row.at(cell.scale), [f"{key}={value}" for key, value in given.items()])
    return not _changed(cell.settings, wanted)


def _twin(plan: Errand, settings: Settings) -> FinishedCell | None:
    """A finished cell of another table with the same settings: the paper prints several rows twice."""
    for path in sorted(plan.results.glob(f"*/{plan.scale}/*-s{settings.run.seed}.json")):
        cell = read_cell(path)
        if not _changed(cell.settings, settings):
            return cell
    return None


def _measured(folder: Path, settings: Settings) -> dict[str, Any]:
    """What a finished cell says about its run."""
    run = RunFolder.open(folder)
    summary = run.summary()
    published = settings.model_dump(mode="json")
    published["data"]["root"] = published["run"]["out"] = ""  # places on one machine
    published["model"]["weights"] = PurePath(settings.model.weights).name
    return {
        "settings": published,
        "summary": CellSummary.of(folder, summary),
        "versions": run.manifest().versions | _commit(),
        "seconds": summary.seconds["total"],
    }


def _commit() -> dict[str, str]:
    """The commit of a checkout that this package is run from; of an installed one nothing."""
    words = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        said = subprocess.run(words, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return {}
    return {"commit": said} if said else {}


def _lines(label: str, cells: list[FinishedCell], printed: list[Published], name: str) -> Iterator[Line]:
    """Our figures and the published ones of one row, those of accuracy first."""
    measured = [figures(cell.summary) for cell in cells]
    paper = {record.figure: record for record in printed}
    always = ("acc", "ft", *SHOWN.get(name, ()))
    wanted = dict.fromkeys([key for ours in measured for key in ours if key[0] in always or key in paper])
    for key in (*wanted, *(key for key in paper if key not in wanted)):
        values = [ours[key] for ours in measured if key in ours]
        record = paper.get(key)
        verdict, why = judge(values, [cell.settings for cell in cells], record)
        theirs, source = (Stat(record.value, record.std), record.protocol) if record else (Stat(None, None), "")
        yield Line(label, *key, Stat.of(values), len(values), theirs, verdict, why, source)


def _base(label: str) -> str:
    """The row of the protocol that a label belongs to."""
    return label.removesuffix(OUTDATED).partition("+")[0]


def _rank(label: str, names: list[str]) -> tuple[int, str]:
    """Rows in the order of the protocol, changed ones behind their own, unknown ones last."""
    name = _base(label)
    return names.index(name) if name in names else len(names), label
