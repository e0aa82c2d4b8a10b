"""ρ̂ and β̂ against their definitions, and the bounds they enter."""

import json
from importlib import import_module
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

import fedprotip
from fedprotip import UsageError
from fedprotip.federation.geometry import Probe
from fedprotip.methods import base
from fedprotip.models import build_network
from fedprotip.models.freeze import frozen_prefixes
from fedprotip.settings import KNOWN
from fedprotip.stream import build_stream
from tests.small import quick, results, small, tensors

# One round per task: the only iterate of task t is W^(t−1), which a shorter run leaves as its result.
ONE_ROUND = {"train": {"rounds": 1}, "run": {"geometry": 1}}
THREE_LAYERS = {"width": 24, "depth": 3}
MODELS = {
    "all": {"width": 24, "depth": 2},
    "frozen after the first task": {**THREE_LAYERS, "freeze": "layer1", "freeze_from": "first"},
    "frozen from the start": {**THREE_LAYERS, "freeze": "layer1", "freeze_from": "start"},
}


def measure(folder, settings):
    """geometry.json of a run."""
    fedprotip.run(settings, out=folder)
    return json.loads((folder / "geometry.json").read_text())


class Plain:
    """By the book: full gradients and dense projectors, of the layers that a run has protected or will protect."""

    def __init__(self, settings, folder=None):
        """The network that a run folder holds; as it was born without one."""
        self.settings, self.stream = settings, build_stream(settings)
        self.network = build_network(settings, self.stream.dataset.image_shape, routes=True).eval()
        for index, task in enumerate(self.stream.tasks):
            self.network.add_head(task.classes, 0, index)
        if folder:
            self.network.load_state_dict(tensors(folder, "model"), strict=False)
        frozen = frozen_prefixes(settings.model, 1)
        names = [name for name, p in self.network.backbone.named_parameters() if p.ndim > 1]
        self.names = [name for name in names if not name.startswith(frozen)]

    def weights(self):
        return [self.network.backbone.get_parameter(name) for name in self.names]

    def loss(self, task, samples=None):
        samples = self.stream.tasks[task].train if samples is None else samples
        images, labels = self.stream.train_batch(task, samples)
        logits = self.network.heads[task](self.network.backbone(images))
        return F.cross_entropy(logits, self.network.targets(labels, task))

    def gradient(self, task, samples=None):
        return torch.autograd.grad(self.loss(task, samples), self.weights())

    def share(self, task, folder):
        """‖P∇L‖² / ‖∇L‖²."""
        inside = whole = 0.0
        known = tensors(folder, "subspaces")
        assert {name.removeprefix("layers/") for name in known if name.startswith("layers/")} == set(self.names)
        for name, g in zip(self.names, self.gradient(task), strict=True):
            phi = known[f"layers/{name}"].double()
            projector = torch.eye(len(phi), dtype=torch.float64) - phi @ phi.T
            inside += (g.flatten(1).double() @ projector).square().sum().item()
            whole += g.double().square().sum().item()
        return inside / whole

    def second_moment(self, task):
        """The largest client's mean of ‖∇ℓ‖² over batches."""
        found = []
        for client in self.stream.clients(task):
            batches = self.stream.client_samples(task, client)
            batches = torch.arange(len(batches)).split(self.settings.train.batch), batches
            squares = [squared(self.gradient(task, batches[1][part.numpy()])) for part in batches[0]]
            found.append(sum(squares) / len(squares))
        return max(found)


def squared(parts, others=None):
    others = others or [torch.zeros_like(part) for part in parts]
    return sum((a.double() - b.double()).square().sum().item() for a, b in zip(parts, others, strict=True))


@pytest.mark.parametrize("model", MODELS)
def test_coefficients_are_their_definitions_over_what_is_projected(tmp_path, monkeypatch, model):
    """ρ̂, β̂ and G² of layers that are never projected are not counted; and the loss increase of Eq. 24."""
    quick(monkeypatch)
    whole = small(**ONE_ROUND, model=MODELS[model], stream={"tasks": 3})
    found = measure(tmp_path / "3", whole)
    iterates = [Plain(whole)]
    for task in (1, 2):
        before = tmp_path / f"{task}"
        fedprotip.run(small(**ONE_ROUND, model=MODELS[model], stream={"tasks": task}), out=before)
        plain = Plain(whole, before)
        assert found["rho"][task] == pytest.approx(plain.share(task, before), rel=1e-4)
        betas = [plain.share(old, before) ** 0.5 for old in range(task)]
        assert found["beta"][task][:task] == pytest.approx(betas, rel=1e-4)
        iterates.append(plain)
    assert found["rho"][0] is None
    pairs = [found["beta"][1][0], *found["beta"][2][:2]]
    assert found["beta_bar"] == pytest.approx(sum(pairs) / 3)
    moments = [plain.second_moment(task) for t, plain in enumerate(iterates) for task in range(t + 1)]
    assert found["gradient_bound_G2"] == pytest.approx(max(moments), rel=1e-4)
    iterates.append(Plain(whole, tmp_path / "3"))
    with torch.no_grad():
        for t in (1, 2):
            increases = [(iterates[t + 1].loss(old) - iterates[t].loss(old)).item() for old in range(t)]
            assert found["measured"]["round_increase"][t][:t] == pytest.approx(increases, abs=1e-5)


@pytest.mark.slow
def test_of_a_frozen_resnet_only_layers_3_and_4_count(tmp_path, monkeypatch):
    quick(monkeypatch)
    model = {"name": "resnet18", "freeze": "layer2"}
    first, both = (small(**ONE_ROUND, model=model, stream={"tasks": tasks}) for tasks in (1, 2))
    found = measure(tmp_path / "2", both)
    fedprotip.run(first, out=tmp_path / "1")
    plain = Plain(both, tmp_path / "1")
    assert {name.partition(".")[0] for name in plain.names} == {"layer3", "layer4"}
    assert found["rho"][1] == pytest.approx(plain.share(1, tmp_path / "1"), rel=1e-3)
    assert found["beta"][1][0] == pytest.approx(plain.share(0, tmp_path / "1") ** 0.5, rel=1e-3)


@pytest.mark.parametrize("model", MODELS)
def test_smoothness_and_drift_are_those_of_what_is_projected(tmp_path, monkeypatch, model):
    """L from the two iterates of the first task; with one client, the drift of Lemma 3 is the step of the model."""
    quick(monkeypatch)
    only = {"model": MODELS[model], "clients": {"count": 1}, "run": {"geometry": 1}}
    two = measure(tmp_path / "two", small(**only, stream={"tasks": 1}, train={"rounds": 2}))
    one = measure(tmp_path / "one", small(**only, stream={"tasks": 1}, train={"rounds": 1}))
    settings = small(**only, stream={"tasks": 2}, train={"rounds": 1})
    born, after = Plain(settings), Plain(settings, tmp_path / "one")
    moved = squared(after.weights(), born.weights())
    turned = squared(after.gradient(0), born.gradient(0))
    assert two["smoothness_L"] == pytest.approx((turned / moved) ** 0.5, rel=1e-3)
    assert one["measured"]["drift"] == pytest.approx([moved], rel=1e-4)
    further = measure(tmp_path / "further", settings)
    second = squared(Plain(settings, tmp_path / "further").weights(), after.weights())
    assert further["measured"]["drift"] == pytest.approx([moved, second], rel=1e-4)


@pytest.mark.parametrize("average", ["weighted", "uniform"])
def test_the_loss_of_a_task_weighs_clients_as_the_average_does(tmp_path, monkeypatch, average):
    """Eq. 18 with p_k of Eq. 6, by the gradient at the network as it was born."""
    quick(monkeypatch)
    train = {"rounds": 1, "average": average}
    settings = small(train=train, stream={"tasks": 1}, run={"geometry": 1}, clients={"alpha": 0.1})
    found, plain = measure(tmp_path / "r", settings), Plain(settings)
    shares = [plain.stream.client_samples(0, client) for client in plain.stream.clients(0)]
    p_k = [len(share) if average == "weighted" else 1 for share in shares]
    assert len(set(map(len, shares))) > 1
    gradients = [plain.gradient(0, share) for share in shares]
    whole = [sum(p * g for p, g in zip(p_k, layer, strict=True)) / sum(p_k) for layer in zip(*gradients, strict=True)]
    assert found["measured"]["gradient_sq_mean"] == pytest.approx([squared(whole)], rel=1e-4)


def test_without_projection_everything_is_admissible(tmp_path, monkeypatch):
    quick(monkeypatch)
    found = measure(tmp_path / "r", small(**ONE_ROUND, stream={"tasks": 2}, method={"projection": "none"}))
    assert found["rho"][1] == found["beta"][1][0] == 1.0


def test_where_nothing_is_left_to_project_it_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"run\.geometry .* model\.freeze = 'layer2' leaves nothing"):
        fedprotip.run(small(run={"geometry": 1}, model={"freeze": "layer2"}), out=tmp_path / "r")
    assert not (tmp_path / "r").exists()


@pytest.fixture
def keeper(monkeypatch):
    """The method keeper is known in these tests only."""
    monkeypatch.setattr(base, "_methods", dict(base._methods))
    monkeypatch.setitem(KNOWN, "method.name", dict(KNOWN["method.name"]))
    base.register(import_module("tests.federation.keeper").Keeper)
    quick(monkeypatch)


def kept(folder, engine, geometry=1):
    run = {"engine": engine, "geometry": geometry}
    fedprotip.run(small(stream={"tasks": 2}, train={"rounds": 2}, method={"name": "keeper"}, run=run), out=folder)
    return json.loads((folder / "geometry.json").read_text()) if geometry else None


def test_losses_with_private_state_are_measured_wherever_clients_keep_it(tmp_path, keeper):
    local = kept(tmp_path / "local", "local")
    assert kept(tmp_path / "apart", "apart") == local
    kept(tmp_path / "plain", "local", geometry=0)
    assert results(tmp_path / "plain") == results(tmp_path / "local") == results(tmp_path / "apart")


def test_a_loss_is_weighed_by_what_the_client_has_kept(tmp_path, keeper):
    """Two clients, three rounds begun each before the end: the probe sees the fourth, and forgets it."""
    settings = small(stream={"tasks": 2}, train={"rounds": 1}, method={"name": "keeper"}, run={"geometry": 1})
    found = measure(tmp_path / "r", settings)
    ends = []
    for tasks in (1, 2):
        folder = tmp_path / "r" if tasks == 2 else tmp_path / "first"
        if tasks == 1:
            fedprotip.run(
                small("stream.tasks=1", "run.geometry=0", train={"rounds": 1}, method={"name": "keeper"}), out=folder
            )
        plain, total = Plain(settings, folder), 0.0
        shares = {client: plain.stream.client_samples(0, client) for client in plain.stream.clients(0)}
        for client, samples in shares.items():
            weight = 1 + (tasks + 1) * (1 + client)
            total += weight * plain.loss(0, samples).item() * len(samples) / sum(map(len, shares.values()))
        ends.append(total)
    assert found["measured"]["loss_increase"] == pytest.approx([ends[1] - ends[0]], rel=1e-3)


@pytest.mark.slow
def test_losses_with_private_state_are_the_same_in_processes(tmp_path, keeper):
    assert kept(tmp_path / "pool", "pool") == kept(tmp_path / "local", "local")


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Geometry at four thresholds."""
    found = []
    for threshold in (0.3, 0.7, 0.99):
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
        assert len(bounds["forgetting"]) == len(bounds["forgetting_canonical"]) == 2
        assert all(b >= m for b, m in zip(bounds["drift"], seen["drift"], strict=True))
        for t in (1, 2):
            for old in range(t):
                mean, largest = (seen[name][t][old] for name in ("round_increase_mean", "round_increase"))
                assert mean <= largest <= bounds["round_increase"][t][old]
        assert bounds["ft_loss_canonical"] > 0
        assert geometry["ft_loss"] == pytest.approx(sum(seen["loss_increase"]) / 2)


def test_what_rounds_lead_to_adds_up(measured):
    """Eq. 14 follows from Eq. 24 by summing over the rounds of all later tasks."""
    for geometry, _, _ in measured:
        means = geometry["measured"]["round_increase_mean"]
        for old, increase in enumerate(geometry["measured"]["loss_increase"]):
            assert 4 * sum(means[t][old] for t in range(old + 1, 3)) == pytest.approx(increase, abs=1e-5)
        bounds = geometry["bounds"]
        for old, bound in enumerate(bounds["forgetting"]):
            assert 4 * sum(bounds["round_increase"][t][old] for t in range(old + 1, 3)) == pytest.approx(bound)


def test_rounds_that_are_not_measured_do_not_count(tmp_path, monkeypatch, measured):
    """Every third of four rounds: the first and the last of a task, and no others."""
    quick(monkeypatch)
    kept = []
    conclude = Probe._conclude

    def noted(self, task, losses=None):
        conclude(self, task, losses)
        kept.append([[len(found) for found in row] for row in self._server.progress.geometry["increase"]])

    monkeypatch.setattr(Probe, "_conclude", noted)
    settings = small(run={"geometry": 3}, method={"threshold": 0.7}, train={"rounds": 4})
    seldom, every = measure(tmp_path / "r", settings), measured[1][0]
    assert kept[-1] == [[], [2], [2, 2]]
    assert seldom["measured"]["round_increase"][1][0] <= every["measured"]["round_increase"][1][0]


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
