"""What lies in a parcel beside what exchanges say: the question, the plan, and whatever a client lacks."""

from collections.abc import Callable
from dataclasses import asdict, dataclass

from fedprotip.messages import BadMessage, Message, Parcel

ASK, PLAN, KNOWLEDGE, MODEL, LOST, SECURE = "ask", "plan", "knowledge", "model", "lost", "secure"
"""Kinds of messages."""
KEYS, SHARES, MASKED, UNMASK = "keys", "shares", "masked", "unmask"
"""Phases of a secure sum (`federation/secure`)."""
START = "start/"
"""Prefix of tensors in a model message that bring a client to W^(t,0)."""


@dataclass(frozen=True)
class Ask:
    """A question to a client: the first message of every parcel."""

    exchange: str
    task: int
    round: int | None
    step: int  # the number of the question, counted by the server
    since: int | None  # the last question that this client was asked; None: it is told everything anew
    keep: int  # the server may go back as far as this question
    phase: str = ""  # of a secure sum; what the phase needs is a message of kind SECURE in the same parcel
    life: str = ""  # of the server: a name drawn whenever it starts, as one that goes back uses numbers a second time
    then: str = ""  # the life in which it asked `since`

    @property
    def bare(self) -> bool:
        """Whether it is a step of a secure sum without the exchange itself: no model is needed."""
        return self.phase not in ("", MASKED)

    def message(self) -> Message:
        return Message(ASK, meta={name: value for name, value in asdict(self).items() if name != "phase" or value})

    @classmethod
    def of(cls, message: Message) -> "Ask":
        return cls(**message.meta)


STEP = "step"
"""Which question a reply answers, among its metadata."""


def answering(reply: Message, ask: Ask) -> Message:
    """The reply as it travels: it says which question it answers."""
    return Message(reply.kind, reply.tensors, {**reply.meta, STEP: ask.step})


def answers(reply: Message, step: int) -> Message:
    """The reply itself; BadMessage when it answers another question than this one."""
    meta = dict(reply.meta)
    if (said := meta.pop(STEP, None)) != step or isinstance(said, bool):
        raise BadMessage(f"it does not answer question {step}, of this task and round")
    return Message(reply.kind, reply.tensors, meta)


@dataclass(frozen=True)
class Request:
    """A parcel for a client; its first message is the question."""

    client: int
    parcel: Parcel
    anew: Callable[[Message], Parcel]
    """The same question with everything a client needs, for one that says it has lost what it was told."""
    unsent: Callable[[], None] = lambda: None
    """To be called where the parcel has never left: then the client was not told what is in it."""


@dataclass(frozen=True)
class Reply:
    """A client's answer, or why there is none."""

    client: int
    message: Message | None = None
    error: str = ""
