"""What a method keeps, declared once: its name, where it belongs, and what its tensors look like.

    Kept("subspaces", "shared", {"layers/*": Form("d r"), "ranks/*": Form("t", torch.int64)}, artefact=True)

Checkpoints, the files of the run folder, what a newcomer receives and what a client may store follow from it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from fedprotip.store.files import Tensors, parsed, serialise
from fedprotip.store.plain import plain_name

Where = Literal["shared", "server", "private"]
OTHERS = ("model", "data")
"""Files NAME.safetensors of a run folder that are no method's."""
LONGEST = 100
"""Letters of a group's name: with what is added to it, it is the name of a file."""


@dataclass(frozen=True)
class Form:
    """The one form of a tensor: its dtype, and its sizes as words; a number is that size, equal words are equal sizes.

    >>> Form("k t t").fits(torch.zeros(5, 3, 3))
    True
    """

    sizes: str
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if not isinstance(self.sizes, str) or not all(w.isdecimal() or w.isidentifier() for w in self.sizes.split()):
            raise ValueError(f"the sizes of a form are numbers and words, as in 'n 1 d', not {self.sizes!r}")
        try:
            kept = parsed(serialise({"": torch.empty(0, dtype=self.dtype)}), "")[""].dtype == self.dtype
        except Exception:  # whatever torch or the format says to it
            kept = False
        if not kept:
            raise ValueError(f"a form cannot have the dtype {self.dtype!r}: no file keeps it")

    def fits(self, tensor: Tensor) -> bool:
        words, found = self.sizes.split(), dict[str, int]()
        if len(words) != tensor.dim():
            return False
        return all(
            size == (int(word) if word.isdecimal() else found.setdefault(word, size))
            for word, size in zip(words, tensor.shape, strict=True)
        )

    def holds(self, tensor: Tensor) -> bool:
        """Whether its numbers have this dtype; those of float may be rounded, whole ones stay what they are."""
        if tensor.is_complex():
            return self.dtype.is_complex
        exact = tensor.dtype == self.dtype or self.dtype.is_floating_point
        return exact or torch.equal(tensor.to(self.dtype).to(tensor.dtype), tensor)

    def canonical(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self.dtype).contiguous()


@dataclass(frozen=True)
class Kept:
    """A group of tensors that lasts beyond a round: NAME/… in the knowledge, or NAME and NAME-… of a client.

    shared: the server and every client have it. server: the server alone. private: a client's own, never sent.
    """

    name: str
    where: Where
    forms: Mapping[str, Form] = field(default_factory=dict)
    """Pattern of the rest of a name → form; the first match counts."""
    artefact: bool = False
    """Whether it becomes the file NAME.safetensors of the run folder."""

    def __post_init__(self) -> None:
        if self.where not in get_args(Where):
            raise ValueError(f"{self.name!r} is kept at {self.where!r}, which is none of {', '.join(get_args(Where))}")
        if len(plain_name(self.name)) > LONGEST:
            raise ValueError(f"the name {self.name[:LONGEST]!r}… of what is kept is longer than {LONGEST} letters")
        if not self.forms or not all(isinstance(form, Form) for form in self.forms.values()):
            raise ValueError(f"{self.name!r} needs forms of its tensors: pattern → Form, at least one")
        if self.artefact and (self.where == "private" or self.name in OTHERS):
            why = "what is private never is" if self.where == "private" else "that is another file of the run folder"
            raise ValueError(f"{self.name!r} cannot become a file of the run folder: {why}")

    def form(self, rest: str) -> Form | None:
        return next((form for pattern, form in self.forms.items() if fnmatchcase(rest, pattern)), None)

    def canonical(self, rest: str, tensor: Tensor) -> Tensor:
        """The tensor as it is kept; a KeyError or ValueError where it was not declared so."""
        form = self.form(rest)
        if form is None or not rest.isprintable() or rest in ("", "__metadata__"):  # the last is the format's own
            raise KeyError(f"{self.name}/{rest} is not declared by the method")
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.is_meta:
            raise ValueError(f"{self.name}/{rest} is no tensor of numbers, but {type(tensor).__name__}")
        if not form.fits(tensor):
            raise ValueError(f"{self.name}/{rest} has shape {tuple(tensor.shape)}, declared is ({form.sizes})")
        if not form.holds(tensor):
            raise ValueError(f"{self.name}/{rest} is {tensor.dtype} that {form.dtype}, as declared, cannot hold")
        return form.canonical(tensor)


def declared(state: Iterable[Kept]) -> tuple[Kept, ...]:
    """What a method says it keeps; ValueError where a name stands for two things."""
    kept = tuple(state)
    if double := [one.name for index, one in enumerate(kept) if one.name in {k.name for k in kept[:index]}]:
        raise ValueError(f"{double[0]!r} is declared twice as state of the method")
    return kept


class Knowledge(dict[str, Tensor]):
    """What is known about past tasks: named tensors, each as its method declared it.

    Everything that enters has its declared dtype and lies contiguous in memory, so that what was just computed and the
    same read from a file or a message give the same bits in every later product.
    """

    def __init__(self, declared: Iterable[Kept] = ()) -> None:
        super().__init__()
        self.declared = {kept.name: kept for kept in declared if kept.where != "private"}

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        group, _, rest = name.partition("/")
        if group not in self.declared:
            raise KeyError(
                f"{name} is not declared by the method; its state has: {', '.join(self.declared) or 'nothing'}"
            )
        super().__setitem__(name, self.declared[group].canonical(rest, tensor))

    def update(self, *entries: Any, **named: Tensor) -> None:  # dict's own and those below would pass by __setitem__
        for name, tensor in dict(*entries, **named).items():
            self[name] = tensor

    def __ior__(self, entries: Any) -> "Knowledge":  # type: ignore[override, misc]
        self.update(entries)
        return self

    def setdefault(self, name: str, tensor: Tensor) -> Tensor:
        if name not in self:
            self[name] = tensor
        return self[name]

    def groups(self, where: Where | None = None) -> dict[str, Tensors]:
        """Group → its entries under their full names; those of one place only, if given."""
        found: dict[str, Tensors] = {}
        for name, tensor in self.items():
            group = name.partition("/")[0]
            if where in (None, self.declared[group].where):
                found.setdefault(group, {})[name] = tensor
        return found

    def shared(self) -> Tensors:
        """What every client has too."""
        return {name: tensor for group in self.groups("shared").values() for name, tensor in group.items()}

    def told(self) -> "Knowledge":
        """What a client that was told everything knows."""
        known = Knowledge(self.declared.values())
        dict.update(known, self.shared())
        return known

    def artefacts(self) -> dict[str, Tensors]:
        """File → its tensors, without the group's name before theirs."""
        return {
            group: {name.removeprefix(f"{group}/"): tensor for name, tensor in entries.items()}
            for group, entries in self.groups().items()
            if self.declared[group].artefact
        }
