"""Groups of tensors that are saved again and again."""

import pytest
import torch

from fedprotip.store.objects import ObjectFolder


@pytest.fixture
def objects(tmp_path):
    folder = ObjectFolder(tmp_path / "objects", tmp_path)
    folder.create()
    return folder


@pytest.mark.parametrize("size", [7, 1000, 300_000])
def test_what_replaces_a_group_is_written_even_where_it_gets_the_same_memory(objects, size):
    """The owner clears its dict and fills it anew, as a client does with W^(t,0): memory that is free is used again."""
    group = {}
    for value in range(20):
        group.clear()
        group["w"] = torch.full((size,), float(value))
        assert objects.read(objects.write_group("start", group))["w"][0] == value


def test_a_group_that_nobody_wrote_to_is_not_read_again(objects, monkeypatch):
    group = {"w": torch.zeros(5)}
    name = objects.write_group("start", group)
    monkeypatch.setattr(objects, "write", None)
    assert objects.write_group("start", dict(group)) == name
