"""DomainNet: 345 classes in six domains, in the official layout: domain folders and their lists of images.

    domainnet/clipart/aircraft_carrier/….jpg    domainnet/clipart_train.txt    domainnet/clipart_test.txt    …

A line of a list is "clipart/aircraft_carrier/clipart_001_000001.jpg 0". The natural order is the paper's order 1;
for order 2 set stream.order = ["clipart", "infograph", "painting", "quickdraw", "real", "sketch"].
"""

from pathlib import Path

import numpy as np
import torch

from fedprotip.errors import UsageError, shortened
from fedprotip.settings import DataSettings
from fedprotip.stream.datasets import IMAGENET_MEAN, IMAGENET_STD, Dataset, locate, read_text, register
from fedprotip.stream.images import photos
from fedprotip.stream.splits import at_most
from fedprotip.stream.transforms import LARGE_PHOTOS

DOMAINS = ("clipart", "real", "painting", "sketch", "infograph", "quickdraw")
CLASSES = 345
TRAIN_LIMIT = 10_000
NEEDS = tuple(f"domainnet/{domain}{end}" for domain in DOMAINS for end in ("", "_train.txt", "_test.txt"))


@register("domainnet", NEEDS)
def domainnet(settings: DataSettings) -> Dataset:
    """10,000 training images per domain by seeded choice (or `data.train_limit`), full test lists."""
    root, _ = locate(settings)
    folder = root / "domainnet"
    names: dict[int, str] = {}
    parts = {}
    for part, limit in (("train", settings.train_limit or TRAIN_LIMIT), ("test", settings.test_limit)):
        paths: list[str] = []
        labels: list[int] = []
        domains: list[int] = []
        for index, domain in enumerate(DOMAINS):
            listed = _read_list(folder / f"{domain}_{part}.txt")
            names |= {label: Path(name).parent.name for name, label in listed}
            chosen = at_most(limit or len(listed), np.full(len(listed), index), settings.seed, f"limit {part}")
            kept = [listed[i] for i in chosen]
            paths += [_existing(folder, name, f"{domain}_{part}.txt") for name, _ in kept]
            labels += [label for _, label in kept]
            domains += [index] * len(kept)
        images = photos(paths, settings.sides, settings.workers, settings.fit)
        parts[part] = images, torch.tensor(labels), torch.tensor(domains)
    absent = next((label for label in range(CLASSES) if label not in names), None)
    if absent is not None:
        raise UsageError(f"Class {absent} of DomainNet is empty: no list in {folder} has an image of it.")
    return Dataset(
        "domainnet",
        [names[label] for label in range(CLASSES)],
        *parts["train"][:2],
        *parts["test"][:2],
        IMAGENET_MEAN,
        IMAGENET_STD,
        DOMAINS,
        parts["train"][2],
        parts["test"][2],
        augmentation=LARGE_PHOTOS,
    )


def _read_list(path: Path) -> list[tuple[str, int]]:
    """Relative path and label of every line."""
    listed = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        name, _, label = line.strip().rpartition(" ")
        if not line.strip():
            continue
        if not name or not label.isdecimal() or len(label) > 9:
            raise UsageError(f"{path}, line {number}: {shortened(line.strip())!r} is not a path and a label.")
        if int(label) >= CLASSES:
            raise UsageError(f"{path}, line {number}: label {label} is out of range, 0 to {CLASSES - 1} are valid.")
        listed.append((name, int(label)))
    if not listed:
        raise UsageError(f"{path} lists no images.")
    return listed


def _existing(folder: Path, name: str, where: str) -> str:
    path = folder / name
    if not path.is_file():
        raise UsageError(f"{folder / where} lists {name}, which does not exist in {folder}.")
    return str(path)
