"""The statistics message: what a client tells, what is refused, how the server adds it up."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedprotip
from fedprotip.federation.aggregate import combine
from fedprotip.inference import assemble
from fedprotip.inference.statistics import COUNTS, MOMENT, SKETCHES, SUMS, FeatureMap, Sums, low_rank, pack, recall
from fedprotip.messages import BadMessage, Message
from fedprotip.methods.exchange import Sender
from fedprotip.methods.parts import statistics
from fedprotip.methods.parts.calibration import without_held_back
from fedprotip.methods.state import Knowledge
from fedprotip.settings import Settings, TrainSettings
from tests.inference.samples import features_of
from tests.sites import Ends
from tests.small import quick, small, tensors

D = 24
PLAIN = small(statistics={"root": False, "directions": 1})


@pytest.fixture
def at(tmp_path):
    """Clients at the end of a task, with a network as it was born."""

    def build(task=0, **sections):
        sections["statistics"] = {"root": False, "directions": 1} | sections.get("statistics", {})
        settings = small(**sections, model={"stages": []})
        ends = Ends(settings, tmp_path)
        site = ends.site(task=task)
        return settings, lambda client: ends.local(client, site)

    return build


def gather(local, change=None):
    """As the exchange at the end of a task asks for it."""
    change = change or statistics.feature_map(local.network, statistics.feature_options(local.settings))
    with torch.no_grad():
        return statistics.gather(local, statistics.KIND, change)


def check(message, classes, d, rank=0, columns=2):
    statistics.check(message, statistics.KIND, classes, FeatureMap(d, columns=columns), rank)


def summed(messages):
    d, columns = messages[0][1].tensors["sketches"].shape[1:]
    return statistics.summed(messages, TrainSettings(), FeatureMap(d, columns=columns).omega, most=10**6)


def nothing_known():
    return Knowledge([statistics.kept(shared=False)])


def plain(local, settings, mapped=lambda features: features):
    """The same by a loop over single samples."""
    classes = local.holding.stream.tasks[local.task].classes
    samples = local.holding.stream.client_samples(local.task, local.client)
    labels = local.holding.stream.dataset.train_labels[torch.from_numpy(samples)].tolist()
    counts, sums, moment, sketches = np.zeros(len(classes)), 0.0, 0.0, 0.0
    omega = statistics.feature_map(local.network, statistics.feature_options(settings)).omega.numpy()
    for index, label in zip(samples, labels, strict=True):
        if labels.count(label) < settings.statistics.minimum:
            continue
        image, _ = local.holding.stream.train_batch(local.task, np.array([index]))
        with torch.no_grad():
            feature = mapped(local.network.embed(image))[0].double().numpy()
        counts[classes.index(label)] += 1
        sums = sums + np.outer(np.eye(len(classes))[classes.index(label)], feature)
        moment = moment + np.outer(feature, feature)
        own = np.eye(len(classes))[classes.index(label)][:, None, None]
        sketches = sketches + own * np.outer(feature, feature @ omega)
    return counts, sums, moment, sketches


@pytest.mark.parametrize("task", [0, 1])
@pytest.mark.parametrize("batch", [7, 512])
def test_a_client_tells_the_sums_of_a_plain_loop(at, task, batch):
    settings, client = at(task, clients={"count": 4}, evaluate={"batch": batch}, stream={"task_size": 3})
    for number in range(4):
        message = gather(client(number))
        counts, sums, moment, sketches = plain(client(number), settings)
        check(message, 3, D)
        assert message.tensors["counts"].tolist() == counts.tolist()
        assert message.tensors["sums"].numpy() == pytest.approx(sums, rel=1e-5, abs=1e-4)
        assert message.tensors["moment"].numpy() == pytest.approx(moment[np.triu_indices(D)], rel=1e-5, abs=1e-4)
        assert message.tensors["sketches"].numpy() == pytest.approx(sketches, rel=1e-5, abs=1e-4)


def test_a_class_below_the_minimum_is_left_out_of_everything(at):
    """Uneven clients: what a class below the minimum would add is nowhere, and the message says that it was there."""
    settings, client = at(
        clients={"count": 3, "alpha": 0.3}, statistics={"minimum": 60}, stream={"tasks": 2, "task_size": 4}
    )
    withheld = []
    for number in range(3):
        message = gather(client(number))
        held = torch.bincount(client(number).labels(), minlength=4)
        few = held < 60
        assert message.tensors["counts"].tolist() == torch.where(few, 0, held).tolist()
        assert (message.tensors["sums"][few] == 0).all()
        assert message.tensors["moment"].numpy() == pytest.approx(
            np.zeros(D * (D + 1) // 2) if few.all() else plain(client(number), settings)[2][np.triu_indices(D)],
            rel=1e-5,
            abs=1e-4,
        )
        assert message.meta == {"withheld": int((few & (held > 0)).sum())}
        withheld.append(message.meta["withheld"])
    assert max(withheld) > 0
    assert min(withheld) < 4


def test_the_minimum_itself_is_enough(at):
    held = torch.bincount(at()[1](0).labels(), minlength=2)
    _, client = at(statistics={"minimum": int(held[0])})
    assert gather(client(0)).tensors["counts"][0] == held[0]
    _, client = at(statistics={"minimum": int(held[0]) + 1})
    assert gather(client(0)).tensors["counts"][0] == 0


def test_a_client_with_too_few_of_everything_sends_zeros(at):
    _, client = at(statistics={"minimum": 10**6})
    message = gather(client(0))
    check(message, 2, D)
    assert all((tensor == 0).all() for tensor in message.tensors.values())
    assert message.meta["withheld"] == 2


def test_mapped_features_are_summed_if_asked_for(at):
    settings, client = at(statistics={"features": 40})
    change = statistics.feature_map(client(0).network, statistics.feature_options(settings))
    message = gather(client(0))
    check(message, 2, 40)
    _, sums, moment, _ = plain(client(0), settings, change)
    assert message.tensors["sums"].numpy() == pytest.approx(sums, rel=1e-4, abs=1e-3)
    assert message.tensors["moment"].numpy() == pytest.approx(moment[np.triu_indices(40)], rel=1e-4, abs=1e-3)
    check(gather(client(0), FeatureMap(D, final=True)), 2, D, columns=0)


def test_stages_are_looked_at_side_by_side_and_by_their_roots(tmp_path):
    ends = Ends(small(statistics={"directions": 1}), tmp_path)
    local = ends.local(0, ends.site(task=0))
    message = gather(local)
    images, _ = next(local.labelled(1000))
    with torch.no_grad():
        found = local.network.look(images)
        hidden = local.network.backbone[:3](images)
    assert torch.equal(found.stacked, torch.cat([hidden, found.final], 1))
    assert message.tensors["sums"].sum(0).tolist() == pytest.approx(found.stacked.sqrt().sum(0).tolist(), rel=1e-4)
    check(message, 2, 2 * D)


# Samples that were held back


def all_labels(local):
    return torch.cat([local.labels(), local.holding.held_back_labels(0)])


def told_by_all(clients, exchange):
    """The knowledge that follows from the answers of some clients."""
    with torch.no_grad():
        answers = [(number, exchange.answer(local)) for number, local in enumerate(clients)]
    site = clients[0].site
    exchange.receive(exchange.digest(combine(exchange, answers, site), site), site)
    return site.known


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_samples_that_were_held_back_are_in_plain_sums(at, share):
    settings, client = at(clients={"held_back": share}, statistics={"minimum": 1})
    for number in range(3):
        with torch.no_grad():
            message = statistics.Statistics(settings).answer(client(number))
        assert message.tensors["counts"].tolist() == torch.bincount(all_labels(client(number)), minlength=2).tolist()
        statistics.Statistics(settings).check_sender(message, client(0).site, Sender(0, len(client(number).samples)))


@pytest.mark.parametrize("how", [{"train": {"aggregate": "median"}}, {"statistics": {"rank": 4}}])
def test_they_are_in_no_others_for_nobody_could_take_them_out(at, how):
    how["statistics"] = {"minimum": 1} | how.get("statistics", {})
    settings, client = at(clients={"held_back": 0.3}, **how)
    with torch.no_grad():
        message = statistics.Statistics(settings).answer(client(0))
    assert message.tensors["counts"].sum() == len(client(0).samples)
    known = client(0).site.known
    statistics.remember(known, Sums.zeros(2, D, 2))
    found = without_held_back(client(0), [], statistics.feature_options(settings))
    assert all(found[name] is known[name] for name in known)


@pytest.mark.parametrize("minimum", [1, 40])
def test_a_client_takes_its_own_out_again(at, minimum):
    """What is left are the sums of all samples of the others and of those it trains on; classes it left out too."""
    settings, client = at(clients={"held_back": 0.3, "alpha": 0.3}, statistics={"minimum": minimum})
    exchange = statistics.Statistics(settings, tells=True)
    known = told_by_all([client(number) for number in range(3)], exchange)
    for number in range(3):
        local = client(number)
        local.known.update(known)
        with torch.no_grad():
            seen = [(local.network.look(x), y) for x, y in local.held_back(1000)]
            found = recall(without_held_back(local, seen, exchange.options))
            held = [(local.network.embed(x).double(), y) for x, y in local.held_back(1000)]
        keep = torch.bincount(all_labels(local), minlength=2)[held[0][1]] >= minimum
        expected, own = recall(known), Sums.zeros(2, D, 2)
        own.add(held[0][0][keep], held[0][1][keep], statistics.feature_map(local.network, exchange.options).omega)
        assert found.counts.tolist() == (expected.counts - own.counts).tolist()
        for part in ("sums", "moment", "sketches"):
            assert torch.allclose(getattr(found, part), getattr(expected, part) - getattr(own, part), atol=1e-3)
    assert any(len(client(number).holding.held_back(0)) for number in range(3))


@given(st.integers(1, 400), st.sampled_from([0.05, 0.1, 0.25, 0.5, 0.9]))
def test_counts_may_be_of_as_many_more_as_can_be_held_back(total, share):
    """Whoever has n samples holds back the share of them, rounded down, but one at least is trained on.

    Where that is none it may be one.
    """
    trained = total - min(int(share * total), max(total - 1, 0))
    message = Message(statistics.KIND, {"counts": torch.tensor([total])}, {"withheld": 0})
    statistics.check_counts(message, Sender(0, trained), 1, share)
    if share * total < 1 < total:
        statistics.check_counts(message, Sender(0, total - 1), 1, share)
    for wrong in (trained + 2 + int(trained / (1 - share)), trained - 1):
        message.tensors["counts"][0] = wrong
        with pytest.raises(BadMessage, match="add up"):
            statistics.check_counts(message, Sender(0, trained), 1, share)


# What arrives


def good(seed=0, classes=2, d=3, n=20, columns=2):
    rng = np.random.default_rng(seed)
    sums = Sums.zeros(classes, d, columns)
    omega = FeatureMap(d, columns=columns).omega
    sums.add(torch.tensor(rng.standard_normal((n, d))), torch.tensor(rng.integers(0, classes, n)), omega)
    tensors = {"counts": sums.counts.long(), "sums": sums.sums.float(), "moment": pack(sums.moment).float()}
    tensors["sketches"] = sums.sketches.float()
    return Message(statistics.KIND, tensors, {"withheld": 0})


def damaged(name, change):
    message = good()
    message.tensors[name] = change(message.tensors[name].clone())
    return message


def at_place(place, value):
    def change(tensor):
        tensor.view(-1)[place] = value
        return tensor

    return change


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (damaged("counts", at_place(1, -3)), "count is negative"),
        (damaged("counts", lambda t: t.float()), "expected torch.int64"),
        (damaged("counts", lambda t: t[:1]), "has shape"),
        (damaged("sums", lambda t: t[:, :2]), "has shape"),
        (damaged("sums", lambda t: t.double()), "expected torch.float32"),
        (damaged("sums", at_place(2, torch.nan)), "not finite"),
        (damaged("moment", at_place(0, torch.inf)), "not finite"),
        (damaged("moment", lambda t: t[:-1]), "has shape"),
        (damaged("moment", at_place(0, -1.0)), "second moment is none"),
        (damaged("moment", at_place(3, -1.0)), "second moment is none"),
        (damaged("moment", at_place(5, -1.0)), "second moment is none"),
        (damaged("sketches", lambda t: t[:, :, :1]), "has shape"),
        (damaged("sketches", lambda t: -t), "sketch of a class is none"),
        (damaged("sketches", lambda t: 2 * t), "do not add up"),
        (damaged("sketches", at_place(0, 50.0)), "sketch of a class is none"),
        (Message("basis", good().tensors, {"withheld": 0}), "was expected"),
        (Message(statistics.KIND, good().tensors, {}), "withheld"),
        (Message(statistics.KIND, good().tensors, {"withheld": torch.nan}), "withheld"),
        (Message(statistics.KIND, {"counts": good().tensors["counts"]}, {"withheld": 0}), "missing"),
    ],
)
def test_damaged_statistics_are_refused(message, words):
    with pytest.raises(BadMessage, match=words):
        check(message, 2, 3)


def test_good_statistics_pass_and_so_do_negative_products_off_the_diagonal():
    check(good(), 2, 3)
    message = good(columns=0)
    message.tensors["moment"][1] = -1e-3
    check(message, 2, 3, columns=0)


@pytest.mark.parametrize("classes", ["x" * 10**6, 2.5, -1, 3, 10**400, True, None, [1]])
def test_only_a_number_of_classes_can_be_withheld(classes):
    with pytest.raises(BadMessage, match="withheld is not a number of classes up to 2"):
        check(Message(statistics.KIND, good().tensors, {"withheld": classes}), 2, 3)
    check(Message(statistics.KIND, good().tensors, {"withheld": 2}), 2, 3)


def test_what_was_withheld_is_an_event():
    exchange = statistics.Statistics(Settings())
    assert exchange.remark(good(), task=0, client=1) is None
    remark = exchange.remark(Message(statistics.KIND, good().tensors, {"withheld": 2}), task=0, client=1)
    assert remark.plain() == {"event": "withheld", "task": 0, "client": 1, "kind": "statistics", "classes": 2}


def impossible(change):
    message = good()
    change(message.tensors)
    return message


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors["counts"].zero_(),
        lambda tensors: tensors["moment"].mul_(1e-3),
        lambda tensors: tensors["sums"].mul_(100),
    ],
    ids=["sums of no samples", "a small moment", "sums larger than the moment allows"],
)
def test_sums_that_no_samples_could_have_are_refused_or_do_no_harm(change):
    """One broken client must not stop the run: answers stay finite for samples like those of the others."""
    message = impossible(change)
    try:
        check(message, 2, 3)
    except BadMessage:
        return
    knowledge = nothing_known()
    statistics.remember(knowledge, summed([(0, good(1)), (1, message)]))
    inference = assemble(statistics.answering(PLAIN), Network3(), knowledge, [(0, 1)])
    assert inference.experts["statistics"](features_of(torch.eye(3))).isfinite().all()


class Network3:
    features = stacked = first = 3


# What is kept


def test_messages_digested_in_any_order_give_the_same_knowledge():
    messages = [(client, good(client, classes=3, d=5)) for client in range(9)]
    one, other = nothing_known(), nothing_known()
    statistics.remember(one, summed(messages))
    statistics.remember(other, summed(messages[::-1]))
    assert one.keys() == other.keys() == {COUNTS, SUMS, MOMENT, SKETCHES}
    for name in one:
        assert one[name].dtype == (torch.float32 if name == SKETCHES else torch.float64)
        torch.testing.assert_close(one[name].double(), other[name].double(), rtol=1e-6, atol=1e-6)
    assert one[COUNTS].sum() == 9 * 20


def test_tasks_add_rows_and_share_one_moment():
    first, second, knowledge = good(0), good(1, classes=4), nothing_known()
    for message in (first, second):
        statistics.remember(knowledge, summed([(0, message)]))
    found = recall(knowledge)
    assert found.counts.tolist() == [*first.tensors["counts"].tolist(), *second.tensors["counts"].tolist()]
    assert found.sums.shape == (6, 3)
    assert torch.equal(found.sums[2:], second.tensors["sums"].double())
    moment = first.tensors["moment"].double() + second.tensors["moment"].double()
    assert torch.equal(pack(found.moment), moment)


def with_overlap(scenario):
    """Labels 0 1 | 1 2, as two tasks and as their experts."""
    knowledge = nothing_known()
    for seed in (0, 1):
        statistics.remember(knowledge, summed([(0, good(seed, columns=0))]))
    stream = {"scenario": scenario, **({"domains": "permute", "task_size": 0} if scenario == "domain" else {})}
    inference = assemble(
        statistics.answering(small(stream=stream, statistics={"root": False, "directions": 0})),
        Network3(),
        knowledge,
        [(0, 1), (1, 2)],
    )
    assert inference.experts.keys() == inference.ways.keys()
    return recall(knowledge), inference.experts


def test_a_class_seen_again_adds_up():
    sums, experts = with_overlap("class")
    assert set(experts) == {"statistics"}
    adds_up(sums, experts["statistics"])


def adds_up(sums, expert):
    scores = expert(features_of(torch.randn(5, 3)))
    assert scores.shape == (5, 4)
    assert torch.equal(scores[:, 1], scores[:, 2])  # one Gaussian, an answer of two tasks
    assert not torch.equal(scores[:, 0], scores[:, 1])
    mean = (sums.sums[1] + sums.sums[2]) / (sums.counts[1] + sums.counts[2])
    nearest = expert(features_of(torch.stack([mean, sums.means()[0], sums.means()[3]]).float()))
    assert nearest[0, 1].item() == pytest.approx(0.0, abs=1e-4)
    assert nearest.argmax(1).tolist() == [1, 0, 3]


def test_with_domains_every_one_keeps_its_own_and_all_together_have_one_more():
    sums, experts = with_overlap("domain")
    assert set(experts) == {"statistics", "shared"}
    adds_up(sums, experts["shared"])
    scores = experts["statistics"](features_of(sums.means().float()))
    assert scores.diagonal().tolist() == pytest.approx([0.0] * 4, abs=1e-4)
    assert not torch.equal(scores[:, 1], scores[:, 2])


# Low rank


def low(seed=0, classes=2, d=9, rank=3, n=40):
    """Statistics of low rank as they are sent, and the sums they stand for."""
    rng = np.random.default_rng(seed)
    mixed = rng.standard_normal((d, d)) * np.geomspace(1, 0.01, d)
    sums = Sums.zeros(classes, d, 2)
    omega, labels = FeatureMap(d, columns=2).omega, torch.tensor(rng.integers(0, classes, n))
    sums.add(torch.tensor(rng.standard_normal((n, d)) @ mixed.T + 3), labels, omega)
    factor, rest = low_rank(sums.scatter(), rank)
    tensors = {"counts": sums.counts.long(), "sums": sums.sums.float(), "factor": factor.float(), "rest": rest.float()}
    tensors["sketches"] = sums.sketches.float()
    return Message(statistics.KIND, tensors, {"withheld": 0}), sums


def test_statistics_of_low_rank_keep_means_and_variances_and_never_lose_definiteness():
    message, sums = low()
    check(message, 2, 9, rank=3)
    found = summed([(0, message), (1, low(seed=1)[0])])
    whole = sums + low(seed=1)[1]
    assert torch.allclose(found.means(), whole.means(), rtol=1e-5)
    assert torch.allclose(found.scatter().diagonal(), whole.scatter().diagonal(), rtol=1e-4)
    assert torch.linalg.eigvalsh(found.scatter()).min() > -1e-4
    error = torch.linalg.matrix_norm(found.scatter() - whole.scatter()) / torch.linalg.matrix_norm(whole.scatter())
    assert 0 < error < 0.2


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("factor", lambda t: t[:, :2], "has shape"),
        ("factor", at_place(0, torch.nan), "not finite"),
        ("rest", at_place(4, -1.0), "variance is negative"),
        ("rest", lambda t: t[:-1], "has shape"),
    ],
)
def test_damaged_statistics_of_low_rank_are_refused(name, change, words):
    message, _ = low()
    message.tensors[name] = change(message.tensors[name].clone())
    with pytest.raises(BadMessage, match=words):
        check(message, 2, 9, rank=3)


def test_the_other_form_is_refused():
    with pytest.raises(BadMessage):
        check(low()[0], 2, 9)
    with pytest.raises(BadMessage):
        check(good(d=9), 2, 9, rank=3)
    check(good(d=6), 2, 6, rank=3)  # no saving: whole moments travel


@pytest.mark.parametrize("method", ["fedprotip", "lda", "ridge"])
def test_a_run_with_statistics_of_low_rank_sends_less_and_answers_nearly_as_well(tmp_path, method, monkeypatch):
    quick(monkeypatch)
    sections = {
        "model": {"width": 64, "stages": []},
        "train": {"rounds": 2, "head_start": "closed"},
        "method": {"name": method},
    }
    whole, cut = (
        fedprotip.run(small(statistics={"rank": rank, "directions": 0}, **sections), out=tmp_path / str(rank))
        for rank in (0, 12)
    )
    assert cut["failures"]["count"] == 0
    assert cut["bytes"]["up"]["statistics"] < 0.6 * whole["bytes"]["up"]["statistics"]
    assert cut["accuracy"]["single"] > whole["accuracy"]["single"] - 10
    kept = tensors(tmp_path / "12", "statistics")
    assert kept["moment"].shape == (64 * 65 // 2,)
