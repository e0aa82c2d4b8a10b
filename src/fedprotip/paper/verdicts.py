"""How our figures compare with the published ones: a verdict needs the published protocol, setting by setting.

    judge([86.5, 85.9], [settings, settings], record)   # ("beats", "")
    judge([86.5], [settings], record)                   # ("not comparable", "train.rounds 3, paper 50")

The settings of a run are compared with those that `protocols.stated` gives for the published number, all of them: a
setting that is added later is compared too, unless it is named here.
"""

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from fedprotip import settings as settings_file
from fedprotip.errors import UsageError
from fedprotip.paper.anchors import DIGITS, DOMAIN_ORDERS, Published
from fedprotip.paper.finished import by_key
from fedprotip.paper.protocols import stated
from fedprotip.report.tables import QUIET
from fedprotip.report.text import setting_text
from fedprotip.settings import Settings
from fedprotip.stream.tasks import task_sizes

LESS_IS_BETTER = frozenset({"ft", "mib", "hours"})
CHANCE = frozenset({"run.seed", "data.seed", "run.geometry", "train.channels_last", "method.per_image"})
"""Another draw, a measurement beside the run, another rounding: the protocol stays the same."""
FINDING = frozenset(
    {
        *("evaluate.group", "evaluate.draws", "model.stages"),
        *("statistics.minimum", "statistics.root", "statistics.directions", "statistics.features", "statistics.rank"),
        *("method.router", "method.statistics", "method.birth", "method.voters", "method.routing_rank"),
    }
)
"""How the task of a sample is found: nothing to figures that are told it, or do not ask."""
VARIANTS = frozenset(
    f"method.{name}"
    for name in (
        *("threshold", "layer_thresholds", "increment", "rank_rule"),
        *("project_on", "merge", "budget", "routing_rank"),
    )
)
"""Choices of FedProTIP itself. With others it is a variant of the method: judged, and the verdict names them."""
SUBJECT = {11: frozenset({"method.threshold"}), 19: frozenset({"method.merge", "method.threshold"})}
"""What a table is about: no variant there, but another row of it."""
OFFICIAL = {
    "resnet18": ("resnet18", "resnet18-f37072fd", "resnet18-5c106cde"),
    "vit_b16": ("vit_b16", "vit_base_patch16_224"),
}
"""Names, up to the first dot, that files of the official pretrained weights have; no other is taken for them."""
SIDES = {"cifar100": 32, "imagenet_r": 224, "domainnet": 224}
CLASSES = {"cifar100": 100, "imagenet_r": 200}


def judge(values: Sequence[float], runs: Sequence[Mapping[str, Any]], record: Published | None) -> tuple[str, str]:
    """Verdict on our values of one figure (a run each), and what a reader must know about it.

    beats, equal (in the digits that the paper prints), below; not comparable, not published, not run.
    """
    if record is None:
        return "not published", ""
    if not values:
        return "not run", ""
    reasons = dict.fromkeys(reason for settings in runs for reason in departures(settings, record))
    if reasons:
        return "not comparable", "; ".join(reasons)
    remarks = dict.fromkeys(remark for settings in runs for remark in variants(settings, record))
    said = [f"a variant: {', '.join(remarks)}"] if remarks else []
    if record.surplus:
        said.append(f"without {record.surplus} MiB of the paper's number, which are no part of the method")
    lead = sum(values) / len(values) - (record.value - record.surplus)
    if abs(lead) < 0.5 * 10.0 ** -DIGITS.get(record.metric, 3):
        return "equal", "; ".join(said)
    return "beats" if (lead < 0) == (record.metric in LESS_IS_BETTER) else "below", "; ".join(said)


def departures(settings: Settings | Mapping[str, Any], record: Published) -> list[str]:
    """In what a run leaves the protocol of a published number: the text's, or that of the authors' code if nearer."""
    try:
        away, _ = _nearest(settings, record)
    except UsageError as error:
        return [f"settings that this version cannot compare: {str(error).rstrip('.')}"]
    return [*away, "other hardware"] if record.metric == "hours" else away


def variants(settings: Settings | Mapping[str, Any], record: Published) -> list[str]:
    """Choices of the method itself in which a run differs; a variant may do better under the same protocol."""
    return _nearest(settings, record)[1]


def _nearest(settings: Settings | Mapping[str, Any], record: Published) -> tuple[list[str], list[str]]:
    """Departures from the nearer of the two protocols, and the choices of the method that differ."""
    ours = _resolved(settings_file.load(settings))
    found = []
    for code in (False, True) if record.method == "fedprotip" else (False,):
        row = stated(record, code)
        raw = row.at("paper")
        raw["model"] = {**raw["model"], "weights": row.model if row.pretrained else ""}
        theirs = _resolved(settings_file.load(raw))
        indifferent = QUIET | CHANCE | (FINDING if record.mode in ("aware", "agnostic") else frozenset())
        keys = [key for key in theirs | ours if key not in indifferent and ours.get(key) != theirs.get(key)]
        free = VARIANTS - SUBJECT.get(record.table, frozenset()) if record.method == "fedprotip" else frozenset()
        told = {key: f"{key} {setting_text(ours.get(key))}, paper {setting_text(theirs.get(key))}" for key in keys}
        found.append(([told[key] for key in keys if key not in free], [told[key] for key in keys if key in free]))
    return min(found, key=lambda pair: (len(pair[0]), len(pair[1])))


def _resolved(settings: Settings) -> dict[str, Any]:
    """All settings by key, in one form where the same can be said in several."""
    flat, name = by_key(settings), settings.data.name
    weights = PurePath(settings.model.weights).name
    official = weights.partition(".")[0] in OFFICIAL.get(settings.model.name, ())
    flat["model.weights"] = "pretrained" if official else weights or "random"
    flat["data.size"] = settings.data.size or SIDES.get(name, 0)
    if settings.model.name == "vit_b16":
        flat["model.image_size"] = settings.model.image_size or 224
    if name == "domainnet":
        flat["data.train_limit"] = settings.data.train_limit or 10_000
        flat["stream.order"] = DOMAIN_ORDERS[1] if settings.stream.order == "natural" else settings.stream.order
    if settings.stream.scenario == "class" and name in CLASSES:
        flat["stream.task_size"] = task_sizes(CLASSES[name], settings.stream)
    if settings.clients.partition == "iid":
        flat["clients.alpha"] = None
    return flat
