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

ALONE = 3000.0
"""Where there is nothing to compare with: so many times `slack` times what is not told apart. Of updates that is 900
times the length of the model; the longest in honest runs were 35 times it, of a head at a rate of 1 with momentum."""

Known = dict[str, list[float]]
"""What was found in line in the rounds before: size → [largest, largest by effort]."""


@dataclass(frozen=True)
class Judged:
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

    def add(self, judged: Judged) -> None:
        self._counts.update(judged.sizes.keys())
        for name, size in judged.sizes.items():
            for place, value in enumerate((size, size / judged.effort)):
                two = self._largest.setdefault((name, place), [])
                two.append((value, judged.reply.client))
                two.sort(reverse=True)
                del two[2:]

    def accept(self, judged: Judged, slack: float) -> bool:
        """Whether nothing of a reply that has been added is out of line; not before there is enough to compare with."""
        if judged.refused:
            return True
        return all(self._comparable(name) for name in judged.sizes) and not self.excess(judged, slack)

    def excess(self, judged: Judged, slack: float) -> str:
        """What of a reply is out of line with all others so far, or, where these are too few, out of all proportion."""
        for name, size in judged.sizes.items():
            if not self._comparable(name):
                if size > (most := ALONE * slack * judged.least.get(name, 0.0)) > 0:
                    return f"its {name} is {size:.3g}, out of all proportion: at most {most:.3g}"
                continue
            most = max(self._most(name, 0, judged), self._most(name, 1, judged) * judged.effort)
            most = max(most, judged.least.get(name, 0.0))
            if size > slack * most:
                return f"its {name} is {size:.3g}, out of line with all others: at most {slack:g} times {most:.3g}"
        return ""

    def _comparable(self, name: str) -> bool:
        return name in self._known or self._counts[name] > FEWEST

    def _most(self, name: str, place: int, judged: Judged) -> float:
        found = self._largest.get((name, place), [])
        others = [value for value, client in found if client != judged.reply.client]
        return max([*others, *self._known.get(name, [0.0, 0.0])[place : place + 1]], default=0.0)


def in_line(replies: Iterable[Judged], slack: float, known: Known) -> Iterator[Judged]:
    """The same replies in the same order; those out of line are refused. `known` learns from the others.

    A further reply can only show that one is in line after all. So a reply goes on as soon as it is; until then it
    waits on disk, and those behind it: in memory there is one at a time.
    """
    others, waiting, kept = Others(known), deque[tuple[Judged, Place | None]](), Known()

    def passed(judged: Judged) -> Judged:
        for name, size in {} if judged.refused else judged.sizes.items():
            largest, steepest = kept.get(name, [0.0, 0.0])
            kept[name] = [max(largest, size), max(steepest, size / judged.effort)]
        return judged

    with Spool() as spool:
        for judged in replies:
            if not judged.refused:
                others.add(judged)
            while waiting and others.accept(waiting[0][0], slack):
                yield passed(restored(spool, *waiting.popleft()))
            if not waiting and others.accept(judged, slack):
                yield passed(judged)
            else:
                waiting.append(put_by(spool, judged))
            del judged  # not held while the next client answers
        for judged, place in waiting:
            why = judged.refused or others.excess(judged, slack)
            yield passed(replace(restored(spool, judged, place), refused=why))
    for name, sizes in kept.items():
        known[name] = [max(pair) for pair in zip(sizes, known.get(name, sizes), strict=True)]


def in_agreement(replies: Iterable[Judged], consensus: Consensus | None) -> Iterator[Judged]:
    """The same replies in the same order; those that contradict what most say are refused.

    All of them wait on disk until the last one has come: in memory there is one at a time.
    """
    if consensus is None:
        yield from replies
        return
    with Spool() as spool:
        waiting = list[tuple[Judged, Place | None]]()
        for judged in replies:
            if judged.reply.message is not None and not judged.refused:
                consensus.add(judged.reply.message)
            waiting.append(put_by(spool, judged))
            del judged
        for judged, place in waiting:
            whole = restored(spool, judged, place)
            message = None if whole.refused else whole.reply.message
            yield whole if message is None else replace(whole, refused=consensus.objection(message))


def put_by(spool: Spool, judged: Judged) -> tuple[Judged, Place | None]:
    """A reply whose message waits on disk."""
    message = judged.reply.message
    if message is None:
        return judged, None
    return replace(judged, reply=replace(judged.reply, message=None)), spool.put(message)


def restored(spool: Spool, judged: Judged, place: Place | None) -> Judged:
    message = None if place is None else spool.get(place)
    return replace(judged, reply=replace(judged.reply, message=message))
