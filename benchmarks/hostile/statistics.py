"""Attacks on class statistics."""

import torch
from torch import Tensor

from benchmarks.hostile.door import STATISTICS, Change, Said, Scene, attack, raw, several, told, with_tensors
from fedprotip.inference.experts import BIRTH, feature_map
from fedprotip.inference.statistics import FeatureMap, pack, unpack
from fedprotip.messages import SAMPLES, Message
from fedprotip.methods.parts.statistics import feature_options


def statistics(message: Message, counts: Tensor, sums: Tensor, moment: Tensor, sketches: Tensor) -> Message:
    packed = {"counts": counts.long(), "sums": sums.float(), "moment": pack(moment).float()}
    return with_tensors(message, packed | {"sketches": sketches.float()})


def parts(message: Message) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Counts (C,), sums (C, d), second moment (d, d) and sketches (C, d, k)."""
    sums, sketches = message.tensors["sums"].double(), message.tensors["sketches"].double()
    return message.tensors["counts"], sums, unpack(message.tensors["moment"].double(), sums.shape[1]), sketches


def omega(scene: Scene) -> Tensor:
    """The columns (d, k) by which statistics are sketched."""
    site, asked = scene.site, scene.ask.exchange
    change = FeatureMap(site.network.features)
    if asked in (STATISTICS, BIRTH):
        change = feature_map(site.network, feature_options(site.settings, born=asked == BIRTH))
    return change.omega


def sketched(scene: Scene, one: Tensor, other: Tensor) -> Tensor:
    """For each class the product of two of its rows (C, d), as sketches (C, d, k) see it: a liar's fit too."""
    return one[:, :, None] * (other @ omega(scene))[:, None, :]


def wider(message: Message, scene: Scene, scatter: Tensor) -> Message:
    """Right means, and a scatter (d, d) more of every class, such that features are 1.7 times as long: none is told."""
    counts, sums, moment, sketches = parts(message)
    more = scatter * (2 * moment.trace() / (counts.sum().clamp_min(1) * scatter.trace().clamp_min(1e-30)))
    own = counts[:, None, None] * (more @ omega(scene))
    return statistics(message, counts, sums, moment + counts.sum() * more, sketches + own)


def features_times(factor: float) -> Change:
    """As if every feature were so many times as large: nothing contradicts anything."""

    def change(message: Message, scene: Scene) -> Said:
        counts, sums, moment, sketches = parts(message)
        return statistics(message, counts, sums * factor, moment * factor**2, sketches * factor**2)

    return change


def weighing(factor: int) -> Change:
    """As if it had so many times as many samples: nothing contradicts anything."""

    def change(message: Message, scene: Scene) -> Said:
        counts, sums, moment, sketches = parts(message)
        return statistics(message, counts * factor, sums * factor, moment * factor, sketches * factor)

    return change


def filled_up(message: Message, scene: Scene, samples: int) -> Message:
    """As if it had so many samples, none withheld: in proportion, and what is missing at the mean of a class."""
    counts, sums, moment, sketches = parts(message)
    factor = samples // max(int(counts.sum()), 1)
    counts, sums, moment, sketches = counts * factor, sums * factor, moment * factor, sketches * factor
    row, missing = int(counts.argmax()), samples - int(counts.sum())
    more = torch.zeros_like(sums)
    more[row] = sums[row] / counts[row].clamp_min(1)
    sketches = sketches + missing * sketched(scene, more, more)
    moment = moment + missing * torch.outer(more[row], more[row])
    counts[row] += missing
    made = statistics(message, counts, sums + missing * more, moment, sketches)
    return with_tensors(made, made.tensors, withheld=0)


def swapped(message: Message) -> Message:
    """The first class under the name of the last, and so on."""
    counts, sums, moment, sketches = parts(message)
    return statistics(message, counts.flip(0), sums.flip(0), moment, sketches.flip(0))


def in_one_class(message: Message, row: int) -> Message:
    """All its samples under the name of this class."""
    counts, sums, moment, sketches = parts(message)
    one = torch.zeros_like(counts), torch.zeros_like(sums), torch.zeros_like(sketches)
    one[0][row], one[1][row], one[2][row] = counts.sum(), sums.sum(0), sketches.sum(0)
    return statistics(message, one[0], one[1], moment, one[2])


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
    counts, sums, moment, sketches = parts(message)
    products = torch.full_like(moment, 10 * float(moment.diagonal().max()))
    return statistics(message, counts, sums, products.fill_diagonal_(0) + moment.diagonal().diag(), sketches)


@attack(STATISTICS, refused=True)
def moment_of_largest_floats(message: Message, scene: Scene) -> Said:
    """Alternating largest numbers beside the diagonal."""
    counts, sums, moment, sketches = parts(message)
    sign = torch.where(torch.arange(moment.numel()).view_as(moment) % 3 == 0, 1.0, -1.0)
    return statistics(message, counts, sums, torch.full_like(moment, 3e38) * (sign + sign.T).sign(), sketches)


@attack(STATISTICS, refused=True)
def moment_negative(message: Message, scene: Scene) -> Said:
    """A negative second moment."""
    counts, sums, moment, sketches = parts(message)
    return statistics(message, counts, sums, -moment, sketches)


@attack(STATISTICS)
def no_scatter(message: Message, scene: Scene) -> Said:
    """Every sample lies exactly on its class mean."""
    counts, sums, _, _ = parts(message)
    means = sums / counts.clamp_min(1)[:, None]
    more = 1 + 1e-6
    return statistics(message, counts, sums, sums.T @ means * more, sketched(scene, sums, means) * more)


@attack(STATISTICS)
def huge_scatter(message: Message, scene: Scene) -> Said:
    """Right means, and a scatter a million times as large."""
    counts, sums, moment, sketches = parts(message)
    means = sums / counts.clamp_min(1)[:, None]
    between, own = sums.T @ means, sketched(scene, sums, means)
    return statistics(message, counts, sums, between + 1e6 * (moment - between), own + 1e6 * (sketches - own))


@attack(STATISTICS)
def scatter_along_one_line(message: Message, scene: Scene) -> Said:
    """A huge scatter just where the classes differ, so that this difference counts for nothing."""
    counts, sums, moment, sketches = parts(message)
    means = sums / counts.clamp_min(1)[:, None]
    line = means[0] - means[-1]
    lines = line.expand(len(counts), -1)
    more = sketched(scene, 1e4 * counts[:, None] * lines, lines)
    return statistics(message, counts, sums, moment + 1e4 * counts.sum() * torch.outer(line, line), sketches + more)


@attack(STATISTICS)
def scatter_of_every_feature(message: Message, scene: Scene) -> Said:
    """Right means, and features that vary by themselves as much as passes: no product is negative."""
    _, _, moment, _ = parts(message)
    return wider(message, scene, moment.diagonal().diag())


@attack(STATISTICS)
def scatter_that_passes(message: Message, scene: Scene) -> Said:
    """As much scatter as passes, where the classes differ most: of features that grow and fall together."""
    counts, sums, _, _ = parts(message)
    means = sums / counts.clamp_min(1)[:, None]
    line = (means[0] - means[-1]).abs()
    return wider(message, scene, torch.outer(line, line))


@attack(STATISTICS)
def means_shifted(message: Message, scene: Scene) -> Said:
    """Every class mean three norms away, and a moment that fits."""
    counts, sums, moment, sketches = parts(message)
    shift = scene.noise(sums[0]).double().abs()
    shift = shift * 3 * (sums.sum(0) / counts.sum().clamp_min(1)).norm() / shift.norm()
    whole = sums.sum(0)
    moved_moment = moment + torch.outer(whole, shift) + torch.outer(shift, whole)
    moved_moment = moved_moment + counts.sum() * torch.outer(shift, shift)
    shifts, weights = shift.expand(len(counts), -1), counts[:, None]
    more = sketched(scene, sums, shifts) + sketched(scene, shifts, sums) + sketched(scene, weights * shifts, shifts)
    return statistics(message, counts, sums + weights * shift, moved_moment, sketches + more)


@attack(STATISTICS)
def means_swapped(message: Message, scene: Scene) -> Said:
    """The statistics of the first class under the name of the last, and so on: what other labels would give."""
    return swapped(message)


@attack(STATISTICS)
def all_in_one_class(message: Message, scene: Scene) -> Said:
    """Its samples of all classes under the name of one."""
    return in_one_class(message, 0)


@attack(STATISTICS)
def classes_it_does_not_have(message: Message, scene: Scene) -> Said:
    """A thousand samples of every class, all with the mean of its first features."""
    counts, sums, _, _ = parts(message)
    mean, total = sums.sum(0) / counts.sum().clamp_min(1), 1000 * len(counts)
    means = mean.expand(len(counts), -1)
    moment, sketches = 1.01 * total * torch.outer(mean, mean), 1010 * sketched(scene, means, means)
    return statistics(message, torch.full_like(counts, 1000), 1000 * means, moment, sketches)


@attack(STATISTICS)
def replayed_statistics(message: Message, scene: Scene) -> Said:
    """What it told about the first task, in every task."""
    return scene.past[scene.ask.exchange][0]


@attack(STATISTICS, needs_robust=True)
def means_of_an_earlier_task(message: Message, scene: Scene) -> Said:
    """Its own counts, with class means of the first task, which it was told: new classes look like old ones."""
    counts, sums, moment, sketches = parts(message)
    known = scene.site.known
    if "statistics/sums" not in known or known["statistics/sums"].shape[1] != sums.shape[1]:
        return message
    means = (known["statistics/sums"] / known["statistics/counts"].clamp_min(1)[:, None])[: len(counts)]
    weights = counts.double()[:, None]
    scatter = moment - sums.T @ (sums / weights.clamp_min(1))
    own = sketches - sketched(scene, sums, sums / weights.clamp_min(1)) + sketched(scene, weights * means, means)
    return statistics(message, counts, weights * means, scatter + means.T @ (weights * means), own)


@attack(STATISTICS, needs_robust=True)
def all_in_the_rarest_class(message: Message, scene: Scene) -> Said:
    """All its samples under the name of the class that it has least of."""
    return in_one_class(message, int(message.tensors["counts"].argmin()))
