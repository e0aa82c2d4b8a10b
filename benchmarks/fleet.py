"""How a round grows with its clients: measured costs of a message, and a simulation of arrival, drop-out and delay.

python -m benchmarks.fleet                     # the tables of docs/scale.md
python -m benchmarks.fleet --megabytes 45 --clients 100 10000 --seeds 3
python -m benchmarks.fleet --tasks 24          # what a task costs after so many others: a small run, measured
"""

import argparse
import json
from collections import deque
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any

import numpy as np
import torch

import fedprotip
from benchmarks import inputs
from fedprotip.federation.aggregate import Average
from fedprotip.federation.engines import SITES
from fedprotip.federation.engines.flower import ROOM
from fedprotip.federation.spool import Spool
from fedprotip.messages import Message

HELD = 8
"""Replies in the memory of the engine and the mean, whatever the number of clients (docs/scale.md)."""


@dataclass(frozen=True)
class Costs:
    """Of one message at the server."""

    nbytes: int
    take: float  # CPU seconds: to disk, from disk, checked for finite numbers, added
    give: float  # CPU seconds: to bytes


@dataclass(frozen=True)
class Crowd:
    """How clients behave: the middle one's seconds for a question, the spread of others, who never answers."""

    work: float = 60.0
    spread: float = 1.0  # of the logarithm
    lost: float = 0.05
    timeout: float = 900.0
    bandwidth: float = 125e6  # bytes a second into the server
    down: float = 10e6  # and out of and into a client
    room: int = ROOM  # clients under way at once


@dataclass(frozen=True)
class Found:
    """A round."""

    seconds: float
    busy: float  # CPU seconds of the server, or of the busiest aggregator
    gigabytes: float  # into and out of the server
    used: float  # share of clients whose answers are in the average


def measure(megabytes: float, repeats: int = 3) -> Costs:
    """What a message of this size costs here."""
    message = Message("train", {"w": torch.randn(int(megabytes * 1e6 / 4))})
    mean, take, give = Average(), [], []
    for _ in range(repeats):
        began = process_time()
        data = message.to_bytes()
        give.append(process_time() - began)
        began = process_time()
        with Spool() as spool:
            read = spool.get(spool.put_bytes(data))
        assert torch.isfinite(read.tensors["w"]).all()
        mean.add(read.tensors, 1.0)
        take.append(process_time() - began)
    return Costs(len(data), min(take), min(give))


def simulate(clients: int, costs: Costs, crowd: Crowd, seed: int = 0) -> Found:
    """One round with one server: questions go out one after another, answers come in as they are done.

    As in the engine, at most `crowd.room` clients in order are under way: who never answers holds up those behind. The
    server takes answers one by one; the line into it is shared. A client whose answer is not there in time is left
    out, however much of it has arrived.
    """
    rng = np.random.default_rng(seed)
    work = crowd.work * np.exp(rng.normal(0, crowd.spread, clients)) + 2 * costs.nbytes / crowd.down
    work = np.where(rng.random(clients) < crowd.lost, np.inf, work)
    out = sent(work, max(costs.give, costs.nbytes / crowd.bandwidth), crowd)
    there = out + work
    in_time = np.sort(there[there <= out + crowd.timeout])
    each = max(costs.take, costs.nbytes / crowd.bandwidth)
    # an answer is taken when it is there and those before it are taken
    order = np.arange(len(in_time))
    taken = np.maximum.accumulate(in_time - order * each) + (order + 1) * each
    waits = crowd.timeout + out[-1] if len(in_time) < clients else 0.0
    seconds = max(float(taken[-1]) if len(taken) else 0.0, float(waits))
    traffic = costs.nbytes * (clients + len(in_time)) / 1e9
    return Found(seconds, clients * costs.give + len(in_time) * costs.take, traffic, len(in_time) / clients)


def sent(work: np.ndarray, each: float, crowd: Crowd) -> np.ndarray:
    """When each client is asked: after the one before it, and as soon as there is room."""
    out, settled, turn = np.zeros(len(work)), deque[float](), 0.0
    for client, seconds in enumerate(np.minimum(work, crowd.timeout).tolist()):
        if len(settled) == crowd.room:
            turn = max(turn, settled.popleft())
        out[client] = turn
        settled.append(max(turn + seconds, settled[-1] if settled else 0.0))  # replies are handed on in order
        turn += each
    return out


def tree(clients: int, costs: Costs, crowd: Crowd, fan: int, seed: int = 0) -> Found:
    """The same with aggregators of `fan` clients each, which send sums on to the next level until one is left."""
    first = simulate(min(fan, clients), costs, crowd, seed)
    seconds, busy, level = first.seconds, first.busy, -(-clients // fan)
    steady = Crowd(0.0, 0.0, 0.0, np.inf, crowd.bandwidth, crowd.bandwidth)
    while level > 1:
        above = simulate(min(fan, level), costs, steady, seed)
        seconds, busy, level = seconds + above.seconds, max(busy, above.busy), -(-level // fan)
    gigabytes = 2 * costs.nbytes * min(fan, clients) / 1e9
    return Found(seconds, busy, gigabytes, first.used)


def middle(round_: Callable[[int], Found], seeds: int) -> Found:
    """The median of every figure over crowds of so many seeds: of ten clients now and then none is lost."""
    return Found(*np.median([astuple(round_(seed)) for seed in range(seeds)], axis=0).tolist())


def over_tasks(tasks: int, folder: Path, clients: int = 3) -> list[tuple[int, int, int, int, int]]:
    """A run of so many tasks with a perceptron: for each its number, bytes to and from a client, and two disks.

    The disk of a client, and that of the run, without clients, when the task is done. All of it is measured.
    """
    wanted = {
        "data": inputs.write_dataset(folder, 2 * tasks, 40, 4, side=8, channels=1),
        "stream": {"tasks": tasks, "task_size": 2},
        "clients": {"count": clients},
        "model": {"name": "mlp", "width": 64},
        "train": {"rounds": 2, "epochs": 1},
        "run": {"engine": "apart", "threads": 1},
    }
    out, disks = folder / "run", list[tuple[int, int]]()

    def size(path: Path) -> int:
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())

    def look(event: Any) -> None:
        if event["event"] == "task":
            disks.append((size(out / SITES / "0"), size(out) - size(out / SITES)))

    fedprotip.run(wanted, out=out, observers=[look])
    crossed = {way: [0] * tasks for way in ("down", "up")}
    for line in map(json.loads, (out / "ledger.jsonl").read_text(encoding="utf-8").splitlines()):
        crossed[line["direction"]][line["task"]] += line["bytes"] // clients
    return [(task + 1, crossed["down"][task], crossed["up"][task], *disks[task]) for task in range(tasks)]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.fleet")
    parser.add_argument("--megabytes", type=float, nargs="+", default=[0.5, 4.5, 45.0], metavar="M")
    parser.add_argument("--clients", type=int, nargs="+", default=[10, 100, 1000, 10**4, 10**5, 10**6], metavar="K")
    parser.add_argument("--fan", type=int, default=100, help="clients of an aggregator")
    parser.add_argument("--seeds", type=int, default=5, help="crowds, of which the median is shown")
    parser.add_argument("--tasks", type=int, default=0, help="measure a run of so many tasks instead")
    given = parser.parse_args(arguments)
    crowd = Crowd()
    if given.tasks:
        with TemporaryDirectory(prefix="fedprotip-") as folder:
            rows = over_tasks(given.tasks, Path(folder))
        print("| task | to a client, KB | from a client, KB | a client's disk, KB | the run folder, KB |")
        print("|---|---|---|---|---|")
        for task, *sizes in rows:
            print(f"| {task} | {' | '.join(f'{size / 1e3:,.0f}' for size in sizes)} |")
        return
    for megabytes in given.megabytes:
        costs = measure(megabytes)
        print(f"\n{megabytes:g} MB: {costs.give:.3f} CPU s to send, {costs.take:.3f} CPU s to take\n")
        head = "clients | round, s | all at once | server CPU, s | memory, GB | disk, GB | traffic, GB | used"
        print(f"| {head} | with a tree | busiest CPU |")
        print("|---|---|---|---|---|---|---|---|---|---|")
        for clients in given.clients:
            flat = middle(lambda seed: simulate(clients, costs, crowd, seed), given.seeds)  # noqa: B023 (used at once)
            wide = middle(lambda seed: simulate(clients, costs, replace(crowd, room=clients), seed), given.seeds)  # noqa: B023
            deep = middle(lambda seed: tree(clients, costs, crowd, given.fan, seed), given.seeds)  # noqa: B023
            memory, disk = (costs.nbytes * min(clients, most) / 1e9 for most in (HELD, crowd.room))
            print(
                f"| {clients:,} | {flat.seconds:,.0f} | {wide.seconds:,.0f} | {flat.busy:,.1f} | {memory:,.2f} "
                f"| {disk:,.2f} | {flat.gigabytes:,.2f} | {flat.used:.0%} | {deep.seconds:,.0f} | {deep.busy:,.1f} |"
            )


if __name__ == "__main__":
    main()
