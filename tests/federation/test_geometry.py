"""ρ̂ and β̂ against their definitions, and the bounds they enter."""

import json
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

import fedprotip
from fedprotip.models import build_network
from fedprotip.stream import build_stream
from tests.small import results, small, tensors

# One round per task: the only iterate of task t is W^(t−1), which a shorter run leaves as its result.
ONE_ROUND = {"train": {"rounds": 1}, "run": {"geometry": 1}}


def plain_geometry(folder, settings, task):
    """ρ_t and β_{τ→t} at W^(t,0) = W^(t−1) by the book: full gradient, dense projector."""
    stream = build_stream(settings)
    network = build_network(settings, stream.dataset.image_shape, routes=True)
    for index in range(task + 1):
        network.add_head(stream.tasks[index].classes, 0, index)
    network.load_state_dict(tensors(folder, "model"), strict=False)
    known = tensors(folder, "subspaces")
    weights = {name: p for name, p in network.backbone.named_parameters() if p.ndim == 2}
    ratios = []
    for old in range(task + 1):
        images, labels = stream.train_batch(old, stream.tasks[old].train)
        loss = F.cross_entropy(network.heads[old](network.backbone(images)), network.targets(labels, old))
        inside = whole = 0.0
        for name, g in zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True):
            phi = known[f"layers/{name}"].double()
            projector = torch.eye(len(phi), dtype=torch.float64) - phi @ phi.T
            inside += (g.double() @ projector).square().sum().item()
            whole += g.double().square().sum().item()
        ratios.append(inside / whole)
    return ratios[task], [ratio**0.5 for ratio in ratios[:task]]


def test_rho_and_beta_are_their_definitions(tmp_path):
    fedprotip.run(small(**ONE_ROUND, stream={"tasks": 3}), out=tmp_path / "three")
    found = json.loads((tmp_path / "three" / "geometry.json").read_text())
    for task in (1, 2):
        before = tmp_path / f"{task}"
        fedprotip.run(small(**ONE_ROUND, stream={"tasks": task}), out=before)
        rho, betas = plain_geometry(before, small(stream={"tasks": 3}), task)
        assert found["rho"][task] == pytest.approx(rho, rel=1e-4)
        assert found["beta"][task][:task] == pytest.approx(betas, rel=1e-4)
    assert found["rho"][0] is None
    pairs = [found["beta"][1][0], *found["beta"][2][:2]]
    assert found["beta_bar"] == pytest.approx(sum(pairs) / 3)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Geometry at four thresholds."""
    found = []
    for threshold in (0.3, 0.7, 0.9, 0.99):
        folder = tmp_path_factory.mktemp("g") / str(threshold)
        settings = small(run={"geometry": 1}, method={"threshold": threshold}, train={"rounds": 4})
        summary = fedprotip.run(settings, out=folder)
        found.append((json.loads((folder / "geometry.json").read_text()), summary, folder))
    return found


def test_a_larger_threshold_means_less_interference_and_less_plasticity(measured):
    """Fig. 2c: both fall as ε grows."""
    for name in ("beta_bar", "rho_mean"):
        values = [g[name] if name == "beta_bar" else sum(g[name][1:]) for g, _, _ in measured]
        assert all(later < earlier for earlier, later in pairwise(values)), (name, values)


def test_the_bounds_hold(measured):
    for geometry, _, _ in measured:
        bounds, seen = geometry["bounds"], geometry["measured"]
        assert all(b >= m for b, m in zip(bounds["taskwise"], seen["gradient_sq_mean"], strict=True))
        assert all(b >= m for b, m in zip(bounds["forgetting"], seen["loss_increase"], strict=True))
        assert len(bounds["forgetting"]) == 2
        assert bounds["ft_loss_canonical"] > 0
        assert geometry["ft_loss"] == pytest.approx(sum(seen["loss_increase"]) / 2)


def test_measuring_does_not_change_the_run(tmp_path, measured):
    _, _, folder = measured[1]
    settings = small(method={"threshold": 0.7}, train={"rounds": 4})
    fedprotip.run(settings, out=tmp_path / "plain")
    assert results(tmp_path / "plain") == results(folder)


def test_the_report_shows_it(measured):
    _, _, folder = measured[0]
    assert any("geometry" in path.name for path in (folder / "plots").iterdir())


def test_a_full_subspace_and_too_few_iterates_have_no_bounds(tmp_path):
    """ρ = 0: nothing is left of the gradient. One iterate a task: L cannot be estimated."""
    cnn = {"name": "small_cnn", "width": 4, "depth": 2}
    fedprotip.run(small(model=cnn, method={"threshold": 1.0}, run={"geometry": 1}), out=tmp_path / "full")
    full = json.loads((tmp_path / "full" / "geometry.json").read_text())
    assert full["rho"][1] == pytest.approx(0, abs=1e-9)
    assert full["bounds"]["taskwise"][1] is None or full["bounds"]["taskwise"][1] > 1e6
    fedprotip.run(small(run={"geometry": 50}), out=tmp_path / "few")
    few = json.loads((tmp_path / "few" / "geometry.json").read_text())
    assert few["smoothness_L"] is None
    assert few["bounds"] == {}
    assert (tmp_path / "few" / "report.html").exists()
