"""The pieces of FedProTIP that are not training: thresholds, messages, merging, references."""

import pytest
import torch

import fedprotip
from fedprotip.inference import assemble, route
from fedprotip.messages import BadMessage, Message
from fedprotip.methods import ClientTask, create_method
from fedprotip.methods.fedprotip import ROUTING, SIGMA
from fedprotip.methods.parts import identity
from fedprotip.models import build_network
from fedprotip.models.prefix import PrefixCache
from fedprotip.store.files import ClientStore, ObjectFolder
from fedprotip.stream import build_stream
from fedprotip.subspace.bank import SubspaceBank
from tests.small import small, tensors


@pytest.fixture
def make(tmp_path):
    """A method with everything it works on, before the end of the first task."""

    def build(**options):
        settings = small(method=options)
        method, stream = create_method(settings), build_stream(settings)
        network = build_network(settings, stream.dataset.image_shape, method.routes).eval()
        network.add_head(stream.tasks[0].classes, 0, 0)
        objects = ObjectFolder(tmp_path / "objects")
        objects.create()
        store, cache = ClientStore(objects, 2**20), PrefixCache(stream, settings)

        def at(client, knowledge, task=0):
            return ClientTask(client, task, network, knowledge, stream, store, seed=0, cache=cache)

        return method, network, at

    return build


def test_threshold_grows_by_task_and_follows_patterns(make):
    method, _, _ = make(threshold=0.7, layer_thresholds={"3.*": 0.9, "*": 0.8})
    assert method.threshold("3.weight", 0) == 0.9
    assert method.threshold("1.weight", 4) == pytest.approx(0.804)
    method, _, _ = make(threshold=0.9995)
    assert method.threshold("1.weight", 7) == 1.0


@pytest.mark.parametrize("options", [{}, {"merge": "energy"}, {"routing_rank": 3}, {"rank_rule": "mass"}])
def test_a_clients_message_is_valid_and_merges(make, options):
    method, network, at = make(**options)
    replies = [(client, method.summarise("basis", at(client, {}))) for client in range(3)]
    for _, message in replies:
        method.validate(message, network, {}, 0)
    merged = method.digest("basis", iter(replies), network, {}, 0)
    assert set(merged.tensors) == {"1.weight", "3.weight", ROUTING}
    if options.get("merge") != "energy":
        for name in ("1.weight", "3.weight"):  # the union holds every client's directions
            phi = merged.tensors[name].double()
            for _, message in replies:
                u = message.tensors[name].double()
                assert (u - phi @ (phi.T @ u)).abs().max() < 1e-4
    if options.get("routing_rank"):
        assert merged.tensors[ROUTING].shape[1] == 3
    own_and_server = {}, {}
    for knowledge in own_and_server:  # client and server make the same of the broadcast
        method.receive(knowledge, merged, 0)
    assert own_and_server[0].keys() == own_and_server[1].keys()


def test_singular_values_travel_only_when_they_are_needed(make):
    method, _, at = make()
    message = method.summarise("basis", at(0, {}))
    assert not any(name.startswith(SIGMA) for name in message.tensors)
    assert message.meta == {}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"columns": 20}, 20),
        ({"images": 15, "columns": 20}, 15),
        ({"images": 25, "columns": 20, "projection": "none"}, 20),
    ],
)
def test_no_more_images_than_columns_run(make, options, expected):
    method, _, at = make(**options)
    local = at(0, {})
    message = method.summarise("basis", local)
    assert local.store.get(0, "moment-0")["samples"] == expected
    if options.get("projection") != "none":
        assert message.tensors["1.weight"].shape[1] > 1


def test_every_image_passes_once_for_columns_and_moments(make):
    """Forty images: the first 32 give the columns, and the moments are of all of them."""
    method, network, at = make(columns=40, per_image=4, statistics=False, router="cosine")
    local, passed = at(0, {}), []
    hook = network.backbone.register_forward_hook(lambda module, inputs, features: passed.append(features))
    method.summarise("basis", local)
    hook.remove()
    assert [len(features) for features in passed] == [32, 8]
    features = torch.cat([network.embed(batch) for batch in local.batches(40, 40)]).double()
    kept = local.store.get(0, "moment-0")
    assert kept["samples"] == 40
    assert torch.allclose(kept["moment"], features.T @ features)
    assert torch.allclose(kept["sum"], features.sum(0))


def test_a_layer_at_full_rank_sends_an_empty_basis_unseen(make, monkeypatch):
    method, network, at = make()
    names = method.summarise("basis", at(0, {})).tensors.keys()
    knowledge = {
        "subspaces/layers/1.weight": torch.eye(64),
        "subspaces/ranks/1.weight": torch.tensor([64]),
        "subspaces/layers/3.weight": torch.eye(24, 3),
        "subspaces/ranks/3.weight": torch.tensor([3]),
        "subspaces/routing/0000": torch.eye(24, 2),
    }
    captured = []
    original = fedprotip.methods.fedprotip.capture
    monkeypatch.setattr(
        "fedprotip.methods.fedprotip.capture",
        lambda *args: captured.append(dict(original(*args))) or dict(captured[-1]),
    )
    network.add_head([2, 3], 0, 1)
    message = method.summarise("basis", at(0, knowledge, 1))
    assert [set(columns) for columns in captured] == [{"3.weight"}]
    assert message.tensors.keys() == names
    assert message.tensors["1.weight"].shape == (64, 0)
    method.validate(message, network, knowledge, 1)
    merged = method.digest("basis", iter([(0, message)]), network, knowledge, 1)
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


def wrong_width(message):
    message.tensors["1.weight"] = torch.eye(7)


def wrong_dtype(message):
    message.tensors["1.weight"] = message.tensors["1.weight"].double()


@pytest.mark.parametrize(
    "damage",
    [break_orthonormality, break_finiteness, drop_routing, empty_routing, unknown_layer, wrong_width, wrong_dtype],
)
def test_bad_bases_are_rejected(make, damage):
    method, network, at = make()
    message = method.summarise("basis", at(0, {}))
    damage(message)
    with pytest.raises(BadMessage):
        method.validate(message, network, {}, 0)


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
    method, network, _ = make()
    tensors = {"values": values, "variances": torch.ones_like(values), "counts": counts}
    with pytest.raises(BadMessage):
        method.validate(Message("reference", tensors), network, {}, 0)


@pytest.mark.parametrize("variance", [-1.0, torch.nan])
def test_bad_variances_are_rejected(make, variance):
    method, network, _ = make()
    tensors = {"values": torch.ones(1, 1), "variances": torch.ones(1, 1), "counts": torch.ones(1, dtype=torch.int64)}
    method.validate(Message("reference", tensors), network, {}, 0)
    tensors["variances"] = torch.full((1, 1), variance)
    with pytest.raises(BadMessage):
        method.validate(Message("reference", tensors), network, {}, 0)


def test_references_of_clients_that_left_are_kept_with_gaps(make):
    method, network, _ = make()
    knowledge = {}

    def refer(value, *counts):
        tasks = len(counts)
        square = torch.full((tasks, tasks), value)
        return Message("reference", {"values": square, "variances": 10 * square, "counts": torch.tensor(counts)})

    method.digest("reference", [(0, refer(1.0, 5)), (1, refer(2.0, 7))], network, knowledge, 0)
    method.digest("reference", [(1, refer(3.0, 7, 9)), (4, refer(4.0, 0, 2))], network, knowledge, 1)
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
@pytest.mark.parametrize("threshold", [0.5, 1.0])
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
    method, network, at = make()
    with torch.no_grad():
        for parameter in network.backbone.parameters():
            parameter.zero_()
    message = method.summarise("basis", at(0, {}))
    method.validate(message, network, {}, 0)
    assert message.tensors[ROUTING].shape == (24, 1)


def test_a_subset_of_voters_decides(tmp_path):
    fedprotip.run(small(clients={"count": 25}), out=tmp_path / "r")
    knowledge = {f"subspaces/{n}": t for n, t in tensors(tmp_path / "r", "subspaces").items()}
    knowledge |= {f"references/{n}": t for n, t in tensors(tmp_path / "r", "references").items()}
    knowledge |= {f"statistics/{n}": t for n, t in tensors(tmp_path / "r", "statistics").items()}
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
        identity, "references", lambda *args: calls.append(len(args[0]) * len(args[3])) or route.references(*args)
    )
    bank = SubspaceBank()
    for task in range(4):
        bank.routing.append(torch.linalg.qr(torch.randn(24, 3, generator=torch.Generator().manual_seed(task)))[0])
        local = at(0, bank.to_tensors(), task)
        if task != 1:  # that task was learned without this client
            moments = identity.Moments(24)
            moments.add(torch.randn(6, 24, generator=torch.Generator().manual_seed(10 + task)))
            moments.keep(local)
            bit_by_bit = identity.refer(local)
    assert sum(calls) == 1 + (1 * 2 + 3) + (2 + 4)  # the new columns of known tasks, and the row of the new one
    get = local.store.get
    monkeypatch.setattr(local.store, "get", lambda client, name: None if name == identity.TOLD else get(client, name))
    at_once = identity.refer(local)
    for name in identity.PARTS:
        assert torch.allclose(bit_by_bit.tensors[name], at_once.tensors[name])
    assert bit_by_bit.tensors["counts"].tolist() == [6, 0, 6, 6]
