"""Sections about answers to single samples: class by class, what is taken for what, site by site."""

import base64
import io
import statistics

from PIL import Image

from fedprotip.report.parts import Grid, Section, Thumb
from fedprotip.report.rundata import RunData
from fedprotip.report.tables import Cell, Table
from fedprotip.report.text import percent, plural, points
from fedprotip.store.answers import PAIRS, Answers, Example, Sites, most_confused

SHOWN = 12
"""Classes that are shown without unfolding."""
MANY = 20
"""Sites from which on their distribution is shown instead of each."""
WORST = 5
BUDGET = 100_000
"""Characters that the small pictures of a page may take together."""


def class_sections(run: RunData) -> list[Section]:
    """By class, by pair, by site; what there is of them."""
    answers = run.answers
    if answers is None or not answers.samples:
        return []
    sections = [_classes(answers, "single" in run.summary.accuracy)]
    sections += [_pairs(answers)] if most_confused(answers.taken) else []
    sections += [_sites(answers.sites)] if len(answers.sites.names) > 1 else []
    return sections


def class_tables(run: RunData) -> list[Table]:
    """The same as files: every class, every pair that occurred, every site."""
    answers = run.answers
    if answers is None:
        return []
    names, samples, sites = answers.classes, answers.samples, answers.sites
    by_class: list[list[Cell]] = [[names[c], samples[c], accuracy] for c, accuracy in answers.accuracy.items()]
    pairs: list[list[Cell]] = [[names[true], names[said], count] for true, said, count in answers.taken]
    by_site: list[list[Cell]] = [list(row) for row in zip(sites.names, sites.samples, sites.accuracy, strict=True)]
    tables = [
        Table("classes", ["class", "samples", "accuracy"], by_class),
        Table("taken_for", ["class", "taken_for", "samples"], pairs),
        Table("sites", ["site", "samples", "accuracy" if sites.measured else "expected_accuracy"], by_site),
    ]
    return [table for table in tables if table.rows]


def _classes(answers: Answers, finds_tasks: bool) -> Section:
    accuracy, names = answers.accuracy, answers.classes
    order = sorted(accuracy, key=lambda label: (accuracy[label], label))
    worst, best = order[0], order[-1]
    how = "One sample at a time, and nobody says of which task" + (
        "." if finds_tasks else ": this method does not look for the task, the strongest output of all heads answers."
    )
    if len(order) == 1:
        spread = ""
    elif accuracy[worst] == accuracy[best]:
        spread = f" All classes are alike, with {points(accuracy[best])}."
    else:
        spread = f" The hardest class is “{names[worst]}” with {points(accuracy[worst])}"
        spread += f", the median {points(statistics.median(accuracy.values()))}" if len(order) > 2 else ""
        spread += f", the easiest “{names[best]}” with {points(accuracy[best])}."
    intro = how + spread
    grids = [_class_grid(answers, order[:SHOWN], "The hardest classes" if len(order) > SHOWN else "")]
    if len(order) > SHOWN:
        grids.append(_class_grid(answers, sorted(order), f"All {len(order)} classes", folded=True))
    return Section("Accuracy by class", intro, grids=grids)


def _class_grid(answers: Answers, labels: list[int], title: str, folded: bool = False) -> Grid:
    mistakes: dict[int, str] = {}
    for true, said, count in most_confused(answers.taken):
        mistakes.setdefault(true, f"{answers.classes[said]} ({count:,})")
    accuracy, samples = answers.accuracy, answers.samples
    rows = [
        [answers.classes[label], points(accuracy[label]), f"{samples[label]:,}", mistakes.get(label, "–")]
        for label in labels
    ]
    columns = ["class", "accuracy", "samples", "most often taken for"]
    return Grid(columns, rows, title, folded, bars=[accuracy[label] for label in labels])


def _pairs(answers: Answers) -> Section:
    pairs, samples = most_confused(answers.taken), answers.samples
    wrong = sum(count for _, _, count in pairs)
    shown = pairs[:PAIRS]
    covered = sum(count for _, _, count in shown) / wrong
    intro = f"{plural(wrong, 'test sample')} of {sum(samples.values()):,} got a wrong answer"
    intro += f"; {percent(covered)} of the mistakes are these" if len(pairs) > PAIRS else ""
    intro += ". In brackets: of all samples of the class."
    names = answers.classes
    rows = [[names[true], names[said], f"{n:,} ({percent(n / samples[true])})"] for true, said, n in shown]
    thumbs = _thumbs(answers)
    grid = Grid(
        ["class", "taken for", "how often"],
        rows,
        thumbs=[thumbs.get((true, said), []) for true, said, _ in shown] if thumbs else [],
    )
    return Section("Most confused", intro, grids=[grid])


def _sites(sites: Sites) -> Section:
    order = sorted(range(len(sites.names)), key=lambda place: (sites.accuracy[place], place))
    low, high = (points(sites.accuracy[order[end]]) for end in (0, -1))
    if sites.measured:
        intro, what = "Accuracy of the test samples that each site holds itself", "test samples"
    else:
        intro = (
            "No test sample belongs to a site, so this is what to expect at each site's mix of classes: the accuracy "
            "of every class, weighted as often as the site trains on it"
        )
        what = "training samples"
    intro += f". It goes from {low} to {high}."
    if len(order) <= MANY:
        return Section("Accuracy by site", intro, grids=[_site_grid(sites, list(range(len(order))), what)])
    quarters = statistics.quantiles(sites.accuracy, n=4, method="inclusive")
    row = [f"{len(order):,} sites", low, *map(points, quarters), high]
    spread = Grid(["", "lowest", "lower quarter", "median", "upper quarter", "highest"], [row])
    worst = _site_grid(sites, order[:WORST], what, "The five lowest")
    return Section("Accuracy by site", intro, grids=[spread, worst])


def _site_grid(sites: Sites, places: list[int], what: str, title: str = "") -> Grid:
    rows = [[sites.names[place], points(sites.accuracy[place]), f"{sites.samples[place]:,}"] for place in places]
    return Grid(["site", "accuracy", what], rows, title, bars=[sites.accuracy[place] for place in places])


def _thumbs(answers: Answers) -> dict[tuple[int, int], list[Thumb]]:
    """Pictures by pair, within the budget: the first of every pair, then the second …"""
    waiting: dict[tuple[int, int], list[Example]] = {}
    for example in answers.examples:
        waiting.setdefault((example.true, example.said), []).append(example)
    found: dict[tuple[int, int], list[Thumb]] = {}
    left = BUDGET
    for place in range(max(map(len, waiting.values()), default=0)):
        for pair, examples in waiting.items():
            if place < len(examples):
                data = _png(examples[place])
                left -= len(data)
                if left < 0:
                    return found
                true, said = (answers.classes[label] for label in pair)
                alt = f"Test picture of class {true} that was taken for {said}."
                height, width, _ = examples[place].shape
                found.setdefault(pair, []).append(Thumb(data, alt, width, height))
    return found


def _png(example: Example) -> str:
    """In base64."""
    height, width, channels = example.shape
    file = io.BytesIO()
    Image.frombytes("L" if channels == 1 else "RGB", (width, height), example.raw).save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode("ascii")
