"""Attacks on class statistics."""

import torch
from torch import Tensor

from benchmarks.hostile.door import STATISTICS, Change, Said, Scene, attack, raw, several, told, with_tensors
from fedprotip.inference.statistics import pack, unpack
from fedprotip.messages import SAMPLES, Message


def statistics(message: Message, counts: Tensor, sums: Tensor, moment: Tensor) -> Message:
    packed = {"counts": counts.long(), "sums": sums.float(), "moment": pack(moment).float()}
    return with_tensors(message, packed)


def parts(message: Message) -> tuple[Tensor, Tensor, Tensor]:
    """Counts (C,), sums (C, d) and second moment (d, d)."""
    sums = message.tensors["sums"].double()
    return message.tensors["counts"], sums, unpack(message.tensors["moment"].double(), sums.shape[1])


def features_times(factor: float) -> Change:
    """As if every feature were so many times as large: nothing contradicts anything."""

    def change(message: Message, scene: Scene) -> Said:
        counts, sums, moment = parts(message)
        return statistics(message, counts, sums * factor, moment * factor**2)

    return change


def weighing(factor: int) -> Change:
    """As if it had so many times as many samples: nothing contradicts anything."""

    def change(message: Message, scene: Scene) -> Said:
        counts, sums, moment = parts(message)
        return statistics(message, counts * factor, sums * factor, moment * factor)

    return change


several(
    (STATISTICS,),
    "Class statistics that no samples have, or none of its own",
    {
        "features_times_1000": features_times(1e3),
        "features_times_1e12": features_times(1e12),
        "features_times_3": features_times(3),
        "features_negated": features_times(-1),
        "features_times_1e_minus_6": features_times(1e-6),
        "thousandfold_statistics": weighing(1000),
        "threefold_statistics": weighing(3),
        "counts_1e9": lambda m, s: with_tensors(
            m, m.tensors | {"counts": torch.where(m.tensors["counts"] > 0, 10**9, 0)}
        ),
        "counts_2_to_40": lambda m, s: with_tensors(
            m, m.tensors | {"counts": torch.full_like(m.tensors["counts"], SAMPLES)}
        ),
        "counts_one": lambda m, s: with_tensors(m, m.tensors | {"counts": m.tensors["counts"].clamp_max(1)}),
        "sums_negated": lambda m, s: with_tensors(m, m.tensors | {"sums": -m.tensors["sums"]}),
        "statistics_zero": lambda m, s: with_tensors(m, {n: torch.zeros_like(t) for n, t in m.tensors.items()}),
    },
)
several(
    (STATISTICS,),
    "No number of classes",
    {
        "withheld_text": told({"withheld": "all"}),
        "withheld_1e308": told({"withheld": 1e308}),
        "withheld_list": told({"withheld": [1]}),
        "withheld_negative": told({"withheld": -1}),
        "withheld_huge": lambda m, s: raw(m, '{"withheld": 1' + 4000 * "0" + "}"),
        "withheld_missing": lambda m, s: Message(m.kind, m.tensors),
    },
    refused=True,
)


@attack(STATISTICS, refused=True)
def moment_with_huge_products(message: Message, scene: Scene) -> Said:
    """A moment that is no second moment: its products are larger than its squares allow."""
    counts, sums, moment = parts(message)
    products = torch.full_like(moment, 10 * float(moment.diagonal().max()))
    return statistics(message, counts, sums, products.fill_diagonal_(0) + moment.diagonal().diag())


@attack(STATISTICS, refused=True)
def moment_of_largest_floats(message: Message, scene: Scene) -> Said:
    """Alternating largest numbers beside the diagonal."""
    counts, sums, moment = parts(message)
    sign = torch.where(torch.arange(moment.numel()).view_as(moment) % 3 == 0, 1.0, -1.0)
    return statistics(message, counts, sums, torch.full_like(moment, 3e38) * (sign + sign.T).sign())


@attack(STATISTICS, refused=True)
def moment_negative(message: Message, scene: Scene) -> Said:
    """A negative second moment."""
    counts, sums, moment = parts(message)
    return statistics(message, counts, sums, -moment)


@attack(STATISTICS)
def no_scatter(message: Message, scene: Scene) -> Said:
    """Every sample lies exactly on its class mean."""
    counts, sums, _ = parts(message)
    return statistics(message, counts, sums, sums.T @ (sums / counts.clamp_min(1)[:, None]) * (1 + 1e-6))


@attack(STATISTICS)
def huge_scatter(message: Message, scene: Scene) -> Said:
    """Right means, and a scatter a million times as large."""
    counts, sums, moment = parts(message)
    between = sums.T @ (sums / counts.clamp_min(1)[:, None])
    return statistics(message, counts, sums, between + 1e6 * (moment - between))


@attack(STATISTICS)
def scatter_along_one_line(message: Message, scene: Scene) -> Said:
    """A huge scatter just where the classes differ, so that this difference counts for nothing."""
    counts, sums, moment = parts(message)
    means = sums / counts.clamp_min(1)[:, None]
    line = means[0] - means[-1]
    return statistics(message, counts, sums, moment + 1e4 * counts.sum() * torch.outer(line, line))


@attack(STATISTICS)
def means_shifted(message: Message, scene: Scene) -> Said:
    """Every class mean three norms away, and a moment that fits."""
    counts, sums, moment = parts(message)
    shift = scene.noise(sums[0]).double().abs()
    shift = shift * 3 * (sums.sum(0) / counts.sum().clamp_min(1)).norm() / shift.norm()
    whole = sums.sum(0)
    moved_moment = moment + torch.outer(whole, shift) + torch.outer(shift, whole)
    moved_moment = moved_moment + counts.sum() * torch.outer(shift, shift)
    return statistics(message, counts, sums + counts[:, None] * shift, moved_moment)


@attack(STATISTICS, needs_robust=True)
def means_swapped(message: Message, scene: Scene) -> Said:
    """The statistics of the first class under the name of the last, and so on: what other labels would give."""
    counts, sums, moment = parts(message)
    return statistics(message, counts.flip(0), sums.flip(0), moment)


@attack(STATISTICS)
def all_in_one_class(message: Message, scene: Scene) -> Said:
    """Its samples of all classes under the name of one."""
    counts, sums, moment = parts(message)
    one = torch.zeros_like(counts), torch.zeros_like(sums)
    one[0][0], one[1][0] = counts.sum(), sums.sum(0)
    return statistics(message, *one, moment)


@attack(STATISTICS)
def classes_it_does_not_have(message: Message, scene: Scene) -> Said:
    """A thousand samples of every class, all with the mean of its first features."""
    counts, sums, _ = parts(message)
    mean, total = sums.sum(0) / counts.sum().clamp_min(1), 1000 * len(counts)
    means = mean.expand(len(counts), -1)
    return statistics(message, torch.full_like(counts, 1000), 1000 * means, 1.01 * total * torch.outer(mean, mean))


@attack(STATISTICS)
def replayed_statistics(message: Message, scene: Scene) -> Said:
    """What it told about the first task, in every task."""
    return scene.past[scene.ask.exchange][0]


@attack(STATISTICS, needs_robust=True)
def means_of_an_earlier_task(message: Message, scene: Scene) -> Said:
    """Its own counts, with class means of the first task, which it was told: new classes look like old ones."""
    counts, sums, moment = parts(message)
    known = scene.site.known
    if "statistics/sums" not in known:
        return message
    means = (known["statistics/sums"] / known["statistics/counts"].clamp_min(1)[:, None])[: len(counts)]
    weights = counts.double()[:, None]
    scatter = moment - sums.T @ (sums / weights.clamp_min(1))
    return statistics(message, counts, weights * means, scatter + means.T @ (weights * means))


@attack(STATISTICS, needs_robust=True)
def all_in_the_rarest_class(message: Message, scene: Scene) -> Said:
    """All its samples under the name of the class that it has least of."""
    counts, sums, moment = parts(message)
    rarest = int(counts.argmin())
    one = torch.zeros_like(counts), torch.zeros_like(sums)
    one[0][rarest], one[1][rarest] = counts.sum(), sums.sum(0)
    return statistics(message, *one, moment)
