"""State is declared once: what may be kept, in which form, and who has it."""

import pytest
import torch

import fedprotip
from fedprotip.messages import Message
from fedprotip.methods import Exchange, base
from fedprotip.methods.local import Belongings
from fedprotip.methods.parts.references import References
from fedprotip.methods.state import Form, Kept, Knowledge
from fedprotip.settings import KNOWN, MethodSettings
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


HYPHENS = (
    Kept("old-images", "private", {"images": Form("n")}),
    Kept("old", "private", {"labels": Form("n", torch.int64)}),
)


def test_what_is_kept_may_have_hyphens_in_its_name(own):
    """The longest declared name that fits counts; in knowledge, in files and with a client."""
    own = Belongings(own.store, 3, HYPHENS)
    own.put("old-images-4", {"images": torch.ones(2)})
    own.put("old-images", {"images": torch.zeros(2)})
    own.put("old-3", {"labels": torch.ones(1, dtype=torch.int64)})
    assert torch.equal(own.get("old-images-4")["images"], torch.ones(2))
    with pytest.raises(KeyError, match="labels is not declared"):
        own.put("old-images-5", {"labels": torch.ones(1)})
    with pytest.raises(KeyError, match="labels/images is not declared"):
        own.put("old-labels", {"labels/images": torch.ones(1)})


REFUSED = {
    "another folder": (("a/b", "shared"), "not the name of a file"),
    "no name": (("", "shared"), "not the name of a file"),
    "two lines": (("a\nb", "server"), "not the name of a file"),
    "half a letter": (("a\ud800", "server"), "not the name of a file"),
    "a long name": (("a" * 240, "server"), "longer than 100 letters"),
    "nowhere": (("a", "clients"), "none of shared, server, private"),
    "the model": (("model", "shared", {"*": Form("n")}, True), "another file of the run folder"),
    "private and told": (("a", "private", {"*": Form("n")}, True), "what is private never is"),
    "no forms": (("a", "shared", {}), "needs forms"),
    "a form that is none": (("a", "shared", {"*": "n"}), "needs forms"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_kept_is_refused_when_it_is_declared(case):
    given, why = REFUSED[case]
    with pytest.raises(ValueError, match=why):
        Kept(*given, **({} if len(given) > 2 else {"forms": {"*": Form("n")}}))


@pytest.mark.parametrize("given", [("n -1",), ("n, d",), (3,), ("n", "float32"), ("n", torch.complex128), ("n", float)])
def test_a_form_that_no_tensor_or_file_has_is_refused(given):
    with pytest.raises(ValueError, match="form"):
        Form(*given)


@pytest.mark.parametrize("name", ["hints/", "hints/__metadata__", "hints/a\ud800", "hints/a\nb", "hints"])
def test_names_that_no_file_can_have_are_refused(known, name):
    with pytest.raises(KeyError, match="is not declared"):
        known[name] = torch.zeros(2)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ([1, 2], "no tensor"),
        (torch.ones(2).numpy(), "no tensor"),
        (torch.ones(2).to_sparse(), "no tensor"),
        (torch.ones(2, device="meta"), "no tensor"),
        (torch.tensor([0.5, 1.0]), "cannot hold"),
        (torch.tensor([torch.nan, 1.0]), "cannot hold"),
        (torch.tensor([1j, 0]), "cannot hold"),
    ],
    ids=str,
)
def test_what_the_declared_form_cannot_hold_is_refused(known, value, why):
    with pytest.raises(ValueError, match=why):
        known["bases/ranks"] = value
    known["bases/ranks"] = torch.tensor([1.0, 2.0])
    assert known["bases/ranks"].tolist() == [1, 2]


def declaring(monkeypatch, **hooks):
    """A method of this test alone, with the hooks of FedAvg but for these."""
    monkeypatch.setattr(base, "_methods", dict(base._methods))
    monkeypatch.setitem(KNOWN, "method.name", dict(KNOWN["method.name"]))

    class Options(MethodSettings):
        name: str = "declaring"

    quick(monkeypatch)
    return base.register(type("Declaring", (base.Method,), {"name": "declaring", "Options": Options, **hooks}))


def test_a_name_is_declared_once(monkeypatch):
    declaring(monkeypatch, state=(*DECLARED, Kept("memory", "shared", {"*": Form("n")})))
    with pytest.raises(ValueError, match="'memory' is declared twice"):
        base.create_method(small(method={"name": "declaring"}))


@pytest.mark.parametrize("word", [{"when": "ends"}, {"who": "all"}, {"combine": "median"}, {"name": ""}])
def test_an_exchange_that_would_never_take_place_is_refused(monkeypatch, word):
    exchange = type("Odd", (Exchange,), {"name": "odd", **word})
    declaring(monkeypatch, at_end=lambda self: (exchange(),))
    with pytest.raises(ValueError, match=r"none of|cannot be called"):
        base.create_method(small(method={"name": "declaring"}))


def test_shared_state_that_clients_would_not_be_told_is_refused(tmp_path, monkeypatch):
    """Simulated clients would have it, real ones not."""

    class Silent(Exchange):
        name, who = "silent", "nobody"

        def digest(self, combined, site):
            site.known["hints/a"] = torch.ones(2)

    declaring(monkeypatch, state=DECLARED, at_end=lambda self: (Silent(),))
    with pytest.raises(ValueError, match="the digest of 'silent' writes what clients share"):
        fedprotip.run(small(method={"name": "declaring"}), out=tmp_path / "r")


def test_both_ends_hear_a_digest_alike(tmp_path, monkeypatch):
    """Its metadata as JSON has them, and the same numbers by chance."""
    heard = []

    class Odd(Exchange):
        name, when, combine = "odd", "begin", "sum"

        def answer(self, local):
            return Message(self.name, {"n": torch.ones(1)})

        def digest(self, combined, site):
            return Message(self.name, combined.tensors, {"shape": (1, 2), 3: True})

        def receive(self, message, site):
            heard.append((message.meta, torch.rand(2, generator=site.chance("odd", 1)).tolist()))

    declaring(monkeypatch, at_begin=lambda self: (Odd(),))
    fedprotip.run(
        small("stream.tasks=1", "train.rounds=1", "run.engine=apart", method={"name": "declaring"}), out=tmp_path / "r"
    )
    assert len(heard) == 4
    assert all(found == ({"shape": [1, 2], "3": True}, heard[0][1]) for found in heard)


@pytest.mark.parametrize("name", ["bases", "nonsense", "memorys", "tally"])
def test_a_client_keeps_only_what_is_declared_as_private(own, name):
    with pytest.raises(KeyError, match="not declared as private"):
        own.put(name, {})
    with pytest.raises(KeyError, match="not declared as private"):
        own.get(name)
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
