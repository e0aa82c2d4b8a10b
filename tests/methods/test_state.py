"""State is declared once: what may be kept, in which form, and who has it."""

import pytest
import torch

import fedprotip
from fedprotip.methods.local import Belongings
from fedprotip.methods.parts.references import References
from fedprotip.methods.state import Form, Kept, Knowledge
from fedprotip.store.clients import ClientStore
from fedprotip.store.objects import ObjectFolder
from tests.small import quick, small

DECLARED = (
    Kept("bases", "shared", {"layers/*": Form("d r"), "ranks": Form("t", torch.int64)}, artefact=True),
    Kept("hints", "shared", {"*": Form("c", torch.float64)}),
    Kept("table", "server", {"*": Form("k t t")}, artefact=True),
    Kept("tally", "server", {"n": Form("", torch.int64)}),
    Kept("memory", "private", {"images": Form("n 1 8 8"), "labels": Form("n", torch.int64)}),
)


@pytest.fixture
def known():
    return Knowledge(DECLARED)


@pytest.mark.parametrize(
    ("sizes", "shape", "fits"),
    [
        ("", (), True),
        ("", (1,), False),
        ("d r", (5, 0), True),
        ("d r", (5,), False),
        ("k t t", (5, 3, 3), True),
        ("k t t", (5, 3, 4), False),
        ("n 1 8 8", (2, 1, 8, 8), True),
        ("n 1 8 8", (2, 3, 8, 8), False),
        ("23", (23,), True),
        ("23", (24,), False),
    ],
)
def test_a_form_knows_its_shapes(sizes, shape, fits):
    assert Form(sizes).fits(torch.zeros(shape)) is fits


STRANGE = {
    "transposed": lambda t: t.T.contiguous().T,
    "every second": lambda t: t.repeat_interleave(2, 0)[::2],
    "expanded": lambda t: t[:1].expand(6, -1),
    "another dtype": lambda t: t.double(),
    "half": lambda t: t.bfloat16(),
    "with a gradient": lambda t: torch.nn.Parameter(t),
}


@pytest.mark.parametrize("way", STRANGE)
@pytest.mark.parametrize("enter", ["item", "update", "update by pairs", "or", "setdefault"])
def test_whatever_enters_has_one_form(known, way, enter):
    tensor = STRANGE[way](torch.arange(24.0).view(6, 4))
    if enter == "item":
        known["bases/layers/1.weight"] = tensor
    elif enter == "update":
        known.update({"bases/layers/1.weight": tensor})
    elif enter == "or":
        known |= {"bases/layers/1.weight": tensor}
    elif enter == "setdefault":
        assert known.setdefault("bases/layers/1.weight", tensor) is known["bases/layers/1.weight"]
        known.setdefault("bases/layers/1.weight", torch.zeros(6, 4))
    else:
        known.update([("bases/layers/1.weight", tensor)])
    kept = known["bases/layers/1.weight"]
    assert kept.dtype == torch.float32
    assert kept.is_contiguous()
    assert not kept.requires_grad
    assert torch.equal(kept, tensor.detach().float())


@pytest.mark.parametrize("name", ["nonsense/w", "bases", "bases/nonsense", "memory/images", "layers/1.weight", ""])
def test_undeclared_names_are_refused(known, name):
    with pytest.raises(KeyError, match="is not declared"):
        known[name] = torch.zeros(2, 2)
    with pytest.raises(KeyError, match="is not declared"):
        known.update({name: torch.zeros(2, 2)})
    with pytest.raises(KeyError, match="is not declared"):
        known |= {name: torch.zeros(2, 2)}
    assert not known


def test_a_shape_that_was_not_declared_is_refused(known):
    with pytest.raises(ValueError, match=r"table/values has shape \(2, 3, 4\), declared is \(k t t\)"):
        known["table/values"] = torch.zeros(2, 3, 4)


def test_a_method_without_state_keeps_nothing():
    with pytest.raises(KeyError, match="its state has: nothing"):
        Knowledge()["anything"] = torch.zeros(1)


def test_what_clients_have_and_what_becomes_a_file_follow_from_the_declaration(known):
    known.update(
        {
            "bases/layers/1.weight": torch.eye(3, 2),
            "bases/ranks": torch.tensor([2]),
            "hints/a": torch.ones(4),
            "table/values": torch.zeros(1, 2, 2),
            "tally/n": torch.tensor(7),
        }
    )
    assert set(known.shared()) == {"bases/layers/1.weight", "bases/ranks", "hints/a"}
    assert set(known.groups()) == {"bases", "hints", "table", "tally"}
    assert set(known.groups("server")) == {"table", "tally"}
    files = known.artefacts()
    assert {name: set(entries) for name, entries in files.items()} == {
        "bases": {"layers/1.weight", "ranks"},
        "table": {"values"},
    }
    assert torch.equal(files["bases"]["layers/1.weight"], torch.eye(3, 2))


@pytest.fixture
def own(tmp_path):
    objects = ObjectFolder(tmp_path / "objects")
    objects.create()
    return Belongings(ClientStore(objects, 0), 3, DECLARED)


def test_a_clients_own_state_has_its_declared_form_too(own):
    images = torch.rand(2, 8, 8, 1).permute(0, 3, 1, 2).double()
    own.put("memory-4", {"images": images, "labels": torch.tensor([1, 2], dtype=torch.int32)})
    found = own.get("memory-4")
    assert found["images"].dtype == torch.float32
    assert found["images"].is_contiguous()
    assert torch.equal(found["images"], images.float())
    assert found["labels"].dtype == torch.int64
    assert own.get("memory-5") is None


@pytest.mark.parametrize("name", ["bases", "nonsense", "memorys", "tally"])
def test_a_client_keeps_only_what_is_declared_as_private(own, name):
    with pytest.raises(KeyError, match="not declared as private"):
        own.put(name, {})
    with pytest.raises(KeyError, match="is not declared"):
        own.put("memory", {"nonsense": torch.zeros(1)})


def test_a_simulated_client_knows_what_a_real_one_is_told_and_no_more(tmp_path, monkeypatch):
    """The local engine reads the server's knowledge; what belongs to the server alone must not be in it."""
    seen, original = set(), References.answer

    def answer(self, local):
        seen.update(name.partition("/")[0] for name in local.known)
        return original(self, local)

    monkeypatch.setattr(References, "answer", answer)
    quick(monkeypatch)
    fedprotip.run(small(), out=tmp_path / "r")
    assert seen == {"subspaces", "left"}
