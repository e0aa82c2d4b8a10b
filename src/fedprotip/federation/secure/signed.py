"""Public keys of a sum, signed by the sites they belong to: nobody between two sites can put others in their place.

A site signs with the key by which the SuperLink knows it. Whose key is whose it reads from a roster that it was given,
and takes nobody else; without one it believes the first key that it sees of a client, and keeps that in its folder.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)

from fedprotip.errors import UsageError
from fedprotip.federation.secure.masks import KEYS
from fedprotip.messages import BadMessage
from fedprotip.store.plain import PlainFolder

CURVE, NUMBER = ec.SECP384R1(), 48
PUBLIC = 1 + NUMBER
SIGNED = PUBLIC + 2 * NUMBER
"""Bytes of the signer's public key and its signature, which follow the keys of a client."""
UNSIGNED = bytes(SIGNED)
"""Instead of them, from a site that has no key."""
KNOWN = "known-keys"
"""File of a site's folder: the first key of every client, where there is no roster."""


class Signer:
    """A site that has a key: it signs, and takes part in a sum only with clients that sign with the keys it knows."""

    def __init__(self, client: int, key: Path, folder: PlainFolder, roster: Path | None = None) -> None:
        """`roster`: lines CLIENT PUBLIC-KEY of all clients; without one `folder` keeps what was seen first."""
        self._client, self._folder, self._roster = client, folder, roster
        self._key = _private(key)
        self._public = _point(self._key.public_key())
        if roster is not None and self._known().get(client) != self._public:
            raise UsageError(f"{roster} does not have the public half of {key} as the key of client {client}.")

    def sign(self, about: str, keys: bytes) -> bytes:
        """What follows the keys of this client in its answer; `about`: which question it answers."""
        signature = self._key.sign(_statement(self._client, about, keys), ec.ECDSA(SHA384()))
        return self._public + b"".join(part.to_bytes(NUMBER, "big") for part in decode_dss_signature(signature))

    def check(self, about: str, told: Mapping[int, bytes]) -> None:
        """BadMessage where the keys of a client (`told`, with what follows them) are not signed by that client."""
        known = self._known()
        before = len(known)
        for client, entry in sorted(told.items()):
            keys, public, signature = entry[:KEYS], entry[KEYS : KEYS + PUBLIC], entry[KEYS + PUBLIC :]
            if entry[KEYS:] == UNSIGNED:
                raise BadMessage(f"the keys of client {client} are not signed, so this site takes no part")
            if client not in known and self._roster is not None:
                raise BadMessage(f"client {client} is not in the roster of this site, which takes no part")
            if known.setdefault(client, public) != public or not _holds(
                public, signature, _statement(client, about, keys)
            ):
                raise BadMessage(f"the keys of client {client} are not signed by its key, so this site takes no part")
        if len(known) > before:
            lines = [f"{client} {_ssh(public)}\n" for client, public in sorted(known.items())]
            self._folder.write(KNOWN, "".join(lines))

    def _known(self) -> dict[int, bytes]:
        """Client → its key, as it stands in the file now."""
        if self._roster is not None:
            try:
                return _read(self._roster.read_text(encoding="utf-8"), self._roster)
            except (OSError, UnicodeDecodeError):
                raise UsageError(f"{self._roster} cannot be read; it has a line for every client.") from None
        found = _read(self._folder.text(KNOWN), self._folder.path / KNOWN) if self._folder.has(KNOWN) else {}
        return {**found, self._client: self._public}


def _statement(client: int, about: str, keys: bytes) -> bytes:
    """What is signed. The key signs other things too, for Flower, which do not begin like this."""
    return b"fedprotip keys of a sum " + json.dumps([client, about]).encode() + keys


def _holds(public: bytes, signature: bytes, statement: bytes) -> bool:
    try:
        parts = (int.from_bytes(signature[:NUMBER], "big"), int.from_bytes(signature[NUMBER:], "big"))
        key = ec.EllipticCurvePublicKey.from_encoded_point(CURVE, public)
        key.verify(encode_dss_signature(*parts), statement, ec.ECDSA(SHA384()))
    except (InvalidSignature, ValueError):
        return False
    return True


def _private(path: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = load_ssh_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.curve.name != CURVE.name:
        raise UsageError(f"{path} is no key of a site; fedprotip flower key makes one.")
    return key


def _read(text: str, path: Path) -> dict[int, bytes]:
    """Client → key, of lines such as `3 ecdsa-sha2-nistp384 AAAA… somebody`."""
    found: dict[int, bytes] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        client, _, key = line.strip().partition(" ")
        if not client or client.startswith("#"):
            continue
        try:
            public = load_ssh_public_key(key.strip().encode())
        except (ValueError, UnsupportedAlgorithm):
            public = None
        right = isinstance(public, ec.EllipticCurvePublicKey) and public.curve.name == CURVE.name
        if not right or not client.isdecimal() or int(client) in found:
            raise UsageError(f"Line {number} of {path} is not the number of a client, which comes once, and its key.")
        assert isinstance(public, ec.EllipticCurvePublicKey)
        found[int(client)] = _point(public)
    return found


def _point(key: ec.EllipticCurvePublicKey) -> bytes:
    return key.public_bytes(Encoding.X962, PublicFormat.CompressedPoint)


def _ssh(public: bytes) -> str:
    key = ec.EllipticCurvePublicKey.from_encoded_point(CURVE, public)
    return key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
