"""FedProTIP as one would write it down from the paper: for clarity, not for speed.

Everything is unfolded, every SVD is a full economy SVD, a projector is a d×d matrix, every client has a model of its
own, and every mode of evaluation makes its own pass. The benchmarks run these functions beside ours and compare.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from time import perf_counter

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from benchmarks import inside
from benchmarks.inside import Stream
from fedprotip.inference.route import CosineRouter
from fedprotip.models import Network
from fedprotip.models.freeze import frozen_prefixes
from fedprotip.models.norms import training_mode
from fedprotip.settings import Settings

DEPENDENT = 1e-2
"""Directions that lie this close to what is there already are rounding."""


# Extraction, Eq. 7–9


@torch.no_grad()
def unfold_inputs(network: Network, images: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
    """All input columns of these weights (d, n·positions), image by image, from one pass over all images."""
    columns: dict[str, Tensor] = {}

    def unfold(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if isinstance(module, nn.Conv2d):
                assert not isinstance(module.padding, str)
                patches = F.unfold(inputs[0], module.kernel_size, module.dilation, module.padding, module.stride)
                columns[name] = patches.transpose(0, 1).flatten(1)  # (n, d, positions) → (d, n·positions)
            else:
                columns[name] = inputs[0].flatten(0, -2).T

        return hook

    modules = [network.backbone.get_submodule(name.removesuffix(".weight")) for name in names]
    handles = [module.register_forward_pre_hook(unfold(name)) for name, module in zip(names, modules, strict=True)]
    network.backbone(images)
    for handle in handles:
        handle.remove()
    return columns


def core_basis(a: Tensor, phi: Tensor, threshold: float) -> Tensor:
    """The rule of GPM: new directions until the bases hold `threshold` of the energy of a (d, m)."""
    _, sigma, _ = torch.linalg.svd(a, full_matrices=False)
    total = sigma.square().sum()
    u, sigma, _ = torch.linalg.svd(dense_projector(phi) @ a, full_matrices=False)
    held = total - sigma.square().sum()
    rank = 0
    while held < threshold * total and rank < len(sigma):
        held = held + sigma[rank] ** 2
        rank += 1
    return u[:, :rank]


# Projection and merging, Eq. 4 and Eq. 10


def dense_projector(phi: Tensor) -> Tensor:
    """P = I − ΦΦᵀ, (d, d)."""
    return torch.eye(len(phi), dtype=phi.dtype) - phi @ phi.T


def merge_union(bases: Sequence[Tensor], phi: Tensor) -> Tensor:
    """Eq. 10: the directions that the clients' bases add to Φ (d, R), one client after another."""
    whole = phi.double()
    for basis in bases:
        u, sines, _ = torch.linalg.svd(dense_projector(whole) @ basis.double(), full_matrices=False)
        whole = torch.cat([whole, u[:, sines > DEPENDENT]], dim=1)
    return whole[:, phi.shape[1] :]


def merge_energy(bases: Sequence[Tensor], sigmas: Sequence[Tensor], phi: Tensor, threshold: float) -> Tensor:
    """The dominant directions of all clients' activations together, outside Φ."""
    everything = torch.cat([u.double() * s for u, s in zip(bases, sigmas, strict=True)], dim=1)
    return core_basis(everything, phi.double(), threshold)


# Rounds, Eq. 5–6


def average(states: Sequence[dict[str, Tensor]], weights: Sequence[float]) -> dict[str, Tensor]:
    """Σ p_k W_k of models that are all in memory."""
    shares = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    mean = {}
    for name in states[0]:
        stacked = torch.stack([state[name].double() for state in states])
        mean[name] = torch.tensordot(shares, stacked, dims=1).to(states[0][name].dtype)
    return mean


def local_step(network: Network, optimizer: torch.optim.Optimizer, loss: Tensor, projectors: dict[str, Tensor]) -> None:
    """One step whose update is projected: W ← W + (W' − W)P for what the optimiser made of W."""
    before = deepcopy({name: weight.detach() for name, weight in network.backbone.named_parameters()})
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for name, projector in projectors.items():
            weight = network.backbone.get_parameter(name)
            update = (weight - before[name]).flatten(1) @ projector
            weight.copy_(before[name] + update.view_as(weight))


def train_round(
    network: Network, stream: Stream, settings: Settings, bases: Mapping[str, Tensor], task: int, round_: int
) -> dict[str, Tensor]:
    """One round from `network`: a model for every client, all in memory; the average of what moves."""
    clients = present(stream, task)
    moving = moving_names(network, settings, bases, task)
    projectors = {name: dense_projector(phi) for name, phi in bases.items()}
    models = [deepcopy(network) for _ in clients]
    for client, model in zip(clients, models, strict=True):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in moving)
        training_mode(model.backbone, settings.model, task)
        optimizer = inside.optimizer_of(model, settings)
        for batch in inside.batches(stream, settings, task, round_, client):  # the same as ours
            images, labels = stream.train_batch(task, batch)
            logits = model.logits(model.backbone(images), task)
            local_step(model, optimizer, F.cross_entropy(logits, model.targets(labels, task)), projectors)
    states = [{name: model.get_parameter(name).detach() for name in moving} for model in models]
    return average(states, [float(len(stream.client_samples(task, client))) for client in clients])


def present(stream: Stream, task: int) -> list[int]:
    """Clients with data of a task."""
    return [client for client in stream.clients(task) if len(stream.client_samples(task, client))]


def moving_names(network: Network, settings: Settings, bases: Mapping[str, Tensor], task: int) -> list[str]:
    """What is trained: first everything behind the frozen part, later only what has a basis; and the task's head."""
    frozen = tuple(f"backbone.{prefix}" for prefix in frozen_prefixes(settings.model, task))
    names = [name for name, _ in network.named_parameters()]
    backbone = [name for name in names if name.startswith("backbone.") and not name.startswith(frozen)]
    if bases:
        backbone = [name for name in backbone if name.removeprefix("backbone.") in bases]
    return backbone + [name for name in names if name.startswith(f"heads.{task}.")]


def load(network: Network, state: Mapping[str, Tensor]) -> None:
    """Overwrite parameters and buffers by name."""
    own = network.state_dict()
    for name, tensor in state.items():
        own[name].copy_(tensor)


# Evaluation: a pass for every mode


@torch.no_grad()
def evaluate(
    network: Network, stream: Stream, router: CosineRouter | None, seen: int, settings: Settings
) -> dict[str, list[float]]:
    """Accuracy (%) of every task so far: task known, all heads, and task found from one sample or a group of 64."""
    network.eval()
    tasks, every = range(seen + 1), torch.tensor([label for labels in network.labels for label in labels])

    def aware(task: int, images: Tensor) -> Tensor:
        return torch.tensor(network.labels[task])[network.logits(network.backbone(images), task).argmax(1)]

    def agnostic(images: Tensor) -> Tensor:
        return every[network(images).argmax(1)]

    result = {"aware": [accuracy(stream, task, settings, partial(aware, task)) for task in tasks]}
    result["agnostic"] = [accuracy(stream, task, settings, agnostic) for task in tasks]
    if router:
        both = [routed(network, stream, router, task, settings) for task in tasks]
        result |= {"single": [single for single, _ in both], "batch64": [group for _, group in both]}
    return result


def test_batches(stream: Stream, task: int, settings: Settings) -> Iterator[tuple[Tensor, Tensor]]:
    indices, size = stream.tasks[task].test, settings.evaluate.batch
    for start in range(0, len(indices), size):
        yield stream.test_batch(task, indices[start : start + size])


def accuracy(stream: Stream, task: int, settings: Settings, answer: Callable[[Tensor], Tensor]) -> float:
    """`answer`: from images to labels."""
    return percent(torch.cat([answer(images) == labels for images, labels in test_batches(stream, task, settings)]))


def routed(
    network: Network, stream: Stream, router: CosineRouter, task: int, settings: Settings
) -> tuple[float, float]:
    """Section 4.4 for one sample at a time, and for groups: relevance, cosine, vote, then the head of that task."""
    energies, right = [], []
    projectors = [basis @ basis.T for basis in router.bases]
    for images, labels in test_batches(stream, task, settings):
        features = network.backbone(images)
        energies.append(torch.stack([(features @ p).square().sum(1) for p in projectors], dim=1))
        pairs = zip(network.labels, network.heads, strict=True)
        by_head = [torch.tensor(known)[head(features).argmax(1)] for known, head in pairs]
        right.append(torch.stack(by_head, dim=1) == labels[:, None])
    energy, answers = torch.cat(energies), torch.cat(right)
    alone = [answers[i, vote(energy[i].sqrt(), router)] for i in range(len(energy))]
    groups = inside.draw_groups(task, len(energy), settings)
    together = [answers[group, vote(energy[group].mean(0).sqrt(), router)] for group in groups]
    return percent(torch.stack(alone)), percent(torch.cat(together))


def vote(relevance: Tensor, router: CosineRouter) -> int:
    """Eq. 12: every client votes for its most similar reference; ties go to the higher mean similarity."""
    similarity = F.cosine_similarity(relevance.double(), router.references.double(), dim=2)  # (K, T)
    votes = torch.bincount(similarity.argmax(1), minlength=similarity.shape[1])
    return max(range(len(votes)), key=lambda task: (int(votes[task]), float(similarity[:, task].mean())))


def percent(right: Tensor) -> float:
    return 100 * float(right.double().mean())


# Everything together


def run_tasks(network: Network, stream: Stream, settings: Settings, path: Path) -> list[float]:
    """Algorithm 1 without routing, for small models whose clients send all their columns; the seconds of each task."""
    bases: dict[str, Tensor] = {}
    every: list[dict[str, Tensor]] = []
    seconds = []
    for task in range(len(stream.tasks)):
        start = perf_counter()
        network.add_head(stream.tasks[task].classes, settings.run.seed, task)
        for round_ in range(settings.train.rounds):
            load(network, train_round(network, stream, settings, bases, task, round_))
        network.eval()
        sent = [client_bases(network, stream, settings, bases, task, client) for client in present(stream, task)]
        for name in sent[0]:
            phi = bases.get(name, sent[0][name][:, :0])
            merged = merge_union([one[name] for one in sent], phi).float()
            bases[name] = torch.cat([phi, merged], dim=1)
        evaluate(network, stream, None, task, settings)
        every += sent
        projectors = {name: dense_projector(phi) for name, phi in bases.items()}
        kept = {"model": network.state_dict(), "bases": bases, "projectors": projectors}
        kept |= {f"client-{number}": one for number, one in enumerate(every)}
        save_groups(kept, path)
        seconds.append(perf_counter() - start)
    return seconds


def save_groups(groups: Mapping[str, Mapping[str, Tensor]], path: Path) -> None:
    """All tensors in one file, everything anew each time."""
    save_file({name: tensor.detach().contiguous().clone() for name, tensor in flat(groups).items()}, path)


def flat(groups: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {f"{group}/{name}": tensor for group, tensors in groups.items() for name, tensor in tensors.items()}


def client_bases(
    network: Network, stream: Stream, settings: Settings, bases: Mapping[str, Tensor], task: int, client: int
) -> dict[str, Tensor]:
    """Core bases of one client from all columns of all its images."""
    method = settings.method.model_dump()
    threshold = min(method["threshold"] + method["increment"] * task, 1.0)
    images, _ = stream.train_batch(task, stream.client_samples(task, client))
    columns = unfold_inputs(network, images, [n for n, _ in network.backbone.named_parameters() if "weight" in n])
    return {name: core_basis(a, bases.get(name, a[:, :0]), threshold) for name, a in columns.items()}
