"""Whether the best of a comparison is really better, or may owe it to its seeds.

Two-sided t-tests: paired by seed where both have at least three seeds in common, because the same seed means the same
tasks, shares and first weights, so that the luck of the draw cancels out; Welch's where they have not, and each has
three. Accuracies are means over many test samples, so their differences are about normal; and a rank test could not
say anything at all below six seeds. p is corrected for the number of comparisons in a mode (Holm).
"""

import math
from dataclasses import dataclass
from statistics import fmean

from fedprotip.report.bounds import UPPER
from fedprotip.report.parts import Grid
from fedprotip.report.tables import Group
from fedprotip.report.text import number
from fedprotip.store.results import MODES, standing_for

FEWEST = 3
"""Seeds of each; a spread of two is a guess."""
LEVEL = 0.05
TITLE = "Is the best really better?"
NOTE = (
    "Two-sided t-test, paired by seed where both have three seeds or more in common (the same seed is the same tasks, "
    "shares and first weights), else Welch's; p after Holm, for all comparisons in a mode. Below 0.05 chance is an "
    "unlikely reason. With few seeds only large differences can be told; “–”: fewer than three seeds, or no spread."
)


@dataclass(frozen=True)
class Verdict:
    """The best group of a mode beside another one."""

    mode: str
    best: str
    other: str
    gain: float
    """Points by which the best is ahead, over the seeds that were compared; below 0 where others made it the best."""
    p: float | None
    """None: it cannot be told."""
    seeds: int
    paired: bool

    @property
    def p_text(self) -> str:
        return "–" if self.p is None else "< 0.001" if self.p < 0.001 else f"{self.p:.3f}"


def verdicts(groups: list[Group]) -> list[Verdict]:
    """In every mode the best against each other one; joint training, which may keep all data, is no competitor."""
    groups = [group for group in groups if group.method != UPPER]
    found: list[Verdict] = []
    for mode in MODES:
        by_label = {group.label: _by_seed(group, mode) for group in groups}
        known = {label: values for label, values in by_label.items() if values}
        if any(mode in group.accuracy for group in groups) and len(known) > 1:
            best = max(known, key=lambda label: fmean(known[label].values()))
            found += _corrected([_compared(mode, best, other, known) for other in known if other != best])
    return found


def verdict_grid(found: list[Verdict]) -> Grid | None:
    """A row for every comparison; nothing where no mode has seeds enough."""
    if all(one.p is None for one in found):
        return None
    rows = [
        [one.mode, one.best, one.other, "+" * (one.gain >= 0) + number(one.gain), one.p_text, _seeds(one)]
        for one in found
    ]
    return Grid(["mode", "best", "against", "points", "p", "seeds"], rows, TITLE, folded=len(rows) > 8, note=NOTE)


def may_be_chance(found: list[Verdict], mode: str, first: str, second: str) -> str:
    """The end of a sentence about who is ahead; empty where nothing was tested."""
    for one in found:
        if (one.mode, one.best, one.other) == (mode, first, second) and one.p is not None:
            if one.gain < 0:
                return f"; over the {one.seeds} seeds that both have it is behind"
            how = "chance is an unlikely reason" if one.p < LEVEL else "it may still be chance"
            sign = f"p {one.p_text}" if one.p < 0.001 else f"p = {one.p_text}"
            return f"; over {one.seeds} seeds {how} ({sign})"
    return ""


def _seeds(one: Verdict) -> str:
    return f"{one.seeds}, paired" if one.paired else str(one.seeds)


def _by_seed(group: Group, mode: str) -> dict[int, float]:
    """Accuracy of each seed; of one that was run more than once the mean."""
    shown = standing_for(mode, group.accuracy)
    values: dict[int, list[float]] = {}
    for run in group.runs:
        if (value := run.summary.accuracy.get(shown)) is not None:
            values.setdefault(run.summary.seed, []).append(value)
    return {seed: fmean(found) for seed, found in values.items()}


def _compared(mode: str, best: str, other: str, known: dict[str, dict[int, float]]) -> Verdict:
    from scipy import stats  # half a second that only comparisons over seeds need

    ours, theirs = known[best], known[other]
    common = sorted(ours.keys() & theirs.keys())
    if len(common) >= FEWEST:
        gains = [ours[seed] - theirs[seed] for seed in common]
        spread = max(gains) - min(gains) > 1e-9
        p = float(stats.ttest_1samp(gains, 0.0).pvalue) if spread else None
        return Verdict(mode, best, other, fmean(gains), _known(p), len(common), True)
    fewest = min(len(ours), len(theirs))
    gain, p = fmean(ours.values()) - fmean(theirs.values()), None
    if fewest >= FEWEST and any(max(v.values()) - min(v.values()) > 1e-9 for v in (ours, theirs)):
        p = float(stats.ttest_ind(list(ours.values()), list(theirs.values()), equal_var=False).pvalue)
    return Verdict(mode, best, other, gain, _known(p), fewest, False)


def _known(p: float | None) -> float | None:
    return p if p is not None and math.isfinite(p) else None


def _corrected(found: list[Verdict]) -> list[Verdict]:
    """Holm: the smallest p times their number, the next times one less, and never below the one before."""
    order = sorted((one for one in found if one.p is not None), key=lambda one: one.p or 0.0)
    lowest, corrected = 0.0, dict[str, float]()
    for place, one in enumerate(order):
        lowest = max(lowest, min(1.0, (len(order) - place) * (one.p or 0.0)))
        corrected[one.other] = lowest
    return [
        Verdict(one.mode, one.best, one.other, one.gain, corrected.get(one.other), one.seeds, one.paired)
        for one in found
    ]
