"""The stream: who holds which sample of which task."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedprotip.errors import UsageError
from fedprotip.settings import load
from fedprotip.stream import build_stream
from tests.stream.samples import made_dataset


def stream(dataset=None, clients=None, seed=0, **settings):
    raw = {"stream": settings, "clients": {"held_back": 0.0} | (clients or {}), "run": {"seed": seed}}
    return build_stream(load(raw), dataset or made_dataset())


def held(found, task):
    """Samples of a task by client."""
    return {client: found.client_samples(task, client) for client in found.clients(task)}


def test_class_tasks_hold_their_samples_and_no_other():
    dataset = made_dataset()
    found = stream(dataset, tasks=3)
    assert [task.classes for task in found.tasks] == [(0, 1), (2, 3), (4, 5)]
    assert [task.name for task in found.tasks] == ["class 0, class 1", "class 2, class 3", "class 4, class 5"]
    for task in found.tasks:
        assert task.train.tolist() == np.flatnonzero(np.isin(dataset.train_labels, task.classes)).tolist()
        assert task.test.tolist() == np.flatnonzero(np.isin(dataset.test_labels, task.classes)).tolist()


@given(
    st.lists(st.integers(1, 30), min_size=4, max_size=8),
    st.integers(1, 20),
    st.sampled_from(["iid", "dirichlet"]),
    st.floats(1e-3, 1e3),
    st.integers(0, 2),
    st.integers(0, 99),
)
def test_clients_share_a_task_out_without_loss(counts, clients, partition, alpha, overlap, seed):
    dataset = made_dataset(counts, [1] * len(counts))
    found = stream(
        dataset,
        {"count": clients, "partition": partition, "alpha": alpha, "held_back": 0.0},
        seed,
        tasks=2,
        overlap=overlap,
        order="seeded",
    )
    for task in found.tasks:
        together = np.concatenate(list(held(found, task.index).values()))
        assert sorted(together) == task.train.tolist()
        assert set(dataset.train_labels[together].tolist()) <= set(task.classes)
    every = np.concatenate([task.train for task in found.tasks])
    assert len(set(every)) == len(every)  # shared classes, but no shared training sample


def test_every_task_has_a_draw_of_its_own():
    """The same 40 samples of one class in three domain tasks: three different partitions."""
    dataset = made_dataset([40], [4])
    for partition in ("iid", "dirichlet"):
        found = stream(dataset, {"partition": partition}, scenario="domain", domains="permute", tasks=3)
        draws = [str([share.tolist() for share in held(found, task).values()]) for task in range(3)]
        assert len(set(draws)) == 3


def test_a_draw_does_not_depend_on_what_was_asked_before():
    one, other = (stream(tasks=3, seed=5) for _ in range(2))
    for task in (2, 0, 1, 2):
        one.client_samples(task, 0)
    for task in range(3):
        for client in range(5):
            assert one.client_samples(task, client).tolist() == other.client_samples(task, client).tolist()
    assert str(held(stream(tasks=3, seed=6), 0)) != str(held(one, 0))


def test_clients_that_left_have_nothing_and_those_that_came_have_their_share():
    found = stream(None, {"count": 3, "roster": {"1": "0,7"}}, tasks=2, task_size=2)
    assert [found.clients(task) for task in range(2)] == [[0, 1, 2], [0, 7]]
    assert len(found.client_samples(0, 7)) == len(found.client_samples(1, 1)) == 0
    assert found.client_samples(0, 7).dtype == found.tasks[0].train.dtype
    together = np.concatenate([found.client_samples(1, client) for client in (0, 7)])
    assert sorted(together) == found.tasks[1].train.tolist()


def test_of_many_small_clients_some_hold_a_sample_back():
    """A tenth of two samples is none; one in five of these clients holds back one, by its own seed."""
    found = stream(made_dataset([200] * 2, [1] * 2), {"count": 200, "partition": "iid", "held_back": 0.1}, tasks=1)
    kept = [(len(found.client_samples(0, client)), len(found.held_back(0, client))) for client in range(200)]
    assert set(kept) == {(2, 0), (1, 1)}
    assert 20 <= sum(back for _, back in kept) <= 60


def test_more_clients_than_samples():
    found = stream(made_dataset([2, 1], [1, 1]), {"count": 40}, tasks=2)
    counts = [len(share) for share in held(found, 0).values()]
    assert sorted(counts)[-3:] in ([0, 0, 2], [0, 1, 1])
    assert sum(counts) == 2


def test_overlapping_classes_are_split_between_their_tasks():
    dataset = made_dataset([8] * 5, [2] * 5)
    found = stream(dataset, tasks=2, task_size=3, overlap=1)
    assert [task.classes for task in found.tasks] == [(0, 1, 2), (2, 3, 4)]
    shared = [set(task.train[dataset.train_labels.numpy()[task.train] == 2]) for task in found.tasks]
    assert [len(part) for part in shared] == [4, 4]
    assert not shared[0] & shared[1]
    assert set(found.tasks[0].test) & set(found.tasks[1].test) == set(np.flatnonzero(dataset.test_labels == 2))


@pytest.mark.parametrize("overlap", [1, 2])
def test_a_longer_stream_begins_as_the_shorter_one(overlap):
    dataset = made_dataset([9] * 8, [1] * 8)
    short = stream(dataset, tasks=2, task_size=3, overlap=overlap)
    long = stream(dataset, tasks=3, task_size=3, overlap=overlap)
    for task in range(2):
        assert long.tasks[task].train.tolist() == short.tasks[task].train.tolist()
        assert str(held(long, task)) == str(held(short, task))
    for before, after in pairwise(long.tasks):
        assert not set(before.train) & set(after.train)


def test_unequal_sizes_and_a_named_order():
    found = stream(tasks=2, task_size=[3, 1], order=["class 5", "class 0", "class 3", "class 1"])
    assert [task.classes for task in found.tasks] == [(5, 0, 3), (1,)]


def test_batches_are_normalised_images_with_global_labels():
    dataset = made_dataset(shape=(3, 4, 4))
    found = stream(dataset, tasks=3)
    indices = np.array([2, 0, 7])
    images, labels = found.train_batch(0, indices)
    expected = (dataset.train_images[[2, 0, 7]].numpy() / 255.0 - 0.5) / 0.25
    assert images.dtype == torch.float32
    assert images.numpy() == pytest.approx(expected, abs=1e-6)
    assert labels.tolist() == dataset.train_labels[[2, 0, 7]].tolist()
    images, labels = found.test_batch(2, indices)
    assert images.numpy() == pytest.approx((dataset.test_images[[2, 0, 7]].numpy() / 255.0 - 0.5) / 0.25, abs=1e-6)
    assert labels.tolist() == dataset.test_labels[[2, 0, 7]].tolist()
    assert found.train_batch(0, indices[:0])[0].shape == (0, 3, 4, 4)


@pytest.mark.parametrize(
    ("choice", "mean", "std"), [("dataset", (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)), ("half", 0.5, 0.5), ("none", 0.0, 1.0)]
)
def test_pixels_are_normalised_as_the_weights_expect(choice, mean, std):
    dataset = replace(made_dataset(shape=(3, 4, 4)), mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6))
    found = build_stream(load({"stream": {"tasks": 3}, "data": {"normalize": choice}}), dataset)
    pixels = dataset.train_images[:5].numpy().transpose(0, 2, 3, 1) / 255.0
    expected = ((pixels - mean) / std).transpose(0, 3, 1, 2)
    assert found.train_batch(0, np.arange(5))[0].numpy() == pytest.approx(expected, abs=1e-6)


# Domains


def test_rotated_domains_are_quarter_turns():
    dataset = made_dataset(shape=(2, 4, 4))
    found = stream(dataset, scenario="domain", domains="rotate", tasks=4)
    indices = np.arange(5)
    plain = found.train_batch(0, indices)[0]
    for task in range(4):
        turned = found.train_batch(task, indices)[0].numpy()
        assert (turned == np.rot90(plain.numpy(), task, axes=(2, 3))).all()
        assert (found.test_batch(task, indices)[1] == dataset.test_labels[indices]).all()
    assert len({found.train_batch(task, indices)[0].numpy().tobytes() for task in range(4)}) == 4


def test_permuted_domains_move_pixels_the_same_way_in_training_and_test():
    dataset = made_dataset(shape=(2, 4, 4))
    found = stream(dataset, scenario="domain", domains="permute", tasks=6)
    indices = np.arange(6)
    plain, same = found.train_batch(0, indices)[0], stream(dataset, tasks=3).train_batch(0, indices)[0]
    assert torch.equal(plain, same)
    orders = set()
    for task in range(1, 6):
        moved = found.train_batch(task, indices)[0]
        assert not torch.equal(moved, plain)
        flat, target = plain.flatten(2).numpy(), moved.flatten(2).numpy()
        order = [int(np.flatnonzero((flat == target[:, :, [p]]).all((0, 1)))[0]) for p in range(16)]
        assert sorted(order) == list(range(16))
        test, plain_test = found.test_batch(task, indices)[0], found.test_batch(0, indices)[0]
        assert torch.equal(test.flatten(2), plain_test.flatten(2)[:, :, order])
        orders.add(tuple(order))
    assert len(orders) == 5
    again = stream(dataset, scenario="domain", domains="permute", tasks=6)
    assert torch.equal(again.train_batch(3, indices)[0], found.train_batch(3, indices)[0])
    other = stream(dataset, seed=1, scenario="domain", domains="permute", tasks=6)
    assert not torch.equal(other.train_batch(3, indices)[0], found.train_batch(3, indices)[0])


@pytest.mark.parametrize("domains", ["rotate", "permute"])
def test_made_domains_hold_all_classes_and_all_samples(domains):
    found = stream(scenario="domain", domains=domains, tasks=3)
    for task in found.tasks:
        assert task.classes == tuple(range(6))
        assert len(task.train) == 21
        assert len(task.test) == 12
        assert sorted(np.concatenate(list(held(found, task.index).values()))) == list(range(21))


def test_labelled_domains_are_the_datasets_own():
    dataset = made_dataset([10, 10], [6, 6], domains=("photo", "sketch", "paint"))
    found = stream(dataset, scenario="domain", tasks=3)
    assert [task.name for task in found.tasks] == ["photo", "sketch", "paint"]
    assert sorted(np.concatenate([task.train for task in found.tasks])) == list(range(20))
    for place, task in enumerate(found.tasks):
        assert task.classes == (0, 1)
        assert (dataset.train_domains[task.train] == place).all()
        assert (dataset.test_domains[task.test] == place).all()
    plain = (dataset.train_images[[1]].numpy() / 255.0 - 0.5) / 0.25
    assert found.train_batch(1, np.array([1]))[0].numpy() == pytest.approx(plain, abs=1e-6)
    named = stream(dataset, scenario="domain", tasks=2, order=["paint", "photo"])
    assert [task.name for task in named.tasks] == ["paint", "photo"]
    assert (dataset.train_domains[named.tasks[0].train] == 2).all()
    orders = {
        tuple(task.name for task in stream(dataset, seed=s, scenario="domain", tasks=3, order="seeded").tasks)
        for s in range(8)
    }
    assert len(orders) > 1


DOMAINS = ("photo", "sketch")


@pytest.mark.parametrize(
    ("dataset", "settings", "parts"),
    [
        ({}, {"tasks": 2}, ["stream.domains = 'labelled'", "'made'", "'rotate' or 'permute'"]),
        ({"domains": DOMAINS}, {"tasks": 3}, ["stream.tasks = 3", "2 domains", "nearest valid"]),
        ({"domains": DOMAINS}, {"tasks": 1, "order": ["foto"]}, ["stream.order", "'foto'", "did you mean 'photo'"]),
        ({}, {"tasks": 5, "domains": "rotate"}, ["stream.tasks = 5", "nearest valid value is 4"]),
        ({"shape": (1, 4, 5)}, {"tasks": 2, "domains": "rotate"}, ["'rotate'", "4×5", "'permute'"]),
        ({}, {"tasks": 2, "domains": "permute", "order": "seeded"}, ["stream.order = 'seeded'", "'natural'"]),
        ({}, {"tasks": 2, "domains": "permute", "overlap": 1}, ["stream.overlap", "'class'"]),
        ({}, {"tasks": 2, "domains": "permute", "task_size": 1}, ["stream.task_size", "'class'"]),
    ],
    ids=repr,
)
def test_impossible_domain_streams_are_one_sentence(dataset, settings, parts):
    with pytest.raises(UsageError) as caught:
        stream(made_dataset(**dataset), scenario="domain", **settings)
    assert str(caught.value).endswith(".")
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(("train", "test", "part"), [((3, 0), (1, 1), "training"), ((3, 3), (1, 0), "test")])
def test_a_task_without_samples_is_refused_before_any_work(train, test, part):
    with pytest.raises(UsageError, match=rf"Task 2 \(class 1\) has no {part} samples"):
        stream(made_dataset(train, test), tasks=2)


@pytest.mark.parametrize(
    "settings",
    [{"tasks": 7}, {"tasks": 2, "task_size": 2, "overlap": 2}, {"tasks": 2, "task_size": 4}, {"domains": "rotate"}],
)
def test_impossible_class_streams_are_refused(settings):
    with pytest.raises(UsageError, match=r"^stream\."):
        stream(**settings)


def test_flips_are_refused_where_mirrored_images_mean_something_else():
    with pytest.raises(UsageError, match=r"train.augment = 'flip': 'digits' .* mirrored"):
        build_stream(load({"train": {"augment": "flip"}}))
