"""How much of the way a method goes from FedAvg, the lower bound, to joint training, the upper one."""

from fedprotip.report.tables import Group
from fedprotip.report.text import NOTICEABLE
from fedprotip.store.results import MODES, standing_for

LOWER, UPPER = "fedavg", "joint"


def of_the_way(groups: list[Group]) -> dict[str, dict[str, float]]:
    """Label → mode → per cent of the way, (accuracy − FedAvg)/(joint − FedAvg).

    Nothing unless there is one of each; no mode in which they are too close for a way between them. A method that looks
    for no task stands for `single` as it answers agnostically, FedAvg and joint training among them.
    """
    ends = [[group for group in groups if group.method == method] for method in (LOWER, UPPER)]
    if any(len(end) != 1 for end in ends):
        return {}
    found: dict[str, dict[str, float]] = {}
    for mode in MODES:
        low, high = (_mean(end[0], mode) for end in ends)
        if low is None or high is None or high - low < NOTICEABLE:
            continue
        for group in groups:
            if (mean := _mean(group, mode)) is not None:
                found.setdefault(group.label, {})[mode] = 100 * (mean - low) / (high - low)
    return found


def way_sentence(groups: list[Group]) -> str:
    """How far the best method comes that keeps not all data, sample by sample; nothing where the bounds are missing."""
    way = {label: modes["single"] for label, modes in of_the_way(groups).items() if "single" in modes}
    methods = [group.label for group in groups if group.method not in (LOWER, UPPER) and group.label in way]
    if not methods:
        return ""
    best = max(methods, key=lambda label: way[label])
    return f"Of the way from FedAvg to joint training, which keeps all data, {best} goes {round(way[best])} %."


def _mean(group: Group, mode: str) -> float | None:
    stat = group.accuracy.get(standing_for(mode, group.accuracy))
    return None if stat is None else stat.mean
