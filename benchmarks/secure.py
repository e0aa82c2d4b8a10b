"""secure: what a sum costs of which the server sees nothing else."""

from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.harness import Agreement, Bench, Side
from fedprotip.messages import BadMessage

if TYPE_CHECKING:
    from fedprotip.federation.secure.masks import Member

SHARE = 0.5
SHORT = 1000
"""Numbers of the vectors by which a whole sum is checked, all clients taking part."""
MB = 10**6


def secure(bench: Bench, megabytes: tuple[float, ...] = (1, 16, 45), clients: tuple[int, ...] = (5, 20, 100)) -> None:
    """Secure sums of float32 vectors: one client's part and the server's, nobody lost; textbook: nothing is masked."""
    for count in clients:
        sum_ = Sum.begun(count)
        for size in megabytes:
            plain, case = np.arange(int(size * MB / 4), dtype=np.uint64), f"{size:g} MB, {count} clients"
            sides: dict[str, Side] = {"ours": partial(sum_.masked, plain), "textbook": plain.copy}
            client = bench.measure(f"{case}: a client", sides, sum_.agree, least=0)
            bench.figure(client, "seconds of a client", client.seconds["ours"] + sum_.meeting)
            bench.figure(client, "MB that a client sends", (8 * len(plain) + sum_.letters_bytes) / MB)
            sides = {"ours": partial(sum_.unmasked, plain), "textbook": plain.copy}
            server = bench.measure(f"{case}: the server", sides, sum_.agree, least=0)
            bench.figure(server, "seconds of the server", server.seconds["ours"])


@dataclass
class Sum:
    """Clients that have told keys, shares and, of a short sum, everything. Steps are made by copies: each only once."""

    members: "dict[int, Member]"
    roster: dict[int, bytes]
    commitments: dict[int, bytes]
    letters: dict[int, dict[int, bytes]]  # by receiver
    meeting: float  # seconds of a client before its vector is asked for
    shares: dict[int, dict[int, bytes]]
    agreement: Agreement

    @classmethod
    def begun(cls, count: int) -> "Sum":
        from fedprotip.federation.secure.masks import Member, unmask

        start = perf_counter()
        members = {client: Member(client, SHARE) for client in range(count)}
        roster = {client: member.keys() for client, member in members.items()}
        sent = {client: member.share(roster) for client, member in members.items()}
        taken = (perf_counter() - start) / count
        letters = {client: {o: to[client] for o, (_, to) in sent.items() if o != client} for client in members}
        commitments = {client: committed for client, (committed, _) in sent.items()}

        chance = np.random.default_rng(0)
        vectors = {client: chance.integers(0, 2**40, SHORT, dtype=np.uint64) for client in members}
        some = {client: copy(member) for client, member in members.items()}
        total = np.stack([some[client].mask(vectors[client], letters[client]) for client in some]).sum(axis=0)
        shares = {client: member.reveal(list(members)) for client, member in some.items()}
        found = unmask(total, roster, commitments, list(members), shares, SHARE)
        plain = np.stack(list(vectors.values())).sum(axis=0)
        apart = float(np.abs(found.astype(np.float64) - plain.astype(np.float64)).max() / plain.max())
        agreement = "relative difference of a short sum", apart, 1e-6
        return cls(members, roster, commitments, letters, taken, shares, agreement)

    def agree(self, results: dict[str, Any]) -> Agreement:
        return self.agreement

    @property
    def letters_bytes(self) -> int:
        return sum(map(len, self.letters[0].values()))

    def masked(self, vector: np.ndarray) -> np.ndarray:
        return copy(self.members[0]).mask(vector, self.letters[0])

    def unmasked(self, total: np.ndarray) -> None:
        """All the server does; at its end it notices that this was no sum of masked vectors."""
        from fedprotip.federation.secure.masks import unmask

        with suppress(BadMessage):
            unmask(total, self.roster, self.commitments, list(self.members), self.shares, SHARE)
