"""The tables of the paper's source, cell by cell: what a cell is about, and what stands in it.

What a row and a column mean is written down here, from the printed table, and not taken from published.toml.
"""

import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

TEX = Path(__file__).parents[3] / "shared" / "paper" / "fedprotip.tex"
LABELS = {
    1: "tab: cif-dom-main",
    2: "table2",
    3: "tab:num-client",
    5: "tab:TIP-compare",
    6: "tab:resnet-scratch",
    7: "tab:vit-cifar100",
    8: "tab:abl-sampling",
    9: "tab:comm-cost-compare",
    10: "app-tab2",
    11: "tab:dom-imgnet-threshold",
    12: "tab:app-domain-full",
    13: "tab:app-domain-full-order2",
    14: "tab:task_pred",
    15: "tab:class-overlap",
    16: "tab:oracle-agnostic-full",
    17: "tab:app-cifar100-full",
    19: "tab:sketch_ablation",
}
METHODS = {name.upper(): name for name in ("fedavg", "glfc", "lga", "target", "lander", "fot", "fedprotip")}
METHODS |= {"FED+PEC": "pec", "FED+SCR": "scr", "TAR+LODE": "lode"}
TIP, PLAIN = "FedProTIP", "FedProTIP (-t)"
"""Without the task the first answers by TIP, the second over all heads."""
BY_TIP = (1, 2, 3, 5, 6, 7, 12, 13, 16, 17)  # tables in which these rows stand for the two
DATASETS = {
    "10-split CIFAR100": {"dataset": "cifar100", "tasks": 10},
    "5-split ImageNet-R": {"dataset": "imagenet_r", "tasks": 5},
    "10-split ImageNet-R": {"dataset": "imagenet_r", "tasks": 10},
    "20-split ImageNet-R": {"dataset": "imagenet_r", "tasks": 20},
    "6-split DomainNet": {"dataset": "domainnet", "order": 1},
    "6-split DomainNet (order 1)": {"dataset": "domainnet", "order": 1},
    "6-split DomainNet (order 2)": {"dataset": "domainnet", "order": 2},
}
SENT = {
    "Model": {"method": "fedprotip", "kind": "model"},
    "Act": {"method": "fot", "kind": "statistics"},
    "Base": {"method": "fedprotip", "kind": "basis"},
    "Ref": {"method": "fedprotip", "kind": "reference"},
}

Keys = dict[str, Any]


def each(name: str, *values: Any) -> list[Keys]:
    return [{name: value} for value in values]


def across(*axes: list[Keys]) -> list[Keys]:
    """Columns of a table, the last axis fastest."""
    return [{key: value for part in parts for key, value in part.items()} for parts in product(*axes)]


SPLITS = [{"partition": "iid"}, {"alpha": 0.5}, {"alpha": 0.2}]
BOTH, TASKS = each("metric", "acc", "ft"), each("task", *range(1, 11))
MODES, TOLD = each("mode", "aware", "agnostic", "batch64"), each("mode", "agnostic", "aware")
COLUMNS = {
    1: across([{"dataset": "cifar100"}, {"dataset": "domainnet", "order": 1}], SPLITS, BOTH),
    2: across(each("tasks", 5, 10, 20), SPLITS[:2], BOTH),
    3: across(each("clients", 5, 10, 20), BOTH),
    **dict.fromkeys((5, 6, 7), across(TOLD, BOTH)),
    8: across(BOTH, MODES) + across([{"metric": "hours"}], each("kind", "task_end", "total")),
    9: TASKS,
    10: MODES,
    **dict.fromkeys((11, 15), across(MODES, BOTH)),
    **dict.fromkeys((12, 13, 17), across(SPLITS, BOTH)),
    14: TASKS,
    16: each("mode", "aware", "agnostic"),
    19: [*across([MODES[0], MODES[2]], BOTH), {"metric": "mib"}],
}


def tabular(table: int) -> str:
    """The text between \\begin{tabular} and \\end{tabular} that a label belongs to."""
    text, label = TEX.read_text(encoding="utf-8"), LABELS[table]
    place = text.index(f"\\label{{{label}}}")
    inside = text.rfind("\\begin{tabular}", 0, place) > text.rfind("\\end{tabular}", 0, place)
    before = table in (10, 16)  # labelled below their tabular
    start = text.rfind("\\begin{tabular}", 0, place) if inside or before else text.index("\\begin{tabular}", place)
    return text[start : text.index("\\end{tabular}", start)]


def cells(table: int) -> Iterator[tuple[Keys, str]]:
    """(what a cell is about, its text) for every cell below the head of a table."""
    group, before = "", {}
    for line in tabular(table).splitlines():
        opened = re.match(r"\s*\\multirow\{\d+\}\{\*\}\{([^&]*)\}\s*$", line)
        if opened:
            group = plain(opened[1])
        parts = line.split(r"\\")[0].split("&")
        label = plain(parts[0]) or (plain(parts[1]) if len(parts) > 1 and group else "")
        numbers = parts[1 if plain(parts[0]) else 2 :]
        if len(numbers) != len(COLUMNS[table]) or label in ("", "Task", "Dataset", "Method", "Sketch s_l"):
            continue
        late = label == "(T11-T20)"
        row = before if late else row_keys(table, group, label)
        before = row
        for column, text in zip(COLUMNS[table], numbers, strict=True):
            keys = {"table": table, **column, **row}
            if late:
                keys["task"] += 10
            if table in BY_TIP and label == TIP and keys["mode"] == "agnostic":
                keys["mode"] = "batch64"
            yield keys, text


def row_keys(table: int, group: str, label: str) -> Keys:
    if table == 8:
        return {"m_s": int(label)}
    if table == 9:
        return SENT[label]
    if table == 11:
        return {**DATASETS[group], "threshold": float(label)}
    if table == 14:
        return DATASETS[label]
    if table == 15:
        return {"overlap": int(label.removesuffix(" class overlap"))}
    if table == 19:
        return {"sketch": label.partition("_")[0]}
    method: Keys = {"method": METHODS[label.removesuffix(" (-t)").upper()]}
    if table == 10:
        return {**method, "batch": int(group)}
    if table == 16:
        return {**method, **DATASETS[group]}
    return method if "mode" in COLUMNS[table][0] else {**method, "mode": "agnostic"}


def number(text: str) -> tuple[float, float | None] | None:
    """Value and ± of a cell; None when it has none."""
    text = re.sub(r"_\{\\textcolor.*", "", text.replace("$-$", "-"))
    found = re.findall(r"-?\d+(?:\.\d+)?", plain(text))
    return (float(found[0]), float(found[1]) if len(found) > 1 else None) if found else None


def gain(text: str) -> str:
    """The change that Table 5 prints below a number."""
    found = re.findall(r"arrow ([\d.]+)", text)
    return found[0] if found else ""


def plain(text: str) -> str:
    """Text without its mark-up."""
    return re.sub(r"\s+", " ", re.sub(r"[{}$]|\\[a-z]+", "", text)).strip()
