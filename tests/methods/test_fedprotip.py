"""The pieces of FedProTIP that are not training: thresholds, messages, merging, references."""

import pytest
import torch

import fedprotip
from fedprotip.federation.aggregate import combine
from fedprotip.inference import assemble, route
from fedprotip.messages import BadMessage, Message
from fedprotip.methods import create_method
from fedprotip.methods.parts import references
from fedprotip.methods.parts.bases import SIGMA, Bases
from fedprotip.methods.parts.moments import Moments, kept_moments
from fedprotip.methods.parts.protection import ROUTING
from fedprotip.methods.state import Knowledge
from fedprotip.models import build_network
from fedprotip.stream import build_stream
from fedprotip.subspace.bank import SubspaceBank
from tests.sites import Ends
from tests.small import quick, small, tensors


@pytest.fixture
def make(tmp_path):
    """A method with everything it works on, before the end of the first task."""

    def build(model=None, **options):
        ends = Ends(small(method=options, stream={"tasks": 4}, model=model or {}), tmp_path)
        return ends.method, ends, lambda client, known=(), task=0: ends.local(client, ends.site(known, task))

    return build


def test_threshold_grows_by_task_and_follows_patterns(make):
    bases = make(threshold=0.7, layer_thresholds={"3.*": 0.9, "*": 0.8})[0].exchange("basis")
    assert bases.threshold("3.weight", 0) == 0.9
    assert bases.threshold("1.weight", 4) == pytest.approx(0.804)
    bases = make(threshold=0.9995)[0].exchange("basis")
    assert bases.threshold("1.weight", 7) == 1.0


@pytest.mark.parametrize("options", [{}, {"merge": "energy"}, {"routing_rank": 3}, {"rank_rule": "mass"}])
def test_a_clients_message_is_valid_and_merges(make, options):
    method, ends, at = make(**options)
    bases, server = method.exchange("basis"), ends.site()
    replies = [(client, answer(bases, at(client))) for client in range(3)]
    for _, message in replies:
        bases.check(message, server)
    merged = bases.digest(iter(replies), server)
    assert set(merged.tensors) == {"1.weight", "3.weight", ROUTING}
    if options.get("merge") != "energy":
        for name in ("1.weight", "3.weight"):  # the union holds every client's directions
            phi = merged.tensors[name].double()
            for _, message in replies:
                u = message.tensors[name].double()
                assert (u - phi @ (phi.T @ u)).abs().max() < 1e-4
    if options.get("routing_rank"):
        assert merged.tensors[ROUTING].shape[1] == 3
    own, sent = at(0).site, Message.from_bytes(merged.to_bytes())
    bases.receive(merged, server)
    bases.receive(sent, own)  # client and server make the same of the broadcast
    assert own.known.keys() == server.known.keys()
    assert all(torch.equal(own.known[name], server.known[name]) for name in own.known)


def answer(exchange, local):
    """As an engine asks for it."""
    with torch.no_grad():
        return exchange.answer(local)


def test_singular_values_travel_only_when_they_are_needed(make):
    method, _, at = make()
    message = answer(method.exchange("basis"), at(0))
    assert not any(name.startswith(SIGMA) for name in message.tensors)
    assert message.meta == {}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"columns": 20}, 20),
        ({"columns": 20, "projection": "none"}, 20),
        ({"columns": 20, "statistics": False, "router": "cosine"}, 20),
    ],
)
def test_no_more_images_than_columns_run(make, options, expected):
    method, _, at = make(**options)
    local = at(0)
    message = answer(method.exchange("basis"), local)
    assert local.own.get("moment-0")["samples"] == expected
    if options.get("projection") != "none":
        assert message.tensors["1.weight"].shape[1] > 1


def test_every_image_passes_once_for_columns_and_moments(make):
    """Forty images: the first 32 give the columns, and the moments are of all of them."""
    method, ends, at = make(columns=40, per_image=4, statistics=False, router="cosine")
    local, network, passed = at(0), ends.network, []
    hook = network.backbone.register_forward_hook(lambda module, inputs, features: passed.append(features))
    answer(method.exchange("basis"), local)
    hook.remove()
    assert [len(features) for features in passed] == [32, 8]
    features = torch.cat([network.embed(batch) for batch in local.images(40, 40)]).double()
    kept = kept_moments(local, 0)
    assert kept["samples"] == 40
    assert torch.allclose(kept["moment"], features.T @ features, rtol=1e-5)
    assert torch.allclose(kept["sum"], features.sum(0))


@pytest.mark.parametrize(("parts", "numbers"), [((3, 4), 24 * 7 - 21), ((900, 900, 9), 24 * 25 // 2), ((1,), 24)])
def test_a_moment_is_kept_by_its_root(make, parts, numbers):
    """Fewer samples than features, more of them, and one; what is kept is small and gives the moment back."""
    local, moments = make()[2](0), Moments(24)
    features = torch.randn(sum(parts), 24, generator=torch.Generator().manual_seed(0))
    for part in features.split(parts):
        moments.add(part)
    moments.keep(local)
    assert local.own.get("moment-0")["root"].shape == (numbers,)
    expected = features.double().T @ features.double()
    assert torch.allclose(kept_moments(local, 0)["moment"], expected, rtol=1e-5, atol=1e-3)
    assert torch.allclose(moments.moment, expected)
    local.own.store.put(local.client, "moment-0", {"moment": expected})  # as earlier versions kept it
    assert torch.equal(kept_moments(local, 0)["moment"], expected)


def test_a_layer_at_full_rank_sends_an_empty_basis_unseen(make, monkeypatch):
    method, ends, at = make()
    bases = method.exchange("basis")
    names = answer(bases, at(0)).tensors.keys()
    knowledge = {
        "subspaces/layers/1.weight": torch.eye(64),
        "subspaces/ranks/1.weight": torch.tensor([64]),
        "subspaces/layers/3.weight": torch.eye(24, 3),
        "subspaces/ranks/3.weight": torch.tensor([3]),
        "subspaces/routing/0000": torch.eye(24, 2),
    }
    captured = []
    original = fedprotip.methods.parts.bases.capture
    monkeypatch.setattr(
        "fedprotip.methods.parts.bases.capture",
        lambda *args: captured.append(dict(original(*args))) or dict(captured[-1]),
    )
    server = ends.site(knowledge, 1)
    message = answer(bases, at(0, knowledge, 1))
    assert [set(columns) for columns in captured] == [{"3.weight"}]
    assert message.tensors.keys() == names
    assert message.tensors["1.weight"].shape == (64, 0)
    bases.check(message, server)
    merged = bases.digest(iter([(0, message)]), server)
    assert merged.tensors["1.weight"].shape == (64, 0)
    assert (torch.eye(24, 3).T @ merged.tensors["3.weight"]).abs().max() < 1e-6


def break_orthonormality(message):
    message.tensors["1.weight"][:, 0] *= 1.1


def break_finiteness(message):
    message.tensors["1.weight"][0, 0] = torch.nan


def drop_routing(message):
    del message.tensors[ROUTING]


def empty_routing(message):
    message.tensors[ROUTING] = message.tensors[ROUTING][:, :0]


def unknown_layer(message):
    message.tensors["nonsense"] = torch.eye(3)


def one_layer_less(message):
    del message.tensors["1.weight"]


def wrong_width(message):
    message.tensors["1.weight"] = torch.eye(7)


def wrong_dtype(message):
    message.tensors["1.weight"] = message.tensors["1.weight"].double()


@pytest.mark.parametrize(
    "damage",
    [
        *(break_orthonormality, break_finiteness, drop_routing, empty_routing),
        *(unknown_layer, one_layer_less, wrong_width, wrong_dtype),
    ],
)
def test_bad_bases_are_rejected(make, damage):
    method, ends, at = make()
    message = answer(method.exchange("basis"), at(0))
    method.exchange("basis").check(message, ends.site())
    damage(message)
    with pytest.raises(BadMessage):
        method.exchange("basis").check(message, ends.site())


def test_a_basis_of_a_frozen_layer_is_rejected_in_the_first_task(make):
    """Nobody else tells one, so there would be nothing to compare its rank with."""
    method, ends, at = make(model={"freeze": "layer1"})
    message = answer(method.exchange("basis"), at(0))
    assert message.tensors.keys() == {"3.weight", ROUTING}
    method.exchange("basis").check(message, ends.site())
    message.tensors["1.weight"] = torch.eye(64)[:, :40]
    with pytest.raises(BadMessage):
        method.exchange("basis").check(message, ends.site())


@pytest.mark.parametrize("merge", ["union", "sketch"])
def test_a_layer_that_nothing_passes_has_an_empty_basis(make, merge):
    method, ends, at = make(merge=merge)
    ends.network.backbone[1].spare = torch.nn.Linear(5, 5)
    bases = next(exchange for exchange in method.exchanges if isinstance(exchange, Bases))
    message = answer(bases, at(0))
    assert not message.tensors["1.spare.weight"].any()
    bases.check(message, ends.site())
    site = ends.site()
    combined = combine(bases, [(0, message)], site)
    bases.receive(bases.digest(combined, site), site)
    assert site.known["subspaces/layers/1.spare.weight"].shape == (5, 0)


@pytest.mark.parametrize(
    ("values", "counts"),
    [
        (torch.full((1, 1), -1.0), torch.ones(1, dtype=torch.int64)),
        (torch.full((1, 1), torch.nan), torch.ones(1, dtype=torch.int64)),
        (torch.ones(2, 2), torch.ones(1, dtype=torch.int64)),
        (torch.ones(1, 1), torch.tensor([-1])),
    ],
)
def test_bad_references_are_rejected(make, values, counts):
    method, ends, _ = make()
    tensors = {"values": values, "variances": torch.ones_like(values), "counts": counts}
    with pytest.raises(BadMessage):
        method.exchange("reference").check(Message("reference", tensors), ends.site())


@pytest.mark.parametrize("variance", [-1.0, torch.nan, 2.01, 3e38])
def test_bad_variances_are_rejected(make, variance):
    method, ends, _ = make()
    tensors = {"values": torch.ones(1, 1), "variances": torch.ones(1, 1), "counts": torch.ones(1, dtype=torch.int64)}
    method.exchange("reference").check(Message("reference", tensors), ends.site())
    tensors["variances"] = torch.full((1, 1), variance)
    with pytest.raises(BadMessage):
        method.exchange("reference").check(Message("reference", tensors), ends.site())


def test_references_of_clients_that_left_are_kept_with_gaps(make):
    method, ends, _ = make()
    exchange, server = method.exchange("reference"), ends.site()
    knowledge = server.known

    def refer(value, *counts):
        tasks = len(counts)
        square = torch.full((tasks, tasks), value)
        return Message("reference", {"values": square, "variances": 10 * square, "counts": torch.tensor(counts)})

    exchange.digest([(0, refer(1.0, 5)), (1, refer(2.0, 7))], server)
    server.task = 1
    exchange.digest([(1, refer(3.0, 7, 9)), (4, refer(4.0, 0, 2))], server)
    assert knowledge["references/clients"].tolist() == [0, 1, 4]
    values = knowledge["references/values"]
    assert values[0, 0, 0] == 1
    assert values[0].isnan().sum() == 3
    assert (values[1] == 3).all()
    assert values[2, 0].isnan().all()
    assert (values[2, 1] == 4).all()
    variances = knowledge["references/variances"]
    assert torch.equal(variances.isnan(), values.isnan())
    assert torch.equal(variances.nan_to_num(), 10 * values.nan_to_num())
    assert knowledge["references/counts"].tolist() == [[5, 0], [7, 9], [0, 2]]


@pytest.mark.parametrize("merge", ["union", "energy"])
@pytest.mark.parametrize("rule", ["mass", "energy"])
@pytest.mark.parametrize("threshold", [0.5, pytest.param(1.0, marks=pytest.mark.slow)])
def test_no_task_is_invisible_even_when_the_feature_space_is_full(tmp_path, rule, merge, threshold):
    """Four features, five tasks: later routing bases cannot be orthogonal, but none is empty or made up."""
    options = {"threshold": threshold, "rank_rule": rule, "merge": merge}
    summary = fedprotip.run(small(stream={"tasks": 5}, model={"width": 4}, method=options), out=tmp_path / "r")
    bases = [t for n, t in tensors(tmp_path / "r", "subspaces").items() if n.startswith("routing/")]
    assert len(bases) == 5
    assert all(basis.shape[1] >= 1 for basis in bases)
    own = tensors(tmp_path / "r", "references")["values"].diagonal(dim1=1, dim2=2)
    assert (own > 1e-3).all()  # each task is seen by its own basis
    assert len(summary["routing"]["single_by_task"]) == 5


def test_dead_features_still_give_a_routing_basis(make):
    method, ends, at = make()
    with torch.no_grad():
        for parameter in ends.network.backbone.parameters():
            parameter.zero_()
    message = answer(method.exchange("basis"), at(0))
    method.exchange("basis").check(message, ends.site())
    assert message.tensors[ROUTING].shape == (24, 1)


@pytest.mark.slow
def test_a_subset_of_voters_decides(tmp_path):
    fedprotip.run(small(clients={"count": 25}), out=tmp_path / "r")
    knowledge = Knowledge(create_method(small()).state)
    for group in ("subspaces", "references", "statistics"):
        knowledge.update({f"{group}/{name}": tensor for name, tensor in tensors(tmp_path / "r", group).items()})
    stream = build_stream(small())
    network = build_network(small(), stream.dataset.image_shape, True)
    classes = [task.classes for task in stream.tasks]
    everyone, some = (
        assemble(create_method(small(method=options)).answering(), network, knowledge, classes)
        .ways["cosine"]
        .router.cosine
        for options in ({}, {"voters": 4})
    )
    assert len(everyone.references) > 20
    assert len(some.references) == 4
    assert not everyone.references.isnan().any()


def test_references_of_earlier_tasks_are_not_computed_again(make, monkeypatch):
    """Three tasks, one that the client missed: the same table as from scratch, by far fewer products."""
    _, _, at = make()
    calls = []
    monkeypatch.setattr(
        references, "references", lambda *args: calls.append(len(args[0]) * len(args[3])) or route.references(*args)
    )
    bank = SubspaceBank()
    for task in range(4):
        bank.routing.append(torch.linalg.qr(torch.randn(24, 3, generator=torch.Generator().manual_seed(task)))[0])
        local = at(0, bank.to_tensors(), task)
        if task != 1:  # that task was learned without this client
            moments = Moments(24)
            moments.add(torch.randn(6, 24, generator=torch.Generator().manual_seed(10 + task)))
            moments.keep(local)
            bit_by_bit = references.refer(local)
    assert sum(calls) == 1 + (1 * 2 + 3) + (2 + 4)  # the new columns of known tasks, and the row of the new one
    store = local.own.store
    get = store.get
    monkeypatch.setattr(store, "get", lambda client, name: None if name == references.TOLD else get(client, name))
    at_once = references.refer(local)
    for name in references.PARTS:
        assert torch.allclose(bit_by_bit.tensors[name], at_once.tensors[name])
    assert bit_by_bit.tensors["counts"].tolist() == [6, 0, 6, 6]


def test_subspaces_and_references_do_not_depend_on_statistics(tmp_path, monkeypatch):
    """Fewer columns than images, so that it matters which images they are of; bits, as the passes are the same."""
    quick(monkeypatch)
    for name, options in (("with", {}), ("without", {"statistics": False})):
        method = {"columns": 40, "router": "cosine", **options}
        fedprotip.run(small(method=method, stream={"tasks": 2}), out=tmp_path / name)
    for group in ("model", "subspaces", "references"):
        one, other = (tensors(tmp_path / name, group) for name in ("with", "without"))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert set(tensors(tmp_path / "with", "references")["counts"].flatten().tolist()) >= {40}
