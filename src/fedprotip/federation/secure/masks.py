"""A sum of vectors of which nobody learns more than the sum: Bonawitz et al. 2017, against a curious server.

    keys     every client tells two fresh public keys
    shares   it draws two secrets, the seed of its own mask and that of its second key, and sends a share of each to
             every other client, encrypted and authenticated; the server passes the letters on
    masked   it adds to its vector its own mask, and a mask with each other client that cancels out in the sum
    unmask   of those whose vector arrived, the others reveal shares of the own mask; of those that were lost, shares of
             the second key, so that the masks with them can be removed. Never both of the same client.

Keys: X25519, HKDF with SHA-256. Masks: ChaCha20. Letters: AES-GCM. Shares: Shamir over GF(2^128), so secrets have 16
bytes. All of them are drawn from the operating system, anew for every sum, and are kept until it is over.
"""

import hashlib
import hmac
import json
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from Crypto.Protocol.SecretSharing import Shamir
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedprotip.messages import BadMessage
from fedprotip.methods.parts.private import FEWEST

KEY, SECRET, NONCE, TAG = 32, 16, 12, 16
KEYS = 2 * KEY
"""Bytes of a client's public keys: the one for letters, the one for masks."""
LETTER = NONCE + 2 * SECRET + TAG
COMMITMENT = 32
PIECE = 2**17
"""Numbers of a mask that are made at once."""


def threshold(clients: int, share: float) -> int:
    """How many of the clients that told their keys must stay to the end: more than this share, and two at least.

    All of them where the share is 1. From a half on no two groups of clients can each reach it: a server that tells
    some that a client is lost, and others that it is not, gets one of its secrets at most.

    >>> [threshold(clients, 0.5) for clients in (1, 2, 3, 4, 5, 100)]
    [2, 2, 2, 3, 3, 51]
    >>> threshold(100, 0.58), threshold(100, 1.0)
    (59, 100)
    """
    return max(min(int(round(clients * share, 6)) + 1, clients), FEWEST)


def session_of(roster: Mapping[int, bytes]) -> bytes:
    """What everything in a sum is bound to: who takes part with which keys."""
    listed = b"".join(client.to_bytes(8, "big") + keys for client, keys in sorted(roster.items()))
    return hashlib.sha256(b"fedprotip sum" + listed).digest()


class Member:
    """A client in one sum. Every step is made once, in this order; anything else is refused."""

    def __init__(self, client: int, share: float, about: str = "") -> None:
        """`about`: the question at which it began, which signatures of its keys are bound to."""
        self.client, self._share, self.about, self._step = client, share, about, 0
        self._letters = X25519PrivateKey.generate()
        self._seed, self._own = secrets.token_bytes(SECRET), secrets.token_bytes(SECRET)
        self._roster: dict[int, bytes] = {}
        self._session = b""
        self._held: dict[int, tuple[bytes, bytes]] = {}  # client → its shares that were given to this one

    @property
    def clients(self) -> int:
        """Of how many the sum may be."""
        return len(self._roster)

    @property
    def least(self) -> int:
        """Of how many it must be."""
        return threshold(len(self._roster), self._share)

    def keys(self) -> bytes:
        self._turn(0)
        return self._told_keys

    @property
    def _told_keys(self) -> bytes:
        return self._letters.public_key().public_bytes_raw() + _public_of(self._seed)

    def share(self, roster: Mapping[int, bytes]) -> tuple[bytes, dict[int, bytes]]:
        """What the own mask is committed to, and a letter to every other client of the roster."""
        self._turn(1)
        if self.client not in roster or len(roster) < FEWEST or any(len(keys) != KEYS for keys in roster.values()):
            raise BadMessage(f"a list of {len(roster)} clients came that no sum can be made of")
        if roster[self.client] != self._told_keys:
            raise BadMessage("a list of keys came with others for this client than it told")
        self._roster, self._session = dict(sorted(roster.items())), session_of(roster)
        places = range(1, len(self._roster) + 1)
        parts = [dict(Shamir.split(self.least, len(places), secret, False)) for secret in (self._own, self._seed)]
        letters = {}
        for place, other in zip(places, self._roster, strict=True):
            own, seed = (part[place] for part in parts)
            if other == self.client:
                self._held[other] = own, seed
            else:
                nonce = secrets.token_bytes(NONCE)
                sealed = AESGCM(self._letter_key(self.client, other)).encrypt(nonce, own + seed, self._session)
                letters[other] = nonce + sealed
        return commitment(self._own, self._session), letters

    def mask(self, vector: np.ndarray, letters: Mapping[int, bytes]) -> np.ndarray:
        """The vector (uint64) with its masks and a check at its end; letters: from all others that sent theirs."""
        self._turn(2)
        if self.client in letters or not letters.keys() <= self._roster.keys():
            raise BadMessage("letters came from clients that have no part in this sum")
        if len(letters) + 1 < self.least:
            raise BadMessage(f"{len(letters) + 1} clients are left, and a sum needs {self.least}")
        for other, letter in letters.items():
            try:
                key = self._letter_key(other, self.client)
                told = AESGCM(key).decrypt(letter[:NONCE], letter[NONCE:], self._session)
                self._held[other] = told[:SECRET], told[SECRET:]
            except (InvalidTag, ValueError):
                raise BadMessage(f"the letter of client {other} was changed on its way") from None
        masked = np.append(vector, check_of(vector, self._session))
        add_mask(masked, own_key(self._own, self._session))
        mine = _key_of(self._seed)
        for other in sorted(letters):
            add_pair_mask(masked, mine, self.client, other, self._roster[other], self._session)
        return masked

    def reveal(self, arrived: Sequence[int]) -> dict[int, bytes]:
        """A share of everyone who sent letters: of its own mask if its vector arrived, else of its key."""
        self._turn(3)
        if self.client not in arrived or not self._held.keys() >= set(arrived):
            raise BadMessage("vectors are said to have come from clients that have no part in this sum")
        if len(set(arrived)) < self.least:
            raise BadMessage(f"only {len(set(arrived))} vectors arrived, and a sum needs {self.least}")
        told = {other: own if other in arrived else seed for other, (own, seed) in self._held.items()}
        self._held = {}
        return told

    def text(self) -> str:
        """All of it, secrets too, for a client whose process ends after every step."""
        held = [[client, own.hex(), seed.hex()] for client, (own, seed) in self._held.items()]
        roster = [[client, keys.hex()] for client, keys in self._roster.items()]
        secret = [part.hex() for part in (self._letters.private_bytes_raw(), self._seed, self._own)]
        return json.dumps([self.client, self._share, self.about, self._step, secret, roster, held])

    @classmethod
    def read(cls, text: str) -> "Member":
        """The member that `text` was of."""
        client, share, about, step, secret, roster, held = json.loads(text)
        member = cls(client, share, about)
        letters, member._seed, member._own = map(bytes.fromhex, secret)
        member._letters, member._step = X25519PrivateKey.from_private_bytes(letters), step
        member._roster = {one: bytes.fromhex(keys) for one, keys in roster}
        member._session = session_of(member._roster)
        member._held = {one: (bytes.fromhex(own), bytes.fromhex(seed)) for one, own, seed in held}
        return member

    def _turn(self, step: int) -> None:
        if self._step != step:
            raise BadMessage("a step of a secure sum was asked for that is not the next one")
        self._step += 1

    def _letter_key(self, sender: int, receiver: int) -> bytes:
        other = receiver if sender == self.client else sender
        public = _public(self._roster[other][:KEY])
        return _derive(self._letters.exchange(public), self._session, f"letter {sender} {receiver}")


def unmask(
    total: np.ndarray,
    roster: Mapping[int, bytes],
    commitments: Mapping[int, bytes],
    arrived: Sequence[int],
    revealed: Mapping[int, Mapping[int, bytes]],
    share: float,
) -> np.ndarray:
    """The sum of the vectors of those that arrived; BadMessage where it cannot be found.

    Args:
        total: of the masked vectors of `arrived`; commitments: of all that sent letters.
        revealed: client → what it revealed about whom.
    """
    session, least = session_of(roster), threshold(len(roster), share)
    places = {client: place for place, client in enumerate(sorted(roster), start=1)}
    if len(revealed) < least or len(arrived) < least:
        raise BadMessage(f"{min(len(revealed), len(arrived))} of {len(roster)} clients are left, a sum needs {least}")
    total = total.copy()
    for client, committed in commitments.items():
        shares = [(places[teller], told[client]) for teller, told in revealed.items() if client in told]
        if client in arrived:
            own = _found(shares, least, lambda secret: commitment(secret, session), committed)
            if own is None:
                raise BadMessage(f"shares of the mask of client {client} do not fit: one of them was changed")
            add_mask(total, own_key(own, session), -1)
        else:
            seed = _found(shares, least, _public_of, roster[client][KEY:])
            if seed is None:
                raise BadMessage(f"shares of the key of client {client} do not fit: one of them was changed")
            for other in arrived:  # what they added for the one that was lost
                add_pair_mask(total, _key_of(seed), client, other, roster[other], session)
    vector, check = total[:-1], total[-1]
    if check_of(vector, session) != check:
        raise BadMessage("masks do not cancel out: a vector was changed, or masked otherwise than agreed")
    return vector


def _found(
    shares: Sequence[tuple[int, bytes]], least: int, image: Callable[[bytes], bytes], known: bytes
) -> bytes | None:
    """The secret behind shares whose image is known; one of them may be wrong where there are more than needed."""
    if len(shares) < least:
        return None
    for chosen in _choices(shares, least):
        secret = Shamir.combine(list(chosen), False)
        if hmac.compare_digest(image(secret), known):
            return secret
    return None


def _choices(shares: Sequence[tuple[int, bytes]], least: int) -> Iterable[Sequence[tuple[int, bytes]]]:
    """The first shares, then the same without each of them in turn."""
    yield shares[:least]
    if len(shares) > least:
        for left_out in range(least):
            yield [share for place, share in enumerate(shares[: least + 1]) if place != left_out]


def check_keys(keys: bytes) -> None:
    """BadMessage where nobody can agree on a secret with the owner of these keys: points of small order."""
    try:
        for start in range(0, KEYS, KEY):
            X25519PrivateKey.generate().exchange(_public(keys[start : start + KEY]))
    except ValueError:
        raise BadMessage("its keys are none") from None


def commitment(own: bytes, session: bytes) -> bytes:
    return hmac.digest(own, b"commitment" + session, "sha256")


def own_key(own: bytes, session: bytes) -> bytes:
    return _derive(own, session, "own mask")


def check_of(vector: np.ndarray, session: bytes) -> np.uint64:
    """A linear combination of a vector: that of a sum is the sum of theirs, if nothing was changed.

    Factors are odd, so that no change of one number is lost, not even of its highest bit.
    """
    factors = np.zeros(len(vector), dtype=np.uint64)
    add_mask(factors, _derive(session, session, "check"))
    np.bitwise_or(factors, np.uint64(1), out=factors)
    return np.multiply(factors, vector, out=factors).sum(dtype=np.uint64)


def add_pair_mask(
    vector: np.ndarray, mine: X25519PrivateKey, client: int, other: int, keys: bytes, session: bytes
) -> None:
    """Add the mask of a client with another one, which has the other sign there."""
    first, second = min(client, other), max(client, other)
    agreed = _derive(mine.exchange(_public(keys[KEY:])), session, f"mask {first} {second}")
    add_mask(vector, agreed, 1 if client == first else -1)


def add_mask(vector: np.ndarray, key: bytes, sign: int = 1) -> None:
    """Add the stream of a key to a vector (uint64) in place, modulo 2^64; the key is used for nothing else."""
    stream = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()
    zeros = bytes(8 * min(PIECE, len(vector)))
    for start in range(0, len(vector), PIECE):
        part = vector[start : start + PIECE]
        words = np.frombuffer(stream.update(zeros[: 8 * len(part)]), dtype="<u8")
        np.add(part, words, out=part) if sign > 0 else np.subtract(part, words, out=part)


def _key_of(seed: bytes) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(_derive(seed, b"", "key"))


def _public_of(seed: bytes) -> bytes:
    return _key_of(seed).public_key().public_bytes_raw()


def _public(key: bytes) -> X25519PublicKey:
    return X25519PublicKey.from_public_bytes(key)


def _derive(secret: bytes, session: bytes, purpose: str) -> bytes:
    return HKDF(SHA256(), KEY, session, f"fedprotip {purpose}".encode()).derive(secret)
