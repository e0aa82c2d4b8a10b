"""A verdict needs the published protocol: whatever differs is named, also in settings that do not exist yet."""

from typing import Literal, get_args, get_origin

import pytest
from pydantic import Field

import fedprotip
from fedprotip import settings as settings_file
from fedprotip.paper.anchors import DOMAIN_ORDERS, EPOCHS, find, frozen, published, rounds
from fedprotip.paper.protocols import protocol, stated
from fedprotip.paper.verdicts import CHANCE, FINDING, SUBJECT, VARIANTS, departures, judge, variants
from fedprotip.report.tables import QUIET
from fedprotip.settings import Settings

PRINTED = {"table": 1, "dataset": "cifar100", "alpha": 0.5, "method": "fedprotip"}
(ACC,) = find(**PRINTED, mode="batch64", metric="acc")
(FT,) = find(**PRINTED, mode="batch64", metric="ft")
(AGNOSTIC,) = find(**PRINTED, mode="agnostic", metric="acc")
OTHER = {
    "method.secure_share": 0.75,
    "data.name": "digits",
    "run.track": ["tensorboard"],
    "data.size": 33,
    "stream.order": "seeded",
    "stream.task_size": [5, 15, *[10] * 8],
    "clients.roster": {"0": "0-3"},
    "model.name": "mlp",
    "model.weights": "",
    "model.freeze": "layer1",
    "model.stages": ["layer3"],
    "train.optimizer": "Adam",
    "train.optimizer_options": {"nesterov": True},
    "method.name": "fedavg",
    "evaluate.examples": 1,
    "method.layer_thresholds": {"layer4*": 0.9},
}
"""Another value of settings for which none can be guessed."""
KEYS = [row["key"] for row in settings_file.documentation() if row["method"] in ("", "fedprotip")]


def paper_settings(row="cifar100-a0.5-fedprotip", table="table1", **sections):
    """Settings of a row at the paper's scale, as they stand in a finished cell."""
    raw = protocol(table).row(row).at("paper")
    raw["model"] = {**raw["model"], "weights": f"{raw['model']['name']}.safetensors"}
    for name, values in sections.items():
        raw[name] = raw.get(name, {}) | values
    return fedprotip.load_settings(raw).model_dump()


def another(key):
    """A valid value of a setting that is not the paper's."""
    section, name = key.split(".")
    settings = fedprotip.load_settings(paper_settings())
    part = getattr(settings, section)
    value, kind = getattr(part, name), type(part).model_fields[name].annotation
    if key in OTHER:
        return OTHER[key]
    if get_origin(kind) is Literal:
        return next(choice for choice in get_args(kind) if choice != value)
    if kind is bool:
        return not value
    if kind in (int, float):
        return value + 1 if kind is int else value / 2 or 0.25
    if kind is str:
        return f"{value}other"
    pytest.fail(f"{key} is new: say in OTHER which other value it can have.")


def changed(key, value):
    section, name = key.split(".")
    return paper_settings(**{section: {name: value}})


ALONE = {"method.budget", "method.birth"}  # they do something with merge = "energy" and router = "auto" only


@pytest.mark.parametrize("key", [key for key in KEYS if key not in ALONE])
def test_every_setting_is_compared_unless_it_is_named(key):
    ours = changed(key, another(key))
    away = [reason for reason in departures(ours, ACC) if reason.startswith(f"{key} ")]
    if key in QUIET | CHANCE:
        assert departures(ours, ACC) == variants(ours, ACC) == []
    elif key in VARIANTS:
        assert departures(ours, ACC) == []
        assert [remark.partition(" ")[0] for remark in variants(ours, ACC)] == [key]
    else:
        assert away
        assert ", paper " in away[0]
        assert judge([99.0], [ours], ACC)[0] == "not comparable"
    assert (departures(ours, AGNOSTIC) == []) == (key in QUIET | CHANCE | VARIANTS | FINDING)


def test_what_is_named_exists():
    assert set(KEYS) >= QUIET | CHANCE | FINDING | VARIANTS
    assert not (QUIET | CHANCE) & (FINDING | VARIANTS)
    assert set.union(*map(set, SUBJECT.values())) <= VARIANTS


def test_a_setting_that_is_added_later_is_compared(monkeypatch):
    class Train(settings_file.schema.TrainSettings):
        newest: int = Field(0, description="New.")

    class Later(Settings):
        train: Train = Train()

    monkeypatch.setattr(settings_file.loading, "Settings", Later)
    assert departures(paper_settings(), ACC) == []
    assert departures(paper_settings(train={"newest": 7}), ACC) == ["train.newest 7, paper 0"]


def test_an_option_of_the_method_that_is_added_later_is_compared(monkeypatch):
    class Later(settings_file.KNOWN["method.name"]["fedprotip"]):
        newest: bool = Field(False, description="New.")

    monkeypatch.setitem(settings_file.KNOWN["method.name"], "fedprotip", Later)
    assert departures(paper_settings(), ACC) == []
    assert departures(paper_settings(method={"newest": True}), ACC) == ["method.newest true, paper false"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"data": {"train_limit": 100}}, "data.train_limit 100, paper 0"),
        ({"data": {"test_limit": 10}}, "data.test_limit 10, paper 0"),
        ({"data": {"size": 64}}, "data.size 64, paper 32"),
        ({"stream": {"task_size": 5}}, "stream.task_size [5, 5, 5, 5, 5, 5, 5, 5, 5, 5], paper [10, 10"),
        ({"stream": {"order": "seeded"}}, "stream.order seeded, paper natural"),
        ({"train": {"augment": "none"}}, "train.augment none, paper standard"),
        ({"train": {"optimizer": "Adam"}}, "train.optimizer Adam, paper SGD"),
        ({"train": {"momentum": 0.9}}, "train.momentum 0.9, paper 0.0"),
        ({"train": {"average": "uniform"}}, "train.average uniform, paper weighted"),
        ({"train": {"head_start": "closed"}}, "train.head_start closed, paper random"),
        ({"model": {"pool": 2}}, "model.pool 2, paper 1"),
        ({"model": {"norm": "track"}}, "model.norm track, paper freeze_after_first"),
        ({"model": {"stem": "stride1"}}, "model.stem stride1, paper cifar"),
        ({"clients": {"roster": {"5": "0-3"}}}, "clients.roster {'5': '0-3'}, paper {}"),
        ({"clients": {"held_back": 0.1}}, "clients.held_back 0.1, paper 0.0"),
        ({"evaluate": {"draws": 1}}, "evaluate.draws 1, paper 20"),
        ({"train": {"rounds": 3, "epochs": 1}}, "train.rounds 3, paper 50; train.epochs 1, paper 5"),
        ({"train": {"steps": 4}}, "train.steps 4, paper 0"),
        ({"train": {"wire": "bf16"}}, "train.wire bf16, paper float32"),
        ({"model": {"weights": ""}}, "model.weights random, paper pretrained"),
        ({"model": {"weights": "a/resnet18-rebuilt.safetensors"}}, "model.weights resnet18-rebuilt.safetensors"),
        ({"model": {"weights": "trained-on-cifar.pth"}}, "model.weights trained-on-cifar.pth, paper pretrained"),
        ({"model": {"freeze_from": "start"}}, "model.freeze_from start, paper first"),
        ({"clients": {"alpha": 0.1}}, "clients.alpha 0.1, paper 0.5"),
        (
            {"method": {"router": "fused", "statistics": True}},
            "method.statistics true, paper false; method.router fused",
        ),
        ({"method": {"projection": "none"}}, "method.projection none, paper local"),
        ({"method": {"name": "fedavg"}}, "method.name fedavg, paper fedprotip"),
    ],
)
def test_another_protocol_is_not_comparable_however_good(change, reason):
    verdict, why = judge([99.0], [paper_settings(**change)], ACC)
    assert verdict == "not comparable"
    assert reason in why


@pytest.mark.parametrize(
    ("table", "row", "record", "change"),
    [
        ("table1", "cifar100-a0.5-fedprotip", {"alpha": 0.5}, {"data": {"size": 32}}),
        ("table1", "cifar100-a0.5-fedprotip", {"alpha": 0.5}, {"stream": {"task_size": 10}}),
        ("table1", "cifar100-a0.5-fedprotip", {"alpha": 0.5}, {"stream": {"task_size": [10] * 10}}),
        ("table1", "cifar100-iid-fedprotip", {"partition": "iid"}, {"clients": {"alpha": 0.1}}),
        ("table1", "domainnet-o1-a0.5-fedprotip", {"alpha": 0.5}, {"stream": {"order": "natural"}}),
        ("table1", "domainnet-o1-a0.5-fedprotip", {"alpha": 0.5}, {"data": {"train_limit": 10_000, "size": 224}}),
        ("table7", "cifar100-a0.5-vit-fedprotip", {}, {"model": {"image_size": 224}}),
        ("table1", "cifar100-a0.5-fedprotip", {"alpha": 0.5}, {"model": {"weights": "a/resnet18-f37072fd.pth"}}),
    ],
)
def test_the_same_in_other_words_is_the_same_protocol(table, row, record, change):
    wanted = {"table": int(table[5:]), "dataset": row.partition("-")[0], **record}
    (printed,) = find(**wanted, method="fedprotip", mode="batch64", metric="acc")
    assert departures(paper_settings(row, table, **change), printed) == []


def test_the_same_protocol_is_judged_by_its_value():
    ours = paper_settings()
    assert departures(ours, ACC) == variants(ours, ACC) == []
    assert judge([86.5, 85.9], [ours, ours], ACC) == ("beats", "")
    assert judge([85.0], [ours], ACC) == ("below", "")
    assert judge([86.004], [ours], ACC) == ("equal", "")
    assert judge([0.5], [ours], FT) == ("beats", "")
    assert judge([1.5], [ours], FT) == ("below", "")
    assert judge([], [], ACC) == ("not run", "")
    assert judge([1.0], [ours], None) == ("not published", "")


def test_one_run_of_several_is_enough_to_be_not_comparable():
    runs = [paper_settings(), paper_settings(train={"rounds": 51})]
    assert judge([99.0, 99.0], runs, ACC) == ("not comparable", "train.rounds 51, paper 50")


def test_a_variant_of_the_method_is_judged_and_named():
    ours = paper_settings(method={"rank_rule": "energy", "routing_rank": 20})
    said = "a variant: method.rank_rule energy, paper mass, method.routing_rank 20, paper 0"
    assert judge([86.5], [ours], ACC) == ("beats", said)


def test_what_a_table_is_about_is_no_variant_there():
    (record,) = find(table=11, dataset="cifar100", threshold=0.9, mode="batch64", metric="acc")
    assert departures(paper_settings("cifar100-a0.5-e0.9-fedprotip", "table11"), record) == []
    assert departures(paper_settings(), record) == ["method.threshold 0.7, paper 0.9"]


def test_the_authors_code_is_a_protocol_of_its_own():
    code = paper_settings("cifar100-a0.5-fedprotip-code")
    assert judge([86.5], [code], ACC) == ("beats", "")
    mixed = paper_settings("cifar100-a0.5-fedprotip-code", model={"pool": 1})
    assert judge([86.5], [mixed], ACC) == ("not comparable", "model.pool 1, paper 2")


def test_finding_the_task_is_nothing_to_figures_that_do_not_ask():
    ours = paper_settings(evaluate={"group": 32}, method={"router": "gaussian"})
    assert departures(ours, AGNOSTIC) == []
    assert len(departures(ours, ACC)) == 2


def test_bytes_are_compared_like_with_like():
    """46.686 MiB of Table 9 hold a mapping layer that is no part of the method: 2,048 × 512 weights and 512 biases."""
    (record,) = find(table=9, kind="model", task=1)
    assert record.surplus == pytest.approx((2048 * 512 + 512) * 4 / 2**20, abs=5e-4)
    assert record.value == pytest.approx(sum((11_168_832, 2048 * 10 + 10, 2048 * 512 + 512)) * 4 / 2**20, abs=5e-4)
    ours = paper_settings("cifar100-a0.5-fedprotip", "table9")
    assert [judge([size], [ours], record)[0] for size in (44.0, 42.684, 40.0)] == ["below", "equal", "beats"]
    assert "without 4.002 MiB" in judge([40.0], [ours], record)[1]
    assert departures(paper_settings(), record) == ["model.pool 1, paper 2"]
    (basis,) = find(table=9, kind="basis", task=1)
    assert judge([9.0], [ours], basis) == ("beats", "")
    (nothing,) = find(table=9, kind="reference", task=1)
    assert judge([0.0001], [ours], nothing) == ("equal", "")


def test_from_scratch_nothing_is_frozen():
    (record,) = find(table=6, method="fedprotip", mode="batch64", metric="acc")
    assert record.threshold == 0.95
    assert "from scratch, nothing frozen" in record.protocol
    assert "ε 0.95" in record.protocol
    assert "frozen to layer2 after the first task" in ACC.protocol
    ours = protocol("table6").row("cifar100-a0.5-scratch-fedprotip").at("paper")
    assert departures(ours, record) == variants(ours, record) == []
    ours["model"] |= {"freeze": "layer2"}
    assert departures(ours, record) == ["model.freeze layer2, paper none"]


def test_hours_are_those_of_other_hardware():
    (record,) = find(table=8, m_s=512, kind="total")
    assert departures(paper_settings("cifar100-a0.5-m512-fedprotip", "table8"), record) == ["other hardware"]


def test_settings_of_another_version_are_not_comparable():
    ours = paper_settings()
    ours["train"]["gone"] = 3
    verdict, why = judge([99.0], [ours], ACC)
    assert verdict == "not comparable"
    assert "settings that this version cannot compare: " in why
    assert "train.gone" in why


@pytest.mark.parametrize("table", sorted({record.table for record in published()}))
def test_what_a_number_says_about_itself_stands_in_its_settings(table):
    """Field by field, not by the pieces that `stated` is made of."""
    for record in find(table=table):
        raw = stated(record).at("paper")
        data, stream, clients, model, train = (raw[name] for name in ("data", "stream", "clients", "model", "train"))
        assert (raw["method"]["name"], data["name"], stream["tasks"]) == (record.method, record.dataset, record.tasks)
        assert (clients["count"], clients["fraction"]) == (record.clients, record.fraction)
        assert (clients["partition"], clients.get("alpha")) == (record.partition, record.alpha)
        assert (stream.get("overlap", 0), stream.get("order")) == (record.overlap, DOMAIN_ORDERS.get(record.order))
        assert (model["name"], model.get("weights") != "") == (record.backbone, record.pretrained)
        assert (model["freeze"], model["freeze_from"]) == (frozen(record.backbone, record.pretrained), "first")
        assert (train["rounds"], train["epochs"]) == (rounds(record.dataset, record.backbone), EPOCHS)
        assert (train["batch"], raw["evaluate"]["group"]) == (record.batch, record.batch)
        assert (train["lr"], train["weight_decay"], train["optimizer"]) == (0.01, 5e-4, "SGD")
        if record.method == "fedprotip":
            assert raw["method"].get("threshold", 0.7) == record.threshold
            assert raw["method"]["columns"] == record.m_s
            assert model.get("head", "") == {"agnostic": "shared"}.get(record.mode, "per_task") * (record.tasks == 6)
