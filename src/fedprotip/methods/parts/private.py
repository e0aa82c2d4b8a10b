"""What `method.secure` asks of a method: nothing but sums, and random numbers that the server cannot repeat."""

import hashlib
import secrets
from collections.abc import Sequence
from importlib.util import find_spec

import torch
from torch import Tensor

from fedprotip.errors import UsageError
from fedprotip.methods.exchange import Exchange
from fedprotip.methods.local import Local
from fedprotip.methods.state import Form, Kept
from fedprotip.seeds import torch_stream
from fedprotip.settings import Settings

SECRET = Kept("secret", "private", {"key": Form("32", torch.uint8)})
"""From which a client's own random numbers follow; for methods that call `gaussian`."""


def refuse_open(name: str, exchanges: Sequence[Exchange], settings: Settings) -> None:
    """Refuse a run whose server would have to see a single client's reply, or that lacks the packages for sums."""
    place = f"method.secure = true is not possible with method.name = {name!r}"
    if settings.train.aggregate != "mean":
        raise UsageError(
            f"method.secure = true is not possible with train.aggregate = {settings.train.aggregate!r}, which compares "
            "single clients; choose 'mean'."
        )
    for exchange in exchanges:
        if exchange.combine == "each" and exchange.who != "nobody" and not exchange.in_clear:
            raise UsageError(f"{place}: its server must see {exchange.name!r} of every client, not only a sum.")
    if missing := [package for package in ("cryptography", "Crypto") if find_spec(package) is None]:
        listed = " and ".join(missing).replace("Crypto", "pycryptodome")
        raise UsageError(f"method.secure = true needs {listed}; install it with: pip install 'fedprotip[secure]'.")


def gaussian(local: Local, purpose: str, name: str, rows: int, columns: int) -> Tensor:
    """Standard normal numbers (rows, columns) in float32 of this client, task and name alone.

    Where the server must not know them, they follow from a secret that the client keeps: whoever knows the Gaussians
    G_k of a summed sketch Σ M_k·G_k can find every M_k in it. Else from the seed of the run.
    """
    if not local.settings.method.secure:
        chance = torch_stream(local.settings.run.seed, purpose, local.task, local.client, name)
        return torch.randn(rows, columns, generator=chance)
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

    kept = local.own.get(SECRET.name)
    if kept is None:
        kept = {"key": torch.frombuffer(bytearray(secrets.token_bytes(32)), dtype=torch.uint8)}
        local.own.put(SECRET.name, kept)
    place = f"{purpose}/{local.task}/{name}".encode()
    key = hashlib.blake2b(place, key=kept["key"].numpy().tobytes(), digest_size=32).digest()
    stream = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(8 * rows * columns))
    words = torch.frombuffer(bytearray(stream), dtype=torch.int64) if rows * columns else torch.zeros(0).long()
    uniform = ((words >> 11).double() + 0.5) / 2**53 + 0.5  # (0, 1), of 53 bits
    return torch.special.ndtri(uniform).float().view(rows, columns)
