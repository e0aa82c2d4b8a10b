"""What a person sees in the terminal: tables when a run is done; `progress.py` has what is shown while it works.

Labels, names of files and settings may come from anywhere. None of their characters commands the terminal: `Console`
and `print_json` are the only ways out.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich import box
from rich import console as rich_console
from rich.markup import escape
from rich.segment import Segment
from rich.table import Column, Table

from fedprotip.paper import costs
from fedprotip.report.text import STAND_IN, STAND_IN_NOTE, other_ways, plural, points, samples_text
from fedprotip.store.results import Summary, standing_for

MEANINGS = {  # first what a user gets
    "single": "one sample, task unknown",
    "aware": "true task given",
    "agnostic": "all heads, no routing",
    "batch64": "task found from a group",
}


BEST = "▲"
COMMANDS = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that a terminal obeys instead of showing them, that turn the direction of writing, or are half of one."""


def visible(text: str) -> str:
    """A text with a picture in place of every character that would do something.

    >>> visible("cat\\x1b[2J\\n")
    'cat␛[2J␊'
    """
    pictures = {"\x7f": "␡"}
    return COMMANDS.sub(lambda m: chr(0x2400 + ord(m[0])) if m[0] < " " else pictures.get(m[0], "�"), text)


def plain(text: str) -> str:
    """One line that rich must not read as markup."""
    return escape(visible(text))


class Console(rich_console.Console):
    """A terminal that shows texts and obeys only rich."""

    def render(
        self, renderable: rich_console.RenderableType, options: rich_console.ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment("\n".join(map(visible, segment.text.split("\n"))), segment.style)


def print_json(value: Any) -> None:
    """For programs; characters that a terminal would obey are escaped, as JSON can."""
    text = json.dumps(value, indent=1, ensure_ascii=False)
    print("\n".join(COMMANDS.sub(lambda m: f"\\u{ord(m[0]):04x}", line) for line in text.split("\n")))


def print_text(text: str) -> None:
    """A text for programs as it is, but for what a terminal would obey."""
    print("\n".join(map(visible, text.split("\n"))), end="")


def print_summary(console: Console, folder: Path, summary: Summary) -> None:
    """The headline table of one run and where to look further."""
    table = Table(title=f"{plain(summary.method)}, {plural(summary.tasks, 'task')}, seed {summary.seed}")
    for heading in ("mode", "accuracy %", "forgetting"):
        table.add_column(heading, justify="left" if heading == "mode" else "right")
    for mode in summary.modes:
        figures = (f"{values[mode]:.1f}" for values in (summary.accuracy, summary.forgetting))
        style = "bold green" if mode == standing_for("single", summary.accuracy) else ""
        table.add_row(f"{mode} [dim]({MEANINGS[mode]})[/dim]", *figures, style=style)
    console.print(table)
    if said := other_ways(summary.router, summary.routers):
        console.print(plain(said), soft_wrap=True, highlight=False)
    if summary.failures.count:
        console.print(f"Clients left out {plural(summary.failures.count, 'time')}; the report says why.")
    console.print(f"Report: {plain(str(folder / 'report.html'))}", soft_wrap=True)


def print_comparison(console: Console, rows: list[dict[str, Any]], page: Path, remarks: Iterable[str] = ()) -> None:
    """Accuracy and forgetting of every method in every mode, mean ± std over seeds; the best is marked."""
    modes = [mode for mode in MEANINGS if any(mode in row["accuracy"] for row in rows)]
    table = Table(title="Accuracy % (forgetting in points)")
    widest = max(len(word) for row in rows for word in row["label"].split())
    table.add_column("method", min_width=widest)
    table.add_column("runs", justify="right")
    for mode in modes:
        style = "bold green" if mode == "single" else ""
        table.add_column(f"{mode}\n[dim]{MEANINGS[mode]}", justify="right", style=style)
    way = any("single" in row["way"] for row in rows)
    if way:
        table.add_column("way\n[dim]from fedavg to joint", justify="right")
    gained = any(row["trained_minus_frozen"] for row in rows)
    if gained:
        table.add_column("trained − frozen\n[dim]class statistics, single", justify="right")
    for row in rows:
        cells = [_cell(row, mode) for mode in modes]
        cells += [points(row["way"].get("single"))] if way else []
        cells += [_gain(row["trained_minus_frozen"].get("single"))] if gained else []
        table.add_row(plain(row["label"]), str(row["n"]), *cells)
    console.print(table)
    for row in rows:
        if kept := {kind: round(stat["mean"]) for kind, stat in row["samples"].items()}:
            console.print(f"{plain(row['label'])} keeps {samples_text(kept)} of past tasks.", soft_wrap=True)
    if any(standing_for(mode, row["accuracy"]) != mode for row in rows for mode in modes):
        console.print(f"[dim]{STAND_IN_NOTE}", soft_wrap=True)
    if any(row.get("best") for row in rows):
        console.print(f"[dim]{BEST} The best of its column.", soft_wrap=True)
    for remark in remarks:
        console.print(plain(remark), soft_wrap=True, highlight=False)
    console.print(f"Report: {plain(str(page))}", soft_wrap=True)


def print_protocols(console: Console, entries: list[dict[str, Any]]) -> None:
    """Tables and figures that can be reproduced; for a single one its rows and what they lack."""
    if len(entries) == 1:
        table = Table("row", "state", title=plain(entries[0]["title"]))
        for row, reason in entries[0]["rows"].items():
            table.add_row(plain(row), plain(reason) or "can run")
    else:
        table = Table("name", "what", "rows that can run", "finished cells")
        for entry in entries:
            ready = f"{entry['ready']} of {len(entry['rows'])}"
            table.add_row(entry["name"], plain(entry["title"]), ready, str(entry["finished"]))
    console.print(table)


def print_reproduction(
    console: Console, glance: tuple[list[str], list[list[str]]], lines: list[dict[str, Any]], paths: list[Path]
) -> None:
    """A line for every row, then our figures beside the published ones; what was not run, and why, is in the files."""
    headings, rows = glance
    first = len(headings) - len(costs.HEADINGS)
    for title, columns in (("Accuracy % (forgetting) [published]", (1, first)), ("What it costs", (first, None))):
        if rows:
            console.print(_narrow(title, [[line[0], *line[slice(*columns)]] for line in (headings, *rows)]))
    table = Table(Column("row", overflow="fold"), "figure", "ours", "published", "verdict")
    for line in lines:
        if line["seeds"]:
            figure = " ".join(part for part in (line["metric"], line["mode"], line["part"]) if part)
            table.add_row(plain(line["row"]), figure, _stat(line["ours"]), _stat(line["paper"]), line["verdict"])
    console.print(table)
    console.print(f"Written: {plain(', '.join(map(str, paths)))}", soft_wrap=True)


def _narrow(title: str, lines: list[list[str]]) -> Table:
    """Of these lines, headings first, only the first cell of each is broken within a word."""
    table = Table(title=plain(title), box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    for place, cells in enumerate(zip(*lines, strict=True)):
        longest = max(len(word) for cell in cells for word in cell.split())
        table.add_column(plain(cells[0]), min_width=12 if place == 0 else longest, overflow="fold")
    for line in lines[1:]:
        table.add_row(*map(plain, line))
    return table


def print_methods(console: Console, known: dict[str, dict[str, Any]]) -> None:
    """A few lines for every method: its idea; what clients store and send, what it needs, and where it can run."""
    table = Table.grid(padding=(0, 1))
    for name, facts in known.items():
        only = "" if len(facts["scenarios"]) > 1 else f" ({facts['scenarios'][0]}-incremental streams only)"
        table.add_row(f"[bold green]{plain(name)}", f"[bold]{plain(facts['idea'])}{only}")
        for key in ("stores", "sends", "needs"):
            table.add_row("", f"[dim]{key}[/] {plain(facts[key])}")
    console.print(table)
    console.print("[dim]fedprotip settings --method NAME shows its settings, docs/methods.md explains it.")


def print_info(console: Console, facts: dict[str, Any]) -> None:
    table = Table(show_header=False, box=None)
    for key, value in facts.items():
        if isinstance(value, dict) and len(value) > 1 and set(value.values()) == {"intact"}:
            value = f"{len(value)}, all intact"
        shown = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
        table.add_row(f"[bold]{key}", plain(shown))
    console.print(table)


def _cell(row: dict[str, Any], mode: str) -> str:
    shown = standing_for(mode, row["accuracy"])
    if shown not in row["accuracy"]:
        return "–"
    accuracy, drop = row["accuracy"][shown], row["forgetting"][shown]
    spread = "" if accuracy["std"] is None else f" ± {accuracy['std']:.1f}"
    mark = (STAND_IN if shown != mode else "") + (f" {BEST}" if mode in row.get("best", ()) else "")
    return f"{accuracy['mean']:.1f}{spread} ({drop['mean']:.1f}){mark}"


def _gain(stat: dict[str, Any] | None) -> str:
    return "–" if stat is None else f"{stat['mean']:+.1f}" + ("" if stat["std"] is None else f" ± {stat['std']:.1f}")


def _stat(stat: dict[str, Any]) -> str:
    if stat["mean"] is None:
        return "–"
    return f"{stat['mean']:.2f}" + ("" if stat["std"] is None else f" ± {stat['std']:.2f}")
