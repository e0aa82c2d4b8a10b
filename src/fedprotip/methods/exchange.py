"""An exchange: one question to clients and what becomes of the answers, as one object.

A round of training is one, as are the closed-form start of a head, bases, references, statistics, calibration. A method
is a list of them and a few hooks.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from torch import Tensor

from fedprotip.messages import Message
from fedprotip.store.events import Event

if TYPE_CHECKING:
    from fedprotip.methods.local import Local
    from fedprotip.methods.parts.consensus import Consensus
    from fedprotip.methods.site import Site

When = Literal["begin", "round", "end"]
Who = Literal["present", "everyone", "nobody"]
Combine = Literal["mean", "sum", "each"]


@dataclass(frozen=True)
class Sender:
    """What the server knows about the client that sent a reply."""

    client: int
    samples: int | None = None
    """Its samples of the task, as it said at the beginning; None: it was not asked, or gave no usable answer."""


class Exchange:
    """What is asked, when, of whom, and how the replies are combined.

    mean and sum are all that robust and secure aggregation need to know about an exchange. `each`: the server sees
    every reply by itself.
    """

    name: str = ""
    """Of the question; replies and what the server makes of them are messages of this kind."""
    when: When = "end"
    who: Who = "present"
    """present: those with data of the task. nobody: a step of the server alone (a generator is trained, say)."""
    combine: Combine = "each"
    needed: bool = True
    """Whether a run must stop when no client gives a usable answer."""
    needs_model: bool = True
    """Whether a client needs the current model and knowledge to answer."""
    needs_weights: bool = True
    """Whether it needs the weights of the model for that; without, it gets knowledge and digests only."""
    counts: bool = False
    """Whether replies say how many samples (`samples`) a client has of the task: those with any are present in it."""
    replaces: bool = False
    """Whether what clients are told makes void what this exchange told before in the task: they get the newest."""
    settles: bool = True
    """At the end of a task: whether the model of the last round travels as it is from here on, and W^(t,0) is
    forgotten, because what clients are told changes the bases that coordinates of its change refer to."""

    in_clear: bool = False
    """Whether replies say nothing about samples and may be seen one by one with `method.secure` too."""
    trains: bool = False
    """Whether it is what a round is for: a client may change its model to answer, which is then put back to the one it
    was sent, and `loss` is in the metadata."""
    fraction: ClassVar[int] = 32
    """Bits behind the point in a secure sum: fewer where numbers are large. 62 are shared by all clients."""
    slack: ClassVar[float] = 3.0
    """How many times as large as the others' a reply may be (`sizes`); in honest runs at most 2.2: docs/threats.md."""

    def check_words(self) -> None:
        """A ValueError where name, when, who or combine is none: such an exchange would silently not take place."""
        if not self.name or not self.name.isprintable():
            raise ValueError(f"an exchange cannot be called {self.name!r}: messages of it have this kind")
        for word, choices in (("when", When), ("who", Who), ("combine", Combine)):
            if (said := getattr(self, word)) not in get_args(choices):
                known = ", ".join(get_args(choices))
                raise ValueError(f"the exchange {self.name!r} has {word} = {said!r}, which is none of {known}")

    def due(self, site: "Site") -> bool:
        """Whether it takes place in the task that the site has begun."""
        return True

    # Client

    def answer(self, local: "Local") -> Message:
        """A client's reply, of kind `name`; without gradients unless it switches them on."""
        raise NotImplementedError(f"the exchange {self.name!r} asks clients but has no answer")

    # Server

    def check(self, message: Message, site: "Site") -> None:
        """Raise BadMessage unless this reply can be used; the kind has been checked.

        In private the sum of all replies is checked by it too: what bounds a single client belongs into `check_sender`.
        """

    def check_sender(self, message: Message, site: "Site", sender: Sender) -> None:
        """Raise BadMessage unless this reply fits what its sender said before; it has been checked by itself."""

    def sizes(self, message: Message, site: "Site") -> Mapping[str, float]:
        """What of a reply must be in line with the other clients': what it is → how large it is.

        A reply is left out when one of them is more than `slack` times the largest of the others, in this round or an
        earlier one of the task; see `federation/line.py`.
        """
        return {}

    def least(self, message: Message, site: "Site") -> Mapping[str, float]:
        """Sizes that any reply may have, whatever the others have: below them none is told apart."""
        return {}

    def effort(self, message: Message, site: "Site", sender: Sender) -> float:
        """How much work stands behind a reply; sizes may grow in proportion to it."""
        return 1.0

    def consensus(self, site: "Site") -> "Consensus | None":
        """What most replies say, by which those that contradict it are left out; None: nothing is compared so."""
        return None

    def weight(self, message: Message, site: "Site") -> float:
        """The weight of a reply in a mean or a sum."""
        return 1.0

    def origin(self, name: str, site: "Site") -> Tensor | None:
        """What a tensor of a mean was at the clients before they answered; None: zero."""
        return None

    def change(self, name: str, tensor: Tensor, site: "Site") -> Tensor | None:
        """How far a tensor of a reply is from its origin; None for counters."""
        if not tensor.is_floating_point():
            return None
        origin = self.origin(name, site)
        return tensor if origin is None else tensor.float() - origin.float()

    def remark(self, message: Message, task: int, client: int) -> Event | None:
        """What a usable reply says that belongs into events.jsonl."""
        return None

    def digest(self, combined: Any, site: "Site") -> Message | None:
        """What clients are to be told; None: nothing.

        `combined`: for mean and sum one message with the combined tensors; for each the pairs (client, message), valid,
        in the order of clients, one at a time; with `who = "nobody"` None. Parcels go out while replies come in: what
        it writes into `site.known` itself, it writes after the last reply.
        """
        return None

    # Both

    def receive(self, message: Message, site: "Site") -> None:
        """Take in what `digest` made, at the server and, from its bytes, at every client.

        A client may hear it with a later question than others: use the message and `site.known`, not the model.
        """
