"""Attacks on references and calibration, and lies about presence."""

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.hostile.door import (
    ALIKE,
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
from benchmarks.hostile.statistics import features_times, filled_up, swapped, weighing
from fedprotip.inference.calibration import MOST_LOSS
from fedprotip.messages import SAMPLES, Message
from fedprotip.methods.parts.statistics import combination


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
        "calibration_zero": table(**dict.fromkeys(("right", "still", "apart", "loss", "distances"), torch.zeros_like)),
    },
)


def said_right(message: Message, right: Tensor, **others: Tensor) -> Said:
    """So many right answers of every way, and ways that are apart as seldom as that allows."""
    apart = (right - right[:, None]).abs()
    return with_tensors(message, message.tensors | {"right": right, "apart": apart} | others)


def judging(right: Callable[[Tensor], Tensor]) -> Change:
    """What it says of every way, from what it found (ways,): 1 is all right and no loss at all, 0 all wrong."""

    def change(message: Message, scene: Scene) -> Said:
        samples, best = message.tensors["distances"][0].sum(), right(message.tensors["right"])
        loss = (MOST_LOSS * samples * (1 - best)).double()[:, None].expand_as(message.tensors["loss"]).clone()
        return said_right(message, samples * best, still=samples * best, loss=loss)

    return change


def turned_round(message: Message, scene: Scene) -> Said:
    """The better a way was, the worse it is said to be."""
    found = message.tensors["right"]
    return said_right(message, found.max() + found.min() - found, still=torch.zeros_like(found))


def worst(found: Tensor) -> Tensor:
    """The way that was right least often."""
    return torch.nn.functional.one_hot(found.argmin(), len(found))


def forged_losses(start: float, end: float) -> Change:
    """Losses between none and the largest possible, from the lowest to the highest temperature."""

    def change(message: Message, scene: Scene) -> Said:
        loss, samples = message.tensors["loss"], message.tensors["distances"][0].sum()
        grid = MOST_LOSS * samples * torch.linspace(start, end, loss.shape[1], dtype=loss.dtype)
        return with_tensors(message, message.tensors | {"loss": grid.expand_as(loss).clone()})

    return change


def all_in_bin(place: int) -> Callable[[Tensor], Tensor]:
    def change(distances: Tensor) -> Tensor:
        moved = torch.zeros_like(distances)
        moved[:, place] = distances.sum(1)
        return moved

    return change


several(
    (CALIBRATION,),
    "A calibration that could be one, and is not its own",
    {
        "right_for_the_worst_way": judging(worst),
        "right_for_the_last_way": judging(lambda t: torch.nn.functional.one_hot(torch.tensor(len(t) - 1), len(t))),
        "wrong_for_the_first_way": judging(lambda t: 1 - torch.nn.functional.one_hot(torch.tensor(0), len(t))),
        "right_for_every_way": judging(torch.ones_like),
        "wrong_for_every_way": judging(torch.zeros_like),
        "right_turned_round": turned_round,
        "nothing_lasts": table(still=torch.zeros_like),
        "forged_losses_for_sure_answers": forged_losses(0, 1),
        "forged_losses_for_unsure_answers": forged_losses(1, 0),
        "ways_never_apart": lambda m, s: said_right(m, m.tensors["right"]),
        "distances_all_near": table(distances=all_in_bin(0)),
        "distances_all_far": table(distances=all_in_bin(-1)),
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
    "References below zero, or variances that none have",
    {
        "variances_1e38": table(variances=lambda t: torch.full_like(t, 3e38)),
        "references_negative": table(values=lambda t: -t),
        "reference_counts_negative": table(counts=lambda t: -t),
    },
    refused=True,
)
several(
    (CALIBRATION,),
    "Counts and losses below zero",
    {
        "losses_negative": table(loss=lambda t: -t - 1),
        "distances_negative": table(distances=lambda t: t - 1),
        "right_negative": table(right=lambda t: -t - 1),
        "still_negative": table(still=lambda t: -t - 1),
    },
    refused=True,
)
several(
    (CALIBRATION,),
    "More right answers or samples than there can be, and numbers that are none",
    {
        "right_more_than_scored": lambda m, s: with_tensors(
            m, m.tensors | {"right": m.tensors["distances"][0].sum() + torch.ones_like(m.tensors["right"])}
        ),
        "still_more_than_right": table(still=lambda t: t + 10**6),
        "apart_more_than_scored": table(apart=lambda t: t + 10**6),
        "right_2_to_62": table(right=lambda t: torch.full_like(t, 2**62)),
        "right_nan": table(right=lambda t: t * torch.nan),
        "losses_nan": table(loss=lambda t: t * torch.nan),
        "losses_infinite": table(loss=lambda t: t + torch.inf),
        "more_scored_than_held_back": table(
            right=lambda t: t + 10**6, distances=lambda t: t + 10**6 * (torch.arange(t.shape[1]) == 0)
        ),
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
    if ALIKE.get(scene.ask.exchange) == STATISTICS or scene.ask.exchange == STATISTICS:
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


@attack(PRESENCE, MODEL, needs_robust=True)
def ten_times_as_many_steps(message: Message, scene: Scene) -> Said:
    """Ten times its samples, and a negated step that is as much longer as ten times the steps would excuse."""
    samples = 10 * message.meta["samples"]
    if scene.ask.exchange == PRESENCE:
        return told({"samples": samples})(message, scene)
    return moved(message, scene, lambda step, _: -10 * step, samples=samples)


@attack(PRESENCE, MODEL, STATISTICS, CALIBRATION)
def ten_times_as_many_of_everything(message: Message, scene: Scene) -> Said:
    """Ten times its samples wherever they count, so that nothing contradicts anything: negated steps, classes swapped
    in statistics, all right for the worst way."""
    if scene.ask.exchange in (PRESENCE, MODEL):
        return ten_times_as_many_samples(message, scene)
    if scene.ask.exchange == CALIBRATION:
        many = with_tensors(message, {name: 10 * tensor for name, tensor in message.tensors.items()})
        return judging(worst)(many, scene)
    stated = 10 * int(scene.past[PRESENCE][-1].meta["samples"])
    return filled_up(swapped(message), scene, with_held_back(scene, stated))


@attack(PRESENCE, MODEL, STATISTICS)
def ten_times_long_and_short(message: Message, scene: Scene) -> Said:
    """Ten times its samples, negated steps, and features almost twice as long in one task and as short in the next."""
    if scene.ask.exchange in (PRESENCE, MODEL):
        return ten_times_as_many_samples(message, scene)
    stated = 10 * int(scene.past[PRESENCE][-1].meta["samples"])
    many = filled_up(message, scene, with_held_back(scene, stated))
    return features_times(0.55 if scene.ask.task % 2 else 1.9)(many, scene)


def with_held_back(scene: Scene, samples: int) -> int:
    """How many samples a client must have summed that says it trains on so many."""
    settings = scene.site.settings
    summed = combination(settings) == "sum" and scene.ask.exchange != "start"
    return int(samples / (1 - settings.clients.held_back) + 1e-9) if summed else samples
