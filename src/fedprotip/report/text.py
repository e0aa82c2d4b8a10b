"""Words and numbers of the report: names, units, and the result in one plain sentence."""

import math
from collections.abc import Iterable, Mapping

from fedprotip.report.rundata import RunData
from fedprotip.store.records import Number
from fedprotip.store.results import RouterFigures

METHOD_NAMES = {
    "fedprotip": "FedProTIP",
    "fedavg": "FedAvg",
    "fedprox": "FedProx",
    "fedlwf": "FedLwF",
    "ridge": "Ridge",
    "joint": "Joint training",
    "pec": "Fed+PEC",
    "scr": "Fed+SCR",
    "lode": "Tar+LODE",
}
WAYS = {
    "cosine": "The paper: cosine similarity to every client's references, and a vote; the head of that task answers.",
    "gaussian": "How much of a sample lies in the subspace of each task, as Gaussians; the head of that task answers.",
    "statistics": "The nearest class mean, measured in standard deviations, is the answer; its task follows.",
    "shared": "The nearest mean of a class in all domains together is the answer; the domain is not needed.",
    "statistics-heads": "Class means choose the task; the head of that task answers.",
    "fused": "Class means say how likely each task is, the heads how likely each class; both together answer.",
    "birth": "The nearest class mean, as the network saw it before any training, is the answer; its task follows.",
    "birth-shared": "The nearest mean of a class in all domains, as the network saw it before any training, answers.",
    "ridge": "The largest output of a linear classifier in closed form is the answer; its task follows.",
}
TRAINED = {"birth": "statistics", "birth-shared": "shared"}
"""Ways of the network before any training, and the same by the trained one."""
STAND_IN = "*"
STAND_IN_NOTE = "* This method does not look for the task: it answers single samples agnostically."
CLOSED_FORM = ("lda", "ridge", "stsa")
NOTICEABLE = 0.5
"""Points of accuracy below which a difference is not worth a word."""
RULES = {"pooled": "one task for all", "alone": "each sample alone", "mixture": "a mixture of tasks"}
SCENARIOS = {"class": "class-incremental", "domain": "domain-incremental"}
PHASES = {"train": "training", "task_end": "task end", "evaluate": "evaluation"}


def method_name(method: str) -> str:
    """The method as the paper writes it; unknown short names are acronyms (fot → FOT)."""
    return METHOD_NAMES.get(method, method.upper() if len(method) <= 6 else method)


def meaning(mode: str, group: int) -> str:
    """What a mode measures, in one line."""
    return {
        "single": "One sample at a time, and nobody says of which task.",
        "aware": "The true task is given.",
        "agnostic": "No task is given: the strongest output over all heads wins, the paper's (-t).",
        "batch64": f"The paper's protocol: one decision for a group of {group} test samples of one task.",
    }[mode]


def number(value: Number, digits: int = 1) -> str:
    """A fixed number of digits; a dash for what was not measured.

    >>> number(97.125), number(None), number(-0.01)
    ('97.1', '–', '0.0')
    """
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    text = f"{value:.{digits}f}"
    return text.removeprefix("-") if float(text) == 0 else text.replace("-", "−")


def significant(value: Number) -> str:
    """Three significant digits, for quantities without a natural scale."""
    if value is None or not math.isfinite(value):
        return number(value)
    mantissa, _, exponent = f"{value:.3g}".partition("e")
    return mantissa.replace("-", "−") + (f"·10^{int(exponent)}".replace("-", "−") if exponent else "")


def percent(share: object) -> str:
    """A share as per cent.

    >>> percent(0.5), percent(None)
    ('50.0 %', '–')
    """
    return points(100 * share) if isinstance(share, float | int) else points(None)


def points(value: object) -> str:
    """What is in per cent already."""
    return f"{number(value)} %" if isinstance(value, float | int) else "–"


def setting_text(value: object) -> str:
    """The value of a setting as a file has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def plus_minus(mean: Number, std: Number, digits: int = 1) -> str:
    """Mean ± sample standard deviation; a single run has no ±."""
    return number(mean, digits) if std is None else f"{number(mean, digits)} ± {number(std, digits)}"


def byte_unit(largest: float) -> tuple[float, str]:
    """Divisor and unit in which `largest` is a readable number."""
    for divisor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if largest >= divisor:
            return divisor, unit
    return 1.0, "B"


def second_unit(largest: float) -> tuple[float, str]:
    for divisor, unit in ((2 * 3600.0, "h"), (2 * 60.0, "min")):
        if largest >= divisor:
            return divisor / 2, unit
    return 1.0, "s"


def bytes_text(count: float) -> str:
    """
    >>> bytes_text(1_250_000)
    '1.25 MB'
    """
    divisor, unit = byte_unit(count)
    value = count / divisor
    digits = 0 if unit == "B" or value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{digits}f} {unit}"


def mib_text(mib: float) -> str:
    """
    >>> mib_text(1000)
    '1.05 GB'
    """
    return bytes_text(mib * 2**20)


def seconds_text(seconds: float) -> str:
    divisor, unit = second_unit(seconds)
    return f"{seconds / divisor:.1f} {unit}"


def plural(count: int, word: str) -> str:
    return f"{count:,} {word}" + ("" if count == 1 else "s")


def samples_text(kept: Mapping[str, int]) -> str:
    """What is kept of the past to learn from, by kind.

    >>> samples_text({"raw": 2000, "synthetic": 1})
    '2,000 raw samples and 1 synthetic sample'
    """
    return joined([plural(count, f"{kind} sample") for kind, count in kept.items()])


def ids_text(ids: Iterable[int], most: int = 12) -> str:
    """Ids with runs folded; long lists are cut and counted.

    >>> ids_text([4, 0, 1, 2]), ids_text([1, 3, 5, 7], most=2)
    ('0–2, 4', '1, 3, … (4 in all)')
    """
    ids = set(ids)
    spans: list[list[int]] = []
    for value in sorted(ids):
        if spans and value == spans[-1][1] + 1:
            spans[-1][1] = value
        else:
            spans.append([value, value])
    parts = [f"{first}" if first == last else f"{first}–{last}" for first, last in spans]
    if len(parts) > most:
        parts = [*parts[:most], f"… ({len(ids)} in all)"]
    return ", ".join(parts)


def joined(parts: list[str]) -> str:
    """
    >>> joined(["a", "b", "c"])
    'a, b and c'
    """
    return " and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else "".join(parts)


def reading(run: RunData) -> str:
    """The result of a run in one or two sentences, computed from its numbers."""
    summary, group = run.summary, run.setting("evaluate.group", 64)
    condition = {
        "single": "when samples come one at a time and nobody tells the task",
        "agnostic": "when not told the task",
        "aware": "when told the task",
        "batch64": f"when it has to find the task from {group} samples",
    }
    if summary.routing.shares:
        del condition["agnostic"]
    shown = [mode for mode in condition if summary.accuracy.get(mode) is not None]
    learned = plural(summary.learned, "task")
    shares = [f"{number(summary.accuracy[mode])} % {condition[mode]}" for mode in shown]
    answers = joined(shares).replace(" %", " % of test samples correctly", 1)
    sentence = f"After {learned} {method_name(summary.method)} answers {answers}"
    if summary.learned > 1:
        brief = {"single": "one at a time", "agnostic": "task not given", "aware": "task given"}
        lost = [f"{_lost(summary.forgetting.get(mode))} ({brief[mode]})" for mode in shown if mode in brief]
        sentence += f"; it forgot {joined(lost)}" if lost else ""
    return sentence + "."


def notices(run: RunData) -> list[str]:
    """What whoever reads the figures of a run has to know about its data."""
    said = [
        f"The data changed before round {one.round + 1} of task {one.task + 1}, and the run went on with it: "
        f"{'; '.join(one.changes)}."
        for one in (run.manifest.data.accepted if run.manifest.data else [])
    ]
    if gone := [task + 1 for task in run.summary.unmeasured]:
        which = f"Task {gone[0]} was" if len(gone) == 1 else f"Tasks {ids_text(gone)} were"
        said.append(f"{which} not evaluated at the end: no test data was left; the figures are about the other tasks.")
    return said


def _lost(points: Number) -> str:
    if points is not None and points < 0.05:
        return "nothing"
    return f"{number(points)} points"


def trains_nothing(run: RunData) -> bool:
    """Whether all answers are closed forms of the features that the backbone began with."""
    return run.summary.method in CLOSED_FORM and not run.setting("method.adapt", False)


def chance(accuracy: float, run: RunData) -> float:
    """Points by which an accuracy (%) is off by chance: two standard errors over the test samples; 0 if not known."""
    samples = sum(run.answers.samples.values()) if run.answers else 0
    return 2 * math.sqrt(accuracy * (100 - accuracy) / samples) if samples and 0 < accuracy < 100 else 0.0


def other_ways(chosen: str, ways: Mapping[str, RouterFigures]) -> str:
    """Which way answers single samples, and what the others would have had; empty where there is no other."""
    known = {name: found.single for name, found in ways.items() if found.single is not None}
    if chosen not in known or len(known) < 2:
        return ""
    own = f"{chosen}, by the network before any training" if chosen in TRAINED else chosen
    others = joined([f"{name} {points(single)}" for name, single in known.items() if name != chosen])
    return f"The way that answers is {own} ({points(known[chosen])}); the others would have had: {others}."


def worth(run: RunData) -> str:
    """What training adds to class statistics, in one or two sentences; empty where the run does not tell."""
    if trains_nothing(run):
        return "Nothing was trained for this: the answers are a closed form of sums."
    known = {name: found.single for name, found in run.summary.routers.items() if found.single is not None}
    chosen = known.get(run.chosen)
    if chosen is None:
        return ""
    if run.chosen in TRAINED:
        trained = known.get(TRAINED[run.chosen])
        if trained is None:
            return ""
        what = f"the untrained network answers, class statistics of the trained one have {points(trained)}"
        return _verdict("Training", trained - chosen, chance(chosen, run), what)
    said, plain, born = [], known.get("statistics"), known.get("birth")
    if born is not None:
        what = f"class statistics of the untrained network have {points(born)}"
        said.append(_verdict("Training", chosen - born, chance(born, run), what))
    if plain is not None and run.chosen != "statistics":
        what = f"class statistics of the same features answer {points(plain)} alone"
        said.append(_verdict("The trained heads", chosen - plain, chance(plain, run), what))
    return " ".join(said)


def _verdict(who: str, gain: float, noise: float, what: str) -> str:
    """Whether it (or they) added points or cost some, unless chance could have done that."""
    several = who.endswith("s")
    if abs(gain) < max(NOTICEABLE, noise):
        return f"{who} {'make' if several else 'makes'} no difference that could be told: {what}."
    verb = ("add" if gain > 0 else "cost") + ("" if several else "s")
    return f"{who} {verb} {number(abs(gain))} points: {what}."
