"""serve: requests to `fedprotip serve` on loopback, answered together and one at a time."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection, HTTPException
from io import BytesIO
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
import torch
from PIL import Image

from benchmarks import inputs
from benchmarks.apart import SOURCE
from benchmarks.harness import Agreement, Bench
from fedprotip import RunError, load_settings, run
from fedprotip.seeds import numpy_stream
from fedprotip.serve.limits import Limits
from fedprotip.stream.stream import build_stream

EDGE = b"edge-of-the-form"


class Load(NamedTuple):
    """What clients saw: answers, errors, requests a second, and the seconds that each took."""

    answered: int
    errors: int
    rate: float
    taken: list[float]

    @property
    def p99(self) -> float:
        """Seconds that 99 of 100 took at most."""
        return float(np.quantile(self.taken, 0.99))


def serve(
    bench: Bench,
    requests: int = 1000,
    clients: int = 8,
    side: int = 32,
    classes: int = 100,
    images: int = 5,  # for training, per class
    model: tuple[str, ...] = (*inputs.RESNET, "model.stem=stride1"),
    overrides: tuple[str, ...] = (),
) -> None:
    """Requests of concurrent clients, on digits and on ResNet-18 (stem stride1, 100 classes), batched and not.

    `overrides`: other data and weights for the second run; then its test images are sent.
    """
    folders = {"digits": bench.folder / "digits", "ResNet-18": bench.folder / "resnet"}
    bench.say("serve: making the two runs")
    run({"method": {"name": "lda"}}, out=folders["digits"])
    few: dict[str, Any] = {"stream": {"tasks": 10, "task_size": classes // 10}, "method": {"name": "lda"}}
    if any(change.startswith("data.name") for change in overrides):
        few["data"] = {"train_limit": images, "test_limit": 2}
    else:
        few["data"] = inputs.write_dataset(bench.folder, classes, images, 2, side)
    settings = load_settings(few, [*model, *overrides])
    run(settings, out=folders["ResNet-18"])
    drawn = numpy_stream(inputs.SEED, "requests")
    noise = [_png(drawn.integers(0, 256, (side, side, 3), dtype=np.uint8)) for _ in range(32)]
    seen = build_stream(settings).dataset.test_images[torch.arange(32)].permute(0, 2, 3, 1).numpy()
    files = {"digits": noise, "ResNet-18": [_png(image) for image in seen]}
    for name, folder in folders.items():
        bench.say(f"serve: {name}, in turns")
        found = _in_turns(folder, requests, clients, files[name])
        seconds = {way: requests / told["load"].rate for way, told in found.items()}
        cpu = {way: told["cpu"] for way, told in found.items()}
        case = bench._enter(f"{name}, {requests} requests", _no_errors(found), seconds, {}, found, cpu)
        for way, told in found.items():
            bench.figure(case, f"requests a second, {way}", told["load"].rate)
            bench.figure(case, f"ms that 99 of 100 took at most, {way}", 1000 * told["load"].p99, "≤")
            bench.figure(case, f"CPU ms of the server for a request, {way}", 1000 * told["cpu"] / requests, "≤")
            bench.figure(case, f"MiB more after the second half, {way}", told["grown"], "≤", 30.0)
        ratio = found["ours"]["load"].rate / found["textbook"]["load"].rate
        bench.figure(case, "times the throughput of one at a time", ratio, "≥", 2.0 if name == "ResNet-18" else None)
        if cpu["ours"]:
            bench.figure(case, "the same by CPU seconds of the server", cpu["textbook"] / cpu["ours"])


STARTED = """
import sys
from fedprotip.serve.limits import Limits
from fedprotip.serve.server import serve
folder, batch, wait = sys.argv[1:]
serve(folder, port=0, limits=Limits(batch=int(batch), wait=float(wait)), say=lambda text: print(text, file=sys.stderr))
"""
WAYS = {"ours": Limits(), "textbook": Limits(batch=1, wait=0.0)}
"""As it comes, and one at a time."""
TURNS = 4


def _no_errors(found: dict[str, Any]) -> Agreement:
    return "requests without an answer", float(sum(told["load"].errors for told in found.values())), 0.0


def _in_turns(folder: Path, requests: int, clients: int, files: Sequence[bytes]) -> dict[str, dict[str, Any]]:
    """Both ways, each by a server of its own, asked in turns: slow minutes of the machine hit both."""
    with ExitStack() as stack:
        servers = {way: stack.enter_context(server(folder, limits)) for way, limits in WAYS.items()}
        for _, address in servers.values():
            load(address, files, max(requests // 2, clients), clients)
        resident = {way: resident_mb(process.pid) for way, (process, _) in servers.items()}
        spent = {way: cpu_seconds(process.pid) for way, (process, _) in servers.items()}
        found: dict[str, list[Load]] = {way: [] for way in servers}
        for turn in range(TURNS):
            for way, (_, address) in servers.items():
                share = requests * (turn + 1) // TURNS - requests * turn // TURNS
                found[way].append(load(address, files, share, clients))
        return {
            way: {
                "load": _whole(found[way]),
                "grown": resident_mb(process.pid) - resident[way],
                "cpu": cpu_seconds(process.pid) - spent[way],
            }
            for way, (process, _) in servers.items()
        }


def _whole(turns: Sequence[Load]) -> Load:
    asked = sum(turn.answered + turn.errors for turn in turns)
    seconds = sum((turn.answered + turn.errors) / turn.rate for turn in turns)
    taken = [one for turn in turns for one in turn.taken]
    return Load(sum(turn.answered for turn in turns), sum(turn.errors for turn in turns), asked / seconds, taken)


def load(address: str, files: Sequence[bytes], requests: int, clients: int) -> Load:
    """So many requests of one image each, by clients that ask again as soon as they are answered."""
    taken: list[float] = []
    errors, places, lock = [0], iter(range(requests)), threading.Lock()

    def ask() -> None:
        connection = HTTPConnection(urlsplit(address).netloc, timeout=60)
        while True:
            with lock:
                place = next(places, None)
            if place is None:
                return connection.close()
            start = perf_counter()
            try:
                connection.request("POST", "/predict", _form(files[place % len(files)]), HEADERS)
                reply = connection.getresponse()
                reply.read()
                good = reply.status == 200
            except (OSError, HTTPException):
                good = False
                connection.close()  # what is left of this one must not be taken for the next
            with lock:
                taken.append(perf_counter() - start)
                errors[0] += not good

    threads = [threading.Thread(target=ask) for _ in range(clients)]
    start = perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    whole = perf_counter() - start
    return Load(len(taken) - errors[0], errors[0], requests / whole, taken)


HEADERS = {"Content-Type": f"multipart/form-data; boundary={EDGE.decode()}"}


def _form(image: bytes) -> bytes:
    head = b'Content-Disposition: form-data; name="images"; filename="a.png"\r\nContent-Type: image/png'
    return b"--%s\r\n%s\r\n\r\n%s\r\n--%s--\r\n" % (EDGE, head, image, EDGE)


def _png(pixels: np.ndarray) -> bytes:
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


@contextmanager
def server(folder: Path, limits: Limits) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server on a free port of loopback, and its address; it is ended by SIGTERM."""
    command = [sys.executable, "-c", STARTED, str(folder), str(limits.batch), str(limits.wait)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    try:
        said = process.stderr.readline()
        found = re.search(r"http://\S+:\d+", said)
        if not found:
            raise RunError(f"The server did not start: {said.strip() or 'no message'}")
        yield process, found[0]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        process.stderr.close()


def cpu_seconds(pid: int) -> float:
    """What a process has worked so far, in all of its threads; 0 where the system has no /proc."""
    told = Path(f"/proc/{pid}/stat")
    fields = told.read_text().rpartition(")")[2].split() if told.exists() else []
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def resident_mb(pid: int) -> float:
    """What a process holds in memory now; 0 where the system has no /proc."""
    status = Path(f"/proc/{pid}/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS:")), 0.0)
