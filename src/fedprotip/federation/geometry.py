"""Measures the geometry of section 5 during a simulation: ρ̂, β̂, G², L, and the losses they bound.

It looks at training data of earlier tasks, which no federated method may do: this is an instrument for
choosing ε, switched on with `run.geometry`, and training never sees what it measures.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedprotip.federation.server import Server
from fedprotip.methods.local import Local, Own
from fedprotip.methods.parts.training import local_batches
from fedprotip.models import Network
from fedprotip.models.capture import Layer, find_layers
from fedprotip.store.clients import ClientStore
from fedprotip.store.files import Tensors
from fedprotip.store.records import finite
from fedprotip.store.results import Geometry
from fedprotip.stream.holdings import Holding
from fedprotip.subspace import geometry
from fedprotip.subspace.project import Projector


class Probe:
    """Gradients of current and past tasks at synchronisation iterates W^(t,e−1).

    W here is every backbone weight that has an input subspace, the part of the model the projector acts on.
    """

    def __init__(self, server: Server, every: int, store: ClientStore) -> None:
        """`store`: private state of clients, which a loss may look at."""
        self._server, self._every, self._store = server, every, store
        self._previous: Tensors = {}
        server.progress.geometry = server.progress.geometry or {
            "rho": [],  # task → list over iterates
            "beta": [],  # task → old task → list over iterates
            "gradient_sq": [],  # task → ‖∇L^(t)‖² over iterates
            "second_moment": 0.0,  # G², the largest mean of ‖∇ℓ‖²
            "smoothness": 0.0,  # L, the largest ‖∇L(W) − ∇L(W')‖ / ‖W − W'‖
            "start_loss": [],  # L^(t)(W^(t,0))
            "end_loss": [],  # L^(t)(W^(t))
            "steps": [],  # S_t
        }

    def tensors(self) -> dict[str, Tensors]:
        """State for a checkpoint: the last iterate and its gradient."""
        return {"geometry": self._previous} if self._previous else {}

    def restore(self, tensors: Tensors) -> None:
        self._previous = tensors

    def measure(self, task: int, round_: int) -> None:
        """At the start of a round: one iterate."""
        if round_ % self._every:
            return
        record = self._server.progress.geometry
        while len(record["rho"]) <= task:
            for name in ("rho", "gradient_sq"):
                record[name].append([])
            record["beta"].append([[] for _ in range(len(record["rho"]) - 1)])
        projectors = self._projectors(task)
        loss, gradient, second = self._gradient(task)
        inside, whole = geometry.squared_norms(gradient, projectors)
        record["rho"][task].append(geometry.adequacy(inside, whole))
        record["gradient_sq"][task].append(whole)
        record["second_moment"] = max(record["second_moment"], second)
        if round_ == 0:
            record["start_loss"].append(loss)
            record["steps"].append(self._steps(task))
        for old in range(task):
            _, gradient_old, second = self._gradient(old)
            record["beta"][task][old].append(geometry.interference(*geometry.squared_norms(gradient_old, projectors)))
            record["second_moment"] = max(record["second_moment"], second)
        self._compare(gradient, first=round_ == 0)

    def finish_task(self, task: int) -> None:
        """At the end of a task: its loss now."""
        self._server.progress.geometry["end_loss"].append(self._gradient(task)[0])

    def report(self) -> Geometry:
        """ρ̂_t, β̂_{τ→t}, β̄_T, FT_loss and the bounds of Eq. 13–16, with what was measured beside them.

        L is estimated from iterates in a row, so it is a lower estimate; without two of them in one task it is
        unknown, and so are the bounds. A bound that does not exist is None.
        """
        record, server = self._server.progress.geometry, self._server
        tasks, rounds, lr = len(record["rho"]), server.settings.train.rounds, server.settings.train.lr
        rho = [min(values) for values in record["rho"]]
        beta = [[max(values) for values in row] for row in record["beta"]]
        beta_bar, g2, smooth = geometry.mean_interference(beta), record["second_moment"], record["smoothness"]
        increases = [self._gradient(old)[0] - record["end_loss"][old] for old in range(tasks - 1)]
        found = {
            "threshold": getattr(server.settings.method, "threshold", None),
            "rho": [None if t == 0 else value for t, value in enumerate(rho)],
            "rho_mean": [None if t == 0 else float(np.mean(values)) for t, values in enumerate(record["rho"])],
            "beta": [[*row, *[None] * (tasks - len(row))] for row in beta],
            "beta_bar": beta_bar,
            "gradient_bound_G2": g2,
            "smoothness_L": smooth or None,
            "canonical_lr": geometry.canonical_lr(rounds, max(record["steps"]), smooth) if smooth else None,
            "ft_loss": geometry.loss_forgetting(increases),
            "bounds": self._bounds(rho, beta, beta_bar, rounds, lr, smooth, g2) if smooth else {},
            "measured": {
                "gradient_sq_mean": [float(np.mean(values)) for values in record["gradient_sq"]],
                "loss_increase": increases,
            },
        }
        return Geometry.model_validate(found)

    def _bounds(
        self,
        rho: list[float],
        beta: list[list[float]],
        beta_bar: float,
        rounds: int,
        lr: float,
        smooth: float,
        g2: float,
    ) -> dict[str, Any]:
        """Eq. 13–16. Cross-entropy is never below 0, so L^(t)(W^(t,0)) stands for Δ_t."""
        record = self._server.progress.geometry
        gaps, steps, tasks = record["start_loss"], record["steps"], len(rho)
        return {
            "taskwise": [
                finite(geometry.taskwise_bound(gaps[t], rho[t], rounds, steps[t], lr, smooth, g2)) for t in range(tasks)
            ],
            "forgetting": [
                geometry.forgetting_bound(
                    [beta[t][old] for t in later], [steps[t] for t in later], rounds, lr, smooth, g2
                )
                for old, later in ((old, range(old + 1, tasks)) for old in range(tasks - 1))
            ],
            "taskwise_canonical": [
                finite(geometry.taskwise_bound_canonical(gaps[t], rho[t], rounds, smooth, g2)) for t in range(tasks)
            ],
            "ft_loss_canonical": geometry.loss_forgetting_bound(tasks, beta_bar, rounds, smooth, g2),
        }

    def _projectors(self, task: int) -> dict[str, Projector]:
        return {layer.name: projector for layer, projector in self._server.site.view.projectors}

    def _gradient(self, task: int) -> tuple[float, dict[str, Tensor], float]:
        """L^(t), ∇L^(t) by layer as (out, d), and the largest client's mean ‖∇ℓ‖² over its batches."""
        server, network = self._server, self._server.network
        layers, parameters = _layers(network), dict(network.backbone.named_parameters())
        flags = {name: parameter.requires_grad for name, parameter in parameters.items()}
        wanted = {layer.parameter: parameters[layer.parameter].requires_grad_(True) for layer in layers}
        network.eval()
        device, size = next(network.parameters()).device, server.settings.train.batch
        clients = server.stream.clients(task)
        shares = [server.stream.client_samples(task, client) for client in clients]
        everything = sum(len(share) for share in shares)
        total = {name: torch.zeros_like(parameter) for name, parameter in wanted.items()}
        loss_sum, second_moments = 0.0, [0.0]
        for client, share in zip(clients, shares, strict=True):
            squares, local = [], self._local(client, task)
            for start in range(0, len(share), size):
                images, labels = server.stream.train_batch(task, share[start : start + size])
                loss = server.method.loss(local, images.to(device), labels.to(device))
                gradients = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True, materialize_grads=True)
                for name, gradient in zip(total, gradients, strict=True):
                    total[name] += gradient * (len(labels) / everything)
                loss_sum += loss.item() * len(labels) / everything
                squares.append(sum(gradient.double().square().sum().item() for gradient in gradients))
            second_moments += [float(np.mean(squares))] if squares else []
        for name, flag in flags.items():
            parameters[name].requires_grad_(flag)
        return loss_sum, {layer.name: layer.weight(total) for layer in layers}, max(second_moments)

    def _local(self, client: int, task: int) -> Local:
        """A client as its loss sees it, at the server's model; it keeps nothing."""
        site, stream = self._server.site, self._server.stream
        own = Own(self._store, client, ())
        return Local(site, Holding(stream, client), self._server.cache, own, task)

    def _compare(self, gradient: dict[str, Tensor], first: bool) -> None:
        """L from two iterates of one task in a row."""
        network = self._server.network
        weights = {name: p.detach() for name, p in network.backbone.named_parameters()}
        point = {lay.name: lay.weight(weights).clone() for lay in _layers(network)}
        if self._previous and not first:
            moved = _distance(point, self._previous, "weight/")
            turned = _distance(gradient, self._previous, "gradient/")
            if moved > 0:
                record = self._server.progress.geometry
                record["smoothness"] = max(record["smoothness"], turned / moved)
        self._previous = {f"weight/{name}": tensor.cpu() for name, tensor in point.items()}
        self._previous |= {f"gradient/{name}": tensor.cpu().contiguous() for name, tensor in gradient.items()}

    def _steps(self, task: int) -> int:
        """S_t: the local steps of the largest client in one round."""
        train, stream = self._server.settings.train, self._server.stream
        sizes = [len(stream.client_samples(task, client)) for client in stream.clients(task)]
        return sum(1 for _ in local_batches(np.arange(max(sizes)), train, np.random.default_rng(0)))


def _layers(network: Network) -> list[Layer]:
    return [layer for group in find_layers(network.backbone, False).values() for layer in group]


def _distance(now: dict[str, Tensor], before: Tensors, prefix: str) -> float:
    squares = [(tensor.cpu().double() - before[prefix + name].double()).square().sum() for name, tensor in now.items()]
    return float(torch.stack(squares).sum().sqrt())
