"""What is known about earlier tasks: appended, never changed, the same after a round trip."""

import numpy as np
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from fedprotip.store.files import serialise
from fedprotip.subspace.bank import SubspaceBank
from tests.subspace import reference


def basis(rng, d, r):
    return torch.tensor(reference.random_basis(rng, d, r)).float()


def filled(seed, tasks):
    """A bank after some tasks: layer 'late' comes with task 2, ranks may be 0."""
    rng = np.random.default_rng(seed)
    bank = SubspaceBank()
    for task in range(tasks):
        whole = basis(rng, 40, 40)
        bank.extend("0/a.b", whole[:, : int(rng.integers(0, 4))], task)
        if task >= 2:
            bank.extend("late", whole[:, :1], task)
        bank.routing.append(basis(rng, 6, int(rng.integers(1, 4))))
    return bank


@given(st.integers(0, 500), st.integers(0, 13))
def test_round_trip_through_tensors(seed, tasks):
    bank = filled(seed, tasks)
    tensors = bank.to_tensors()
    shuffled = {name: tensors[name] for name in sorted(tensors, reverse=True)}
    again = SubspaceBank.from_tensors(shuffled | {"references/values": torch.ones(2), "other": torch.ones(1)})
    assert again.ranks == bank.ranks
    assert again.layers.keys() == bank.layers.keys()
    assert all(torch.equal(again.layers[name], bank.layers[name]) for name in bank.layers)
    assert len(again.routing) == tasks
    assert all(torch.equal(a, b) for a, b in zip(again.routing, bank.routing, strict=True))
    serialise(tensors)  # what a checkpoint does with them


@given(st.integers(0, 500), st.integers(1, 12))
def test_columns_are_appended_and_counted(seed, tasks):
    before, after = filled(seed, tasks), filled(seed, tasks)
    new = basis(np.random.default_rng(seed), 40, 3)
    after.extend("0/a.b", new, tasks)
    old = before.layers["0/a.b"]
    assert torch.equal(after.layers["0/a.b"][:, : old.shape[1]], old)
    assert torch.equal(after.layers["0/a.b"][:, old.shape[1] :], new)
    for name, ranks in after.ranks.items():
        assert sum(ranks) == after.layers[name].shape[1]
    assert len(after.ranks["0/a.b"]) == tasks + 1


def test_a_layer_that_comes_late_had_no_columns_before():
    assert filled(0, 5).ranks["late"] == [0, 0, 1, 1, 1]


def test_an_unknown_layer_has_an_empty_basis():
    assert SubspaceBank().basis("x", 7).shape == (7, 0)
    assert SubspaceBank().routed(7).shape == (7, 0)


def test_a_rank_of_zero_keeps_the_layer_known():
    bank = SubspaceBank()
    bank.extend("x", torch.zeros(5, 0), 0)
    again = SubspaceBank.from_tensors(bank.to_tensors())
    assert again.basis("x", 5).shape == (5, 0)
    assert again.ranks == {"x": [0]}


@given(st.integers(0, 500), st.integers(1, 12))
def test_the_routing_bases_together_span_their_union(seed, tasks):
    bank = filled(seed, tasks)
    sines = torch.linalg.svdvals(torch.cat(bank.routing, dim=1).double())
    assume(not ((sines > 1e-5) & (sines < 0.1)).any())  # between the same and another direction
    whole = bank.routed(6).numpy()
    assert whole.shape[1] <= 6
    assert np.abs(whole.T @ whole - np.eye(whole.shape[1])).max() < 1e-10
    expected = reference.projector_onto(torch.cat(bank.routing, dim=1).double().numpy())
    assert np.abs(whole @ whole.T - expected).max() < 1e-4


def test_projectors_do_not_depend_on_the_one_before_and_stay_exact():
    """Task by task over 100 tasks, from Φ to its complement to nothing: at hand or not, the same to the bit."""
    d, bank, before = 60, SubspaceBank(), None
    directions = basis(np.random.default_rng(5), d, d)
    for task in range(100):
        known = bank.basis("layer", d).shape[1]
        bank.extend("layer", directions[:, known : known + (1 if task % 5 else 0)], task)  # some tasks add nothing
        phi = bank.layers["layer"].double()
        made = bank.projector("layer", before)
        alone = bank.projector("layer")
        assert torch.equal(made.basis, alone.basis)
        assert made.is_complement == alone.is_complement == (2 * phi.shape[1] > d)
        assert made.room == d - phi.shape[1]
        dense = torch.eye(d, dtype=torch.float64) - phi @ phi.T
        assert (made(torch.eye(d)).double() - dense).abs().max() < 1e-6
        before = made
    assert before.room == 0


def test_a_small_basis_is_not_copied():
    bank = filled(0, 3)
    assert bank.projector("0/a.b").basis.data_ptr() == bank.layers["0/a.b"].data_ptr()
