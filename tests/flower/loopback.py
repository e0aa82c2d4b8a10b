"""A deployment of real processes on this machine: its commands, what its run has come to, whom it started."""

import ipaddress
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import fedprotip

SOURCE = str(Path(fedprotip.__file__).parents[1])
TESTS = str(Path(__file__).parents[2])


def environment():
    programs = str(Path(sys.executable).parent)
    found = os.pathsep.join([SOURCE, TESTS])
    given = {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1", "PYTHONPATH": found}
    return {**os.environ, **given}


def free_port():
    """Below those that the system gives to whoever calls out: such a one may take it before a SuperLink is back."""
    while True:
        port = random.SystemRandom().randrange(20000, 30000)
        with socket.socket() as found, suppress(OSError):
            found.bind(("127.0.0.1", port))
            return port


def shell(text, folder, seconds=3600):
    done = subprocess.run(
        ["bash", "-e", "-c", text], cwd=folder, env=environment(), capture_output=True, text=True, timeout=seconds
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def events(folder, kind):
    path = folder / "events.jsonl"
    lines = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return [line for line in lines if line["event"] == kind]


def rounds(folder):
    return events(folder, "round")


def finished(folder):
    path = folder / "manifest.json"
    return path.exists() and json.loads(path.read_text())["status"] == "finished"


def wait_for(what, seconds):
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.5)


def children(pid):
    """Ids and command lines of all processes below this one."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if parent == pid:
                found += [(int(entry.name), command), *children(int(entry.name))]
    return found


def listening(pid):
    """Addresses at which this process and all below it listen."""
    sockets = set()
    for process in [pid, *(child for child, _ in children(pid))]:
        for entry in Path(f"/proc/{process}/fd").glob("*"):
            with suppress(OSError):
                sockets.add(os.readlink(entry))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            local, state, inode = (line.split()[place] for place in (1, 3, 9))
            if state == "0A" and f"socket:[{inode}]" in sockets:
                words = bytes.fromhex(local.partition(":")[0])
                address = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
                known = ipaddress.ip_address(address)
                found.append(getattr(known, "ipv4_mapped", None) or known)
    return found


def at_work(pid):
    """Ids of what the SuperNode of a site has started for messages."""
    return {child for child, command in children(pid) if "flwr-clientapp" in command}


def kill_supernode(pid):
    """The SuperNode of a site, with what it has started for messages; parents first, so that none starts another."""
    for child, _ in children(pid):
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def kill_site(pid):
    """A site and its SuperNode, by their ids."""
    kill_supernode(pid)
    os.kill(pid, signal.SIGKILL)
