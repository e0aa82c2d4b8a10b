"""Which replies are out of line with those of the other clients.

One client of many must not decide what becomes of all of them: a reply whose sizes (`Exchange.sizes`: the length of an
update, the rank of a basis, …) are many times those of all others is left out. A client with more samples makes more
steps, so that its update may be longer in proportion. What is compared is the largest of the others, not their median:
where data are spread unevenly, most clients may have next to nothing, and the few others are right.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from fedprotip.federation.parcels import Reply
from fedprotip.federation.spool import Place, Spool
from fedprotip.methods.parts.consensus import Consensus

FEWEST = 2
"""Others that a reply is compared with at least, unless there were rounds before: of two, either may be the odd one."""

Known = dict[str, list[float]]
"""What was found in line in the rounds before: size → [largest, largest by effort]."""


@dataclass(frozen=True)
class Measured:
    """A reply, what is wrong with it by itself, and how large it is."""

    reply: Reply
    refused: str = ""
    nbytes: int = 0
    sizes: Mapping[str, float] = field(default_factory=dict)
    least: Mapping[str, float] = field(default_factory=dict)
    effort: float = 1.0


class Others:
    """The largest sizes so far, such that any one client can be left aside."""

    def __init__(self, known: Known) -> None:
        self._known, self._counts = known, Counter[str]()
        self._largest: dict[tuple[str, int], list[tuple[float, int]]] = {}

    def add(self, measured: Measured) -> None:
        self._counts.update(measured.sizes.keys())
        for name, size in measured.sizes.items():
            for place, value in enumerate((size, size / measured.effort)):
                two = self._largest.setdefault((name, place), [])
                two.append((value, measured.reply.client))
                two.sort(reverse=True)
                del two[2:]

    def accept(self, measured: Measured, slack: float) -> bool:
        """Whether nothing of a reply that has been added is out of line; not before there is enough to compare with."""
        if measured.refused:
            return True
        return all(self._comparable(name) for name in measured.sizes) and not self.excess(measured, slack)

    def excess(self, measured: Measured, slack: float) -> str:
        """What of a reply is out of line with all others so far."""
        for name, size in measured.sizes.items():
            if not self._comparable(name):
                continue
            most = max(self._most(name, 0, measured), self._most(name, 1, measured) * measured.effort)
            most = max(most, measured.least.get(name, 0.0))
            if size > slack * most:
                return f"its {name} is {size:.3g}, out of line with all others: at most {slack:g} times {most:.3g}"
        return ""

    def _comparable(self, name: str) -> bool:
        return name in self._known or self._counts[name] > FEWEST

    def _most(self, name: str, place: int, measured: Measured) -> float:
        found = self._largest.get((name, place), [])
        others = [value for value, client in found if client != measured.reply.client]
        return max([*others, *self._known.get(name, [0.0, 0.0])[place : place + 1]], default=0.0)


def in_line(replies: Iterable[Measured], slack: float, known: Known) -> Iterator[Measured]:
    """The same replies in the same order; those out of line are refused. `known` learns from the others.

    A further reply can only show that one is in line after all. So a reply goes on as soon as it is; until then it
    waits on disk, and those behind it: in memory there is one at a time.
    """
    others, waiting, kept = Others(known), deque[tuple[Measured, Place | None]](), Known()

    def passed(measured: Measured) -> Measured:
        for name, size in {} if measured.refused else measured.sizes.items():
            largest, steepest = kept.get(name, [0.0, 0.0])
            kept[name] = [max(largest, size), max(steepest, size / measured.effort)]
        return measured

    with Spool() as spool:
        for measured in replies:
            if not measured.refused:
                others.add(measured)
            while waiting and others.accept(waiting[0][0], slack):
                yield passed(restored(spool, *waiting.popleft()))
            if not waiting and others.accept(measured, slack):
                yield passed(measured)
            else:
                waiting.append(put_by(spool, measured))
            del measured  # not held while the next client answers
        for measured, place in waiting:
            why = measured.refused or others.excess(measured, slack)
            yield passed(replace(restored(spool, measured, place), refused=why))
    for name, sizes in kept.items():
        known[name] = [max(pair) for pair in zip(sizes, known.get(name, sizes), strict=True)]


def in_agreement(replies: Iterable[Measured], consensus: Consensus | None) -> Iterator[Measured]:
    """The same replies in the same order; those that contradict what most say are refused.

    All of them wait on disk until the last one has come: in memory there is one at a time.
    """
    if consensus is None:
        yield from replies
        return
    with Spool() as spool:
        waiting = list[tuple[Measured, Place | None]]()
        for measured in replies:
            if measured.reply.message is not None and not measured.refused:
                consensus.add(measured.reply.message)
            waiting.append(put_by(spool, measured))
            del measured
        for measured, place in waiting:
            whole = restored(spool, measured, place)
            message = None if whole.refused else whole.reply.message
            yield whole if message is None else replace(whole, refused=consensus.objection(message))


def put_by(spool: Spool, measured: Measured) -> tuple[Measured, Place | None]:
    """A reply whose message waits on disk."""
    message = measured.reply.message
    if message is None:
        return measured, None
    return replace(measured, reply=replace(measured.reply, message=None)), spool.put(message)


def restored(spool: Spool, measured: Measured, place: Place | None) -> Measured:
    message = None if place is None else spool.get(place)
    return replace(measured, reply=replace(measured.reply, message=message))
