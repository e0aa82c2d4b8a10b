"""LGA: balance between tasks, and noisy copies of what the proxy server sees."""

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F

import fedprotip
from fedprotip.methods import lga
from fedprotip.methods.lga import LGA, balance, copies, radius
from fedprotip.methods.parts import proxy
from fedprotip.paper.protocols import protocol
from tests.methods.test_target import same_gradients
from tests.sites import Ends
from tests.small import quick, small

LESS = {"name": "lga", "memory": 12, "disturb_steps": 3, "steps": 4, "iterates": 2}


def chance(seed=0):
    return torch.Generator().manual_seed(seed)


def test_every_task_has_mean_one():
    wrong, tasks = torch.rand(60, generator=chance()), torch.arange(60) % 4
    weights = balance(wrong, tasks, 3)
    for task in range(4):
        assert weights[tasks == task].mean().item() == pytest.approx(1, abs=1e-6)


def test_errors_count_by_their_root_in_the_second_task_and_by_more_later():
    wrong, tasks = torch.tensor([0.04, 0.36, 0.25]), torch.tensor([0, 0, 1])
    assert torch.allclose(balance(wrong, tasks, 1), torch.tensor([0.2, 0.6, 0.5]) / torch.tensor([0.4, 0.4, 0.5]))
    later = balance(wrong, tasks, 3)
    assert (later[1] / later[0]).item() == pytest.approx(9**0.75, rel=1e-5)


def test_a_task_without_errors_counts_as_it_is():
    assert torch.equal(balance(torch.zeros(4), torch.tensor([0, 0, 1, 1]), 1), torch.ones(4))


def test_nested_groups_add_up_over_older_tasks():
    wrong, tasks = torch.rand(12, generator=chance()), torch.tensor([0, 1, 2] * 4)
    g = wrong ** (2 / 3)
    first, second, new = tasks == 0, tasks <= 1, tasks == 2
    expected = first * g / g[first].mean() + second * g / g[second].mean() + new * g / g[new].mean()
    assert torch.allclose(balance(wrong, tasks, 2, nested=True), expected)


@pytest.mark.parametrize("groups", ["task", "nested"])
def test_both_terms_have_weights_within_bounds(tmp_path, groups):
    parts = Ends(small(f"method.groups={groups}", "method.strength=2.0", method=LESS), tmp_path)
    site = parts.site()
    local = parts.local(0, site)
    teacher = deepcopy(site.network).requires_grad_(False)
    for task in (1, 2):
        site.settle()
        site.begin_task(task)
    local = parts.local(0, site)
    local.scratch["teacher"] = teacher  # it knows the first task alone
    images, labels = torch.randn(30, 1, 8, 8, generator=chance()), torch.arange(30) % 6
    with torch.no_grad():
        site.network.heads[0].bias += torch.tensor([8.0, -3.0])  # one old class is never wrong
    z, y = site.network(images), F.one_hot(labels, 6).float()
    g = 1 - z.sigmoid()[torch.arange(30), labels]
    weights = balance(g.detach(), labels // 2, 2, groups == "nested")
    assert weights.min() < 0.5
    weights = weights.clamp(0.5, 5)
    mixed = torch.cat([teacher(images).sigmoid(), y[:, 2:]], 1).detach()
    terms = [F.binary_cross_entropy_with_logits(z, said, reduction="none").sum(1) for said in (y, mixed)]
    expected = 2 * ((weights * terms[0]).mean() + (weights * terms[1]).mean())
    found = parts.method.loss(local, images, labels)
    assert torch.allclose(found, expected, atol=1e-4)
    same_gradients(found, expected, site.network)


@pytest.mark.parametrize("taught", [False, True])
def test_in_the_first_task_there_is_one_term_and_no_weight(tmp_path, taught):
    parts = Ends(small("method.strength=2.0", method=LESS), tmp_path)
    local = parts.local(0)
    local.scratch["teacher"] = proxy.model_of(local.network, 0.5 * proxy.flat(local.network), 1) if taught else None
    images, labels = torch.randn(5, 1, 8, 8), torch.tensor([0, 1, 1, 0, 1])
    plain = F.binary_cross_entropy_with_logits(local.network(images), F.one_hot(labels, 2).float(), reduction="sum")
    torch.testing.assert_close(parts.method.loss(local, images, labels), 2 * plain / 5)


def test_bounds_out_of_order_are_refused():
    with pytest.raises(fedprotip.UsageError, match="above highest"):
        small("method.lowest=6.0", method=LESS)


def test_the_radius_is_the_root_of_the_mean_variance_within_classes():
    features, labels = torch.randn(20, 7, generator=chance()), torch.arange(20) % 2
    covariances = [torch.cov(features[labels == label].T) for label in (0, 1)]
    expected = (sum(c.trace() / 7 for c in covariances) / 2).sqrt()
    assert torch.allclose(radius(features, labels), expected)
    assert radius(features[:2], labels[:2]) == 0  # one image of a class has no spread


def test_copies_spread_by_the_variances_of_their_class():
    features = torch.randn(4000, 3, generator=chance()) * torch.tensor([1.0, 0.5, 2.0])
    noise = copies(features, 0.1, 5, 0.1, 100, chance(1)) - features.repeat(5, 1)
    assert torch.allclose(noise.std(0), 0.1 * features.var(0), rtol=0.05)


@pytest.mark.parametrize("length", [0.3, 50.0])
def test_noise_is_bounded_and_the_search_for_it_ends(length):
    """At 50 radii no draw is ever short enough: published code would not return."""
    features = torch.randn(10, 40, generator=chance())
    noise = copies(features, length, 5, 0.1, 3, chance(1)) - features.repeat(5, 1)
    most = 0.1 * features.var(0).square().sum()
    assert noise.shape == (50, 40)
    assert (noise.square().sum(1) <= most * 1.001).all()
    assert noise.square().sum(1).min() > 0


def test_equal_features_have_no_noise():
    features = torch.ones(3, 4)
    assert torch.equal(copies(features, 0.2, 2, 0.1, 5, chance()), features.repeat(2, 1))


def test_the_radius_is_measured_once_after_the_first_task(tmp_path):
    parts = Ends(small(method=LESS), tmp_path)
    site = parts.site()
    images, labels = torch.randn(8, *site.image_shape, generator=chance()), torch.arange(8) % 2
    site.known.update({"monitor/images": images, "monitor/labels": labels, "monitor/task": torch.tensor(0)})
    proxy.Monitor().digest(None, site)
    site.settle()
    site.begin_task(1)
    proxy.Teacher().digest(None, site)
    measured = site.known["proxy/radius"].clone()
    assert torch.allclose(measured, radius(site.network.embed(images), labels))
    site.known["monitor/images"] = 3 * images
    proxy.Teacher().digest(None, site)
    assert torch.equal(site.known["proxy/radius"], measured)


def test_first_rounds_of_a_task_are_not_compared(tmp_path, monkeypatch):
    site = Ends(small("method.ignored=2", method=LESS), tmp_path).site()
    site.known.update({"monitor/images": torch.zeros(1, *site.image_shape), "monitor/labels": torch.tensor([0])})
    course, best = iter([0.6, 0.4]), []
    monkeypatch.setattr(LGA, "performance", lambda self, site: next(course))
    models = []
    for _ in range(4):
        with torch.no_grad():
            site.network.heads[0].bias += 1
        models.append(proxy.flat(site.network))
        proxy.Monitor().digest(None, site)
        best.append(next(i for i, model in enumerate(models) if torch.equal(model, site.known["best/weights"])))
    assert best == [0, 1, 2, 2]
    proxy.Teacher().digest(None, site)  # nor are those of the next task
    for _ in range(2):
        with torch.no_grad():
            site.network.heads[0].bias += 1
        proxy.Monitor().digest(None, site)
        assert torch.equal(site.known["best/weights"], proxy.flat(site.network))


def test_the_cpu_variant_judges_models_in_every_task(tmp_path, monkeypatch):
    """In as many rounds as Table 1 has at that scale."""
    quick(monkeypatch)
    settings = fedprotip.load_settings(protocol("table1").row("cifar100-a0.5-100each-lga").at("cpu"))
    ignored, rounds = settings.method.ignored, settings.train.rounds
    judged, original = [], LGA.performance
    monkeypatch.setattr(LGA, "performance", lambda self, site: judged.append(site.task) or original(self, site))
    asked = small(f"method.ignored={ignored}", f"train.rounds={rounds}", method=LESS)
    fedprotip.run(asked, out=tmp_path / "r")
    assert judged == [task for task in range(3) for _ in range(rounds - ignored)]


@pytest.mark.parametrize(("ignored", "warned"), [(2, False), (3, True)])
def test_a_run_of_which_no_round_is_judged_says_so(tmp_path, ignored, warned):
    (*said,) = Ends(small(f"method.ignored={ignored}", "train.rounds=3", method=LESS), tmp_path).method.cautions()
    assert bool(said) == warned
    assert not warned or "method.ignored = 3 leaves none of train.rounds = 3" in said[0]


def test_copies_are_of_their_own_class_and_as_far_as_the_radius_says(tmp_path, monkeypatch):
    """Classes that do not spread have no noise, however far they are apart."""
    parts = Ends(small(method=LESS), tmp_path)
    site, judged, lengths = parts.site(task=1), [], []
    features = torch.eye(site.network.features)[[1, 0, 1, 0, 1, 0]]
    monkeypatch.setattr(proxy, "monitor_features", lambda site: (features, torch.tensor([3, 1] * 3)))
    monkeypatch.setattr(proxy, "accuracy", lambda network, *given: judged.append(given) or 1.0)
    original = lga.copies
    monkeypatch.setattr(lga, "copies", lambda *given: lengths.append(given[1]) or original(*given))
    site.known.update({"proxy/radius": torch.tensor(0.7), "proxy/rounds": torch.tensor(8)})
    assert parts.method.performance(site) == 1
    ((found, told),) = judged
    assert lengths == pytest.approx([0.7, 0.7])
    assert torch.equal(found, torch.eye(site.network.features)[(told == 3).int()])
    assert told.bincount().tolist() == [0, 15, 0, 15]


def test_noisy_copies_are_judged_from_the_second_task_on(tmp_path, monkeypatch):
    parts = Ends(small(method=LESS), tmp_path)
    site, judged = parts.site(), []
    original = proxy.accuracy
    monkeypatch.setattr(proxy, "accuracy", lambda *given: judged.append(len(given[1])) or original(*given))
    images, labels = torch.randn(6, *site.image_shape, generator=chance()), torch.tensor([0, 1] * 3)
    site.known.update({"monitor/images": images, "monitor/labels": labels, "proxy/rounds": torch.tensor(0)})
    first = parts.method.performance(site)
    site.settle()
    site.begin_task(1)
    assert 0 <= parts.method.performance(site) <= 1
    assert parts.method.performance(site) == parts.method.performance(site)
    assert judged == [6, 30, 30, 30]
    assert 0 <= first <= 1
