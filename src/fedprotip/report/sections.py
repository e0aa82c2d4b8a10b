"""What stands on the page of one run, in order; a section without data does not exist."""

from collections import Counter

from fedprotip.report import finding, plots
from fedprotip.report.classes import class_sections
from fedprotip.report.geometry import geometry_section
from fedprotip.report.parts import Grid, Picture, Section
from fedprotip.report.rundata import RunData
from fedprotip.report.text import (
    PHASES,
    bytes_text,
    ids_text,
    meaning,
    mib_text,
    number,
    percent,
    plural,
    samples_text,
    seconds_text,
)
from fedprotip.store.results import Memory


def run_sections(run: RunData) -> list[Section]:
    """All sections of a run between the headline and the settings; what a reader can do without is folded."""
    summary = run.summary
    sections = class_sections(run)
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
    if any(event.samples for event in run.tasks):
        sections.append(_samples(run))
    if any(event.seconds for event in run.tasks):
        sections.append(_seconds(run))
    if run.memory is not None and run.memory.peaks("rss"):
        sections.append(_memory(run.memory, run))
    if summary.failures.count or run.failures or run.absences:
        sections.append(_failures(run))
    if run.geometry is not None:
        sections.append(geometry_section(run.geometry, run))
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
    intro = "Read a column downwards: what later tasks did to that task."
    return Section("Accuracy matrix", intro, pictures, folded=True)


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
    fullest = max(rank / last.dims[layer] for layer, rank in last.ranks.items())
    pictures, gist = [Picture("ranks", plots.ranks(run), alt)], f"{percent(fullest)} of the fullest layer"
    return Section("Protected subspace", intro, pictures, [grid], folded=True, gist=gist)


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
    pictures, gist = [Picture("bytes", plots.traffic(run), alt)], f"{bytes_text(up)} up, {bytes_text(down)} down"
    return Section("Bytes", intro, pictures, [grid], folded=True, gist=gist)


def _samples(run: RunData) -> Section:
    kinds = sorted({kind for event in run.tasks for kind in event.samples})
    rows = [[f"{e.task + 1}", *(f"{e.samples.get(kind, 0):,}" for kind in kinds)] for e in run.tasks]
    told = {
        "raw": "raw: their own samples, all clients together",
        "synthetic": "synthetic: images that the server made and sent to every client",
    }
    intro = f"What clients keep of past tasks to learn from again; {'; '.join(told.get(kind, kind) for kind in kinds)}."
    grid = Grid(["after task", *kinds], rows, folded=len(rows) > 8)
    return Section("Samples kept", intro, grids=[grid], folded=True, gist=samples_text(run.tasks[-1].samples))


def _seconds(run: RunData) -> Section:
    spent = run.summary.seconds
    rows = [[words, seconds_text(spent[phase])] for phase, words in PHASES.items() if phase in spent]
    rows += [["total", seconds_text(spent["total"])]] if "total" in spent else []
    for name, mib in (("memory", run.summary.peak_rss_mb), ("GPU memory", run.summary.peak_gpu_mb)):
        rows += [[f"peak {name}", mib_text(mib)]] if mib is not None else []
    alt = "Stacked bars of the seconds of each task: " + ", ".join(f"{name} {value}" for name, value in rows)
    picture = Picture("seconds", plots.seconds(run), alt + ".")
    intro, gist = "Wall-clock time on the machine that ran all this.", seconds_text(spent.get("total", 0.0))
    return Section("Time", intro, [picture], [Grid(["", ""], rows)], folded=True, gist=gist)


def _memory(memory: Memory, run: RunData) -> Section:
    rss, gpu = memory.peaks("rss"), memory.peaks("gpu")
    phases = [phase for phase in PHASES if phase in rss or phase in gpu]
    rows = [
        [PHASES[phase], *(mib_text(peaks[phase]) if phase in peaks else "–" for peaks in (rss, gpu) if peaks)]
        for phase in phases
    ]
    alt = "Bars of the peak memory of each phase of each task: " + ", ".join(f"{row[0]} {row[1]}" for row in rows)
    intro = "The most that the process had in each phase; most of it is there before any work: Python, torch, the data."
    grid = Grid(["", "memory", *(["GPU memory"] if gpu else [])], rows, "Peak of all tasks")
    gist = f"{mib_text(max(rss.values()))} at most"
    return Section("Memory", intro, [Picture("memory", plots.memory(run), alt + ".")], [grid], folded=True, gist=gist)


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
