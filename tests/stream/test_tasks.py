"""Which classes form which task: order, sizes, overlap."""

import re
from itertools import chain, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedprotip.errors import UsageError
from fedprotip.settings import StreamSettings
from fedprotip.stream.tasks import class_tasks, ordered, task_sizes

NAMES = [str(number) for number in range(10)]


def tasks(seed=0, **settings):
    return class_tasks(NAMES, StreamSettings(**settings), seed)


def test_classes_are_shared_out_evenly():
    assert tasks(tasks=5) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert tasks(tasks=3) == [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert tasks(tasks=1) == [list(range(10))]
    assert tasks(tasks=10) == [[label] for label in range(10)]


def test_sizes_may_be_given():
    assert tasks(tasks=2, task_size=3) == [[0, 1, 2], [3, 4, 5]]
    assert tasks(tasks=3, task_size=[1, 5, 2]) == [[0], [1, 2, 3, 4, 5], [6, 7]]


def test_neighbours_share_the_overlap():
    assert tasks(tasks=3, task_size=3, overlap=1) == [[0, 1, 2], [2, 3, 4], [4, 5, 6]]
    assert tasks(tasks=3, task_size=3, overlap=2) == [[0, 1, 2], [1, 2, 3], [2, 3, 4]]
    assert tasks(tasks=2, overlap=2) == [[0, 1, 2, 3, 4, 5], [4, 5, 6, 7, 8, 9]]


def test_the_order_may_be_named_seeded_or_natural():
    assert tasks(tasks=2, task_size=2, order=["7", "3", "5", "1"]) == [[7, 3], [5, 1]]
    assert tasks(tasks=2, order=["7", "3", "5"]) == [[7, 3], [5]]
    seeded = [list(chain(*tasks(seed, tasks=5, order="seeded"))) for seed in (0, 0, 1)]
    assert seeded[0] == seeded[1] != seeded[2]
    assert sorted(seeded[0]) == list(range(10)) != seeded[0]


def test_a_longer_stream_begins_as_the_shorter_one():
    """So a finished run can be extended."""
    for overlap in (0, 1):
        short = tasks(3, tasks=2, task_size=2, overlap=overlap, order="seeded")
        assert tasks(3, tasks=4, task_size=2, overlap=overlap, order="seeded")[:2] == short


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 40), st.integers(0, 8))
def test_tasks_cover_what_they_should_or_are_refused_with_a_valid_hint(classes, count, overlap, size):
    settings = StreamSettings(tasks=count, overlap=overlap, task_size=size)
    names = [str(number) for number in range(classes)]
    try:
        parts = class_tasks(names, settings, 0)
    except UsageError as error:
        sentence = str(error)
        assert sentence.startswith("stream.")
        hint = re.search(r"stream\.overlap = .* the nearest valid value is (\d+)\.$", sentence)
        if hint:  # what is named is the largest overlap that is possible
            nearest = settings.model_copy(update={"overlap": int(hint[1])})
            assert int(hint[1]) < min(sizes_of(classes, nearest))
            above = settings.model_copy(update={"overlap": int(hint[1]) + 1})
            with pytest.raises(UsageError, match=r"stream\.overlap"):
                task_sizes(classes, above)
        return
    assert len(parts) == count
    assert all(len(set(part)) == len(part) > overlap for part in parts)
    for before, after in pairwise(parts):
        assert before[len(before) - overlap :] == after[:overlap]
    covered = sum(len(part) for part in parts) - overlap * (count - 1)
    assert sorted(set(chain(*parts))) == list(range(covered))
    assert size or covered == classes


def sizes_of(classes, settings):
    """Sizes before the check that there are enough classes."""
    return task_sizes(max(classes, settings.task_size * settings.tasks), settings)


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"tasks": 11}, ["stream.tasks = 11", "10 classes", "nearest valid value"]),
        ({"tasks": 3, "order": ["1", "2"]}, ["stream.tasks = 3", "2"]),
        ({"tasks": 2, "task_size": 2, "overlap": 2}, ["stream.overlap = 2", "nearest valid value is 1"]),
        ({"tasks": 2, "task_size": [4, 1], "overlap": 1}, ["stream.overlap = 1", "nearest valid value is 0"]),
        ({"tasks": 1, "task_size": 2, "overlap": 3}, ["stream.overlap = 3", "nearest valid value is 1"]),
        ({"tasks": 5, "overlap": 8}, ["stream.overlap = 8", "nearest valid value is 5"]),
        ({"tasks": 2, "task_size": [2, 2, 2]}, ["stream.task_size = [2, 2, 2]", "3 entries", "stream.tasks = 2"]),
        ({"tasks": 4, "task_size": 3}, ["stream.tasks = 4", "stream.task_size = 3", "12 classes", "has 10"]),
        ({"tasks": 2, "order": ["1", "x1"]}, ["stream.order", "'x1'", "did you mean '1'"]),
        ({"tasks": 2, "order": ["1", "2", "1"]}, ["stream.order", "twice"]),
        ({"tasks": 1, "order": []}, ["stream.order = []", "natural"]),
    ],
    ids=repr,
)
def test_impossible_streams_are_one_sentence(settings, parts):
    with pytest.raises(UsageError) as caught:
        tasks(**settings)
    assert str(caught.value).endswith(".")
    for part in parts:
        assert part in str(caught.value)


def test_order_of_domains_names_them_so():
    with pytest.raises(UsageError, match="not a domain"):
        ordered(["photo", "sketch"], StreamSettings(order=["foto"]), 0, "domain")
