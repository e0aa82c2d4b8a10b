"""Algorithm 1 of the paper: FedProTIP's training procedure, and that of every other method.

    for every task t:
        (optionally its head begins in closed form, from one exchange of statistics)
        for every round e:      clients train from W^(t,e−1), projected (Eq. 4–5); the server averages (Eq. 6)
        at the end of the task: clients send bases (Eq. 7–9), the server merges them (Eq. 10),
                                clients send references against the merged bases (Eq. 11)

What differs between methods hides behind the hooks of `methods/base.py`; where clients run, behind the
engine. A run continues from wherever `server.progress` stands.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from time import perf_counter

from fedprotip.errors import RunError
from fedprotip.evaluation.evaluate import evaluate, evaluate_unknown
from fedprotip.federation.aggregate import Average
from fedprotip.federation.engines.local import LocalEngine, Reply
from fedprotip.federation.geometry import Probe
from fedprotip.federation.journal import Journal
from fedprotip.federation.server import Server
from fedprotip.messages import BadMessage, Message
from fedprotip.methods.parts.statistics import START

PATIENCE = 3
"""Rounds in a row without any usable update after which the run stops: something is wrong with all clients."""


def run_tasks(server: Server, engine: LocalEngine, journal: Journal, probe: Probe | None = None) -> None:
    """Train all tasks that are left, evaluate after each, and leave checkpoints on the way."""
    progress, settings = server.progress, server.settings
    for task in range(progress.task, len(server.stream.tasks)):
        server.begin_task(task)
        if progress.round == 0 and progress.routing.get("inside"):
            with journal.phase(progress, "evaluate"):
                meet_task(server, task)
        engine.begin_task(task, server.network, server.knowledge)
        active = server.stream.clients(task)
        present = engine.present(active)
        before = dict(progress.seconds)
        absent = sorted(set(active) - set(present))
        if absent and progress.round == 0:
            journal.event("absent", task=task, clients=absent, reason="no data of this task")

        if settings.train.head_start == "closed" and progress.round == 0:
            with journal.phase(progress, "start"):
                start_task(server, engine, journal, present, task)
        for round_ in range(progress.round, server.method.rounds(task)):
            if probe:
                with journal.phase(progress, "geometry"):
                    probe.measure(task, round_)
            with journal.phase(progress, "train"):
                train_round(server, engine, journal, present, task, round_)
            progress.round = round_ + 1
            if progress.round % settings.run.checkpoint == 0:
                journal.checkpoint(server, probe.tensors() if probe else {})

        with journal.phase(progress, "task_end"):
            finish_task(server, engine, journal, present, active, task)
        if probe:
            with journal.phase(progress, "geometry"):
                probe.finish_task(task)
        with journal.phase(progress, "evaluate"):
            evaluation = evaluate(server.predictor(task), server.stream, task, settings, server.cache)
            evaluation.enter(progress.matrix, progress.routing)
        seconds = {phase: total - before.get(phase, 0.0) for phase, total in progress.seconds.items()}
        ranks, dims = server.method.ranks(server.knowledge)
        journal.event("task", task=task, seconds=seconds, accuracy=evaluation.means(), ranks=ranks, dims=dims)
        progress.task, progress.round = task + 1, 0
        journal.checkpoint(server, probe.tensors() if probe else {})


def meet_task(server: Server, task: int) -> None:
    """A task that is not learned yet stands for inputs of no task: would they be noticed?"""
    known, routing = server.predictor(task - 1), server.progress.routing
    routing["unknown"] = evaluate_unknown(known, server.stream, task, server.settings, server.cache, routing["inside"])


def train_round(
    server: Server, engine: LocalEngine, journal: Journal, present: list[int], task: int, round_: int
) -> None:
    """One global round: W^(t,e) ← Σ p_k W_k^(t,e,S)."""
    started, losses = perf_counter(), []
    average = Average()
    parcel = logged(server, journal, task, round_, lambda client: server.parcel(client, task))
    replies = engine.train(server.choose(present, task, round_), round_, parcel)
    for _, update in valid(replies, server, journal, task, round_, server.check_update):
        average.add(update.tensors, server.weight(update))  # Eq. 6
        losses.append(update.meta["loss"])
    if average:
        server.apply(average)
    server.progress.barren = 0 if average else server.progress.barren + 1
    loss = sum(losses) / len(losses) if losses else None
    journal.event("round", task=task, round=round_, loss=loss, clients=len(losses), seconds=perf_counter() - started)
    if server.progress.barren >= PATIENCE:
        raise RunError(f"No client delivered a usable update in {PATIENCE} rounds in a row; {_reason(server)}.")


def start_task(server: Server, engine: LocalEngine, journal: Journal, present: list[int], task: int) -> None:
    """One exchange before the first round: the new head begins as the discriminant of the summed statistics."""
    if not server.has_new_head(task):
        return
    parcel = logged(server, journal, task, None, lambda client: server.parcel(client, task))
    replies = engine.summarise(present, START, parcel)
    checked = valid(replies, server, journal, task, None, lambda message: server.check_start(message, task))
    first = next(checked, None)
    if first is not None:  # one reply at a time is in memory
        server.start_head(chain([first], checked), task)


def finish_task(
    server: Server, engine: LocalEngine, journal: Journal, present: list[int], active: list[int], task: int
) -> None:
    """Task end: for FedProTIP extract → merge → broadcast → refer; nothing for FedAvg."""
    method, digested = server.method, list[Message]()
    reached: dict[int, int] = {}  # client → digested messages it has received

    def parcel(client: int) -> list[Message]:
        lacking = server.parcel(client, task)
        knows_all = any(message.kind == "knowledge" for message in lacking)
        news = [] if knows_all else digested[reached.get(client, 0) :]
        reached[client] = len(digested)
        return [*lacking, *news]

    def check(message: Message) -> None:
        method.validate(message, server.network, server.knowledge, task)

    for exchange in method.task_end:
        clients = active if exchange.everyone else present
        replies = engine.summarise(clients, exchange.kind, logged(server, journal, task, None, parcel))
        checked = valid(replies, server, journal, task, None, check)
        first = next(checked, None)
        if first is None:
            raise RunError(f"No client delivered its {exchange.kind} at the end of task {task + 1}; {_reason(server)}.")
        usable = chain([first], checked)
        result = method.digest(exchange.kind, usable, server.network, server.knowledge, task)
        if result is not None:
            server.settle()
            method.receive(server.knowledge, result, task)
            digested.append(result)
    server.settle()
    for client, received in reached.items():
        if received == len(digested):
            server.progress.knows[str(client)] = task


def _reason(server: Server) -> str:
    """The last failure, and what to do."""
    return (
        f"the last reason: {server.progress.last_failure}; mend it and resume, or start again with other settings "
        "(a smaller train.lr if values are not finite)"
    )


Parcel = Callable[[int], list[Message]]


def logged(server: Server, journal: Journal, task: int, round_: int | None, parcel: Parcel) -> Parcel:
    """The same parcels, entered into the ledger as they go out."""

    def send(client: int) -> list[Message]:
        messages = parcel(client)
        for message in messages:
            journal.message(server.progress, "down", client, task, round_, message)
        return messages

    return send


def valid(
    replies: Iterable[Reply],
    server: Server,
    journal: Journal,
    task: int,
    round_: int | None,
    check: Callable[[Message], object],
) -> Iterator[tuple[int, Message]]:
    """The replies that can be used, one at a time; the others are left out, reported and counted.

    Engines yield replies in the order of clients, whoever finished first: sums depend on the order.
    """
    last = -1
    for reply in replies:
        assert reply.client > last, "an engine must yield replies in the order of clients"
        last = reply.client
        reason = reply.error
        if reply.message is not None:
            try:
                check(reply.message)
            except BadMessage as error:
                reason = str(error)
            journal.message(server.progress, "up", reply.client, task, round_, reply.message, rejected=reason)
        if reason or reply.message is None:
            journal.failure(server.progress, reply.client, task, round_, reason)
        else:
            if withheld := reply.message.meta.get("withheld"):
                journal.event("withheld", task=task, client=reply.client, kind=reply.message.kind, classes=withheld)
            yield reply.client, reply.message
