"""STSA: ridge regression of all data from sums, and an estimate of the products from sums of groups."""

import json

import numpy as np
import pytest
import torch

import fedprotip
from fedprotip.errors import UsageError
from fedprotip.inference.experts import feature_map
from fedprotip.inference.statistics import Sums, recall, ridge
from fedprotip.messages import BadMessage, Message
from fedprotip.methods import create_method
from fedprotip.methods.exchange import Sender
from fedprotip.methods.stsa import moment_of_groups
from tests.sites import Ends
from tests.small import quick, results, small, tensors


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    quick(monkeypatch)


def settings(*overrides, method=(), **sections):
    return small(*overrides, method={"name": "stsa", "features": 48, **dict(method)}, **sections)


def split(x, groups):
    """Sums and numbers of groups of rows, as (1, g) and (1, g, d)."""
    parts = [x[groups == group] for group in range(int(groups.max()) + 1)]
    return torch.tensor([[float(len(p)) for p in parts]]).double(), torch.stack([p.sum(0) for p in parts])[
        None
    ].double()


def test_groups_of_one_sample_are_exact():
    x = torch.randn(20, 5, generator=torch.Generator().manual_seed(0)).double()
    torch.testing.assert_close(moment_of_groups(*split(x, torch.arange(20))), x.T @ x)


def test_the_estimate_is_right_on_average_and_never_negative():
    """Over many blind draws of unequal groups."""
    rng = np.random.default_rng(0)
    x = torch.tensor(rng.standard_normal((24, 4)) * [1, 2, 3, 0.5] + [1, 0, -2, 3])
    sizes = np.repeat(np.arange(5), [2, 3, 4, 7, 8])
    total, draws = torch.zeros(4, 4, dtype=torch.float64), 1000
    for _ in range(draws):
        found = moment_of_groups(*split(x, torch.tensor(rng.permutation(sizes))))
        assert torch.linalg.eigvalsh(found).min() > -1e-9
        total += found / draws
    torch.testing.assert_close(total, x.T @ x, rtol=0.05, atol=8.0)


def test_of_a_single_group_only_the_mean_is_known_and_empty_groups_are_none():
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)).double()
    counts, sums = split(x, torch.zeros(6).long())
    torch.testing.assert_close(moment_of_groups(counts, sums), torch.outer(x.sum(0), x.sum(0)) / 6)
    counts, sums = split(x, torch.tensor([0, 0, 1, 1, 1, 0]))
    more = torch.cat([counts, torch.zeros(1, 2)], 1), torch.cat([sums, torch.zeros(1, 2, 3)], 1)
    torch.testing.assert_close(moment_of_groups(*more), moment_of_groups(counts, sums))
    nothing = moment_of_groups(torch.zeros(2, 3).double(), torch.zeros(2, 3, 4).double())
    assert torch.equal(nothing, torch.zeros(4, 4, dtype=torch.float64))


def test_without_a_bias_it_is_plain_ridge_regression():
    """W = (G + γI)⁻¹P, with γ as a multiple of the mean square of a feature."""
    rng = np.random.default_rng(1)
    x, labels = rng.standard_normal((50, 6)) + 1, rng.integers(0, 3, 50)
    sums = Sums.zeros(3, 6)
    sums.add(torch.tensor(x), torch.tensor(labels))
    weights, bias = ridge(sums, 0.3, centred=False)
    gamma = 0.3 * np.mean(x**2) * 50
    expected = np.linalg.solve(x.T @ x + gamma * np.eye(6), x.T @ np.eye(3)[labels]).T
    np.testing.assert_allclose(weights.numpy(), expected, atol=1e-6)
    assert not bias.any()


def everything(ends, folder):
    """Mapped features and labels of all training samples, by the model of a finished run."""
    network = ends.network
    own = tensors(folder, "model")
    network.backbone.load_state_dict(
        {n.removeprefix("backbone."): t for n, t in own.items() if n.startswith("backbone.")}
    )
    change = feature_map(network, ends.method.exchange("statistics").options)
    parts = []
    for task in ends.stream.tasks:
        images, labels = ends.stream.train_batch(task.index, task.train)
        with torch.no_grad():
            parts.append((change(network.embed(images)), labels))
    return torch.cat([x for x, _ in parts]).double(), torch.cat([y for _, y in parts])


def test_the_sums_of_clients_and_tasks_are_those_of_all_data_at_once(tmp_path):
    """By the features of the final model: the backbone has not moved since the first task."""
    given = settings(statistics={"minimum": 1})
    fedprotip.run(given, out=tmp_path / "r")
    ends = Ends(given, tmp_path / "ends")
    x, labels = everything(ends, tmp_path / "r")
    known = {f"statistics/{name}": tensor for name, tensor in tensors(tmp_path / "r", "statistics").items()}
    sums = recall(known)
    torch.testing.assert_close(sums.moment, x.T @ x, rtol=1e-4, atol=1e-3)
    order = [label for task in ends.stream.tasks for label in task.classes]
    targets = (labels[:, None] == torch.tensor(order)).double()
    torch.testing.assert_close(sums.sums, targets.T @ x, rtol=1e-4, atol=1e-3)
    gamma = 0.01 * x.square().mean() * len(x)
    weights = torch.linalg.solve(x.T @ x + gamma * torch.eye(48), x.T @ targets)
    predictor = fedprotip.load(tmp_path / "r")
    images = ends.stream.dataset.test_images[:200]
    names = [ends.stream.dataset.classes[order[place]] for place in range(len(order))]
    change = feature_map(ends.network, ends.method.exchange("statistics").options)
    normalised = ends.stream.plan(ends.method.answering(), False, 3).pixels.normalised(images.float() / 255)
    with torch.no_grad():
        plain = (change(ends.network.embed(normalised)).double() @ weights).argmax(1)
    answers = [answer.label for answer in predictor.predict(images)]
    assert np.mean([answer == names[place] for answer, place in zip(answers, plain, strict=True)]) > 0.99


@pytest.mark.parametrize("variant", ["second", "first"])
@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"method": {"adapt": False}},
        {"method": {"features": 0}},
        {"stream": {"tasks": 3, "task_size": 4, "overlap": 1}},
        {"stream": {"scenario": "domain", "tasks": 2, "domains": "rotate", "task_size": 0}},
        {"clients": {"count": 4, "roster": {"1": "0-1", "2": "2-3"}}},
    ],
    ids=["plain", "fixed", "unmapped", "overlap", "rotate", "clients miss tasks"],
)
def test_it_answers_well_whatever_the_stream(tmp_path, variant, sections):
    method = {**sections.get("method", {}), "variant": variant}
    method = {"features": 256, **method}
    summary = fedprotip.run(settings(**{**sections, "method": method}), out=tmp_path / "r")
    assert summary["failures"]["count"] == 0
    assert summary["accuracy"]["agnostic"] > 70
    assert summary["accuracy"]["single"] == pytest.approx(summary["accuracy"]["agnostic"])


def test_the_backbone_learns_in_the_first_task_only(tmp_path):
    fedprotip.run(settings(), out=tmp_path / "r")
    events = [json.loads(line) for line in (tmp_path / "r" / "events.jsonl").read_text().splitlines()]
    assert {event["task"] for event in events if event["event"] == "round"} == {0}
    lines = [json.loads(line) for line in (tmp_path / "r" / "ledger.jsonl").read_text().splitlines()]
    up = {(line["kind"], line["task"]) for line in lines if line["direction"] == "up"}
    assert {kind for kind, task in up if task} == {"presence", "statistics"}


def test_first_order_sums_are_far_smaller_than_products(tmp_path):
    sizes = {}
    for variant in ("second", "first"):
        summary = fedprotip.run(settings(method={"variant": variant, "features": 512}), out=tmp_path / variant)
        sizes[variant] = summary["bytes"]["up"]["statistics"]
    assert sizes["first"] < sizes["second"] / 10


def replies(ends, site):
    exchange = ends.method.exchange("statistics")
    with torch.no_grad():
        return exchange, [exchange.answer(ends.local(client, site)) for client in range(3)]


def test_groups_are_no_smaller_than_the_minimum_and_hold_every_sample(tmp_path):
    ends = Ends(settings(method={"variant": "first", "groups": 50}, statistics={"minimum": 7}), tmp_path)
    site = ends.site()
    exchange, messages = replies(ends, site)
    change = feature_map(ends.network, ends.method.answering().experts["ridge"])
    for client, message in enumerate(messages):
        counts = message.tensors["counts"]
        assert counts[counts > 0].min() >= 7
        labels = ends.local(client, site).labels()
        held = torch.tensor([int((labels == label).sum()) for label in site.classes[0]])
        assert torch.equal(counts.sum(1), torch.where(held < 7, 0, held))
        assert torch.equal((counts > 0).sum(1), held // 7)
        images, labels = ends.stream.train_batch(0, ends.stream.client_samples(0, client))
        with torch.no_grad():
            mapped = change(ends.network.embed(images)).double()
        for row, label in enumerate(site.classes[0]):
            if held[row] >= 7:
                whole = mapped[labels == label].sum(0).float()
                torch.testing.assert_close(message.tensors["sums"].sum(1)[row], whole, rtol=1e-4, atol=1e-4)
        exchange.check(message, site)
        exchange.check_sender(message, site, Sender(client, len(labels)))


def test_groups_are_drawn_blindly(tmp_path):
    """Samples that lie side by side may be alike, and the estimate is right for independent groups alone."""
    ends = Ends(settings(method={"variant": "first", "groups": 2}, statistics={"minimum": 1}), tmp_path)
    site = ends.site()
    _, (message, *_) = replies(ends, site)
    change = feature_map(ends.network, ends.method.answering().experts["ridge"])
    parts = [(change(ends.network.embed(x)).detach(), y) for x, y in ends.local(0, site).labelled(64)]
    mapped, labels = (torch.cat(part) for part in zip(*parts, strict=True))
    for row, label in enumerate(site.classes[0]):
        mine, found = mapped[labels == label], message.tensors["sums"][row, 0]
        for orderly in (mine[::2], mine[: (len(mine) + 1) // 2]):
            assert not torch.allclose(found, orderly.sum(0), rtol=1e-3)


def test_the_server_adds_groups_of_all_clients(tmp_path):
    """Many small groups: the estimate comes close to the products themselves."""
    ends = Ends(settings(method={"variant": "first", "groups": 100}, statistics={"minimum": 1}), tmp_path)
    site = ends.site()
    exchange, messages = replies(ends, site)
    exchange.digest(iter(enumerate(messages)), site)
    sums = recall(site.known)
    change = feature_map(ends.network, ends.method.answering().experts["ridge"])
    images, _ = ends.stream.train_batch(0, ends.stream.tasks[0].train)
    with torch.no_grad():
        x = change(ends.network.embed(images)).double()
    assert int(sums.counts.sum()) == len(x)
    error = torch.linalg.matrix_norm(sums.moment - x.T @ x) / torch.linalg.matrix_norm(x.T @ x)
    assert error < 0.05


@pytest.mark.parametrize(
    "change",
    [
        lambda m: {**m, "counts": -m["counts"]},
        lambda m: {**m, "counts": m["counts"] * 2**50},
        lambda m: {**m, "counts": 0 * m["counts"]},
        lambda m: {**m, "counts": m["counts"].float()},
        lambda m: {**m, "sums": -m["sums"]},
        lambda m: {**m, "sums": m["sums"] * torch.nan},
        lambda m: {**m, "sums": m["sums"][:, :-1]},
        lambda m: {"counts": m["counts"]},
    ],
)
def test_sums_that_cannot_be_are_refused(tmp_path, change):
    ends = Ends(settings(method={"variant": "first"}), tmp_path)
    site = ends.site()
    exchange, messages = replies(ends, site)
    with pytest.raises(BadMessage):
        exchange.check(Message("statistics", change(messages[0].tensors), {"withheld": 0}), site)
    for meta in ({}, {"withheld": -1}, {"withheld": True}, {"withheld": 3}):
        with pytest.raises(BadMessage):
            exchange.check(Message("statistics", messages[0].tensors, meta), site)
    with pytest.raises(BadMessage, match="samples"):
        exchange.check_sender(messages[0], site, Sender(0, 10**6))


def test_sums_of_opposite_signs_do_not_look_short(tmp_path):
    ends = Ends(settings(method={"variant": "first", "features": 0}), tmp_path)
    site = ends.site()
    exchange, messages = replies(ends, site)
    signs = torch.tensor([1e6, -1e6])[:, None, None]
    far = Message("statistics", {**messages[0].tensors, "sums": messages[0].tensors["sums"] * signs})
    honest, large = (exchange.sizes(message, site)["length of features"] for message in (messages[0], far))
    assert large == pytest.approx(1e6 * honest)


def test_groups_of_too_many_samples_count_for_as_many_as_a_client_can(tmp_path):
    ends = Ends(settings(method={"variant": "first"}), tmp_path)
    site = ends.site()
    exchange, messages = replies(ends, site)
    most = [int(message.tensors["counts"].sum()) for message in messages]
    site.most = max(most) / 2
    exchange.digest(iter(enumerate(messages)), site)
    assert site.known["statistics/counts"].sum().item() == pytest.approx(sum(min(n, site.most) for n in most))


def test_values_at_the_edge_of_float_do_no_harm(tmp_path):
    ends = Ends(settings(method={"variant": "first"}), tmp_path)
    site = ends.site()
    exchange, messages = replies(ends, site)
    sums = torch.where(messages[0].tensors["counts"][:, :, None] > 0, torch.finfo(torch.float32).max, 0.0)
    huge = Message("statistics", {**messages[0].tensors, "sums": sums.expand(-1, -1, 48)}, {"withheld": 0})
    exchange.check(huge, site)
    assert exchange.sizes(huge, site)["length of features"] > 1e30
    exchange.digest(iter([(0, huge), (1, messages[1])]), site)
    assert site.known["statistics/moment"].isfinite().all()
    expert = site.inference(ends.method.answering(), 0).experts["ridge"]
    assert expert.weights.isfinite().all()


def test_first_order_sums_give_the_same_bytes_whatever_the_engine(tmp_path):
    given = {"method": {"variant": "first"}, "clients": {"count": 4, "roster": {"1": "0-2,5", "2": "1-3,5"}}}
    fedprotip.run(settings(**given), out=tmp_path / "local")
    fedprotip.run(settings("run.engine=apart", **given), out=tmp_path / "apart")
    assert results(tmp_path / "apart") == results(tmp_path / "local")
    assert torch.equal(*(tensors(tmp_path / name, "statistics")["moment"] for name in ("local", "apart")))


@pytest.mark.parametrize("aggregate", ["trimmed", "median"])
def test_robust_aggregation_needs_products(tmp_path, aggregate):
    with pytest.raises(UsageError, match="knows no products"):
        create_method(settings(f"train.aggregate={aggregate}", method={"variant": "first"}))
    summary = fedprotip.run(settings(f"train.aggregate={aggregate}", "stream.tasks=2"), out=tmp_path / "r")
    assert summary["accuracy"]["agnostic"] > 50
