"""serve: requests to `fedprotip serve` on loopback, answered together and one at a time."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection
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
    """What clients saw: answers, errors, requests a second, and the time that 99 of 100 took at most."""

    answered: int
    errors: int
    rate: float
    p99: float


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
        found = {way: _served(folder, limits, requests, clients, files[name]) for way, limits in WAYS.items()}
        seconds = {way: requests / told["load"].rate for way, told in found.items()}
        case = bench._enter(f"{name}, {requests} requests", _no_errors(found), seconds, {}, found)
        for way, told in found.items():
            bench.figure(case, f"requests a second, {way}", told["load"].rate)
            bench.figure(case, f"ms that 99 of 100 took at most, {way}", 1000 * told["load"].p99, "≤")
            bench.figure(case, f"MiB more after the second half, {way}", told["grown"], "≤", 30.0)
        ratio = found["ours"]["load"].rate / found["textbook"]["load"].rate
        bench.figure(case, "times the throughput of one at a time", ratio, "≥", 2.0 if name == "ResNet-18" else None)


STARTED = """
import sys
from fedprotip.serve.limits import Limits
from fedprotip.serve.server import serve
folder, batch, wait = sys.argv[1:]
serve(folder, port=0, limits=Limits(batch=int(batch), wait=float(wait)), say=lambda text: print(text, file=sys.stderr))
"""
WAYS = {"ours": Limits(), "textbook": Limits(batch=1, wait=0.0)}
"""As it comes, and one at a time."""


def _no_errors(found: dict[str, Any]) -> Agreement:
    return "requests without an answer", float(sum(told["load"].errors for told in found.values())), 0.0


def _served(folder: Path, limits: Limits, requests: int, clients: int, files: Sequence[bytes]) -> dict[str, Any]:
    with server(folder, limits) as (process, address):
        load(address, files, max(requests // 2, clients), clients)
        before = resident_mb(process.pid)
        found = load(address, files, requests, clients)
        return {"load": found, "grown": resident_mb(process.pid) - before}


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
            except OSError:
                good = False
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
    return Load(len(taken) - errors[0], errors[0], requests / whole, float(np.quantile(taken, 0.99)))


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


def resident_mb(pid: int) -> float:
    """What a process holds in memory now; 0 where the system has no /proc."""
    status = Path(f"/proc/{pid}/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS:")), 0.0)
