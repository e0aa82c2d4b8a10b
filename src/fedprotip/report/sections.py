"""What stands on the page of one run, in order; a section without data does not exist."""

from collections import Counter

from fedprotip.report import finding, plots, tables
from fedprotip.report.parts import Grid, Picture, Section
from fedprotip.report.rundata import RunData
from fedprotip.report.text import (
    PHASES,
    bytes_text,
    ids_text,
    meaning,
    number,
    percent,
    plural,
    seconds_text,
    significant,
)
from fedprotip.store.results import Geometry


def run_sections(run: RunData) -> list[Section]:
    """All sections of a run between the headline and the settings."""
    summary = run.summary
    sections: list[Section] = []
    if summary.learned > 1:  # with a single task there is nothing to follow and nothing to find
        sections += [_accuracy(run), _matrix(run)]
        if summary.confusion or summary.routing.shares:
            sections.append(finding.routing(run))
        if summary.sweeps.size or summary.sweeps.purity:
            sections.append(finding.together(run))
    if summary.confidence.bins:
        sections.append(finding.confidence(run))
    if any(event.ranks for event in run.tasks):
        sections.append(_ranks(run))
    if run.traffic:
        sections.append(_traffic(run))
    if any(event.seconds for event in run.tasks):
        sections.append(_seconds(run))
    if summary.failures.count or run.failures or run.absences:
        sections.append(_failures(run))
    if run.geometry is not None:
        sections.append(_geometry(run.geometry, run))
    elif len(summary.drift) > 1:
        sections.append(finding.drift(run))
    return sections


def headline_rows(run: RunData) -> list[dict[str, str]]:
    group = run.setting("evaluate.group", 64)
    return [
        {
            "mode": mode,
            "meaning": meaning(mode, group),
            "accuracy": f"{number(run.summary.accuracy[mode])} %",
            "forgetting": number(run.summary.forgetting.get(mode)) if run.summary.learned > 1 else "–",
        }
        for mode in run.summary.modes
    ]


def _accuracy(run: RunData) -> Section:
    summary = run.summary
    modes = [mode for mode in summary.modes if summary.matrix.get(mode)]
    ends = ", ".join(f"{mode} ends at {number(summary.over_tasks(mode)[-1])} %" for mode in modes)
    curve = Picture(
        "accuracy_over_tasks",
        plots.accuracy_over_tasks(run),
        f"Line chart of the average accuracy over the tasks seen so far: {ends}.",
    )
    rows = [[f"{t + 1}", *(number(summary.over_tasks(mode)[t]) for mode in modes)] for t in range(summary.learned)]
    grid = Grid(["tasks", *modes], rows, "Average accuracy (%)", folded=summary.learned > 8)
    return Section("Accuracy over tasks", "The average over all tasks seen so far.", [curve], [grid])


def _matrix(run: RunData) -> Section:
    pictures = [
        Picture(
            f"matrix_{mode}",
            plots.accuracy_matrix(run, mode),
            f"Heatmap of the accuracy in mode {mode}: one row after each task, one column for each task.",
        )
        for mode in run.summary.modes
        if run.summary.matrix.get(mode)
    ]
    return Section("Accuracy matrix", "Read a column downwards: what later tasks did to that task.", pictures)


def _ranks(run: RunData) -> Section:
    last = [event for event in run.tasks if event.ranks][-1]
    full = ", ".join(f"{layer}: {rank} of {last.dims[layer]}" for layer, rank in last.ranks.items())
    intro = "Directions that later tasks may no longer change. A layer at 100 % cannot learn any more."
    alt = f"Rank of the protected subspace over tasks; at the end {full}."
    rows = [
        [layer, str(rank), str(last.dims[layer]), percent(rank / last.dims[layer])]
        for layer, rank in last.ranks.items()
    ]
    grid = Grid(["layer", "rank R", "width d", "share"], rows, "After the last task", folded=len(rows) > 8)
    return Section("Protected subspace", intro, [Picture("ranks", plots.ranks(run), alt)], [grid])


def _traffic(run: RunData) -> Section:
    totals: Counter[tuple[str, str]] = Counter()
    for (_, direction, kind), count in run.traffic.items():
        totals[direction, kind] += count
    kinds = sorted({kind for _, kind in totals}, key=lambda kind: (kind != "model", kind))
    rows = [[kind, bytes_text(totals["up", kind]), bytes_text(totals["down", kind])] for kind in kinds]
    up, down = (sum(totals[way, kind] for kind in kinds) for way in ("up", "down"))
    rows.append(["total", bytes_text(up), bytes_text(down)])
    clients = run.summary.clients
    intro = (
        f"All clients together sent {bytes_text(up)} (up) and received {bytes_text(down)} (down): "
        f"{bytes_text(up / clients)} and {bytes_text(down / clients)} for each of the {clients}."
    )
    alt = f"Stacked bars of the bytes of each task by kind; {bytes_text(up)} up, {bytes_text(down)} down."
    grid = Grid(["kind", "up", "down"], rows, "Bytes by kind")
    return Section("Bytes", intro, [Picture("bytes", plots.traffic(run), alt)], [grid])


def _seconds(run: RunData) -> Section:
    spent = run.summary.seconds
    rows = [[words, seconds_text(spent[phase])] for phase, words in PHASES.items() if phase in spent]
    rows += [["total", seconds_text(spent["total"])]] if "total" in spent else []
    for name, megabytes in (("memory", run.summary.peak_rss_mb), ("GPU memory", run.summary.peak_gpu_mb)):
        rows += [[f"peak {name}", bytes_text(megabytes * 1e6)]] if megabytes is not None else []
    alt = "Stacked bars of the seconds of each task: " + ", ".join(f"{name} {value}" for name, value in rows)
    picture = Picture("seconds", plots.seconds(run), alt + ".")
    return Section("Time", "Wall-clock time on the machine that ran all this.", [picture], [Grid(["", ""], rows)])


def _failures(run: RunData) -> Section:
    counts = Counter(run.summary.failures.by_reason) or Counter(event.reason for event in run.failures)
    rows = []
    for reason, count in counts.most_common():
        events = [event for event in run.failures if event.reason == reason]
        who, when = ids_text(e.client for e in events), ids_text(e.task + 1 for e in events)
        rows.append([reason, f"{count:,}", when, who])
    grids = [Grid(["reason", "times", "in tasks", "clients"], rows)] if rows else []
    away = [[f"task {e.task + 1}", e.reason, ids_text(e.clients)] for e in run.absences]
    if away:
        grids.append(Grid(["", "reason", "clients"], away, "Clients without a part in a task"))
    total = run.summary.failures.count or len(run.failures)
    intro = (
        f"{plural(total, 'time')} a client was left out of a round or task end; the rest went on without it."
        if total
        else "No client failed; some were not there."
    )
    return Section("Clients left out", intro, grids=grids)


def _geometry(geometry: Geometry, run: RunData) -> Section:
    pictures = []
    known = [value for value in geometry.rho_mean if value is not None]
    if known:
        alt = f"Line chart of ρ̂ for each task; the mean lies between {min(known):.2f} and {max(known):.2f}."
        pictures.append(Picture("geometry_rho", plots.geometry_rho(geometry), alt))
    if any(value is not None for row in geometry.beta for value in row):
        alt = f"Heatmap of β̂ between new and old tasks; its mean is {significant(geometry.beta_bar)}."
        pictures.append(Picture("geometry_beta", plots.geometry_beta(geometry), alt))
    if len(run.summary.drift) > 1:
        pictures.append(finding.drift_picture(run))
    if geometry.measured.gradient_sq_mean or geometry.measured.loss_increase:
        alt = "Measured squared gradients and loss increases beside their bounds; the table has the numbers."
        pictures.append(Picture("geometry_bounds", plots.geometry_bounds(geometry), alt))
    columns = [
        "",
        "ρ̂ min",
        "ρ̂ mean",
        "gradient²",
        "bound, Eq. 13",
        "Eq. 15",
        "loss increase",
        "bound, Eq. 14",
    ]
    rows = [[f"task {row[0]}", *map(_significant, row[1:])] for row in tables.geometry(run).rows]
    scalars = {
        "mean β̂": geometry.beta_bar,
        "G²": geometry.gradient_bound_G2,
        "L": geometry.smoothness_L,
        "forgetting in loss": geometry.ft_loss,
        "its bound, Eq. 16": geometry.bounds.ft_loss_canonical,
    }
    constants = [[name, significant(value)] for name, value in scalars.items() if value is not None]
    grids = [Grid(columns, rows, "Measured and bound", folded=True)]
    grids += [Grid(["", ""], constants, "Constants")] if constants else []
    intro = (
        "ρ̂ is the share of a task's gradient that projection leaves: high means room to learn. "
        "β̂ is how much a new task still disturbs an old one: low means little forgetting."
    )
    return Section("Geometry of projection", intro, pictures, grids)


def _significant(value: object) -> str:
    return significant(value) if isinstance(value, float | int) else "–"
