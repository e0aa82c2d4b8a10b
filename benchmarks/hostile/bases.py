"""Attacks on the bases of layers and of routing."""

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.hostile.door import BASIS, Change, Said, Scene, attack, several, told, with_tensors
from fedprotip.messages import Message
from fedprotip.subspace.bank import SubspaceBank
from fedprotip.subspace.basis import orthonormalise, residual


def bases(message: Message, make: Callable[[str, Tensor], Tensor]) -> Message:
    return with_tensors(message, {n: t if n.startswith("sigma/") else make(n, t) for n, t in message.tensors.items()})


def earlier_bases(scene: Scene) -> tuple[SubspaceBank, Callable[[str, int], Tensor]]:
    bank = SubspaceBank.from_tensors(scene.site.known)

    def earlier(name: str, d: int) -> Tensor:
        return bank.routed(d) if name == "routing" else bank.basis(name, d)

    return bank, earlier


def of_rank(share: float) -> Change:
    """Random bases of this share of all directions, in every layer."""

    def change(message: Message, scene: Scene) -> Said:
        def made(name: str, basis: Tensor) -> Tensor:
            d = len(basis)
            square = torch.randn(d, d, generator=scene.chance, dtype=torch.float64)
            return torch.linalg.qr(square)[0][:, : max(int(share * d), 1)].to(basis.dtype)

        return bases(message, made)

    return change


def more_directions(count: int) -> Change:
    """The honest bases and so many directions more in every layer."""

    def change(message: Message, scene: Scene) -> Said:
        def made(name: str, basis: Tensor) -> Tensor:
            room = len(basis) - basis.shape[1]
            more = torch.randn(len(basis), min(count, room), generator=scene.chance)
            return torch.cat([basis, orthonormalise(residual(more, basis)).to(basis)], 1)

        return bases(message, made)

    return change


several(
    (BASIS,),
    "Bases that would freeze layers for good",
    {
        "full_rank_basis": of_rank(1),
        "basis_of_60_percent": of_rank(0.6),
        "basis_of_30_percent": of_rank(0.3),
        "basis_8_more_directions": more_directions(8),
        "basis_40_more_directions": more_directions(40),
    },
)


def energies(captured: float | None = None, tail: float | None = None) -> Change:
    """What earlier bases are said to capture of every layer, and what was cut off; None: as it was."""

    def change(message: Message, scene: Scene) -> Said:
        told: dict[str, list[float]] = message.meta.get("rest", {})
        rest = {
            name: [was if new is None else new for was, new in zip(known, (captured, tail), strict=True)]
            for name, known in told.items()
        }
        return with_tensors(message, message.tensors, rest=rest) if rest else message

    return change


several(
    (BASIS,),
    "Energies beside those of the basis that nobody has: earlier bases hold everything, or nothing is ever enough",
    {
        "captured_1e30": energies(captured=1e30),
        "tail_1e30": energies(tail=1e30),
        "captured_and_tail_largest": energies(3.4e38, 3.4e38),
    },
)
several(
    (BASIS,),
    "Metadata of bases that is none",
    {
        "rest_list": told({"rest": [1, 2]}),
        "rest_text": told({"rest": "all"}),
        "rest_none": told({"rest": None}),
        "rest_of_texts": lambda m, s: with_tensors(m, m.tensors, rest=dict.fromkeys(m.tensors, "text")),
        "rest_of_five": lambda m, s: with_tensors(m, m.tensors, rest=dict.fromkeys(m.tensors, [1.0] * 5)),
        "rest_1e308": lambda m, s: with_tensors(m, m.tensors, rest={key: [1e308, 1e308] for key in m.tensors}),
    },
)


@attack(BASIS)
def basis_beside_the_data(message: Message, scene: Scene) -> Said:
    """Directions that its data do not use, as many as its data use."""
    _, earlier = earlier_bases(scene)

    def made(name: str, basis: Tensor) -> Tensor:
        used = torch.cat([basis.double(), earlier(name, len(basis)).double()], 1)
        every, sizes, _ = torch.linalg.svd(used)  # the last columns of a full one span what is left
        beside = every[:, int((sizes > 1e-6).sum()) :]
        return beside[:, : max(basis.shape[1], 1)].to(basis.dtype) if beside.shape[1] else basis

    return bases(message, made)


@attack(BASIS)
def only_routing_full_rank(message: Message, scene: Scene) -> Said:
    """A routing basis of all directions: its task would hold every feature."""
    return bases(message, lambda name, basis: torch.eye(len(basis), dtype=basis.dtype) if name == "routing" else basis)


@attack(BASIS)
def routing_of_another_task(message: Message, scene: Scene) -> Said:
    """The routing basis of the first task, in every task."""
    bank, _ = earlier_bases(scene)
    return bases(message, lambda name, basis: bank.routing[0] if name == "routing" and bank.routing else basis)


@attack(BASIS)
def layers_unprotected(message: Message, scene: Scene) -> Said:
    """Bases without a direction: nothing of its data is to be kept."""
    return bases(message, lambda name, basis: basis if name == "routing" else basis[:, :0])


@attack(BASIS, refused=True)
def routing_empty(message: Message, scene: Scene) -> Said:
    """A routing basis without a direction."""
    return bases(message, lambda name, basis: basis[:, :0])


@attack(BASIS, refused=True)
def basis_not_orthonormal(message: Message, scene: Scene) -> Said:
    """The same column again and again."""
    return bases(message, lambda name, basis: basis[:, :1].repeat(1, max(basis.shape[1], 2)))


@attack(BASIS)
def basis_almost_orthonormal(message: Message, scene: Scene) -> Said:
    """Columns that are off by just what is allowed."""
    return bases(message, lambda name, basis: basis * (1 + 4.9e-5))


@attack(BASIS, refused=True)
def layers_that_are_not_there(message: Message, scene: Scene) -> Said:
    """A basis of one layer more, and of one less."""
    names = [name for name in message.tensors if name != "routing"]
    kept = {name: tensor for name, tensor in message.tensors.items() if name not in names[:1]}
    return with_tensors(message, kept | {"99.weight": torch.eye(3)})


@attack(BASIS)
def energies_1e30(message: Message, scene: Scene) -> Said:
    """Singular values so large that no other client's directions count; where bases are merged by energy."""
    sizes = {name: tensor.clamp_min(1) * 1e30 for name, tensor in message.tensors.items() if name.startswith("sigma/")}
    return with_tensors(message, message.tensors | sizes)
