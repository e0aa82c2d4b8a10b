"""One HTML page for a run, one for a comparison; both carry everything they show.

fedprotip report DIR
fedprotip compare DIR DIR … --out OUT
"""

import base64
import os
import struct
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from fedprotip.errors import UsageError
from fedprotip.report import style, tables
from fedprotip.report.alike import other_questions
from fedprotip.report.bounds import of_the_way
from fedprotip.report.classes import class_tables
from fedprotip.report.comparison import (
    common_facts,
    comparison_grids,
    comparison_reading,
    comparison_sections,
    mode_meanings,
    remarks,
    result_grids,
)
from fedprotip.report.files import save
from fedprotip.report.formats import latex_table, markdown_table, markdown_text
from fedprotip.report.gains import gains
from fedprotip.report.parts import Picture, Section
from fedprotip.report.rundata import RunData
from fedprotip.report.sections import headline_rows, run_sections
from fedprotip.report.significance import verdicts
from fedprotip.report.text import SCENARIOS, method_name, notices, other_ways, plural, reading, worth
from fedprotip.store.folder import RunFolder, is_run
from fedprotip.store.results import standing_for

FORMATS = ("csv", "md", "tex")


def write_report(folder: Path) -> Path:
    """Write `report.html`, `tables/` and `plots/` into a run folder; returns the page's path."""
    run = RunData.load(folder)
    for table in (*tables.all_tables(run), *class_tables(run)):
        tables.write_csv(table, folder, f"tables/{table.name}.csv")
    summary = run.summary
    data = run.setting("data.name", "")
    page = _render(
        "page.html.j2",
        title=method_name(summary.method) + (f" on {data}" if data else ""),
        reading=" ".join(filter(None, [reading(run), other_ways(run.chosen, summary.routers), worth(run)])),
        facts=[
            SCENARIOS.get(summary.scenario, summary.scenario),
            plural(summary.tasks, "task"),
            plural(summary.clients, "client"),
            f"seed {summary.seed}",
        ],
        finished=run.finished,
        notices=[*notices(run), *run.warnings],
        headline=headline_rows(run),
        first=standing_for("single", summary.accuracy),
        sections=_embedded(run_sections(run), folder),
        settings=run.settings_text,
        versions=run.manifest.versions
        | {name: str(v) for name in ("seed", "threads") if (v := getattr(run.manifest, name)) is not None},
    )
    return save(folder, "report.html", page)


def write_comparison(folders: list[Path], out: Path) -> Path:
    """Write `report.html`, `comparison.csv`, `.md` and `.tex`, and `plots/` into `out`; returns the page's path.

    A run without a report of its own gets one, so that no link of the page is dead.
    """
    if is_run(out):
        raise UsageError(f"{out} is a run folder; its own report would be lost. Choose another folder.")
    groups = _groups(folders)
    for run in (run for group in groups for run in group.runs):
        if not RunFolder(run.folder).has("report.html"):
            write_report(run.folder)
    for kind in FORMATS:
        save(out, f"comparison.{kind}", _as_text(groups, kind))
    runs = [run for group in groups for run in group.runs]
    page = _render(
        "comparison.html.j2",
        title=" · ".join(dict.fromkeys(method_name(group.method) for group in groups)),
        reading=comparison_reading(groups),
        facts=[*common_facts(runs), plural(len(runs), "run")],
        modes=mode_meanings(groups),
        remarks=remarks(groups),
        sections=_embedded(comparison_sections(groups), out),
        links=[
            {
                "label": group.label,
                "seed": run.summary.seed,
                "href": _relative(run.folder / "report.html", out),
            }
            for group in groups
            for run in group.runs
        ],
    )
    return save(out, "report.html", page)


def comparison_text(folders: list[Path], kind: str) -> str:
    """The comparison as a table for programs ("csv"), pages ("md") or papers ("tex")."""
    return _as_text(_groups(folders), kind)


def comparison_remarks(folders: list[Path]) -> list[str]:
    """What a reader must know before trusting the comparison, and who is ahead."""
    groups = _groups(folders)
    return [*remarks(groups), comparison_reading(groups)]


def comparison_rows(folders: list[Path]) -> list[dict[str, Any]]:
    """One plain row per method (and settings): label, n, seeds, mean and std of everything, `way` and gain.

    `best`: modes in which its accuracy is the best; `behind`: mode → the best one, points, p and seeds of the test.
    """
    groups = _groups(folders)
    comparable, gained = not other_questions(groups), gains(groups)
    way, tested = (of_the_way(groups), verdicts(groups)) if comparable else ({}, [])
    accuracy, rows = result_grids(groups)[0], []
    for place, group in enumerate(groups):
        gain = {mode: asdict(stat) for mode, stat in gained.get(group.label, {}).items()}
        behind = {one.mode: asdict(one) for one in tested if one.other == group.label}
        best = [mode for column, mode in enumerate(accuracy.columns) if (place, column) in accuracy.best]
        more = {"way": way.get(group.label, {}), "trained_minus_frozen": gain, "best": best, "behind": behind}
        rows.append(group.as_row() | more)
    return rows


def _as_text(groups: list[tables.Group], kind: str) -> str:
    if kind == "csv":
        way = {} if other_questions(groups) else of_the_way(groups)
        return tables.csv_text(tables.comparison(groups, way))
    grids = comparison_grids(groups)
    said = [*remarks(groups), comparison_reading(groups)]
    if kind == "tex":
        return "\n".join([*(f"% {line}" for line in said), "", *map(latex_table, grids)])
    lines = [*(f"> {markdown_text(line)}" for line in said), "", *map(markdown_table, grids)]
    return "\n".join(lines)


def _groups(folders: list[Path]) -> list[tables.Group]:
    distinct = {folder.resolve(): folder for folder in folders}  # the same folder twice is one run
    if not distinct:
        raise UsageError("There is nothing to compare: name at least one run folder.")
    return tables.aggregate([RunData.load(folder) for folder in distinct.values()])


def _embedded(sections: list[Section], folder: Path) -> list[dict[str, Any]]:
    """Sections for the template; each picture also becomes a PNG file in plots/ of `folder`."""
    return [
        {
            "title": section.title,
            "intro": section.intro,
            "grids": section.grids,
            "folded": section.folded,
            "gist": section.gist,
            "pictures": [_embed(picture, folder) for picture in section.pictures],
        }
        for section in sections
    ]


def _embed(picture: Picture, folder: Path) -> dict[str, Any]:
    image = style.png(picture.figure)
    save(folder, f"plots/{picture.name}.png", image)
    width, height = struct.unpack(">II", image[16:24])  # the header chunk of every PNG
    return {
        "alt": picture.alt,
        "caption": picture.caption,
        "data": base64.b64encode(image).decode("ascii"),
        "width": round(width * 96 / style.DPI),
        "height": round(height * 96 / style.DPI),
    }


def _relative(path: Path, base: Path) -> str:
    return quote(Path(os.path.relpath(path.resolve(), base.resolve())).as_posix())


def _render(template: str, **values: Any) -> str:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(colours=style.MODE_COLOURS, **values)
