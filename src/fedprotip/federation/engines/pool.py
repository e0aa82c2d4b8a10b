"""Clients that train side by side, in processes of their own on this machine: `clients.workers`.

The run and its workers talk in `Message` bytes. A worker is told once what to build, at the start of a task the
whole model and what clients know, in every round what moves; then it is given one client after another.
"""

import tempfile
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from signal import SIG_BLOCK, SIG_SETMASK, SIGINT, pthread_sigmask

import torch

from fedprotip import settings as settings_file
from fedprotip.errors import FedprotipError, RunError, UsageError
from fedprotip.federation.client import Workspace, full_state, load_state, moving_state
from fedprotip.federation.engines.local import LocalEngine, Reply
from fedprotip.federation.server import device_of
from fedprotip.messages import Message
from fedprotip.methods import create_method
from fedprotip.methods.base import START, Knowledge
from fedprotip.models import Network, build_network
from fedprotip.models.prefix import PrefixCache, still_prefix
from fedprotip.settings import Settings, to_toml
from fedprotip.store.files import ClientStore, ObjectFolder, Tensors, hash_of
from fedprotip.stream import build_stream

AHEAD = 2
"""Clients per worker that may be under way or done before it is their turn: so many replies are kept at most."""
PATIENCE = 5.0
"""Seconds that a worker has to end when it is asked to; then it is killed."""
FAILED, STOPPED = "worker/failed", "worker/stopped"
"""Kinds of answers: this client failed; the whole run must stop."""


class WorkerEngine(LocalEngine):
    """Clients train in worker processes; replies come in the order of clients, with the bytes of the local engine.

    The same bytes as long as a worker has as many threads as the run would have without workers: each gets its
    share of them, at least one. Summaries at a task's end, which keep state of clients, are made in this process.

    Memory: every worker holds the data as this process does, one model, the moving part of the server's, and its
    share of `run.cache_mb`; this process keeps up to `AHEAD` replies per worker. `peak_rss_mb` counts this process.
    """

    def __init__(self, workspace: Workspace, folder: Path) -> None:
        """`folder`: where workers put rows of a frozen prefix that memory has no room for."""
        super().__init__(workspace)
        self._folder = folder
        self._workers: list[Worker] = []
        self._files: tempfile.TemporaryDirectory[str] | None = None
        self._home: dict[int, Worker] = {}  # client → the worker that keeps its rows of a frozen prefix

    def begin_task(self, task: int, network: Network, knowledge: Knowledge) -> None:
        super().begin_task(task, network, knowledge)
        self._keeps = still_prefix(network, self.workspace.settings, task) > 0
        self._home = {}

    def train(self, clients: list[int], round_: int, parcel: Callable[[int], list[Message]]) -> Iterator[Reply]:
        try:
            self._ready()
            moving = moving_state(self._network, self.workspace.settings, self.workspace.task)
            start = Message("round", moving, {"round": round_}).to_bytes()
            answers: dict[int, Message] = {}
            waiting = set(clients)
            for place, client in enumerate(clients):
                window = clients[place : place + AHEAD * len(self._workers)]
                self._hand_out(window, waiting, round_, start)
                while client not in answers:
                    self._collect(answers)
                    self._hand_out(window, waiting, round_, start)
                parcel(client)  # counted when it is the client's turn, as in the local engine
                yield _reply(client, answers.pop(client))
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
            self._files.cleanup()
            self._files = None

    def _ready(self) -> None:
        """Workers that hold the current task; started when the first client trains."""
        if not self._workers:
            self._start()
        late = [worker for worker in self._workers if worker.task != self.workspace.task]
        if late:
            data = self._task_message().to_bytes()
            for worker in late:
                worker.send(data)
            for worker in late:
                _stop_if_told(worker.receive())
                worker.task, worker.round = self.workspace.task, None

    def _start(self) -> None:
        settings, count = self.workspace.settings, useful_workers(self.workspace)
        self._files = tempfile.TemporaryDirectory(prefix="fedprotip-", dir=self._folder, ignore_cleanup_errors=True)
        what = {
            "settings": to_toml(settings),
            "threads": max(1, torch.get_num_threads() // count),
            "cache_mb": -(-settings.run.cache_mb // count),
            "folder": self._files.name,
        }
        resource_tracker.ensure_running()  # its own start would unblock the signal again
        for _ in range(count):
            self._workers.append(Worker(settings.clients.workers))
        for worker in self._workers:
            worker.send(Message("build", meta=what).to_bytes())
        mine = fingerprint(self.workspace)
        for worker in self._workers:
            _refuse_another_run(worker.receive(), mine, settings)

    def _task_message(self) -> Message:
        """W and what clients know, W^(t,0) of this task included."""
        shared = (*self.workspace.method.shared, START)
        known = {name: tensor for name, tensor in self.workspace.knowledge.items() if name.startswith(shared)}
        parts = {"model": full_state(self._network), "knowledge": known}
        tensors = {f"{part}/{name}": tensor for part, group in parts.items() for name, tensor in group.items()}
        return Message("task", tensors, {"task": self.workspace.task})

    def _hand_out(self, window: Sequence[int], waiting: set[int], round_: int, start: bytes) -> None:
        """Give every idle worker the first client of the window that waits and belongs to no other worker."""
        for worker in self._workers:
            if worker.client is not None:
                continue
            free = (c for c in window if c in waiting and self._home.get(c, worker) is worker)
            client = next(free, None)
            if client is None:
                continue
            if worker.round != round_:
                worker.send(start)
                worker.round = round_
            worker.ask(client)
            waiting.remove(client)
            if self._keeps:
                self._home[client] = worker

    def _collect(self, answers: dict[int, Message]) -> None:
        """Wait for at least one worker and take its answer."""
        busy = {worker.connection: worker for worker in self._workers if worker.client is not None}
        for connection in wait(list(busy)):
            assert isinstance(connection, Connection)
            worker = busy[connection]
            answer = worker.receive()
            assert worker.client is not None
            answers[worker.client] = answer
            worker.client = None


class Worker:
    """A worker process as the run sees it: what it holds, and which client it is busy with."""

    def __init__(self, wanted: int) -> None:
        """`wanted`: the setting, for the sentence when no process can be started."""
        self.task: int | None = None
        self.round: int | None = None
        self.client: int | None = None
        context = get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=main, args=(theirs,), daemon=True, name="fedprotip worker")
        before = pthread_sigmask(SIG_BLOCK, {SIGINT})  # inherited: Ctrl-C is for the run, which ends its workers
        try:
            self.process.start()
        except (RuntimeError, AssertionError) as error:
            self.connection.close()
            raise UsageError(
                f"clients.workers = {wanted}: this process cannot start others ({_first_line(error)}); start the run "
                'below if __name__ == "__main__":, or choose the nearest valid value, 0.'
            ) from None
        except OSError as error:
            self.connection.close()
            raise RunError(f"A worker process cannot start: {error.strerror}; choose fewer clients.workers.") from None
        finally:
            theirs.close()
            pthread_sigmask(SIG_SETMASK, before)

    def send(self, data: bytes) -> None:
        try:
            self.connection.send_bytes(data)
        except OSError:
            raise self._gone() from None

    def ask(self, client: int) -> None:
        """Let a client train from the model of the round."""
        self.client = client
        self.send(Message("train", meta={"client": client}).to_bytes())

    def receive(self) -> Message:
        try:
            return Message.from_bytes(self.connection.recv_bytes())
        except (EOFError, OSError):
            raise self._gone() from None

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
        doing = "started" if self.task is None else "waited" if self.client is None else f"trained client {self.client}"
        hint = (
            'a script must start its runs below if __name__ == "__main__":, or set clients.workers = 0'
            if self.task is None
            else "perhaps memory ran out: resume the run, or start again with fewer clients.workers"
        )
        return RunError(f"A worker process died while it {doing} (exit code {self.process.exitcode}); {hint}.")


class Trainer:
    """What a worker process holds: a workspace of its own, and the server's moving tensors in this round."""

    def __init__(self, start: Message) -> None:
        settings = settings_file.load(tomllib.loads(start.meta["settings"]))
        method, stream = create_method(settings), build_stream(settings)
        plain = settings.model_copy(update={"model": settings.model.model_copy(update={"weights": ""})})
        network = build_network(plain, stream.dataset.image_shape, method.routes)
        network.to(device_of(settings.run.device))
        share = settings.run.model_copy(update={"cache_mb": start.meta["cache_mb"]})
        folder = Path(start.meta["folder"])
        cache = PrefixCache(stream, settings.model_copy(update={"run": share}), folder, enabled=not method.sees_images)
        store = ClientStore(ObjectFolder(folder / "unused"), 0)  # training keeps no state of clients
        self.workspace = Workspace(settings, method, network, stream, store, cache)
        self._round = Message("round")

    def begin_task(self, message: Message) -> None:
        """Hold the server's model and knowledge; copies, as received bytes are not aligned like other tensors."""
        known = self.workspace.knowledge  # the same dictionary always: projectors continue those of the task before
        known.clear()
        known.update({name: tensor.clone() for name, tensor in _part(message, "knowledge/").items()})
        device = next(self.workspace.network.parameters()).device
        known.update({name: tensor.to(device) for name, tensor in known.items() if name.startswith(START)})
        self.workspace.begin_task(message.meta["task"])
        load_state(self.workspace.network, _part(message, "model/"))

    def begin_round(self, message: Message) -> None:
        self._round = message

    def train(self, client: int) -> Message:
        """The client's update, or why there is none."""
        try:
            load_state(self.workspace.network, self._round.tensors)
            return self.workspace.train(client, self._round.meta["round"])
        except FedprotipError:
            raise
        except Exception as error:  # a failing client must not stop the others
            return Message(FAILED, meta={"reason": f"{type(error).__name__}: {error}"})


def main(connection: Connection) -> None:
    """A worker process: answers until the run hangs up."""
    with suppress(EOFError, ConnectionError):
        first = Message.from_bytes(connection.recv_bytes())
        torch.set_num_threads(first.meta["threads"])
        try:
            trainer = Trainer(first)
            answer = Message("ready", meta={"fingerprint": fingerprint(trainer.workspace)})
        except Exception as error:
            connection.send_bytes(_stopped(error).to_bytes())
            return
        connection.send_bytes(answer.to_bytes())
        while True:
            message = Message.from_bytes(connection.recv_bytes())
            if message.kind == "round":
                trainer.begin_round(message)
            else:
                connection.send_bytes(_answer(trainer, message))


def fingerprint(workspace: Workspace) -> str:
    """Recognises method, backbone and data, so that a worker that has built something else is noticed."""
    stream = workspace.stream
    images, _ = stream.train_batch(0, stream.tasks[0].train[:8])
    names = [type(workspace.method).__qualname__, str(workspace.network.backbone), str(stream.dataset.image_shape)]
    data = [stream.dataset.train_labels.numpy().tobytes(), images.contiguous().numpy().tobytes()]
    return hash_of("\n".join(names).encode() + b"".join(data))


def useful_workers(workspace: Workspace) -> int:
    """As many as the setting says, but no more than clients train in a round of any task."""
    clients, stream = workspace.settings.clients, workspace.stream
    most = max(len(stream.clients(task.index)) for task in stream.tasks)
    return min(clients.workers, max(int(clients.fraction * most), 1))


def _answer(trainer: Trainer, message: Message) -> bytes:
    try:
        if message.kind == "train":
            return trainer.train(message.meta["client"]).to_bytes()
        trainer.begin_task(message)
        return Message("ready").to_bytes()
    except Exception as error:
        return _stopped(error).to_bytes()


def _stopped(error: Exception) -> Message:
    """An error that stops the run, in words."""
    expected = isinstance(error, FedprotipError)
    text = str(error) if expected else f"A worker process failed: {type(error).__name__}: {error}."
    return Message(STOPPED, meta={"text": text, "usage": isinstance(error, UsageError)})


def _stop_if_told(message: Message) -> None:
    if message.kind == STOPPED:
        raise (UsageError if message.meta["usage"] else RunError)(message.meta["text"])


def _reply(client: int, message: Message) -> Reply:
    _stop_if_told(message)
    if message.kind == FAILED:
        return Reply(client, error=message.meta["reason"])
    return Reply(client, message)


def _refuse_another_run(message: Message, mine: str, settings: Settings) -> None:
    """A worker knows only what can be imported: what was registered in this process is missing or another there."""
    if message.kind != STOPPED and message.meta["fingerprint"] == mine:
        return
    told = message.meta.get("text", "it builds another method, model or dataset under the same name").rstrip(".")
    raise UsageError(
        f"clients.workers = {settings.clients.workers}: a worker process cannot rebuild this run ({told}); what is "
        "registered in Python is known to this process alone, then the only valid value is 0."
    )


def _part(message: Message, prefix: str) -> Tensors:
    return {n.removeprefix(prefix): tensor for n, tensor in message.tensors.items() if n.startswith(prefix)}


def _first_line(error: BaseException) -> str:
    return " ".join(str(error).split()).partition(". ")[0].rstrip(".")[:120]
