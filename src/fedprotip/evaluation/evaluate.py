"""Every mode in one pass over the test samples of the tasks seen so far.

aware: the true task is given. agnostic: argmax over all heads, the paper's (-t). single: the task of each
sample is predicted from that sample alone. batch64: the paper's protocol, one decision for a group of 64
test samples of one task.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedprotip.inference.route import CosineRouter, relevance
from fedprotip.models import Network
from fedprotip.prefix import InputBatch, PrefixCache
from fedprotip.seeds import numpy_stream
from fedprotip.settings import Settings
from fedprotip.stream import Stream

ROUTED = ("single", "batch64")


@dataclass
class Evaluation:
    """Results after one task: per mode the accuracy (%) of every task seen, and how routing did."""

    accuracy: dict[str, list[float]]
    routing: dict[str, list[float]]  # mode → share of samples sent to a right task, by task
    confusion: dict[str, list[list[int]]]  # mode → decisions, rows = true task, columns = predicted

    def means(self) -> dict[str, float]:
        return {mode: float(np.mean(values)) for mode, values in self.accuracy.items()}

    def enter(self, matrix: dict[str, list[list[float]]], routing: dict[str, Any]) -> None:
        """Append a row to the accuracy matrices; keep the newest routing."""
        for mode, values in self.accuracy.items():
            matrix.setdefault(mode, []).append(values)
        routing.update({"by_task": self.routing, "confusion": self.confusion})


@dataclass(frozen=True)
class Answers:
    """What the model says about the test samples of one task."""

    labels: Tensor  # (n,) true global labels
    by_head: Tensor  # (n, H) the label each head would answer
    agnostic: Tensor  # (n,) the label of the largest logit of all heads
    energies: Tensor | None  # (n, T) ‖U_t U_tᵀ a‖² for routing


@torch.no_grad()
def answer(network: Network, batches: Iterable[InputBatch], router: CosineRouter | None) -> Answers:
    """One forward pass over the test samples of a task: all that any mode needs."""
    network.eval()
    device = next(network.parameters()).device
    head_labels = [torch.tensor(labels, device=device) for labels in network.labels]
    every_label = torch.cat(head_labels)
    parts: list[tuple[Tensor, ...]] = []
    for inputs, labels in batches:
        features = network.embed(inputs.to(device))
        logits = [head(features) for head in network.heads]
        by_head = torch.stack([known[z.argmax(1)] for known, z in zip(head_labels, logits, strict=True)], dim=1)
        agnostic = every_label[torch.cat(logits, dim=1).argmax(1)]
        energies = router.energies(features) if router else torch.zeros(len(labels), 0)
        parts.append((labels, by_head.cpu(), agnostic.cpu(), energies.cpu()))
    labels, by_head, agnostic, energies = (torch.cat(column) for column in zip(*parts, strict=True))
    return Answers(labels, by_head, agnostic, energies if router else None)


def evaluate(
    network: Network,
    stream: Stream,
    router: CosineRouter | None,
    seen: int,
    settings: Settings,
    cache: PrefixCache | None = None,
) -> Evaluation:
    """Evaluate on tasks 0…seen, after learning task `seen`."""
    cache, size = cache or PrefixCache(stream, settings), settings.evaluate.batch
    modes = ("aware", "agnostic", *(ROUTED if router else ()))
    result = Evaluation({mode: [] for mode in modes}, {}, {})
    if router:
        result.routing = {mode: [] for mode in ROUTED}
        result.confusion = {mode: [] for mode in ROUTED}
    for task in range(seen + 1):
        test = stream.tasks[task].test
        pieces = (test[start : start + size] for start in range(0, len(test), size))
        said = answer(network, cache.test_batches(network, task, seen, pieces), router)
        right = said.by_head == said.labels[:, None]
        result.accuracy["aware"].append(_percent(right[:, network.head_of(task)]))
        result.accuracy["agnostic"].append(_percent(said.agnostic == said.labels))
        if router and said.energies is not None:
            allowed = _right_tasks(stream, said.labels, task, seen, settings)
            for mode, groups in (("single", None), ("batch64", draw_groups(task, said, settings))):
                _enter_routed(result, mode, network, router, said, right, allowed, groups)
    return result


def _enter_routed(
    result: Evaluation,
    mode: str,
    network: Network,
    router: CosineRouter,
    said: Answers,
    right: Tensor,
    allowed: Tensor,
    groups: list[Tensor] | None,
) -> None:
    """Route every group by its pooled relevance and score its members with the head of that task.

    Without groups every sample is decided alone.
    """
    assert said.energies is not None
    if groups is None:
        samples, decisions = torch.arange(len(said.labels)), router.route(said.energies.sqrt())
        routed = decisions
    else:
        samples = torch.cat(groups)
        decisions = router.route(torch.stack([relevance(said.energies[group]) for group in groups]))
        routed = decisions.repeat_interleave(torch.tensor([len(group) for group in groups]))
    heads = torch.tensor([network.head_of(task) for task in range(len(router.bases))])[routed]
    result.accuracy[mode].append(_percent(right[samples, heads]))
    result.routing[mode].append(float(allowed[samples, routed].double().mean()))
    result.confusion[mode].append(torch.bincount(decisions, minlength=len(router.bases)).tolist())


def draw_groups(task: int, said: Answers, settings: Settings) -> list[Tensor]:
    """Groups of one task for mode batch64.

    With enough samples for `draws` groups each sample is in exactly one; else seeded draws of a group each
    (with replacement only when the task has fewer samples than a group).
    """
    size, draws, n = settings.evaluate.group, settings.evaluate.draws, len(said.labels)
    rng = numpy_stream(settings.run.seed, "groups", task)
    if n >= size * draws:
        return list(torch.from_numpy(rng.permutation(n)).split(size))
    return [torch.from_numpy(rng.choice(n, size, replace=n < size)) for _ in range(draws)]


def _right_tasks(stream: Stream, labels: Tensor, task: int, seen: int, settings: Settings) -> Tensor:
    """(n, T): tasks that are a right answer for each sample; with class overlap several hold its label."""
    if settings.stream.scenario == "domain":
        return (torch.arange(seen + 1) == task).expand(len(labels), -1)
    held = [torch.isin(labels, torch.tensor(stream.tasks[other].classes)) for other in range(seen + 1)]
    return torch.stack(held, dim=1)


def _percent(correct: Tensor) -> float:
    return 100 * float(correct.double().mean())
