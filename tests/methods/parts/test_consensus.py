"""Class means that contradict what most clients have."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from fedprotip.inference.statistics import Sums, pack
from fedprotip.messages import Message
from fedprotip.methods.parts import statistics
from fedprotip.methods.parts.consensus import MOST, SPREADS, Consensus

CLASSES, D = 3, 8
CENTRES = 4 * torch.eye(CLASSES, D) + 5


def told(seed, counts=(20,) * CLASSES, order=range(CLASSES), spread=1.0, low_rank=False, shift=0.0):
    """A client's statistics; `order`: which class it has under the name of each; `shift` (d,): where they are."""
    chance = torch.Generator().manual_seed(seed)
    rows = torch.arange(CLASSES).repeat_interleave(torch.tensor(counts))
    sums = Sums.zeros(CLASSES, D)
    noise = spread * torch.randn(len(rows), D, generator=chance)
    sums.add(CENTRES[torch.tensor(list(order))[rows]] + noise + shift, rows)
    tensors = {"counts": sums.counts.long(), "sums": sums.sums.float(), "sketches": sums.sketches.float()}
    if low_rank:
        tensors |= {"factor": torch.zeros(D, 1), "rest": sums.scatter().diagonal().float()}
    else:
        tensors["moment"] = pack(sums.moment).float()
    return Message(statistics.KIND, tensors, {"withheld": 0})


def objections(messages):
    consensus = Consensus([10, 11, 12], statistics._sums)
    for message in messages:
        consensus.add(message)
    return [consensus.objection(message) for message in messages]


@pytest.mark.parametrize("low_rank", [False, True])
@pytest.mark.parametrize("place", [0, 2, 4])
def test_who_swaps_classes_is_named_whatever_it_states(place, low_rank):
    messages = [told(seed, low_rank=low_rank) for seed in range(5)]
    messages[place] = told(9, (5000, 4000, 10), order=(1, 0, 2), low_rank=low_rank)
    found = objections(messages)
    assert [bool(why) for why in found] == [client == place for client in range(5)]
    assert found[place] in {
        "its mean of class 10 lies where the others have class 11",
        "its mean of class 11 lies where the others have class 10",
    }


@example(900, 30.0, 3, 6)
@example(0, 30.0, 300, 4)
@given(st.integers(0, 10**6), st.sampled_from([1e-12, 1e-3, 1.0, 4.0, 30.0]), st.integers(0, 300), st.integers(3, 6))
def test_honest_clients_are_never_named(seed, spread, most, clients):
    """However few samples they have, one many and others next to none, and however much classes overlap."""
    chance = torch.Generator().manual_seed(seed)
    counts = ((most + 1) ** torch.rand(clients, CLASSES, generator=chance)).int() - torch.randint(
        2, (clients, CLASSES), generator=chance
    )
    assert not any(objections([told(seed + place, own, spread=spread) for place, own in enumerate(counts.tolist())]))


@pytest.mark.parametrize("few", [1, 2, 5])
@pytest.mark.parametrize("seed", range(20))
def test_who_knows_a_class_that_others_hardly_have_is_not_named(seed, few):
    """The middle of means of few samples is off: of classes that overlap it lies anywhere between them."""
    counts = [(300,) * CLASSES, *[(few, 300, 300)] * 3]
    assert not any(objections([told(seed + client, own, spread=30.0) for client, own in enumerate(counts)]))


def test_of_two_nobody_knows_who_is_right():
    swapped = told(9, order=(1, 0, 2))
    assert not any(objections([told(0), swapped]))
    assert not any(objections([told(0), swapped, told(1, (0, 0, 20)), told(2, (0, 0, 20))]))
    assert objections([told(0), swapped, told(1), told(2, (0, 0, 20))])[1]


def test_one_of_two_cannot_make_the_other_look_wrong():
    """Halfway to a mean far out, beyond the next class, is where nobody's samples are."""
    far = told(9, (20, 0, 0), shift=4 * (CENTRES[1] - CENTRES[0]))
    others = [told(seed, (0, 20, 20)) for seed in (1, 2, 3)]
    assert not any(objections([told(0), far, *others]))


def test_who_has_a_class_alone_cannot_make_others_look_wrong():
    """It says that another one's samples are of a class that nobody else has."""
    alone = told(9, (0, 0, 50), order=(0, 1, 0))
    assert not any(objections([told(seed, (6, 6, 0), spread=2.0) for seed in range(4)] + [alone]))


def test_features_that_do_not_vary_or_are_none_are_not_judged():
    dead = {name: torch.zeros_like(tensor) for name, tensor in told(0).tensors.items()}
    dead["counts"] = told(0).tensors["counts"]
    assert not any(objections([Message(statistics.KIND, dead, {"withheld": 0})] * 4))
    nothing = told(0, (0, 0, 0))
    assert not any(objections([nothing] * 4))


def test_memory_does_not_grow_with_the_number_of_clients():
    consensus, one = Consensus([10, 11, 12], statistics._sums), told(0)
    for _ in range(MOST + 5):
        consensus.add(one)
    assert [len(heard) for heard in consensus._told] == [MOST] * CLASSES
    assert len(consensus._spreads) == SPREADS
    assert consensus.objection(told(9, order=(1, 0, 2)))
