"""Sections about finding the task of a sample, and what that rests on."""

from fedprotip.report import plots, plots_finding, tables
from fedprotip.report.parts import Grid, Picture, Section
from fedprotip.report.rundata import RunData
from fedprotip.report.text import RULES, WAYS, joined, number, percent, plural, points
from fedprotip.store.results import MODES

UNKNOWN = {
    "new": "by the distance to the nearest class, less that to all samples",
    "odd": "by the distance to all samples where the network sees first",
    "energy": "by the outputs of the heads",
}


def routing(run: RunData) -> Section:
    """Where samples were sent, and every way to decide it."""
    summary = run.summary
    pictures = [
        Picture(
            f"confusion_{mode}",
            plots.routing_confusion(run, mode),
            f"Heatmap of routing decisions in mode {mode}: rows are true tasks, columns predicted tasks, "
            f"in per cent of the row.",
        )
        for mode in MODES
        if summary.confusion.get(mode)
    ]
    table, grids = tables.routing(run), _ways(run)
    if table.rows:
        alt = "Chart of the share of samples that were sent to a right task, for each task."
        pictures.append(Picture("routing_by_task", plots.routing_by_task(run), alt, _readings(run)))
        rows = [[f"task {row[0]}", *(percent(value) for value in row[1:])] for row in table.rows]
        heads = [column.replace("_", " ") for column in table.columns[1:]]
        grids.append(Grid(["", *heads], rows, "Samples sent to a right task, by task", folded=True))
    shares = [f"{percent(share)} in mode {mode}" for mode, share in summary.routing.shares.items()]
    intro = f"The right task was found for {' and '.join(shares)}. " if shares else ""
    if len(summary.routers) > 1:
        intro += f"This run finds it by {run.chosen}; the other ways were asked about the same samples. "
    intro += "The diagonal of a matrix is right." + _no_room(run) + _left_out(run)
    gist = f"{percent(summary.routing.single)} found" if summary.routing.single is not None else ""
    return Section("Finding the task", intro, pictures, grids, folded=True, gist=gist)


def _no_room(run: RunData) -> str:
    """Why relevance cannot tell tasks apart when the first one takes all directions of U_L; empty when it does not."""
    first = run.tasks[0] if len(run.tasks) > 1 else None
    if first is None or "routing" not in first.ranks or first.ranks["routing"] < first.dims["routing"]:
        return ""
    return (
        f" U_L of the first task spans all {first.dims['routing']} features, so later tasks have no direction of their "
        "own and the ways cosine and gaussian cannot tell them from it: method.routing_rank = 20 leaves them room."
    )


def _readings(run: RunData) -> str:
    """What the figures by task are about; empty where only those of the end are known."""
    if not run.summary.routing_over_tasks:
        return ""
    return (
        "Bars: the samples of each task, asked after the last task. Lines, and “so far” in the table: the samples of "
        "all tasks up to that one, asked right after it was learned; after the first task there is nothing to confuse, "
        "and the published figures by task begin with 1, so they are compared with these. “Newest”: right after a "
        "task, its own samples alone."
    )


def _left_out(run: RunData) -> str:
    """Which part of the data class statistics say nothing about; empty when it is none."""
    # keyed, because the start of a head tells the same as the end of its task
    told = {(event.task, event.client): event.classes for event in run.withheld}
    if not told:
        return ""
    groups = plural(sum(told.values()), "time")
    return (
        f" {groups} a client had fewer than {run.setting('statistics.minimum', 5)} samples of a class: their sum would "
        "be close to a sample itself, so it was left out of the class statistics."
    )


def _ways(run: RunData) -> list[Grid]:
    """One row per way; the chosen one is bold."""
    rows, bold = [], set()
    for place, (way, found) in enumerate(run.summary.routers.items()):
        shares = (None if way == "shared" else share for share in (found.routing_single, found.routing_batch64))
        right, right_batch = (None if share is None else 100 * share for share in shares)
        cells = [found.single, right, found.batch64, right_batch]
        rows.append([f"{way} (chosen)" if way == run.chosen else way, *map(number, cells)])
        bold |= {(place, column) for column in range(1, 5) if way == run.chosen}
    if not rows:
        return []
    title = "Accuracy and tasks found (%) by each way"
    grids = [Grid(["", "single", "found", "batch64", "found"], rows, title, best=bold)]
    known = [[way, WAYS[way]] for way in run.summary.routers if way in WAYS]
    return grids + ([Grid(["", "what it does"], known, "What the ways do", folded=True)] if known else [])


def together(run: RunData) -> Section:
    """Accuracy over the number of samples, and over the share of them that is of one task."""
    sweeps, chosen, pictures, grids = run.summary.sweeps, run.chosen, [], []
    if sweeps.size:
        alt = f"Line chart of the accuracy over the number of samples that come together. {chosen}: "
        alt += ", ".join(f"{number(v)} % with {n}" for n, v in zip(sweeps.sizes, sweeps.size[chosen], strict=True))
        caption = (
            "More samples of one task make that task easier to find. The broad line is the way this run uses. "
            "Every test sample counts alike at each size; one at a time is mode single."
        )
        pictures.append(Picture("accuracy_over_size", plots_finding.accuracy_over_size(run), alt + ".", caption))
        rows = [[way, *map(number, values)] for way, values in sweeps.size.items()]
        grids.append(Grid(["samples", *map(str, sweeps.sizes)], rows, "Accuracy (%) by samples", folded=True))
    if sweeps.purity:
        alt = f"Line chart of the accuracy over the share of a group of 64 that is of one task, by {chosen} and cosine."
        caption = (
            "The rest of the 64 is of other tasks. One task for all must be wrong about them; each sample alone "
            "does not care" + ("; a mixture lets the group itself say which tasks it holds." if _mixes(run) else ".")
        )
        pictures.append(Picture("accuracy_over_purity", plots_finding.accuracy_over_purity(run), alt, caption))
        rows = [
            [way, RULES.get(rule, rule), *map(number, values)]
            for way, rules in sweeps.purity.items()
            for rule, values in rules.items()
        ]
        shares = [f"{number(100 * share, 0)} %" for share in sweeps.purities]
        grids.append(Grid(["way", "decision", *shares], rows, "Accuracy (%) by purity", folded=True))
    return Section("How many samples come together", _gain(run), pictures, grids, folded=True)


def _mixes(run: RunData) -> bool:
    return "mixture" in run.summary.sweeps.purity.get(run.chosen, {})


def _gain(run: RunData) -> str:
    """What a group brings, in one sentence."""
    sizes, values = run.summary.sweeps.sizes, run.summary.sweeps.size.get(run.chosen, [])
    if len(values) < 2:
        return "Accuracy when several samples are answered at once."
    return (
        f"With {run.chosen} one sample at a time is answered with {points(values[0])} accuracy, "
        f"{sizes[-1]} samples of one task together with {points(values[-1])}."
    )


def confidence(run: RunData) -> Section:
    """Whether answers are as sure as they are right, and whether unknown inputs stand out."""
    known = run.summary.confidence
    alt = "Reliability diagram of mode single: " + ", ".join(
        f"{percent(line.accuracy)} right at confidence {percent(line.confidence)} ({line.count} answers)"
        for line in known.bins
    )
    caption = (
        "On the dotted line confidence can be taken at its word; below it answers are too sure, above it too modest."
    )
    if known.ece is not None:
        caption += f" On average they are {number(100 * known.ece)} points off (ECE)."
    if known.temperature is not None:
        made = "made surer" if known.temperature < 1 else "made less sure" if known.temperature > 1 else "as they are"
        caption += f" Temperature {number(known.temperature, 2)}: probabilities {made}."
    picture = Picture("reliability", plots_finding.reliability(run), alt + ".", caption)
    rows = [[percent(line.confidence), percent(line.accuracy), f"{line.count:,}"] for line in known.bins]
    intro = "Every answer comes with a probability; one sample at a time, task unknown. " + _unknown(run)
    return Section(
        "How sure the answers are",
        intro.strip(),
        [picture],
        [Grid(["confidence", "right", "answers"], rows)],
        folded=True,
        gist=f"{number(100 * known.ece)} points off" if known.ece is not None else "",
    )


def _unknown(run: RunData) -> str:
    scores = {name: value for name, value in run.summary.unknown.items() if value is not None}
    if not scores:
        return ""
    found = [f"{number(value, 2)} {UNKNOWN.get(name, f'by {name}')}" for name, value in scores.items()]
    return (
        "Before the last task was learned, its samples could be told from known ones "
        f"with an AUROC of {joined(found)} (0.5 is guessing, 1 is perfect)."
    )


def drift_picture(run: RunData) -> Picture:
    last = joined([f"{number(value, 2)} on task {t + 1}" for t, value in enumerate(run.summary.drift[-1])])
    return Picture(
        "drift",
        plots_finding.drift(run),
        f"Heatmap of the distance between class means of test data and the kept class statistics; at the end {last}.",
        "How far class means of test data lie from the kept class statistics, in standard deviations of a sample, "
        "beyond chance. The diagonal is the gap between training and test data; growth down a column is drift. "
        "Small changes need not be: the standard deviation itself is estimated anew with every task.",
    )


def drift(run: RunData) -> Section:
    intro = "Class statistics are taken once, when a task ends. If the features change later, they no longer fit."
    return Section("Drift of class statistics", intro, [drift_picture(run)], folded=True)
