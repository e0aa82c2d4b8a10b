"""Exemplars: herding, equal shares of the memory, replay."""

import torch
import torch.nn.functional as F

from fedprotip.methods.parts.memory import chosen_rows, first_rows, herding, replayed, room, shortened, varied
from fedprotip.stream.look import Look
from fedprotip.stream.plan import Pixels
from fedprotip.stream.transforms import Augmentation


def plain_herding(features, count):
    normed = F.normalize(features.double(), dim=1)
    chosen = []
    while len(chosen) < min(count, len(features)):
        rest = [row for row in range(len(features)) if row not in chosen]
        means = torch.stack([normed[[*chosen, row]].mean(0) for row in rest])
        chosen.append(rest[int((means - normed.mean(0)).norm(dim=1).argmin())])
    return chosen


def test_herding_keeps_the_mean_of_those_chosen_near_that_of_all():
    for seed in range(5):
        features = torch.randn(20, 6, generator=torch.Generator().manual_seed(seed)) + 1
        assert herding(features, 12).tolist() == plain_herding(features, 12)


def test_no_sample_is_chosen_twice_and_fewer_are_the_first_of_more():
    features = torch.ones(7, 3)  # where repeats would be as good
    assert sorted(herding(features, 100).tolist()) == list(range(7))
    features = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
    assert herding(features, 20)[:5].tolist() == herding(features, 5).tolist()
    assert len(herding(features, 0)) == 0


def test_classes_share_the_memory():
    assert [room(100, classes) for classes in (1, 3, 7, 200)] == [100, 33, 14, 0]


def test_a_class_that_is_missing_has_no_exemplars():
    features, labels = torch.randn(9, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([3, 5, 3] * 3)
    rows = chosen_rows(features, labels, 2)
    assert labels[rows].tolist() == [3, 3, 5, 5]
    assert rows[2:].tolist() == [[1, 4, 7][row] for row in herding(features[labels == 5], 2)]
    assert len(chosen_rows(features[:0], labels[:0], 2)) == 0


def test_truncation_keeps_the_first_of_every_class():
    labels = torch.tensor([1, 1, 1, 4, 4, 2])
    assert first_rows(labels, 2).tolist() == [0, 1, 3, 4, 5]
    kept = shortened({"images": torch.arange(6.0), "labels": labels}, 2, without=torch.tensor([4]))
    assert kept["images"].tolist() == [0, 1, 5]
    assert kept["labels"].tolist() == [1, 1, 2]


def own(passes, samples=10, batch=4):
    for _ in range(passes):
        for part in torch.arange(samples).split(batch):
            yield part.float().view(-1, 1, 1, 1).repeat(1, 1, 2, 2), part


def test_every_pass_sees_every_exemplar_once_in_batches_of_the_usual_length():
    exemplars = {"images": torch.arange(100, 123).float().view(-1, 1, 1, 1).repeat(1, 1, 2, 2)}
    exemplars["labels"] = torch.arange(100, 123)
    batches = list(replayed(own(3), exemplars, 10, 4, torch.Generator().manual_seed(0), None))
    assert all(torch.equal(images[:, 0, 0, 0], labels.float()) for images, labels in batches)
    assert max(len(labels) for _, labels in batches) <= 4
    seen = torch.cat([labels for _, labels in batches])
    assert (seen.bincount(minlength=123)[[*range(10), *range(100, 123)]] == 3).all()
    orders = [labels[labels >= 100].tolist() for labels in seen.chunk(3)]
    assert orders[0] != orders[1]
    assert sum(bool((labels >= 100).any() and (labels < 100).any()) for _, labels in batches) > len(batches) / 2


def looking(**how):
    pixels = Pixels(shape=(1, 6, 6), given=(1, 6, 6), mean=(0.3,), std=(0.4,))
    how = Augmentation(**how)
    return Look(pixels, how, how, ("any",))


def test_kept_images_are_augmented_by_the_steps_that_new_ones_are():
    """Borders are black and light changes, though they are kept normalised."""
    new = torch.randint(256, (8, 1, 6, 6), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    look = looking(pad=2, brightness=0.3)
    found = varied(look.batch(new), look, torch.Generator().manual_seed(1))
    torch.testing.assert_close(found, look.batch(new, torch.Generator().manual_seed(1)))


def test_replayed_images_vary_as_new_ones_do():
    images = looking().batch(
        torch.randint(256, (8, 1, 6, 6), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    )
    exemplars = {"images": images, "labels": torch.arange(8)}
    new = [(torch.zeros(8, 1, 6, 6), torch.full((8,), 9))]

    def seen(how, seed=0):
        parts = list(replayed(iter(new), exemplars, 8, 100, torch.Generator().manual_seed(seed), how))
        images, labels = (torch.cat(part) for part in zip(*parts, strict=True))
        return images[labels < 9], labels[labels < 9]

    same, rows = seen(None)
    assert torch.equal(same, images[rows])
    flipped, rows = seen(looking(pad=0, brightness=0.0))
    plain, mirrored = images[rows], images[rows].flip(3)
    is_plain, is_mirrored = (torch.isclose(flipped, other).flatten(1).all(1) for other in (plain, mirrored))
    assert (is_plain ^ is_mirrored).all()
    assert is_plain.any()
    assert is_mirrored.any()
    moved, rows = seen(looking(pad=2))
    assert not torch.allclose(moved, images[rows])
