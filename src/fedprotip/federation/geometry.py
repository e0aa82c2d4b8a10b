"""Measures the geometry of section 5 during a simulation: ρ̂, β̂, G², L, and the losses and distances they bound.

It looks at training data of earlier tasks and at private state, which no federated method may do: this is an instrument
for choosing ε, switched on with `run.geometry`, and training never sees what it measures.
"""

from collections.abc import Callable, Iterable, Iterator
from math import sqrt
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedprotip.federation.engines.base import Engine, Private
from fedprotip.federation.parcels import Ask, Reply, Request, answers
from fedprotip.federation.server import Server
from fedprotip.messages import Message
from fedprotip.methods.local import Belongings, Local
from fedprotip.methods.parts.training import local_batches
from fedprotip.models.capture import Layer, find_layers
from fedprotip.models.freeze import frozen_prefixes
from fedprotip.store.files import Tensors
from fedprotip.store.records import finite
from fedprotip.store.results import Geometry
from fedprotip.stream.holdings import Holding
from fedprotip.subspace import geometry
from fedprotip.subspace.project import Projector


class Probe:
    """Gradients of current and past tasks at synchronisation iterates W^(t,e−1), and what comes of a round.

    W here is what projection acts on: the backbone weights with an input subspace that later tasks may move.
    """

    def __init__(self, server: Server, every: int, private: Private) -> None:
        self._server, self._every, self._private = server, every, private
        self._previous: Tensors = {}
        fresh: dict[str, Any] = {
            "rho": [],  # task → list over iterates
            "beta": [],  # task → old task → list over iterates
            "gradient_sq": [],  # task → ‖∇L^(t)‖² over iterates
            "increase": [],  # task → old task → Γ over rounds
            "before": [],  # losses of the old tasks when the round under way began, if it is measured
            "drift": [],  # task → [‖W_k − W‖², steps] of the client that came nearest to its bound
            "second_moment": 0.0,  # G², the largest mean of ‖∇ℓ‖²
            "smoothness": 0.0,  # L, the largest ‖∇L(W) − ∇L(W')‖ / ‖W − W'‖
            "start_loss": [],  # L^(t)(W^(t,0))
            "end_loss": [],  # L^(t)(W^(t))
            "steps": [],  # S_t
        }
        server.progress.geometry = fresh | server.progress.geometry

    def tensors(self) -> dict[str, Tensors]:
        """State for a checkpoint: the last iterate and its gradient."""
        return {"geometry": self._previous} if self._previous else {}

    def restore(self, tensors: Tensors) -> None:
        self._previous = tensors

    def watch(self, engine: Engine) -> Engine:
        """The same engine; what clients send after a measured round is measured on its way."""
        return _Watched(engine, self._see)

    def measure(self, task: int, round_: int) -> None:
        """At the start of every round: what the last one has led to, and every so often one iterate."""
        record = self._server.progress.geometry
        if round_ % self._every:
            self._conclude(task)
            return
        for name in ("rho", "gradient_sq", "drift"):
            record[name] += [[] for _ in range(len(record[name]), task + 1)]
        for name in ("beta", "increase"):
            record[name] += [[[] for _ in range(t)] for t in range(len(record[name]), task + 1)]
        layers, projectors = self._layers(task), self._projectors()
        loss, gradient, second = self._gradient(task, layers)
        inside, whole = geometry.squared_norms(gradient, projectors)
        record["rho"][task].append(geometry.adequacy(inside, whole))
        record["gradient_sq"][task].append(whole)
        moments, losses = [record["second_moment"], second], []
        if round_ == 0:
            record["start_loss"].append(loss)
            record["steps"].append(max(map(self._steps, self._sizes(task))))
        for old in range(task):
            loss, gradient_old, second = self._gradient(old, layers)
            record["beta"][task][old].append(geometry.interference(*geometry.squared_norms(gradient_old, projectors)))
            moments.append(second)
            losses.append(loss)
        record["second_moment"] = max(moments)
        self._compare(gradient, layers, first=round_ == 0)
        self._conclude(task, losses)
        record["before"] = losses

    def finish_task(self, task: int) -> None:
        """At the end of a task: what its last round has led to, and its loss now."""
        self._conclude(task)
        self._server.progress.geometry["end_loss"].append(self._loss(task))

    def _conclude(self, task: int, losses: list[float] | None = None) -> None:
        """Γ_τ^(t,e) (Eq. 24) of the round that is over, if it was measured; `losses`: those of the old tasks now."""
        record = self._server.progress.geometry
        if record["before"]:
            now = losses if losses is not None else [self._loss(old) for old in range(task)]
            for old, before in enumerate(record["before"]):
                record["increase"][task][old].append(now[old] - before)
            record["before"] = []

    def report(self) -> Geometry:
        """ρ̂_t, β̂_{τ→t}, β̄_T, FT_loss and all bounds, with what was measured beside them.

        L is estimated from iterates in a row, so it is a lower estimate; without two of them in one task it is
        unknown, and so are the bounds. A bound that does not exist is None.
        """
        record, server = self._server.progress.geometry, self._server
        tasks, rounds = len(record["rho"]), server.settings.train.rounds
        rho = [min(values) for values in record["rho"]]
        beta = [[max(values) for values in row] for row in record["beta"]]
        g2, smooth = record["second_moment"], record["smoothness"]
        increases = [self._loss(old) - record["end_loss"][old] for old in range(tasks - 1)]
        found = {
            "threshold": getattr(server.settings.method, "threshold", None),
            "rho": [None if t == 0 else value for t, value in enumerate(rho)],
            "rho_mean": [None if t == 0 else float(np.mean(values)) for t, values in enumerate(record["rho"])],
            "beta": _square(beta),
            "beta_bar": geometry.mean_interference(beta),
            "gradient_bound_G2": g2,
            "smoothness_L": smooth or None,
            "canonical_lr": geometry.canonical_lr(rounds, max(record["steps"]), smooth) if smooth else None,
            "ft_loss": geometry.loss_forgetting(increases),
            "bounds": self._bounds(rho, beta, smooth, g2) if smooth else {},
            "measured": {
                "gradient_sq_mean": [float(np.mean(values)) for values in record["gradient_sq"]],
                "loss_increase": increases,
                "round_increase": _square([[max(v, default=None) for v in row] for row in record["increase"]]),
                "round_increase_mean": _square(
                    [[float(np.mean(v)) if v else None for v in row] for row in record["increase"]]
                ),
                "drift": [worst[0] if worst else None for worst in record["drift"]],
            },
        }
        return Geometry.model_validate(found)

    def _bounds(self, rho: list[float], beta: list[list[float]], smooth: float, g2: float) -> dict[str, Any]:
        """Eq. 13–16, 25, 31 and Lemma 3. Cross-entropy is never below 0, so L^(t)(W^(t,0)) stands for Δ_t."""
        record, train = self._server.progress.geometry, self._server.settings.train
        gaps, steps, tasks, rounds, lr = record["start_loss"], record["steps"], len(rho), train.rounds, train.lr
        later = [range(old + 1, tasks) for old in range(tasks - 1)]  # old task → those after it
        betas = [[beta[t][old] for t in after] for old, after in enumerate(later)]
        return {
            "taskwise": [
                finite(geometry.taskwise_bound(gaps[t], rho[t], rounds, steps[t], lr, smooth, g2)) for t in range(tasks)
            ],
            "forgetting": [
                geometry.forgetting_bound(betas[old], [steps[t] for t in after], rounds, lr, smooth, g2)
                for old, after in enumerate(later)
            ],
            "taskwise_canonical": [
                finite(geometry.taskwise_bound_canonical(gaps[t], rho[t], rounds, smooth, g2)) for t in range(tasks)
            ],
            "forgetting_canonical": [geometry.forgetting_bound_canonical(b, rounds, smooth, g2) for b in betas],
            "ft_loss_canonical": geometry.loss_forgetting_bound(
                tasks, geometry.mean_interference(beta), rounds, smooth, g2
            ),
            "round_increase": _square(
                [[geometry.round_bound(b, steps[t], lr, smooth, g2) for b in row] for t, row in enumerate(beta)]
            ),
            "drift": [geometry.drift_bound(worst[1], lr, g2) if worst else None for worst in record["drift"]],
        }

    def _layers(self, task: int) -> list[Layer]:
        """What projection acts on in a task: layers with a projector, and where nothing is projected those that move.

        In the first task nothing is projected: there it is what later tasks may move.
        """
        backbone, projectors = self._server.network.backbone, self._projectors()
        still = frozen_prefixes(self._server.settings.model, max(task, 1))
        found = (layer for group in find_layers(backbone, False).values() for layer in group)
        moving = {name for name, parameter in backbone.named_parameters() if parameter.requires_grad}
        return [
            layer
            for layer in found
            if not layer.parameter.startswith(still) and (layer.name in projectors or layer.parameter in moving)
        ]

    def _projectors(self) -> dict[str, Projector]:
        return {layer.name: projector for layer, projector in self._server.site.view.projectors}

    def _gradient(self, task: int, layers: list[Layer]) -> tuple[float, dict[str, Tensor], float]:
        """L^(t), ∇L^(t) by layer as (out, d), and the largest client's mean ‖∇ℓ‖² over its batches."""
        parameters = dict(self._server.network.backbone.named_parameters())
        wanted = {layer.parameter: parameters[layer.parameter] for layer in layers}
        flags = {name: parameter.requires_grad for name, parameter in wanted.items()}
        total = {name: torch.zeros_like(parameter.requires_grad_(True)) for name, parameter in wanted.items()}
        loss_sum, squares = 0.0, dict[int, list[float]]()
        for client, share, loss in self._losses(task):
            made = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True, materialize_grads=True)
            gradients = dict(zip(wanted, made, strict=True))
            for name, gradient in gradients.items():
                total[name] += gradient * share
            loss_sum += loss.item() * share
            square = sum(layer.weight(gradients).double().square().sum().item() for layer in layers)
            squares.setdefault(client, []).append(square)
        for name, flag in flags.items():
            wanted[name].requires_grad_(flag)
        second = max((float(np.mean(values)) for values in squares.values()), default=0.0)
        return loss_sum, {layer.name: layer.weight(total) for layer in layers}, second

    def _loss(self, task: int) -> float:
        """L^(t) at the server's model (Eq. 18)."""
        with torch.no_grad():
            return sum(loss.item() * share for _, share, loss in self._losses(task))

    def _losses(self, task: int) -> Iterator[tuple[int, float, Tensor]]:
        """(client, share of L^(t), loss) of every batch of a task, as clients that have the server's model see it."""
        server, train = self._server, self._server.settings.train
        shares = {c: server.stream.client_samples(task, c) for c in server.stream.clients(task)}
        shares = {client: samples for client, samples in shares.items() if len(samples)}
        weighted = train.average == "weighted"
        everything = sum(map(len, shares.values())) if weighted else len(shares)
        server.network.eval()
        for client, samples in shares.items():
            p_k = (len(samples) if weighted else 1) / everything
            local = self._local(client, task)
            with torch.no_grad():
                server.method.begin_round(local)
            for start in range(0, len(samples), train.batch):
                images, labels = server.stream.train_batch(task, samples[start : start + train.batch])
                loss = server.method.loss(local, images.to(server.site.device), labels.to(server.site.device))
                yield client, p_k * len(labels) / len(samples), loss

    def _local(self, client: int, task: int) -> Local:
        """A client at the beginning of a round, always the same one: its loss is one function of W."""
        site, stream = self._server.site, self._server.stream
        own = Belongings(self._private(client), client, self._server.method.state)
        return Local(site, Holding(stream, client), self._server.cache, own, task, round=0)

    def _compare(self, gradient: dict[str, Tensor], layers: list[Layer], first: bool) -> None:
        """L from two iterates of one task in a row."""
        weights = {name: p.detach() for name, p in self._server.network.backbone.named_parameters()}
        point = {layer.name: layer.weight(weights).clone() for layer in layers}
        if self._previous and not first:
            moved = _distance(point, self._previous, "weight/")
            turned = _distance(gradient, self._previous, "gradient/")
            if moved > 0:
                record = self._server.progress.geometry
                record["smoothness"] = max(record["smoothness"], turned / moved)
        self._previous = {f"weight/{name}": tensor.cpu() for name, tensor in point.items()}
        self._previous |= {f"gradient/{name}": tensor.cpu().contiguous() for name, tensor in gradient.items()}

    def _see(self, ask: Ask, client: int, message: Message) -> None:
        """Lemma 3: how far a client went in a measured round, ‖W_k^(t,e,S) − W^(t,e−1)‖²."""
        site, exchange = self._server.site, self._server.method.exchange(ask.exchange)
        if not exchange.trains or ask.round is None or ask.round % self._every:
            return
        try:
            exchange.check(answers(message, ask.step), site)
        except Exception:  # the server leaves it out, and says so
            return
        layers = self._layers(ask.task)
        sent = {f"backbone.{layer.parameter}" for layer in layers} & message.tensors.keys()
        went = site.wire.unpack({name: message.tensors[name] for name in sent})
        distance = 0.0
        for layer in layers:
            if (name := f"backbone.{layer.parameter}") in sent:
                weight = self._server.network.get_parameter(name).detach()
                change = layer.weight({layer.parameter: went[name].to(weight.device) - weight})
                distance += change.double().square().sum().item()
        steps = self._steps(len(self._server.stream.client_samples(ask.task, client)))
        worst = self._server.progress.geometry["drift"][ask.task]
        if not worst or distance * worst[1] ** 2 > worst[0] * steps**2:
            worst[:] = [distance, steps]

    def _sizes(self, task: int) -> list[int]:
        stream = self._server.stream
        return [len(stream.client_samples(task, client)) for client in stream.clients(task)]

    def _steps(self, samples: int) -> int:
        """S: the local steps of a client with so many samples in one round."""
        train = self._server.settings.train
        return sum(1 for _ in local_batches(np.arange(samples), train, np.random.default_rng(0)))


class _Watched:
    """An engine whose replies are seen on their way, together with what was asked."""

    def __init__(self, engine: Engine, see: Callable[[Ask, int, Message], None]) -> None:
        self._engine, self._see = engine, see

    def ask(self, requests: Iterable[Request]) -> Iterator[Reply]:
        asked: dict[int, Ask] = {}

        def noted() -> Iterator[Request]:
            for request in requests:
                asked[request.client] = Ask.of(request.parcel[0])
                yield request

        for reply in self._engine.ask(noted()):
            if reply.message is not None:
                self._see(asked[reply.client], reply.client, reply.message)
            yield reply

    def close(self) -> None:
        self._engine.close()


def _square(rows: list[list[Any]]) -> list[list[Any]]:
    """Task → old task, with None where a task is no old one."""
    return [[*row, *[None] * (len(rows) - len(row))] for row in rows]


def _distance(now: dict[str, Tensor], before: Tensors, prefix: str) -> float:
    squares = ((tensor.cpu().double() - before[prefix + name].double()).square().sum() for name, tensor in now.items())
    return sqrt(sum(square.item() for square in squares))
