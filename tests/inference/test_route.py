"""Relevance, references and the vote against raw features and plain loops."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from fedprotip.inference.route import CosineRouter, believed, energies, fill_missing, references, relevance
from tests.subspace.reference import random_basis

seeds = st.integers(0, 5000)


def reference(moment, samples, basis):
    values, _ = references(moment[None], torch.zeros(1, len(moment)), torch.tensor([samples]), [basis])
    return values.item()


def energy_variance(moment, total, samples, basis):
    _, variances = references(moment[None], total[None], torch.tensor([samples]), [basis])
    return variances.item()


def bases_of(rng, d, ranks):
    return [torch.tensor(random_basis(rng, d, rank)).float() for rank in ranks]


@given(seeds, st.integers(1, 12), st.integers(1, 40), st.sampled_from([1e-6, 1.0, 1e6]))
def test_a_reference_needs_no_features(seed, d, n, scale):
    rng = np.random.default_rng(seed)
    features = rng.standard_normal((d, n)) * scale
    basis = random_basis(rng, d, int(rng.integers(1, d + 1)))
    moment = torch.tensor(features @ features.T)
    expected = np.linalg.norm(basis @ basis.T @ features) / np.sqrt(n)
    assert reference(moment, n, torch.tensor(basis)) == pytest.approx(expected, rel=1e-6, abs=1e-9 * scale)


@given(seeds, st.integers(1, 10), st.integers(1, 30))
def test_the_relevance_of_a_group_is_its_reference(seed, d, n):
    """Eq. 11 is the same quantity for a client's features and for a group of test features."""
    rng = np.random.default_rng(seed)
    features = torch.tensor(rng.standard_normal((n, d)))
    bases = [basis.double() for basis in bases_of(rng, d, rng.integers(1, d + 1, 3))]
    pooled = relevance(energies(features, bases))
    moment = features.T @ features
    assert pooled.tolist() == pytest.approx([reference(moment, n, basis) for basis in bases], rel=1e-6, abs=1e-9)


@given(seeds, st.integers(1, 10), st.integers(1, 30))
def test_references_to_bases_of_different_ranks_are_those_to_each_alone(seed, d, n):
    rng = np.random.default_rng(seed)
    features = [torch.tensor(rng.standard_normal((n + more, d))) for more in range(3)]
    bases, moments = bases_of(rng, d, rng.integers(1, d + 1, 4)), [part.T @ part for part in features]
    sums, samples = torch.stack([part.sum(0) for part in features]), torch.tensor([n, n + 1, n + 2])
    values, variances = references(torch.stack(moments), sums, samples, bases)
    for task, moment in enumerate(moments):
        assert values[task].tolist() == pytest.approx([reference(moment, n + task, basis) for basis in bases])
        alone = [energy_variance(moment, sums[task], n + task, basis) for basis in bases]
        assert variances[task].tolist() == pytest.approx(alone)


def test_a_reference_of_rounding_errors_is_zero_not_nan():
    moment = torch.diag(torch.tensor([1.0, -1e-18], dtype=torch.float64))
    assert reference(moment, 5, torch.tensor([[0.0], [1.0]])) == 0.0


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("centre", [0.0, 1.0, 4.0])
def test_the_variance_of_energies_is_that_of_a_simulation(seed, centre):
    """Normal features with a crooked covariance, once as moments and once one by one."""
    rng = np.random.default_rng(seed)
    features = rng.standard_normal((40000, 6)) @ rng.standard_normal((6, 6)) + centre * rng.standard_normal(6)
    basis = random_basis(rng, 6, 3)
    expected = ((features @ basis) ** 2).sum(1).var()
    moment, total = torch.tensor(features.T @ features), torch.tensor(features.sum(0))
    assert energy_variance(moment, total, len(features), torch.tensor(basis)) == pytest.approx(expected, rel=0.1)


def test_the_variance_of_one_sample_is_zero_and_rounding_never_makes_it_negative():
    feature = torch.tensor([0.1, 0.7, 1e3], dtype=torch.float64)
    found = energy_variance(torch.outer(feature, feature), feature, 1, torch.eye(3))
    assert 0 <= found < 1e-3


@given(seeds, st.integers(1, 12))
def test_energies_are_those_of_the_projected_features(seed, tasks):
    rng = np.random.default_rng(seed)
    d = 15
    features = torch.tensor(rng.standard_normal((9, d))).float()
    bases = bases_of(rng, d, rng.integers(1, 5, tasks))
    found = energies(features, bases)
    assert found.shape == (9, tasks)
    for task, basis in enumerate(bases):
        projected = features.double() @ basis.double() @ basis.double().T
        assert found[:, task].tolist() == pytest.approx(projected.square().sum(1).tolist(), rel=1e-4, abs=1e-6)


def plain_route(query, references):
    """Every client votes for its most similar reference; most votes win, ties by mean similarity."""
    similarity = [
        [float(query @ row / (np.linalg.norm(query) * np.linalg.norm(row))) for row in client] for client in references
    ]
    votes = Counter(int(np.argmax(row)) for row in similarity)
    mean = np.mean(similarity, axis=0)
    return max(range(len(mean)), key=lambda task: (votes[task], mean[task])), votes, similarity


@given(seeds, st.sampled_from([1, 2, 12]), st.sampled_from([1, 2, 37]))
def test_routing_is_the_plain_vote(seed, tasks, clients):
    rng = np.random.default_rng(seed)
    references = rng.uniform(0.05, 1, (clients, tasks, tasks))
    queries = rng.uniform(0.05, 1, (6, tasks))
    router = CosineRouter([torch.eye(1)] * tasks, torch.tensor(references))
    found = router.route(torch.tensor(queries))
    assert found.shape == (6,)
    for query, decision in zip(queries, found.tolist(), strict=True):
        expected, _, similarity = plain_route(query, references)
        gaps = np.sort(similarity, axis=1)
        assume(tasks == 1 or (gaps[:, -1] - gaps[:, -2]).min() > 1e-9)
        assert decision == expected


@pytest.mark.parametrize("clients", [1, 2, 37, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("tasks", [1, 2, 12])
def test_features_of_a_task_are_routed_to_it(tasks, clients):
    """Tasks in subspaces of their own, references of clients with different amounts of data."""
    rng = np.random.default_rng(0)
    d = 3 * tasks
    whole = random_basis(rng, d, d)
    bases = [torch.tensor(whole[:, 3 * t : 3 * t + 3]).float() for t in range(tasks)]

    def draw(task, n):
        return torch.tensor(whole[:, 3 * task : 3 * task + 3] @ rng.standard_normal((3, n)) + 0.05).T.float()

    told = torch.zeros(clients, tasks, tasks)
    for client in range(clients):
        for task in range(tasks):
            n = 1 + client % 5
            a = draw(task, n).double()
            told[client, task] = torch.tensor([reference(a.T @ a, n, basis) for basis in bases])
    router = CosineRouter(bases, told)
    for task in range(tasks):
        energy = router.energies(draw(task, 50))
        assert (router.route(energy.sqrt()) == task).float().mean() > 0.9
        assert router.route(relevance(energy)[None]).tolist() == [task]


@given(seeds, st.integers(1, 64), st.integers(1, 6))
def test_a_group_of_identical_samples_routes_as_the_single_sample(seed, n, tasks):
    rng = np.random.default_rng(seed)
    bases = bases_of(rng, 8, [2] * tasks)
    router = CosineRouter(bases, torch.tensor(rng.uniform(0, 1, (5, tasks, tasks))).float())
    energy = router.energies(torch.tensor(rng.standard_normal((1, 8))).float())
    scores = router.scores(energy.sqrt())[0].sort(descending=True).values
    similarity = torch.nn.functional.cosine_similarity(energy.sqrt()[:, None], router.references, dim=2)
    margins = similarity.sort(dim=1, descending=True).values
    assume(tasks == 1 or (scores[0] - scores[1] > 1e-5 and (margins[:, 0] - margins[:, 1]).min() > 1e-5))
    group = relevance(energy.expand(n, -1))
    assert group.tolist() == pytest.approx(energy[0].sqrt().tolist(), rel=1e-5)
    assert router.route(group[None]).tolist() == router.route(energy.sqrt()).tolist()


@given(seeds, st.floats(1e-3, 1e3))
def test_the_scale_of_a_sample_does_not_matter(seed, scale):
    rng = np.random.default_rng(seed)
    router = CosineRouter([torch.eye(1)] * 4, torch.tensor(rng.uniform(0, 1, (3, 4, 4))))
    query = torch.tensor(rng.uniform(0.1, 1, (5, 4)))
    assert router.route(query * scale).tolist() == router.route(query).tolist()


def tied(clients, difference):
    """Half of the clients vote for task 0, half for task 1; task 1 is more similar on average."""
    query = torch.tensor([1.0, 0.0])

    def at(cosine):
        return [cosine, (1 - cosine**2) ** 0.5]

    for_0 = [at(0.9), at(0.8)]
    for_1 = [at(0.8), at(0.9 + difference)]
    return query[None], torch.tensor([for_0] * (clients // 2) + [for_1] * (clients // 2), dtype=torch.float64)


@pytest.mark.parametrize("clients", [2, 36, 1000])
@pytest.mark.parametrize("difference", [1e-2, 1e-4])
def test_a_tie_goes_to_the_higher_similarity(clients, difference):
    query, references = tied(clients, difference)
    assert CosineRouter([torch.eye(1)] * 2, references).route(query).tolist() == [1]
    assert CosineRouter([torch.eye(1)] * 2, references.flip(1)).route(query).tolist() == [0]


@pytest.mark.parametrize("clients", [3, 37, 301])
def test_similarity_never_outweighs_a_vote(clients):
    """One vote more wins, although the others are far more similar."""
    few, many = clients // 2, clients - clients // 2
    references = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]] * few + [[[0.0, 1.0], [1e-3, 1.0]]] * many)
    assert CosineRouter([torch.eye(1)] * 2, references).route(torch.tensor([[1.0, 0.0]])).tolist() == [1]


def test_all_zero_relevance_and_references_still_give_a_task():
    router = CosineRouter([torch.eye(1)] * 3, torch.zeros(2, 3, 3))
    assert router.route(torch.zeros(4, 3)).tolist() == [0, 0, 0, 0]


def test_many_decisions_are_made_in_pieces():
    """More than one chunk, the same answers."""
    rng = np.random.default_rng(0)
    router = CosineRouter([torch.eye(1)] * 40, torch.tensor(rng.uniform(0, 1, (300, 40, 40))))
    queries = torch.tensor(rng.uniform(0, 1, (800, 40)))
    assert 800 > 2 * (2**22 // (300 * 40))
    found = router.route(queries)
    assert found[[0, 399, 799]].tolist() == [router.route(queries[[i]]).item() for i in (0, 399, 799)]
    assert len(found) == 800


# Gaps


def plain_fill(references, counts):
    filled = references.copy()
    clients, tasks, _ = references.shape
    for tau in range(tasks):
        for t in range(tasks):
            known = [k for k in range(clients) if not np.isnan(references[k, tau, t])]
            weight = sum(counts[k, tau] for k in known)
            square = sum(counts[k, tau] * references[k, tau, t] ** 2 for k in known)
            pooled = np.sqrt(square / weight) if weight else 0.0
            for k in range(clients):
                if k not in known:
                    filled[k, tau, t] = pooled
    return filled


@given(seeds, st.integers(1, 8), st.integers(1, 5))
def test_gaps_are_filled_as_by_a_plain_loop(seed, clients, tasks):
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 3, (clients, tasks)) * rng.integers(1, 90, (clients, tasks))
    last = rng.integers(0, tasks + 1, clients)  # the client left before this task came
    references = rng.uniform(0, 2, (clients, tasks, tasks))
    references[counts == 0] = np.nan
    for client in range(clients):
        references[client, :, last[client] :] = np.nan
    found = fill_missing(torch.tensor(references), torch.tensor(counts))
    assert not found.isnan().any()
    assert found.numpy() == pytest.approx(plain_fill(references, counts), rel=1e-9)


def test_clients_that_left_and_joined_borrow_from_the_others():
    nan = torch.nan
    references = torch.tensor(
        [
            [[1.0, 2.0], [3.0, 4.0]],  # always there
            [[5.0, nan], [nan, nan]],  # left after task 0
            [[nan, nan], [7.0, 1.0]],  # joined at task 1
        ]
    )
    counts = torch.tensor([[10, 30], [10, 0], [0, 10]])
    found = fill_missing(references, counts)
    assert found[0].tolist() == [[1, 2], [3, 4]]
    assert found[1].tolist() == [
        [5.0, 2.0],
        [pytest.approx(((30 * 9 + 10 * 49) / 40) ** 0.5), pytest.approx(((30 * 16 + 10) / 40) ** 0.5)],
    ]
    assert found[2].tolist() == [[pytest.approx(13**0.5), 2.0], [7.0, 1.0]]


def test_what_nobody_has_is_zero_and_what_is_known_stays():
    nan = torch.nan
    found = fill_missing(torch.tensor([[[1.0, nan], [2.0, 3.0]]]), torch.tensor([[4, 5]]))
    assert found.tolist() == [[[1.0, 0.0], [2.0, 3.0]]]


def test_stated_samples_behind_references_are_believed_within_bounds():
    """Ten thousand times another's count for four times; the only client of a task may have what it has, up to 400."""
    counts = torch.tensor([[200, 0, 300], [10**6, 250, 100], [150, 0, 90]])
    assert believed(counts).tolist() == [[200, 0, 300], [800, 250, 100], [150, 0, 90]]
    assert believed(counts[:1]).tolist() == counts[:1].tolist()
    nan = torch.nan
    references = torch.tensor([[[1.0]], [[9.0]], [[1.0]], [[nan]]])
    told = fill_missing(references, torch.tensor([[200], [10**6], [200], [0]]))
    assert told[3].item() == pytest.approx(((1 + 81 * 4 + 1) / 6) ** 0.5)
