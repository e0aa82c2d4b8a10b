"""Class statistics and what follows from them, against plain loops and scikit-learn."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.covariance import OAS
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import Ridge

from fedprotip.inference.backdrop import TAIL, Backdrop
from fedprotip.inference.statistics import (
    WEIGHT,
    FeatureMap,
    Gaussians,
    Sums,
    low_rank,
    oas,
    pack,
    ridge,
    unpack,
)

seeds = st.integers(0, 5000)


def samples(seed, classes=4, d=6, n=80, offset=0.0):
    """Features (n, d) around class means with one crooked covariance; every class is there."""
    rng = np.random.default_rng(seed)
    labels = np.concatenate([np.arange(classes), rng.integers(0, classes, n - classes)])
    crooked = rng.standard_normal((d, d)) / d**0.5
    features = 2 * rng.standard_normal((classes, d))[labels] + rng.standard_normal((n, d)) @ crooked + offset
    return features, labels


def sums_of(features, labels, classes):
    sums = Sums.zeros(classes, features.shape[1])
    sums.add(torch.tensor(features), torch.tensor(labels))
    return sums


def assert_same(one, other, rel=1e-12):
    for name in ("counts", "sums", "moment"):
        expected = getattr(other, name)
        torch.testing.assert_close(getattr(one, name), expected, rtol=rel, atol=rel * expected.abs().max().item())


# Sums


@settings(max_examples=25)
@given(seeds, st.integers(1, 9))
def test_packing_keeps_half_and_loses_nothing(seed, d):
    a = torch.tensor(np.random.default_rng(seed).standard_normal((d, d)))
    moment = a + a.T  # symmetric to the last bit, which a product need not be
    assert pack(moment).shape == (d * (d + 1) // 2,)
    assert torch.equal(unpack(pack(moment), d), moment)


def test_the_upper_triangle_is_packed_row_by_row():
    assert pack(torch.tensor([[1.0, 2.0, 3.0], [2.0, 4.0, 5.0], [3.0, 5.0, 6.0]])).tolist() == [1, 2, 3, 4, 5, 6]


@settings(max_examples=25)
@given(seeds)
def test_sums_are_those_of_a_plain_loop(seed):
    features, labels = samples(seed)
    counts, totals, moment = np.zeros(5), np.zeros((5, 6)), np.zeros((6, 6))
    for feature, label in zip(features, labels, strict=True):
        counts[label] += 1
        totals[label] += feature
        moment += np.outer(feature, feature)
    found = sums_of(features, labels, 5)
    assert_same(found, Sums(*map(torch.tensor, (counts, totals, moment))))
    assert found.seen.tolist() == [True] * 4 + [False]
    assert found.means()[4].tolist() == [0.0] * 6
    assert found.freedom() == 80 - 4


@settings(max_examples=25)
@given(seeds, st.integers(1, 7))
def test_sums_add_up_in_any_order_and_over_any_split(seed, clients):
    features, labels = samples(seed)
    rng = np.random.default_rng(seed)
    owner = rng.integers(0, clients, len(labels))
    parts = [sums_of(features[owner == client], labels[owner == client], 4) for client in range(clients)]
    for order in (range(clients), rng.permutation(clients)):
        total = Sums.zeros(4, 6)
        for client in order:
            total = total + parts[client]
        assert_same(total, sums_of(features, labels, 4))


@settings(max_examples=25)
@given(seeds)
def test_adding_leaves_both_parts_as_they_were(seed):
    features, labels = samples(seed)
    one = sums_of(features, labels, 4)
    before = one.moment.clone()
    assert ((one + one).moment == 2 * before).all()
    assert torch.equal(one.moment, before)


@settings(max_examples=25)
@given(seeds)
def test_samples_can_be_taken_out_again(seed):
    features, labels = samples(seed)
    some = np.random.default_rng(seed).random(len(labels)) < 0.3
    some[labels == 3] = True  # nothing is left of the last class
    found = sums_of(features, labels, 4).without(sums_of(features[some], labels[some], 4))
    assert_same(found, sums_of(features[~some], labels[~some], 4), rel=1e-9)
    assert found.sums[3].tolist() == [0.0] * 6


@settings(max_examples=25)
@given(seeds, st.sampled_from([0.0, 30.0]))
def test_the_scatter_is_that_of_centred_samples(seed, offset):
    features, labels = samples(seed, offset=offset)
    centred = features - np.stack([features[labels == label].mean(0) for label in range(4)])[labels]
    found = sums_of(features, labels, 4).scatter()
    assert found.numpy() == pytest.approx(centred.T @ centred, rel=1e-8, abs=1e-8)


def test_a_single_sample_has_one_degree_of_freedom_not_none():
    assert sums_of(np.ones((1, 3)), np.array([0]), 2).freedom() == 1
    assert Sums.zeros(2, 3).freedom() == 1


# Shrinkage


@settings(max_examples=25)
@given(seeds, st.integers(2, 12), st.integers(2, 60))
def test_the_shrinkage_is_the_published_formula(seed, d, n):
    x = np.random.default_rng(seed).standard_normal((n, d)) * np.arange(1, d + 1)
    s = x.T @ x / n
    square, trace = np.trace(s @ s), np.trace(s)
    expected = ((1 - 2 / d) * square + trace**2) / ((n + 1 - 2 / d) * (square - trace**2 / d))
    assert oas(torch.tensor(s), n) == pytest.approx(min(expected, 1.0), rel=1e-9)


@pytest.mark.parametrize("n", [50, 200, 2000])
def test_it_is_that_of_scikit_learn_up_to_the_terms_it_leaves_out(n):
    """scikit-learn leaves out −2/d: its numerator is larger by up to 2/d of tr(S²), its denominator by 2/(nd)."""
    d = 64
    x = np.random.default_rng(0).standard_normal((n, d)) * np.linspace(0.1, 3, d)
    expected = OAS(assume_centered=True).fit(x).shrinkage_
    found = oas(torch.tensor(x.T @ x / n), n)
    assert 0 < found < 1
    assert found == pytest.approx(expected, rel=2 / d)


@pytest.mark.parametrize("covariance", [torch.eye(5), torch.zeros(3, 3), torch.ones(1, 1)])
def test_nothing_to_tell_directions_apart_is_shrunk_wholly(covariance):
    assert oas(covariance.double(), 10) == 1.0


# Gaussians


@settings(max_examples=25)
@given(seeds, st.sampled_from([0.01, 0.3, 1.0]))
def test_the_discriminant_is_that_of_scikit_learn(seed, shrinkage):
    """It divides the scatter by n and not by n − C, and adds log priors: both are taken out.

    It shrinks towards a multiple of I, and ours towards the diagonal: features have variance 1 here.
    """
    features, labels = samples(seed)
    features = features / (sums_of(features, labels, 4).scatter().diagonal() / (len(labels) - 4)).sqrt().numpy()
    priors = np.bincount(labels) / len(labels)
    theirs = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=shrinkage, priors=priors).fit(features, labels)
    scale = (len(labels) - 4) / len(labels)
    expected = scale * (features @ theirs.coef_.T + theirs.intercept_ - np.log(priors))
    gaussians = Gaussians.of(sums_of(features, labels, 4), shrinkage)
    densities = gaussians.log_densities(torch.tensor(features)).double().numpy()
    weights, bias = (part.double().numpy() for part in gaussians.head())
    for found in (densities, features @ weights.T + bias):
        centred = found - found.mean(1, keepdims=True)
        wanted = expected - expected.mean(1, keepdims=True)
        assert centred == pytest.approx(wanted, rel=5e-3, abs=5e-3 * np.abs(wanted).max())


@settings(max_examples=25)
@given(seeds)
def test_log_densities_are_mahalanobis_distances(seed):
    features, labels = samples(seed)
    sums = sums_of(features, labels, 4)
    scatter = sums.scatter().numpy() / sums.freedom()
    scales = np.sqrt(np.diag(scatter))
    share = oas(torch.tensor(scatter / np.outer(scales, scales)), sums.freedom())
    inverse = np.linalg.inv((1 - share) * scatter + share * np.diag(np.diag(scatter)))
    gaussians = Gaussians.of(sums)
    assert gaussians.shrinkage == pytest.approx(share, rel=1e-4)
    found = gaussians.log_densities(torch.tensor(features[:9]))
    for row, feature in zip(found.tolist(), features, strict=False):
        apart = [feature - mean for mean in sums.means().numpy()]
        assert row == pytest.approx([-0.5 * a @ inverse @ a for a in apart], rel=1e-3, abs=1e-3)


def test_whitened_samples_have_unit_variance_around_their_class():
    features, labels = samples(0, n=4000)
    whitened = Gaussians.of(sums_of(features, labels, 4), shrinkage=0.0).whiten(torch.tensor(features)).numpy()
    centred = whitened - np.stack([whitened[labels == label].mean(0) for label in range(4)])[labels]
    assert np.cov(centred.T) == pytest.approx(np.eye(6), abs=0.01)


@settings(max_examples=25)
@given(seeds)
def test_a_class_nobody_tells_about_is_never_the_answer(seed):
    features, labels = samples(seed)
    found = Gaussians.of(sums_of(features, 2 * labels, 8)).log_densities(torch.tensor(features))
    assert (found[:, 1::2] == -torch.inf).all()
    assert found[:, ::2].isfinite().all()


def test_a_class_without_statistics_begins_as_the_mean_of_the_others():
    features, labels = samples(1)
    gaussians = Gaussians.of(sums_of(features, labels, 5))
    weights, bias = gaussians.head()
    logits = torch.tensor(features).float() @ weights.T + bias
    mean = gaussians.centres[:4].mean(0)
    as_mean = -0.5 * (gaussians.whiten(torch.tensor(features)) - mean).square().sum(1)
    shift = logits[:, 0] - gaussians.log_densities(torch.tensor(features))[:, 0]
    assert (logits[:, 4] - shift).tolist() == pytest.approx(as_mean.tolist(), rel=1e-2, abs=1e-2)
    assert logits.isfinite().all()


@pytest.mark.parametrize("n", [0, 1, 2, 5])
def test_fewer_samples_than_features_give_finite_answers(n):
    features, labels = samples(0, classes=1, d=20, n=max(n, 1))
    gaussians = Gaussians.of(sums_of(features[:n], labels[:n], 2))
    found = gaussians.log_densities(torch.tensor(features))
    assert not found.isnan().any()
    assert found[:, 0].isfinite().all() == bool(n)


def as_sent(sums):
    """Rounded to float32 on the way, as in a message."""
    d = len(sums.moment)
    return Sums(sums.counts, sums.sums.float().double(), unpack(pack(sums.moment).float().double(), d))


@pytest.mark.parametrize("offset", [0, 30, 1000])
def test_features_far_from_zero_survive_the_rounding_of_a_message(offset):
    features, labels = samples(3, n=800, offset=offset)
    sums = sums_of(features, labels, 4)
    exact, found = (Gaussians.of(s).log_densities(torch.tensor(features)).argmax(1) for s in (sums, as_sent(sums)))
    assert (exact == found).double().mean() > 0.97


@pytest.mark.parametrize("d", [4, 10, 32])
def test_features_that_never_change_are_no_reason_to_fail(d):
    """A dead backbone: the scatter is rounding error alone, and may have negative eigenvalues."""
    features = np.tile(np.random.default_rng(d).uniform(0.1, 9, d), (50, 1))
    gaussians = Gaussians.of(as_sent(sums_of(features, np.arange(50) % 2, 2)))
    assert not gaussians.log_densities(torch.tensor(features)).isnan().any()


# Own directions of classes


def stretched(seed, d=8, n=600):
    """Two classes with one covariance and a third that is ten times as wide along the first axis."""
    rng = np.random.default_rng(seed)
    labels = np.arange(n) % 3
    features = rng.standard_normal((n, d))
    features[labels == 2, 0] *= 10
    return features + 2 * rng.standard_normal((3, d))[labels], labels


def sketched(features, labels, omega, classes=3):
    sums = Sums.zeros(classes, features.shape[1], omega.shape[1])
    sums.add(torch.tensor(features), torch.tensor(labels), omega)
    return sums


@settings(max_examples=20)
@given(seeds)
def test_own_directions_are_those_of_the_classes_own_covariance(seed):
    """With as many columns as features a sketch is exact; against plain eigenvectors of every class."""
    features, labels = stretched(seed)
    omega = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    sums = sketched(features, labels, omega)
    gaussians = Gaussians.of(sums, omega=omega)
    whitening = gaussians.whitening.double().numpy()
    found = gaussians.log_densities(torch.tensor(features[:20])).double().numpy()
    for label in range(3):
        own = features[labels == label] @ whitening
        values, vectors = np.linalg.eigh(np.cov(own.T))
        values, vectors = values[::-1][:4], vectors[:, ::-1][:, :4]
        share = WEIGHT * (len(own) - 1) / (len(own) - 1 + 8)
        covariance = np.eye(8) + vectors @ np.diag(share * np.clip(values - 1, 0, None)) @ vectors.T
        apart = features[:20] @ whitening - own.mean(0)
        wanted = -0.5 * (np.sum(apart @ np.linalg.inv(covariance) * apart, 1) + np.log(np.linalg.det(covariance)))
        assert found[:, label] == pytest.approx(wanted, rel=1e-3, abs=1e-2)


def test_sketches_of_clients_add_up_to_that_of_all_data_and_find_the_wide_direction():
    features, labels = stretched(1, d=30, n=3000)
    omega = FeatureMap(30, columns=8, seed=5).omega
    whole = sketched(features, labels, omega)
    parts = [sketched(features[k::4], labels[k::4], omega) for k in range(4)]
    together = parts[0] + parts[1] + parts[2] + parts[3]
    torch.testing.assert_close(together.sketches, whole.sketches)
    gains = Gaussians.of(whole, omega=omega).own.gains.square().sum(dim=(1, 2))
    assert gains[2] > 2 * gains[:2].max()


def test_a_class_of_few_samples_falls_back_to_the_covariance_of_all():
    features, labels = stretched(2, d=30)
    omega = FeatureMap(30, columns=8).omega
    for few in (0, 1, 2):
        some = np.concatenate([np.flatnonzero(labels < 2), np.flatnonzero(labels == 2)[:few]])
        gaussians = Gaussians.of(sketched(features[some], labels[some], omega), omega=omega)
        assert gaussians.own.gains[2].square().sum() <= 0.5 * few
        assert not gaussians.log_densities(torch.tensor(features)).isnan().any()


def test_own_directions_answer_better_where_classes_differ_in_shape():
    rng = np.random.default_rng(0)
    labels = np.arange(4000) % 2
    features = rng.standard_normal((4000, 20))
    features[labels == 1, :3] *= 6  # the means are the same
    omega = FeatureMap(20, columns=10).omega
    sums = sketched(features[:2000], labels[:2000], omega, classes=2)
    for columns, least, most in ((0, 0.4, 0.6), (10, 0.75, 1.0)):
        chosen = omega if columns else omega[:, :0]
        answers = Gaussians.of(sums, omega=chosen).log_densities(torch.tensor(features[2000:])).argmax(1).numpy()
        assert least <= (answers == labels[2000:]).mean() <= most


# Samples that look like nothing learned


def test_odd_and_new_samples_are_told_from_usual_ones():
    features, labels = samples(0, n=2000)
    sums = sums_of(features, labels, 4)
    backdrop, gaussians = Backdrop.of(sums, first=3), Gaussians.of(sums)

    def figures(values):
        given = torch.tensor(values).float()
        densities = gaussians.log_densities(given)
        return backdrop(given, densities, densities)

    usual, far = figures(features), figures(features + 100 * np.eye(6)[0])
    assert usual["odd"].mean() == pytest.approx(1, abs=0.1)
    assert far["odd"].min() > usual["odd"].max()
    between = figures((features[:1000] + features[1000:]) / 2 + np.zeros(6))
    assert between["new"].median() > usual["new"].median()  # between classes, and yet among all samples
    assert usual["new"].mean() == pytest.approx(1, abs=2)


def test_own_directions_of_classes_count_half_in_what_is_new_and_the_bulk_by_its_logarithm():
    features, labels = samples(1, n=500)
    sums, given = sums_of(features, labels, 4), torch.tensor(features).float()
    backdrop = Backdrop.of(sums, first=3)
    shared = Gaussians.of(sums).log_densities(given)
    bulk = -2 * backdrop.everything.log_densities(given)[:, 0] / 6
    for own in (shared, shared - 3, shared - 6):
        expected = 1 + (-2 * shared.amax(1) / 6 - bulk) + (-2 * own.amax(1) / 6 - bulk) / 2 + TAIL * bulk.log()
        assert backdrop(given, own, shared)["new"].tolist() == pytest.approx(expected.tolist(), abs=1e-4)


def test_classes_without_their_own_directions_are_those_that_never_had_any():
    features, labels = samples(2, n=400)
    omega, sums = FeatureMap(6, columns=4).omega, Sums.zeros(4, 6, 4)
    sums.add(torch.tensor(features), torch.tensor(labels), omega)
    given = torch.tensor(features).float()
    alike = Gaussians.of(sums, omega=omega).alike().log_densities(given)
    assert torch.equal(alike, Gaussians.of(sums).log_densities(given))
    assert not torch.equal(alike, Gaussians.of(sums, omega=omega).log_densities(given))


# Ridge


@settings(max_examples=25)
@given(seeds, st.sampled_from([1e-3, 0.1, 10.0]), st.sampled_from([0.0, 5.0]))
def test_ridge_is_that_of_scikit_learn(seed, strength, offset):
    features, labels = samples(seed, offset=offset)
    variance = ((features - features.mean(0)) ** 2).mean()
    theirs = Ridge(alpha=strength * variance * len(labels)).fit(features, np.eye(4)[labels])
    weights, bias = ridge(sums_of(features, labels, 4), strength)
    assert weights.numpy() == pytest.approx(theirs.coef_, rel=1e-3, abs=1e-5)
    assert bias.numpy() == pytest.approx(theirs.intercept_, rel=1e-3, abs=1e-4)


def test_ridge_never_answers_a_class_without_samples():
    features, labels = samples(0)
    weights, bias = ridge(sums_of(features, labels, 6), 0.01)
    assert bias.isneginf().tolist() == [False] * 4 + [True] * 2
    assert weights.isfinite().all()
    weights, bias = ridge(Sums.zeros(3, 5), 0.01)
    assert (weights == 0).all()
    assert bias.isneginf().all()


# Random features


def test_every_machine_draws_the_same_features():
    features = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    here, there, other = FeatureMap(5, 16, 3), FeatureMap(5, 16, 3), FeatureMap(5, 16, 4)
    torch.manual_seed(99)  # another machine is in another state
    assert torch.equal(here(features), there(features))
    assert torch.equal(here(features), here(features))
    assert not torch.equal(here(features), other(features))
    assert here.out == 16
    assert here(features).shape == (7, 16)
    assert (here(features) >= 0).all()
    assert (here(features) > 0).any()


def test_without_a_width_features_stay_as_they_are():
    features = torch.randn(7, 5)
    assert FeatureMap(5, 0, 3)(features) is features
    assert FeatureMap(5, 0, 3).out == 5


def test_the_map_is_positively_homogeneous_and_keeps_the_size_of_features():
    """relu(aR) with R of variance 1/d: E‖relu(aR)‖² = M‖a‖²/(2d)."""
    features = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
    mapped = FeatureMap(40, 4096, 0)(features)
    torch.testing.assert_close(FeatureMap(40, 4096, 0)(3 * features), 3 * mapped)
    sizes = mapped.square().sum(1) / features.square().sum(1)
    assert sizes.tolist() == pytest.approx([4096 / 80] * 3, rel=0.1)


@given(seeds, st.integers(1, 6))
def test_low_rank_keeps_variances_and_is_exact_where_the_rank_is_low(seed, rank):
    rng = np.random.default_rng(seed)
    a = torch.tensor(rng.standard_normal((20, rank)) * np.geomspace(1, 0.1, rank))
    factor, rest = low_rank(a @ a.T, rank)
    assert factor.shape == (20, rank)
    assert torch.allclose(factor @ factor.T, a @ a.T, atol=1e-9)
    assert rest.max() < 1e-9
    full = a @ a.T + torch.eye(20).double()
    factor, rest = low_rank(full, rank)
    assert (rest >= 0).all()
    assert torch.allclose(factor.square().sum(1) + rest, full.diagonal())
    best = torch.linalg.eigvalsh(full).sort(descending=True).values[:rank]
    assert torch.linalg.eigvalsh(full - factor @ factor.T).min() > -1e-9  # never more than there is
    assert 0.9 * best.sum() <= factor.square().sum() <= best.sum() + 1e-9
