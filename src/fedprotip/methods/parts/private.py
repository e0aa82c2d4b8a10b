"""What `method.secure` asks of a method: nothing but sums, and random numbers that the server cannot repeat."""

import hashlib
import math
import secrets
from collections.abc import Sequence
from importlib.util import find_spec

import torch
from torch import Tensor

from fedprotip.errors import UsageError
from fedprotip.methods.exchange import Exchange
from fedprotip.methods.local import Local
from fedprotip.methods.state import Form, Kept
from fedprotip.models.heads import Network
from fedprotip.models.norms import moving_norms
from fedprotip.seeds import torch_stream
from fedprotip.settings import Settings

DELTA = 1e-5
"""δ of what noise promises."""
FEWEST = 2
"""Clients in a sum at least: the sum of one is its vector."""
PACKAGES = {"cryptography": "cryptography", "Crypto": "pycryptodome"}
"""Module → package that has it."""
SECRET = Kept("secret", "private", {"key": Form("32", torch.uint8)})
"""From which a client's own random numbers follow; for methods that call `gaussian`."""


def refuse_open(name: str, exchanges: Sequence[Exchange], settings: Settings, trains: bool) -> None:
    """Refuse a run whose server would have to see a single client's reply, or that lacks the packages for sums.

    trains: whether there are rounds of training, for which clients are drawn.
    """
    place = f"method.secure = true is not possible with method.name = {name!r}"
    if settings.train.aggregate != "mean":
        raise UsageError(
            f"method.secure = true is not possible with train.aggregate = {settings.train.aggregate!r}, which compares "
            "single clients; choose 'mean'."
        )
    _refuse_single(settings, trains)
    for exchange in exchanges:
        if exchange.combine == "each" and exchange.who != "nobody" and not exchange.in_clear:
            raise UsageError(
                f"{place}: its server must see {exchange.name!r} of every client, not only a sum; "
                f"{_instead(exchange, settings)}."
            )
    if settings.method.secure_noise:
        _refuse_noise(place.replace("secure = true", "secure_noise"), exchanges, settings)
    if missing := [PACKAGES[module] for module in PACKAGES if find_spec(module) is None]:
        listed = " and ".join(missing)
        raise UsageError(f"method.secure = true needs {listed}; install it with: pip install 'fedprotip[secure]'.")


def _instead(exchange: Exchange, settings: Settings) -> str:
    """What to choose where an exchange is no sum."""
    if settings.statistics.rank and exchange.name in ("start", "statistics"):
        return "choose statistics.rank = 0"
    if getattr(settings.method, "variant", "") == "first":
        return "choose method.variant = 'second'"
    return "choose another method, such as 'fedprotip' or 'fedavg', or method.secure = false"


def _refuse_single(settings: Settings, trains: bool) -> None:
    """A sum of one client is its vector, so there is none."""
    clients, tasks = settings.clients, settings.stream.tasks
    starts = {0, *map(int, clients.roster)}
    for task in sorted(task for task in starts if not tasks or task < tasks):
        active = len(clients.active(task))
        if active < FEWEST:
            where = f"clients.roster has one client from task {task} on" if clients.roster else "clients.count = 1"
            raise UsageError(
                f"method.secure = true is not possible where {where}: the sum of one is what it sent; "
                f"choose {FEWEST} clients or more, or method.secure = false."
            )
        if trains and clients.drawn(active) < FEWEST:
            enough = math.ceil(1000 * FEWEST / active) / 1000
            raise UsageError(
                f"method.secure = true is not possible where clients.fraction = {clients.fraction:g} draws one of "
                f"{active} clients in a round, as the sum of one is what it sent; {enough:g} is enough."
            )


def _refuse_noise(place: str, exchanges: Sequence[Exchange], settings: Settings) -> None:
    """Noise is promised for updates alone, each of which counts the same."""
    for exchange in exchanges:
        update = exchange.trains and exchange.combine == "mean"
        if not update and exchange.who != "nobody" and not exchange.in_clear:
            choice = "train.head_start = 'random'" if exchange.name == "start" else "method.name = 'fedavg'"
            raise UsageError(f"{place}: {exchange.name!r} would be summed without noise; choose {choice}.")
    if settings.train.average != "uniform":
        raise UsageError("method.secure_noise needs train.average = 'uniform': numbers of samples would be told.")
    if settings.train.wire != "float32":
        raise UsageError("method.secure_noise needs train.wire = 'float32': what is rounded after it has less noise.")
    if find_spec("dp_accounting") is None:
        raise UsageError("method.secure_noise needs dp-accounting; install it with: pip install 'fedprotip[noise]'.")


def refuse_noisy_norms(network: Network, settings: Settings) -> None:
    """Refuse noise on running statistics: a variance with noise may be negative, and their counters have no room."""
    moving = moving_norms(network.backbone, settings.model, task=0) if settings.method.secure_noise else []
    if moving:
        raise UsageError(
            f"method.secure_noise would add noise to the running statistics of {moving[0]!r}, which breaks a network: "
            "choose model.norm = 'frozen', or a backbone without such layers."
        )


def gaussian(local: Local, purpose: str, name: str, rows: int, columns: int) -> Tensor:
    """Standard normal numbers (rows, columns) in float32 of this client, task and name alone.

    Where the server must not know them, they follow from a secret that the client keeps: whoever knows the Gaussians
    G_k of a summed sketch Σ M_k·G_k can find every M_k in it. Else from the seed of the run.
    """
    if not local.settings.method.secure:
        chance = torch_stream(local.settings.run.seed, purpose, local.task, local.client, name)
        return torch.randn(rows, columns, generator=chance)
    kept = local.own.get(SECRET.name)
    if kept is None:
        kept = {"key": torch.frombuffer(bytearray(secrets.token_bytes(32)), dtype=torch.uint8)}
        local.own.put(SECRET.name, kept)
    place = f"{purpose}/{local.task}/{name}".encode()
    key = hashlib.blake2b(place, key=kept["key"].numpy().tobytes(), digest_size=32).digest()
    return normal(key, rows * columns).float().view(rows, columns)


def normal(key: bytes, count: int) -> Tensor:
    """So many standard normal numbers in float64 that nobody can repeat without the key (32 bytes)."""
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

    stream = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(8 * count))
    return bell(torch.frombuffer(bytearray(stream), dtype=torch.int64) if count else torch.zeros(0, dtype=torch.int64))


def bell(words: Tensor) -> Tensor:
    """Standard normal numbers in float64 from random words (int64), by 53 bits of each."""
    places = ((words >> 11).double() + 0.5) / 2**53 + 0.5
    return torch.special.ndtri(places.clamp(max=1 - 2.0**-53))  # the highest place is rounded to 1


def epsilon(noise: float, sums: int, delta: float = DELTA) -> float:
    """ε of so many sums, each with Gaussian noise of `noise` times what one client can change it by.

    That is `secure_clip` as against no change at all, and twice as much as against another one. Of all clients of a
    sum, whichever was drawn: that only some are asked in a round is not counted in their favour.
    """
    from dp_accounting import GaussianDpEvent
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant()
    accountant.compose(GaussianDpEvent(noise), sums)
    return float(accountant.get_epsilon(delta))


def stated(settings: Settings, rounds: int) -> str:
    """What noise on the sums of so many rounds promises, as a sentence."""
    spent = epsilon(settings.method.secure_noise, rounds)
    return (
        f"Noise of method.secure_noise = {settings.method.secure_noise:g} hides the part of any one client in {rounds} "
        f"rounds with (ε, δ) = ({spent:.3g}, {DELTA:g}): sums hardly tell it from a client that changed nothing."
    )
