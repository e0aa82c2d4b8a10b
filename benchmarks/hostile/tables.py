"""Attacks on references and calibration, and lies about presence."""

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.hostile.door import (
    CALIBRATION,
    EVERY,
    LONG,
    MODEL,
    PRESENCE,
    REFERENCE,
    STATISTICS,
    Change,
    Said,
    Scene,
    attack,
    moved,
    several,
    told,
    with_tensors,
)
from benchmarks.hostile.statistics import weighing
from fedprotip.messages import SAMPLES, Message


def table(**change: Callable[[Tensor], Tensor]) -> Change:
    return lambda message, scene: with_tensors(
        message, {name: change[name](tensor) if name in change else tensor for name, tensor in message.tensors.items()}
    )


several(
    (REFERENCE,),
    "References that are none",
    {
        "references_equal": table(values=torch.ones_like, variances=torch.ones_like),
        "references_zero": table(values=torch.zeros_like, variances=torch.zeros_like),
        "references_1e38": table(
            values=lambda t: torch.full_like(t, 3e38), variances=lambda t: torch.full_like(t, 3e38)
        ),
        "references_1e15": table(values=lambda t: torch.full_like(t, 1e15)),
        "references_reversed": table(values=lambda t: t.flip(1)),
        "variances_zero": table(variances=torch.zeros_like),
        "variances_1e38": table(variances=lambda t: torch.full_like(t, 3e38)),
        "reference_counts_2_to_40": table(counts=lambda t: torch.full_like(t, SAMPLES), values=lambda t: t.flip(1)),
        "reference_counts_zero": table(counts=torch.zeros_like),
    },
)
several(
    (CALIBRATION,),
    "A calibration that is none",
    {
        "losses_for_sure_answers": table(loss=lambda t: torch.linspace(0, 1e9, t.shape[1], dtype=t.dtype).expand_as(t)),
        "losses_for_unsure_answers": table(
            loss=lambda t: torch.linspace(1e9, 0, t.shape[1], dtype=t.dtype).expand_as(t)
        ),
        "losses_1e308": table(loss=lambda t: torch.full_like(t, 1.7e308)),
        "distances_2_to_40": table(distances=lambda t: torch.full_like(t, SAMPLES)),
        "distances_far_out": table(
            distances=lambda t: torch.zeros_like(t).index_fill(1, torch.tensor(t.shape[1] - 1), 10**6)
        ),
        "calibration_zero": table(right=torch.zeros_like, loss=torch.zeros_like, distances=torch.zeros_like),
    },
)
several(
    (PRESENCE,),
    "A number of samples that it does not have, when it joins",
    {
        "presence_zero": told({"samples": 0}),
        "presence_2_to_40": told({"samples": SAMPLES}),
        "absent_then_present": lambda m, s: with_tensors(m, {}, samples=0 if s.ask.task % 2 else m.meta["samples"]),
    },
)
several(
    (REFERENCE,),
    "References below zero",
    {
        "references_negative": table(values=lambda t: -t),
        "reference_counts_negative": table(counts=lambda t: -t),
    },
    refused=True,
)
several(
    (CALIBRATION,),
    "A calibration below zero",
    {
        "losses_negative": table(loss=lambda t: -t - 1),
        "distances_negative": table(distances=lambda t: t - 1),
    },
    refused=True,
)
several(
    (PRESENCE,),
    "No number of samples, when it joins",
    {
        "presence_negative": told({"samples": -1}),
        "presence_float": told({"samples": 7.0}),
        "presence_text": told({"samples": "x" * LONG}),
        "presence_nested": told({"samples": {"samples": [1]}}),
        "presence_missing": lambda m, s: Message(m.kind),
        "presence_with_tensors": lambda m, s: with_tensors(m, {"model": torch.zeros(1000)}),
    },
    refused=True,
)


@attack(PRESENCE, *EVERY)
def lies_from_the_start(message: Message, scene: Scene) -> Said:
    """A trillion samples as it joins, and in whatever it says later; a negated step."""
    if scene.ask.exchange == MODEL:
        return moved(message, scene, lambda step, _: -step, samples=10**12)
    if scene.ask.exchange == STATISTICS:
        many = weighing(10**12 // max(int(message.tensors["counts"].sum()), 1))
        return many(message, scene)
    return told({"samples": 10**12})(message, scene) if scene.ask.exchange == PRESENCE else message


@attack(PRESENCE, MODEL, needs_robust=True)
def ten_times_as_many_samples(message: Message, scene: Scene) -> Said:
    """Ten times its samples as it joins and in every round, and a negated step."""
    samples = 10 * message.meta["samples"]
    if scene.ask.exchange == PRESENCE:
        return told({"samples": samples})(message, scene)
    return moved(message, scene, lambda step, _: -step, samples=samples)
