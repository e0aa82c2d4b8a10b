"""A reservoir holds every sample that passed with the same chance, however they came in parts."""

import torch

from fedprotip.methods.parts import reservoir


def passed(counts, capacity, seed):
    """Samples 0, 1, … pass in parts of these sizes; the label of each is its number, and so is its image."""
    kept, start, chance = reservoir.empty((1, 2, 2)), 0, torch.Generator().manual_seed(seed)
    for count in counts:
        labels = torch.arange(start, start + count)
        images = labels.float().view(-1, 1, 1, 1).expand(-1, 1, 2, 2)
        kept = reservoir.offered(kept, images, labels, capacity, chance)
        start += count
    return kept


def test_all_are_kept_while_there_is_room():
    kept = passed([3, 4], capacity=10, seed=0)
    assert kept["labels"].tolist() == list(range(7))
    assert int(kept["seen"]) == 7


def test_it_never_grows_beyond_its_size_and_images_stay_with_their_labels():
    kept = passed([5, 1, 30, 0, 7], capacity=8, seed=1)
    assert len(set(kept["labels"].tolist())) == len(kept["images"]) == 8
    assert torch.equal(kept["images"][:, 0, 0, 0].long(), kept["labels"])
    assert int(kept["seen"]) == 43


def test_every_sample_has_the_same_chance():
    """600 reservoirs of 5 of 40 samples: each is in 75 of them on average, with a deviation of 8."""
    often = torch.zeros(40)
    for seed in range(600):
        often[passed([13, 20, 7], capacity=5, seed=seed)["labels"]] += 1
    assert often.sum() == 3000
    assert often.min() > 75 - 4 * 8.1
    assert often.max() < 75 + 4 * 8.1
    assert abs(often[:20].mean() - often[20:].mean()) < 4 * 8.1 / 20**0.5 * 2**0.5  # neither old nor new ones


def test_parts_do_not_matter_only_the_order():
    assert torch.equal(passed([40], 5, seed=3)["labels"], passed([13, 27], 5, seed=3)["labels"])


def test_where_one_is_kept_the_second_takes_its_place_in_half_of_all_cases_and_the_third_in_a_third():
    for seen, share in ((1, 1 / 2), (2, 1 / 3)):
        chance = torch.Generator().manual_seed(0)
        taken = sum(int(reservoir.slots(seen, 1, 1, chance)) == 0 for _ in range(4000))
        assert abs(taken / 4000 - share) < 0.03
