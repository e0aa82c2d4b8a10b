"""Rounding is not a direction: Φ never has more of them than the activations, and no honest faint one is lost."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedprotip.stream import build_stream
from fedprotip.subspace.bank import SubspaceBank
from fedprotip.subspace.basis import DEPENDENT, EPS, core_basis, core_of_moment, noise
from fedprotip.subspace.merge import EnergyMerge, UnionMerge
from fedprotip.subspace.project import Projector
from tests.small import small
from tests.subspace import reference

seeds = st.integers(0, 10_000)
rules = st.sampled_from(["mass", "energy"])
scales = st.sampled_from([1e-8, 1.0, 1e8])


def learned(tasks, d, threshold, rule, merge="union"):
    """Ranks of Φ and of all activations so far, after every task of a list of clients' activations (d, m)."""
    bank, earlier, seen = SubspaceBank(), torch.zeros(d, 0), []
    for task, clients in enumerate(tasks):
        merger = UnionMerge(earlier) if merge == "union" else EnergyMerge(earlier, threshold, rule)
        for a in clients:
            merger.add(core_basis(a, earlier, threshold, rule))
        bank.extend("layer", merger.result(), task)
        earlier = bank.projector("layer")
        seen += clients
        sigma = torch.linalg.svdvals(torch.cat(seen, dim=1).double())
        yield bank.layers["layer"].shape[1], int((sigma > 1e-7 * sigma[0]).sum())


def digit_tasks(seed, clients):
    """Pixels of two digits a task: some are dark in all of them, others light up in a single image."""
    stream = build_stream(small(stream={"tasks": 5}, clients={"count": clients}, run={"seed": seed}))
    return [
        [stream.train_batch(task, stream.client_samples(task, client))[0].flatten(1).T for client in range(clients)]
        for task in range(5)
    ]


@pytest.mark.parametrize("merge", ["union", "energy"])
@pytest.mark.parametrize("threshold", [0.5, 0.7, 0.9])
@pytest.mark.parametrize("rule", ["mass", "energy"])
def test_phi_never_has_more_directions_than_the_digits(rule, threshold, merge):
    for seed, clients in ((0, 1), (0, 10), (1, 5), (2, 10)):
        ranks = list(learned(digit_tasks(seed, clients), 64, threshold, rule, merge))
        assert ranks[-1][1] == 61
        assert all(ours <= theirs for ours, theirs in ranks), (seed, clients, ranks)


@pytest.mark.parametrize("merge", ["union", "energy"])
def test_with_everything_wanted_phi_has_all_directions_of_the_digits(merge):
    for seed, clients in ((0, 1), (0, 10), (1, 5)):
        assert all(ours == theirs for ours, theirs in learned(digit_tasks(seed, clients), 64, 1.0, "mass", merge))


@settings(max_examples=30)
@given(seeds, st.integers(8, 40), st.integers(1, 4), rules, scales, st.sampled_from([0.7, 0.95, 1.0]))
def test_phi_never_has_more_directions_than_activations_of_low_rank(seed, d, clients, rule, scale, threshold):
    """Every task sees more of a space that never fills; activations are rounded to float32."""
    rng = np.random.default_rng(seed)
    space = reference.random_basis(rng, d, d - 2)
    tasks = []
    for task in range(4):
        part = space[:, : 1 + (d - 3) * (task + 1) // 4]
        sizes = np.geomspace(1, 0.03, part.shape[1])[:, None] * scale
        tasks.append(
            [torch.tensor(part @ (sizes * rng.standard_normal((part.shape[1], 60)))).float() for _ in range(clients)]
        )
    assert all(ours <= theirs for ours, theirs in learned(tasks, d, threshold, rule))


@given(seeds, st.integers(6, 40), st.integers(1, 30), st.booleans(), scales, st.floats(1.5, 1e3))
def test_a_faint_direction_above_the_floor_is_kept_and_one_below_is_not(seed, d, strong, past, scale, times):
    """Strong activations, inside Φ where there is a past, and one faint direction outside them."""
    rng = np.random.default_rng(seed)
    whole = reference.random_basis(rng, d, min(strong, d - 2) + 1)
    known, faint = whole[:, :-1], whole[:, -1:]
    phi = torch.tensor(known).float() if past else torch.zeros(d, 0)
    rows = reference.random_basis(rng, 50, whole.shape[1]).T
    main = known @ (rng.uniform(0.1, 1, (known.shape[1], 1)) * rows[:-1]) * scale
    once = faint @ rows[-1:] * noise(Projector.of(phi)) * np.linalg.norm(main)
    for factor, found in ((times, 1), (1 / times, 0)):
        basis = core_basis(torch.tensor(main + factor * once).float(), phi, 1.0, "mass").basis.double().numpy()
        assert basis.shape[1] == (0 if past else known.shape[1]) + found
        if found:
            assert np.linalg.norm(basis.T @ faint) > 0.9


@given(seeds, st.integers(6, 60), scales, rules)
def test_activations_inside_a_span_that_is_known_up_to_the_merge_add_nothing(seed, d, scale, rule):
    """The columns of Φ are off by EPS/DEPENDENT, as the merge may leave them."""
    rng = np.random.default_rng(seed)
    exact = reference.random_basis(rng, d, int(rng.integers(1, d - 1)))
    off = rng.standard_normal(exact.shape)
    off *= 0.9 * EPS / DEPENDENT / np.linalg.norm(off, 2)
    phi = torch.tensor(np.linalg.qr(exact + off)[0]).float()
    a = torch.tensor(exact @ rng.standard_normal((exact.shape[1], 50)) * scale).float()
    for earlier in (phi, Projector.outside(phi)):
        assert core_basis(a, earlier, 1.0, rule).basis.shape == (d, 0)


@pytest.mark.parametrize(("threshold", "rank"), [(0.99, 2), (0.9995, 3)])
def test_the_routing_basis_of_one_client_has_the_rank_of_eq_9(threshold, rank):
    """A third direction of 0.08 % of the features counts like any other."""
    a = torch.diag(torch.tensor([1.0, 0.1, 8e-4, 0.0])).double()
    assert core_basis(a, torch.zeros(4, 0), threshold, "mass").basis.shape == (4, rank)
    core = core_of_moment(a @ a.T, 4, torch.zeros(4, 0), threshold, "mass")
    assert core.basis.shape == (4, rank)
    merger = UnionMerge(torch.zeros(4, 0))
    merger.add(core)
    assert merger.result().shape == (4, rank)
