"""Engine `pool`: clients side by side, in processes of this machine; a thin pipe around `Client.handle`.

A worker process holds the clients that were given to it first, for good: their rows of a frozen prefix and their models
are there. What passes through the pipe is what would pass over a network: parcels and replies, as bytes.
"""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from multiprocessing import get_context, parent_process, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from signal import SIG_BLOCK, SIG_SETMASK, SIGHUP, SIGINT, SIGTERM, pthread_sigmask
from threading import Thread
from time import sleep
from typing import Any

from fedprotip.errors import FedprotipError, RunError, UsageError
from fedprotip.federation.client import Client
from fedprotip.federation.engines.base import reason
from fedprotip.federation.engines.workplace import Workplace, instructions, useful_workers
from fedprotip.federation.parcels import LOST, Ask, Reply, Request
from fedprotip.messages import BadMessage, Message, pack_parcel, unpack_parcel
from fedprotip.methods import create_method
from fedprotip.models.heads import builder_of
from fedprotip.settings import Settings
from fedprotip.store.clients import StoreError
from fedprotip.store.files import hash_of
from fedprotip.store.scratch import Scratch
from fedprotip.stream import Stream

AHEAD = 2
"""Clients per worker that may be under way or done before it is their turn: so many replies are kept at most."""
AWAKE = 8
"""Clients of a worker that keep their model in memory; the others have it in their folder."""
PATIENCE = 5.0
"""Seconds that a worker has to end when it is asked to; then it is killed."""


class PoolEngine:
    """Clients in worker processes, each with as many threads as its share of the run's.

    Memory: every worker holds the data as this process does, the models of up to AWAKE clients and its share of
    `run.cache_mb`; this process keeps up to AHEAD replies per worker. `peak_rss_mb` counts this process.
    """

    def __init__(self, stream: Stream, settings: Settings, folder: Path) -> None:
        """`folder`: holds a folder for every client."""
        self._stream, self._settings, self._folder = stream, settings, folder
        self._workers: list[Worker] = []
        self._files: Scratch | None = None
        self._home: dict[int, Worker] = {}  # client → the worker that holds it

    def ask(self, requests: Iterable[Request]) -> Iterator[Reply]:
        try:
            if not self._workers:
                self._start()
            source, waiting, answers = iter(requests), list[Request](), dict[int, Reply]()
            order: list[int] = []
            room, more = AHEAD * len(self._workers), True
            while True:
                while more and len(order) < room:
                    request = next(source, None)
                    more = request is not None
                    if request:
                        waiting.append(request)
                        order.append(request.client)
                self._hand_out(waiting)
                if not order:
                    return
                while order[0] not in answers:
                    self._collect(answers)
                    self._hand_out(waiting)
                yield answers.pop(order.pop(0))
        except BaseException:  # also when nobody wants the rest: workers are in the middle of something
            self.close()
            raise

    def close(self) -> None:
        """End the workers, whatever they are doing."""
        workers, self._workers, self._home = self._workers, [], {}
        for worker in workers:
            worker.process.terminate()
        for worker in workers:
            worker.end()
        if self._files:
            self._files.close()
            self._files = None

    def _start(self) -> None:
        settings, count = self._settings, useful_workers(self._settings, self._stream)
        self._files = Scratch(self._folder)
        told = instructions(settings, self._stream, self._folder, self._files, count)
        resource_tracker.ensure_running()  # its own start would unblock the signal again
        for _ in range(count):
            self._workers.append(Worker())
        for worker in self._workers:
            worker.send(json.dumps(told).encode())
        mine = likeness(settings, self._stream)
        for worker in self._workers:
            _refuse_another_run(worker.receive(), mine)

    def _hand_out(self, waiting: list[Request]) -> None:
        """Give every idle worker the first client that waits and belongs to no other worker."""
        for worker in self._workers:
            free = (request for request in waiting if self._home.get(request.client, worker) is worker)
            request = next(free, None) if worker.busy_with is None else None
            if request:
                waiting.remove(request)
                self._home[request.client] = worker
                worker.ask(request)

    def _collect(self, answers: dict[int, Reply]) -> None:
        """Wait for at least one worker and take its answer."""
        busy = {worker.connection: worker for worker in self._workers if worker.busy_with is not None}
        for connection in wait(list(busy)):
            assert isinstance(connection, Connection)
            worker = busy[connection]
            request, (head, body) = worker.busy_with, worker.receive()
            assert request is not None
            worker.busy_with = None
            _stop_if_told(head)
            message, failed = None, head.get("failed", "")
            try:
                message = None if failed else Message.from_bytes(body)
            except BadMessage as error:
                failed = reason(error)
            if message is not None and message.kind == LOST and Ask.of(request.parcel[0]).since is not None:
                worker.ask(Request(request.client, request.anew(message), request.anew))
            else:
                answers[request.client] = Reply(request.client, message, failed)


class Worker:
    """A worker process as the run sees it."""

    def __init__(self) -> None:
        self.busy_with: Request | None = None
        self._ready = False
        context = get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=main, args=(theirs,), daemon=True, name="fedprotip worker")
        before = pthread_sigmask(SIG_BLOCK, {SIGINT, SIGHUP})  # inherited: they are for the run, which ends its workers
        try:
            self.process.start()
        except (RuntimeError, AssertionError) as error:
            self.connection.close()
            raise UsageError(
                f'run.engine = "pool": this process cannot start others ({_first_line(error)}); start the run '
                'below if __name__ == "__main__":, or choose "local".'
            ) from None
        except OSError as error:
            self.connection.close()
            raise RunError(f"A worker process cannot start: {error.strerror}; choose fewer run.workers.") from None
        finally:
            theirs.close()
            pthread_sigmask(SIG_SETMASK, before)

    def send(self, data: bytes) -> None:
        try:
            self.connection.send_bytes(data)
        except OSError:
            raise self._gone() from None

    def ask(self, request: Request) -> None:
        """Let a client of this worker answer."""
        self.busy_with = request
        self.send(request.client.to_bytes(8, "little") + pack_parcel(request.parcel))

    def receive(self) -> tuple[dict[str, Any], bytes]:
        """What the worker says about an answer, and the answer's bytes."""
        try:
            head, _, body = self.connection.recv_bytes().partition(b"\n")
        except (EOFError, OSError):
            raise self._gone() from None
        self._ready = True
        return json.loads(head), body

    def end(self) -> None:
        """Wait for a process that was told to end, and release what belongs to it."""
        self.process.join(PATIENCE)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.connection.close()
        self.process.close()

    def _gone(self) -> RunError:
        self.process.join(PATIENCE)
        if self.process.exitcode == -SIGTERM:  # sent to the whole group, as a rule: the run's own is under way
            sleep(1)
        busy = f"answered for client {self.busy_with.client}" if self.busy_with else "waited"
        doing = busy if self._ready else "started"
        hint = (
            "perhaps memory ran out: resume the run, or start again with fewer run.workers"
            if self._ready
            else 'a script must start its runs below if __name__ == "__main__":, or set run.engine = "local"'
        )
        return RunError(f"A worker process died while it {doing} (exit code {self.process.exitcode}); {hint}.")


class Host(Workplace):
    """What a worker process holds: the data, and the clients that were given to it."""

    def __init__(self, told: dict[str, Any]) -> None:
        super().__init__(told)
        self.likeness = likeness(self.settings, self.stream)
        self._clients: dict[int, Client] = {}

    def answer(self, data: bytes) -> bytes:
        number = int.from_bytes(data[:8], "little")
        client = self._clients.pop(number, None) or self.client(number)
        self._clients[number] = client  # the last of them was asked last
        for resting in list(self._clients.values())[:-AWAKE]:
            resting.rest()
        try:
            return b"{}\n" + client.handle(unpack_parcel(data[8:])).to_bytes()
        except (FedprotipError, StoreError):
            raise
        except Exception as error:  # a failing client must not stop the others
            return json.dumps({"failed": reason(error)}).encode() + b"\n"


def main(connection: Connection) -> None:
    """A worker process: answers until the run hangs up, or is gone."""
    Thread(target=end_with_the_run, daemon=True).start()
    with suppress(EOFError, ConnectionError):
        told = json.loads(connection.recv_bytes())
        try:
            host = Host(told)
            connection.send_bytes(json.dumps({"likeness": host.likeness}).encode() + b"\n")
            while True:
                connection.send_bytes(host.answer(connection.recv_bytes()))
        except (EOFError, ConnectionError):
            raise
        except Exception as error:
            connection.send_bytes(_stopped(error))


def end_with_the_run() -> None:
    """A run that was killed may be resumed at once: nobody else may be at work in the folders of its clients then."""
    run = parent_process()
    if run is not None:
        run.join()
        os._exit(1)


def likeness(settings: Settings, stream: Stream) -> str:
    """Recognises method, backbone and data, so that a worker that has built something else is noticed."""
    newest = stream.tasks[-1]  # data of learned tasks may be gone
    images, _ = stream.train_batch(newest.index, newest.train[:8])
    shape, builder = stream.dataset.image_shape, builder_of(settings.model.name)
    names = [type(create_method(settings)).__qualname__, str(builder(settings.model, shape)), str(shape)]
    data = [stream.dataset.train_labels.numpy().tobytes(), images.contiguous().numpy().tobytes()]
    return hash_of("\n".join(names).encode() + b"".join(data))


def _stopped(error: Exception) -> bytes:
    """An error that stops the run, in words."""
    expected = isinstance(error, FedprotipError)
    text = str(error) if expected else f"A worker process failed: {reason(error)}."
    return json.dumps({"stopped": text, "usage": isinstance(error, UsageError)}).encode() + b"\n"


def _stop_if_told(head: dict[str, Any]) -> None:
    if "stopped" in head:
        raise (UsageError if head["usage"] else RunError)(head["stopped"])


def _refuse_another_run(answer: tuple[dict[str, Any], bytes], mine: str) -> None:
    """A worker knows only what can be imported: what was registered elsewhere is missing or another there."""
    head = answer[0]
    if head.get("likeness") == mine:
        return
    told = head.get("stopped", "it builds another method, model or dataset under the same name").rstrip(".")
    raise UsageError(
        f'run.engine = "pool": a worker process cannot rebuild this run ({told}); what is registered in a script or '
        'notebook is known to this process alone: put it into a file that can be imported, or choose "local".'
    )


def _first_line(error: BaseException) -> str:
    return " ".join(str(error).split()).partition(". ")[0].rstrip(".")[:120]
