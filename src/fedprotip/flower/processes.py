"""What this machine runs of a deployment: started in the background, found again by their ids, ended by them."""

import ctypes
import fcntl
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Concatenate, ParamSpec, TypeVar

from fedprotip.envelopes import require_flower
from fedprotip.errors import RunError, UsageError, shortened
from fedprotip.flower import keys
from fedprotip.flower.deployment import Place, SiteEntry
from fedprotip.flower.relay import PLACE
from fedprotip.store.plain import PlainFolder

Given = ParamSpec("Given")
Found = TypeVar("Found")

READY = 300.0
"""Seconds in which a SuperLink has to listen, a site to be there, and a command of Flower to end."""
GRACE = 10.0
"""Seconds that a process has to end when it is asked to."""
AGAIN = (2.0, 30.0)
"""Seconds after which a SuperNode that has ended is started again, at first and at most."""
MOST_FOLDER = 100
"""Bytes of the name of a folder with a socket, which has 107 of them."""
RECORD = "processes.json"
SUPERLINK = "superlink"
STARTED = "SuperNode {pid} is started."
"""What the log of a site says as soon as its program listens."""


def in_home(act: Callable[Concatenate[Place, Given], Found]) -> Callable[Concatenate[Place, Given], Found]:
    """Errors of the file system in a sentence: all that a deployment writes lies in its home, or is named there."""

    @wraps(act)
    def acting(place: Place, *given: Given.args, **named: Given.kwargs) -> Found:
        try:
            return act(place, *given, **named)
        except OSError as error:
            where, why = error.filename or place.home, error.strerror or error
            raise RunError(
                f"{where}: {why}; what Flower and this deployment write is in {place.home} (home in {place.path})."
            ) from error

    return acting


@in_home
def up(place: Place, modules: Sequence[str] = ()) -> list[str]:
    """Start what the file names and is not running; their names. `modules`: what sites import beside this package.

    RunError where something of it ends at once, when all has been started.
    """
    require_flower()
    _require_linux()
    with alone(place.home, "up.lock", "Another fedprotip flower up is at work in {}: wait for its end."):
        return _up(place, modules)


def _up(place: Place, modules: Sequence[str]) -> list[str]:
    started, link, sites = list[str](), place.what.superlink, dict[str, int]()
    public = {site.client: keys.site_key(place.key_of(site)) for site in place.what.sites if link.keys}
    if link.here and not running(place, SUPERLINK):
        if _listens(link.listen or link.host, link.port):
            raise UsageError(f"Port {link.port} is taken by another program; choose another superlink.port.")
        before = _size(_log(place, SUPERLINK))
        _start(place, SUPERLINK, _superlink(place), place.home / "flwr")
        started.append(SUPERLINK)
        _wait_for_superlink(place, before)
    for site in place.what.sites:
        if link.keys and link.here:
            admit(place, public[site.client], site.client)
        name = f"site-{site.client}"
        if not running(place, name):
            command = [sys.executable, "-m", "fedprotip", "flower", "join", str(place.path), "--client"]
            command += [str(site.client), *(f"--import={module}" for module in modules)]
            sites[name] = _size(_log(place, name))
            _start(place, name, command, place.home / "flwr")
    for name, before in sites.items():
        _wait_for_site(place, name, before)
    return [*started, *sites]


@in_home
def admit(place: Place, public: Path, client: int | None = None) -> bool:
    """Let the site with this public key in, as this client and no other one; False where it is already."""
    keys.plain_key(public)
    if client is not None:
        keys.bind(place.home, client, public)
    done = flwr(place, "supernode", "register", str(public), connection(place))
    told = done.stdout + done.stderr
    if done.returncode and "already" not in told:
        raise RunError(f"The SuperLink does not take the key {public}: {last_word(told)}")
    return not done.returncode


@in_home
def down(place: Place) -> list[str]:
    """End what this machine runs of the deployment, sites first; their names."""
    record, ended = _read(place), []
    for name in sorted(record, key=lambda name: name == SUPERLINK):
        if pid := running(place, name):
            _end(pid)
            ended.append(name)
    (place.home / RECORD).unlink(missing_ok=True)
    return ended


def running(place: Place, name: str) -> int | None:
    """The id of a process of this deployment; None where it has ended."""
    entry = _read(place).get(name)
    return entry["pid"] if entry and _born(entry["pid"]) == entry["born"] else None


@in_home
def join(place: Place, site: SiteEntry, tell: Any) -> None:
    """Be a site: its program in this process, and a SuperNode beside it, for as long as this process lives."""
    require_flower()
    _require_linux()
    from fedprotip.federation.secure.demands import Demands
    from fedprotip.flower.site import SiteProgram, serve  # torch: only the program of a site needs it

    data, own = place.data_of(site)
    if data.source and not os.path.exists(data.source):
        there = os.path.abspath(data.source)
        raise UsageError(f"The data of client {site.client} is not there: {there} does not exist.")
    with held(place.folder_of(site)), TemporaryDirectory(prefix="fedprotip-") as folder:
        if len(os.fsencode(folder)) > MOST_FOLDER:
            raise UsageError(f"{folder} is too long a name for a socket in it; set TMPDIR to a shorter folder.")
        signer = _signer(place, site) if place.what.superlink.keys else None
        demands = Demands(site.secure, site.secure_share, site.secure_noise)
        program = SiteProgram(site.client, place.folder_of(site), data, own, tell, signer, demands)
        door, node = Path(folder) / "door", SuperNode(place, site, Path(folder) / "door", tell)
        try:
            serve(program, door, node.start)
        finally:
            node.end()
            program.close()


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """A site's folder for this process alone, and one that is made for its owner alone.

    Two programs of one site would write over each other, and could be led to reveal two secrets of a client's in a sum.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    with alone(folder, "lock", "Another program of this site is at work in {}: end it first."):
        yield


@contextmanager
def alone(folder: Path, name: str, taken: str) -> Iterator[None]:
    """The lock of this name for this process; RunError, by the sentence `taken`, where another one has it."""
    with PlainFolder(folder).make().lockable(name) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(taken.format(folder)) from None
        yield


def _signer(place: Place, site: SiteEntry) -> Any:
    keys.site_key(place.key_of(site))
    from fedprotip.federation.secure.signed import Signer

    roster = place.at(site.roster) if site.roster else None
    return Signer(site.client, place.key_of(site), PlainFolder(place.folder_of(site)), roster)


def check_line(place: Place) -> None:
    """UsageError where this site and the SuperLink, if that is there, would not speak with each other."""
    link, ours, fits = place.what.superlink, place.authority, False
    if link.tls and not ours.exists():
        raise UsageError(f"{ours} is missing; it is the ca.crt of the SuperLink's home: copy it here.")
    if link.tls:
        keys.check_authority(ours)
    context = ssl.create_default_context(cafile=str(ours) if link.tls else None)
    context.check_hostname = link.tls
    context.verify_mode = ssl.CERT_REQUIRED if link.tls else ssl.CERT_NONE
    try:
        line = socket.create_connection((link.host, link.port), 5)
        with line, context.wrap_socket(line, server_hostname=link.host):
            fits = link.tls
    except ssl.SSLCertVerificationError as error:
        why = error.verify_message.rstrip(".")
        raise UsageError(
            f"The SuperLink at {place.address} shows a certificate that does not fit {ours} and this host ({why}): "
            "copy its ca.crt here anew, or set superlink.host to a name that it is for."
        ) from None
    except ssl.SSLError:
        fits = not link.tls
    except OSError:
        return  # it is not there: the SuperNode asks again and again
    if not fits:
        there = "does not speak TLS" if link.tls else "speaks TLS alone"
        raise UsageError(f"The SuperLink at {place.address} {there}: superlink.tls has to be the same there and here.")


class SuperNode:
    """Flower's program at a site; one that ends is started again."""

    def __init__(self, place: Place, site: SiteEntry, door: Path, tell: Any) -> None:
        self._place, link = place, place.what.superlink
        secure = ["--root-certificates", str(place.authority)] if link.tls else ["--insecure"]
        check_line(place)
        if link.keys:
            keys.site_key(place.key_of(site))
            secure += ["--auth-supernode-private-key", str(place.key_of(site))]
        where = ["--superlink", place.address, "--host", "127.0.0.1"]
        self._command = [_program("flower-supernode"), *secure, *where, "--node-config", f'{PLACE}="{door}"']
        self._environment = place.environment(place.home / f"flwr-{site.client}")
        self._tell, self._ending = tell, threading.Event()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        threading.Thread(target=self._watch, daemon=True).start()

    def end(self) -> None:
        self._ending.set()
        if self._process and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(GRACE)
            except subprocess.TimeoutExpired:
                self._process.kill()

    def _watch(self) -> None:
        pause = AGAIN[0]
        while not self._ending.is_set():
            began = time.monotonic()
            command = [*self._command, "--port", str(_free_port())]
            self._process = subprocess.Popen(command, env=self._environment, preexec_fn=_with_parent)
            self._tell(STARTED.format(pid=self._process.pid))
            code = self._process.wait()
            if self._ending.is_set():
                return
            pause = AGAIN[0] if time.monotonic() - began > AGAIN[1] else min(2 * pause, AGAIN[1])
            self._tell(f"The SuperNode has ended (exit code {code}); another one is started in {pause:g} seconds.")
            self._ending.wait(pause)
            try:
                check_line(self._place)
            except (UsageError, OSError) as error:
                self._tell(str(error))


def connection(place: Place) -> str:
    """The name under which Flower's commands find the SuperLink; written into their configuration."""
    secure = (
        f"root-certificates = {json.dumps(str(place.authority))}" if place.what.superlink.tls else "insecure = true"
    )
    text = f'[superlink]\ndefault = "ours"\n\n[superlink.ours]\naddress = "{place.address}"\n{secure}\n'
    PlainFolder(place.home / "flwr").make().write("config.toml", text)  # whole: another command may be reading it
    return "ours"


def flwr(place: Place, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Flower's own command, with our home; one that does not end in time has failed."""
    command = [_program("flwr"), *arguments]
    environment = {**place.environment(place.home / "flwr"), "NO_COLOR": "1", "COLUMNS": "1000"}
    try:
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=READY)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"no answer within {READY:g} seconds")


def _superlink(place: Place) -> list[str]:
    link, database = place.what.superlink, place.home / "superlink.db"
    secure = ["--insecure"]
    if link.tls:
        files = keys.certificates(place.home, link.host)
        secure = ["--ssl-certfile", str(files.certificate), "--ssl-keyfile", str(files.key)]
        secure += ["--ssl-ca-certfile", str(files.authority)]
    secure += ["--enable-supernode-auth"] if link.keys else []
    where = ["--host", link.listen or link.host, "--port", str(link.port), "--database", str(database)]
    return [_program("flower-superlink"), *secure, *where, "--disable-runtime-dependency-installation"]


def _start(place: Place, name: str, command: list[str], home: Path) -> None:
    with _log(place, name).open("ab") as log:
        process = subprocess.Popen(
            command,
            env=place.environment(home),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    record = _read(place) | {name: {"pid": process.pid, "born": _born(process.pid)}}
    PlainFolder(place.home).write(RECORD, json.dumps(record))


def _wait_for_superlink(place: Place, before: int) -> None:
    """`before`: length of its log when it was started."""
    link, end, log = place.what.superlink, time.monotonic() + READY, _log(place, SUPERLINK)
    while not _listens(link.listen or link.host, link.port):
        if not running(place, SUPERLINK) or time.monotonic() > end:
            said = _said(log, before)
            wrong = "\n".join(line for line in said.splitlines() if " ERROR " in line)
            raise RunError(f"The SuperLink does not start; the end of {log} says: {last_word(wrong or said)}")
        time.sleep(0.2)


def _wait_for_site(place: Place, name: str, before: int) -> None:
    """`before`: length of its log when it was started."""
    log, end, mark = _log(place, name), time.monotonic() + READY, STARTED.partition("{pid}")
    while True:
        lives = running(place, name)
        said = _said(log, before)
        if any(mark[0] in line and line.endswith(mark[2]) for line in said.splitlines()):
            return
        if not lives:
            raise RunError(f"{name} has ended at once; the end of {log} says: {last_word(said)}")
        if time.monotonic() > end:
            raise RunError(f"{name} does not start within {READY:g} seconds; see {log}.")
        time.sleep(0.2)


def last_word(said: str) -> str:
    """The last line that says anything: Flower draws boxes around what it says, too."""
    lines = [line.strip(" │") for line in said.splitlines() if any(map(str.isalnum, line))]
    return shortened((lines or ["nothing"])[-1], 500)


def _said(log: Path, before: int) -> str:
    """What a log says behind its first bytes, which may be those of months."""
    with log.open("rb") as file:
        file.seek(before)
        return file.read().decode(errors="replace")


def _log(place: Place, name: str) -> Path:
    return place.home / f"{name}.log"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _listens(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host if host != "0.0.0.0" else "127.0.0.1", port), 1):
            return True
    except OSError:
        return False


def _free_port() -> int:
    with socket.socket() as any_port:
        any_port.bind(("127.0.0.1", 0))
        return any_port.getsockname()[1]


def _program(name: str) -> str:
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if not found:
        raise UsageError(f'{name} is not installed; it comes with the extra: pip install "fedprotip[flower]".')
    return found


def _read(place: Place) -> dict[str, Any]:
    try:
        found = json.loads((place.home / RECORD).read_text(encoding="utf-8"))
        return {name: {"pid": int(one["pid"]), "born": one["born"]} for name, one in found.items()}
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, KeyError, AttributeError):
        raise RunError(
            f"{place.home / RECORD} is damaged; end the processes of the deployment and remove it."
        ) from None


def _born(pid: int) -> str | None:
    """When a process was started, so that nobody else is taken for it who got its id; None: it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else f"{_boot()} {fields[19]}"


def _boot() -> str:
    """Which one it was, from which the moments of processes count."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


def _end(pid: int) -> None:
    """Ask a process to end, wait, then kill it."""
    for number, patience in ((signal.SIGTERM, GRACE), (signal.SIGKILL, GRACE)):
        born = _born(pid)
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return
        for _ in _ticks(patience):
            if _born(pid) != born:
                return


def _ticks(seconds: float) -> Iterator[None]:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield
        time.sleep(0.1)


def _require_linux() -> None:
    if not sys.platform.startswith("linux"):
        raise UsageError("A SuperLink and sites are started on Linux only; a container will do.")


def _with_parent() -> None:
    """Called in a new process: it ends when the one that started it does, however that ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
