"""One client: GPM of this package equals a textbook GPM with full SVD and dense projectors."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fedprotip
from fedprotip.methods.parts.training import local_batches
from fedprotip.models import build_network
from fedprotip.seeds import numpy_stream
from fedprotip.stream import build_stream
from tests.small import small, tensors

SETTINGS = {
    "clients": {"count": 1},
    "train": {"weight_decay": 0.0, "rounds": 2},
    "method": {"name": "gpm", "threshold": 0.95, "rank_rule": "energy", "columns": 10**6},
}


def textbook_gpm(settings):
    """Saha et al. 2021, by the book: all activations, numpy SVD, I − ΦΦᵀ as a matrix, plain SGD."""
    stream = build_stream(settings)
    network = build_network(settings, stream.dataset.image_shape, routes=False)
    linears = [module for module in network.backbone if isinstance(module, torch.nn.Linear)]
    bases = [np.zeros((linear.in_features, 0)) for linear in linears]
    for task in range(len(stream.tasks)):
        network.add_head(stream.tasks[task].classes, 0, task)
        samples = stream.client_samples(task, 0)
        projectors = [torch.tensor(np.eye(len(phi)) - phi @ phi.T).float() for phi in bases]
        for round_ in range(settings.train.rounds):
            for batch in local_batches(samples, settings.train, numpy_stream(0, "batches", task, round_, 0)):
                images, labels = stream.train_batch(task, batch)
                places = torch.tensor([stream.tasks[task].classes.index(int(label)) for label in labels])
                loss = F.cross_entropy(network.heads[task](network.backbone(images)), places)
                network.zero_grad()
                loss.backward()
                with torch.no_grad():
                    for linear, projector in zip(linears, projectors, strict=True):
                        linear.weight -= settings.train.lr * linear.weight.grad @ projector
                        if task == 0:
                            linear.bias -= settings.train.lr * linear.bias.grad
                    for parameter in network.heads[task].parameters():
                        parameter -= settings.train.lr * parameter.grad
        inputs = stream.train_batch(task, samples)[0].flatten(1)
        for index, linear in enumerate(linears):
            bases[index] = extend(bases[index], inputs.double().numpy().T, settings.method.threshold + 0.003 * task)
            inputs = F.relu(linear(inputs)).detach()
    return network, bases


def extend(phi, a, threshold):
    rest = a - phi @ (phi.T @ a)
    u, sigma, _ = np.linalg.svd(rest, full_matrices=False)
    total = (a**2).sum()
    share = (total - (sigma**2).sum()) / total
    rank = 0
    while share < threshold:
        share += sigma[rank] ** 2 / total
        rank += 1
    return np.hstack([phi, u[:, :rank]])


def test_gpm_equals_the_textbook(tmp_path):
    settings = small(**SETTINGS)
    summary = fedprotip.run(settings, out=tmp_path / "r")
    network, bases = textbook_gpm(settings)
    found, known = tensors(tmp_path / "r", "model"), tensors(tmp_path / "r", "subspaces")
    for name, tensor in network.state_dict().items():
        assert torch.allclose(found[name], tensor, atol=2e-4), name
    for name, phi in zip(["1.weight", "3.weight"], bases, strict=True):
        ours = known[f"layers/{name}"].double().numpy()
        assert ours.shape == phi.shape
        assert np.abs(ours @ ours.T - phi @ phi.T).max() < 1e-2
    assert set(summary["accuracy"]) == {"aware", "agnostic"}


def test_fedprotip_with_one_client_trains_like_gpm(tmp_path):
    fedprotip.run(small(**SETTINGS), out=tmp_path / "gpm")
    sections = SETTINGS | {"method": SETTINGS["method"] | {"name": "fedprotip", "increment": 0.003}}
    fedprotip.run(small(**sections), out=tmp_path / "fedprotip")
    one, other = tensors(tmp_path / "gpm", "model"), tensors(tmp_path / "fedprotip", "model")
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("clients", [{"count": 2}, {"count": 1, "roster": {"1": "0-1"}}])
def test_gpm_is_refused_with_several_clients(tmp_path, clients):
    with pytest.raises(fedprotip.UsageError, match="centralised"):
        fedprotip.run(small(clients=clients, method={"name": "gpm"}), out=tmp_path / "r")
    assert not (tmp_path / "r").exists()
