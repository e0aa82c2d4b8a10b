"""A row of a table: one run, what distinguishes it, and the budget that a scale adds.

Scale `paper` is the paper's own budget, `cpu` the whole data set with a budget for two cores.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from fedprotip import settings as settings_file
from fedprotip.errors import UsageError
from fedprotip.paper.anchors import EPOCHS, PREFIX, frozen, rounds
from fedprotip.settings import layered, preset_settings

Nested = Mapping[str, Mapping[str, Any]]

SCALES = ("paper", "cpu")
CPU_DATA = ("cifar100", "digit_domains", "digits")
KINDS = {"data.name": "the dataset", "model.name": "the backbone", "method.name": "the method"}


@cache
def shipped(name: str) -> dict[str, dict[str, Any]]:
    """The tables of a file of settings that comes with the package."""
    return tomllib.loads((files("fedprotip") / "configs" / f"{name}.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Row:
    """One run of a protocol."""

    name: str
    settings: Nested  # what distinguishes the row; it stands above the budget of the scale
    published: Mapping[str, Any] = field(default_factory=dict)  # for anchors.find; empty: no number in the paper
    scales: tuple[str, ...] = SCALES
    instead: str = ""  # the row that stands for it at scale cpu, where its method takes over 20 minutes
    ours: bool = False  # below it lie the defaults, not the paper's own settings (`configs/paper.toml`)

    @property
    def data(self) -> str:
        return self.settings["data"]["name"]

    @property
    def method(self) -> str:
        return self.settings["method"]["name"]

    @property
    def model(self) -> str:
        return self.settings.get("model", {}).get("name", "resnet18")

    @property
    def pretrained(self) -> bool:
        return self.model in PREFIX and self.settings.get("model", {}).get("weights") != ""

    def at(self, scale: str) -> dict[str, dict[str, Any]]:
        """The settings at a scale, as a nested mapping for `settings.load`."""
        preset = {} if self.ours else preset_settings("paper", self.method)
        return layered(preset, _paper(self) if scale == "paper" else _cpu(self), self.settings)

    def why_not(self, scale: str) -> str:
        """Why the row does not exist at a scale; empty when it does."""
        if scale not in self.scales:
            return f"it exists at scale {self.scales[0]!r} only"
        if scale == "cpu" and self.instead:
            return f"it takes more than 20 minutes of one core; {self.instead} has a fifth of the images"
        if scale == "cpu" and self.data not in CPU_DATA:
            return f"{self.data} at 224 px is beyond two cores"
        if scale == "cpu" and self.model == "vit_b16":
            return "ViT-B/16 at 224 px is beyond two cores"
        if scale == "cpu" and self.model == "resnet18" and not self.pretrained:
            return "a ResNet-18 from scratch learns nothing in three epochs, and its prefix cannot be frozen"
        return ""

    def missing(self, scale: str) -> list[str]:
        """What this version of the package lacks for the row: unregistered names, else the first invalid setting."""
        wanted = self.at(scale)
        named = {key: wanted[key.partition(".")[0]]["name"] for key in KINDS}
        absent = [f"{KINDS[key]} {name!r}" for key, name in named.items() if name not in settings_file.declared(key)]
        if absent:
            return absent
        try:
            settings_file.load(wanted)
        except UsageError as error:
            return [str(error).rstrip(".")]
        return []


# Budgets: what a scale adds to a row


def _paper(row: Row) -> Nested:
    """Section 6 and appendix E.3."""
    train = {"epochs": EPOCHS, "batch": 64, "lr": 0.01, "weight_decay": 5e-4, "optimizer": "SGD"}
    budget: Nested = {"train": {**train, "rounds": rounds(row.data, row.model)}, "run": {"device": "auto"}}
    if row.model in PREFIX:
        stem = {"stem": "cifar" if row.data == "cifar100" else "imagenet"} if row.model == "resnet18" else {}
        stage = frozen(row.model, row.pretrained)
        model = {"name": row.model, "freeze": stage, "freeze_from": "first", **stem}
        return layered(budget, {"model": model, "train": {"augment": "standard"}})
    return budget


def _cpu(row: Row) -> Nested:
    """Three local epochs a task; the prefix is frozen from the start, as the two cores ask for."""
    budget: Nested = {
        "train": {"rounds": 3, "epochs": 1, "batch": 64, "lr": 0.01, "weight_decay": 5e-4},
        "method": shipped("rivals-cpu").get(row.method, {}),  # every part of a method, at smaller size
    }
    if row.model == "resnet18":
        prefix = {"name": "resnet18", "stem": "stride1", "freeze": "layer2", "freeze_from": "start", "norm": "frozen"}
        return layered(budget, {"model": prefix})
    return budget
