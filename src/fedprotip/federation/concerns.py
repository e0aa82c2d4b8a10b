"""What the owner of a run should know while it can still be changed: a sentence each, with the remedy."""

import math
from collections.abc import Iterable, Iterator, Mapping

from fedprotip.errors import listed, shortened
from fedprotip.evaluation.evaluate import Evaluation
from fedprotip.evaluation.metrics import mean
from fedprotip.federation.server import Server
from fedprotip.inference.statistics import COUNTS
from fedprotip.methods.parts.private import stated
from fedprotip.methods.parts.protection import ROUTING
from fedprotip.methods.parts.statistics import least
from fedprotip.models.capture import find_layers
from fedprotip.store.records import Number
from fedprotip.stream.advice import alike_warnings

CHANCE = 2.58
"""Standard deviations that two equally good ways differ by in one of a hundred cases."""
BY_SUBSPACES = ("cosine", "gaussian")
"""Routers that need directions of its own for every task."""
SHOWN = 5

Ways = Mapping[str, Mapping[str, list[Number]]]
"""Way → mode → accuracy by task, %; None where a task has no test samples any more."""


def at_start(server: Server) -> Iterator[str]:
    """Before the first task."""
    yield from server.method.cautions()
    yield from alike_warnings(server.stream.dataset)
    if server.settings.method.secure_noise and server.settings.method.secure:
        yield stated(server.settings, sum(server.method.rounds(task) for task in range(len(server.stream.tasks))))
    if server.method.protects and not find_layers(server.network.backbone, only_trainable=False):
        yield (
            f"model.name = {server.settings.model.name!r} has no layer of type nn.Linear or nn.Conv2d, so "
            f"{server.method.name!r} has nothing to protect: after the first task only heads learn. "
            "Choose another backbone, or a method that moves all of it."
        )


def full(server: Server) -> set[str]:
    """Layers whose subspace spans all inputs; ROUTING among them where the routing bases span all features."""
    ranks, dims = server.method.ranks(server.site.known)
    return {name for name, rank in ranks.items() if rank >= dims[name]}


def after_task(server: Server, evaluation: Evaluation, full_before: set[str], ways_before: Ways) -> Iterator[str]:
    """After a task: what is new since the one before."""
    task = server.site.task
    tests = [len(each.test) for each in server.stream.tasks[: task + 1]]
    yield from _filled(server, full(server) - full_before)
    yield from _untold(server)
    ahead = best_ahead(evaluation.ways, evaluation.chosen, tests)
    if ahead and ahead != best_ahead(ways_before, evaluation.chosen, tests[:-1]):
        figures = (f"{mean(evaluation.ways[way]['single']):.1f} %" for way in (ahead, evaluation.chosen))
        has_it = hasattr(server.settings.method, "router")
        choose = f"; a new run has it with method.router = {ahead!r}" if has_it else ""
        yield (
            "After task {} the router {!r} answers single samples better than the configured {!r}: {} and {}, more "
            "than chance explains{}.".format(task + 1, ahead, evaluation.chosen, *figures, choose)
        )


def best_ahead(ways: Ways, chosen: str, tests: list[int]) -> str:
    """The best other way in mode single, if it is ahead of the chosen one by more than chance; else nothing.

    Tasks of so many test samples; one task alone needs no router.
    """
    if len(tests) < 2 or chosen not in ways:
        return ""
    sizes = [0 if share is None else size for share, size in zip(ways[chosen]["single"], tests, strict=True)]
    if not (n := sum(sizes)):
        return ""
    right = {
        way: sum((share or 0.0) / 100 * size for share, size in zip(modes["single"], sizes, strict=True)) / n
        for way, modes in ways.items()
    }
    best = max(right, key=lambda way: right[way])
    middle = (right[best] + right[chosen]) / 2
    return best if right[best] - right[chosen] > CHANCE * math.sqrt(2 * middle * (1 - middle) / n) else ""


def _filled(server: Server, layers: set[str]) -> Iterator[str]:
    answering = server.method.answering()
    if ROUTING in layers and answering.ways and answering.ways[answering.chosen].router in BY_SUBSPACES:
        yield (
            f"After task {server.site.task + 1} the routing bases span all {server.network.features} features: a later "
            "task has no direction of its own to be found by. Fix their number with method.routing_rank = 20, or "
            "choose method.router = 'fused'."
        )
    if layers := layers - {ROUTING}:
        yield (
            f"After task {server.site.task + 1} the subspaces of {_named(sorted(layers))} span all inputs: these "
            "layers learn nothing more. A smaller method.threshold or a larger model.width leaves room for later tasks."
        )


def _untold(server: Server) -> Iterator[str]:
    """Classes of the task of which nobody sent statistics."""
    site = server.site
    labels = site.network.labels[site.network.head_of(site.task)]
    if COUNTS in site.known:
        counts = site.known[COUNTS][-len(labels) :].tolist()
        untold = [server.stream.dataset.classes[k] for k, n in zip(labels, counts, strict=True) if not n]
        if untold:
            minimum, clients = least(server.settings), len(server.progress.present)
            lacking = f"{minimum} samples" if minimum > 1 else "a sample to train on"
            remedy = "Lower statistics.minimum, or gather more samples" if minimum > 1 else "Gather samples"
            yield (
                f"No statistics of {_named(map(repr, untold))}: none of {clients} clients has {lacking}, "
                f"so answers by statistics never say it. {remedy}."
            )


def _named(names: Iterable[str]) -> str:
    return listed([shortened(name, 60) for name in names], SHOWN)
