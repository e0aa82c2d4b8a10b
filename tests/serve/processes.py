"""`fedprotip serve` as a process of its own, as a user starts it."""

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import fedprotip

PATIENCE = 300.0


@contextmanager
def serving(folder, *options, **environment):
    """(process, address); ended by SIGTERM afterwards, if the test has not done so."""
    path = os.pathsep.join([str(Path(fedprotip.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-m", "fedprotip", "serve", str(folder), "--port", "0", *map(str, options)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process, _address(process)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stderr.close()


def _address(process):
    until, said = time.monotonic() + PATIENCE, ""
    while time.monotonic() < until and process.poll() is None:
        if select.select([process.stderr], [], [], 0.2)[0]:
            said += process.stderr.readline()
            if found := re.search(r"http://\S+:\d+", said):
                return found[0]
    raise AssertionError(f"the server did not start: {said}")


def get(address, path="/health", body=None, **headers):
    """(status, what the body says)."""
    asked = urllib.request.Request(address + path, data=body, headers=headers)
    try:
        with urllib.request.urlopen(asked, timeout=PATIENCE) as reply:
            return reply.status, _read(reply)
    except urllib.error.HTTPError as reply:
        return reply.code, _read(reply)


def _read(reply):
    text = reply.read().decode()
    return json.loads(text) if reply.headers["content-type"] == "application/json" else text
