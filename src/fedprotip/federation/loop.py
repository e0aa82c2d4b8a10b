"""Algorithm 1 of the paper: FedProTIP's training procedure, and that of every other method.

    for every task t:
        who has data of it? (optionally its head begins in closed form, from one exchange of statistics)
        for every round e:      clients train from W^(t,e−1), projected (Eq. 4–5); the server averages (Eq. 6)
        at the end of the task: clients send bases (Eq. 7–9), the server merges them (Eq. 10),
                                clients send references against the merged bases (Eq. 11)

Each of these is an exchange (`methods/exchange.py`), and which ones there are the method says; where clients run is the
engine's business. A run continues from wherever `server.progress` stands.
"""

from time import perf_counter
from typing import Any

from fedprotip.errors import RunError
from fedprotip.evaluation.evaluate import evaluate, evaluate_unknown
from fedprotip.federation import concerns
from fedprotip.federation.conversation import converse
from fedprotip.federation.engines.base import Engine
from fedprotip.federation.geometry import Probe
from fedprotip.federation.journal import Journal
from fedprotip.federation.server import Server
from fedprotip.store.events import RoundDone, TaskDone
from fedprotip.store.records import finite

PATIENCE = 3
"""Rounds in a row without any usable update after which the run stops, when as many different clients were asked (or
all there are): something is wrong with all of them, not with one."""

DIVERGED = "the loss of most clients exploded (a smaller train.lr, or a client that works against the others)"


def run_tasks(server: Server, engine: Engine, journal: Journal, probe: Probe | None = None) -> None:
    """Train all tasks that are left, evaluate after each, and leave checkpoints on the way."""
    progress, settings = server.progress, server.settings
    for task in range(progress.task, len(server.stream.tasks)):
        before = dict(progress.seconds)
        server.begin_task(task)
        progress.routing.pop("answers", None)  # of an earlier end: long, and made anew at the next one
        full = concerns.full(server)
        if progress.round == 0:
            journal.warn(concerns.at_start(server) if task == 0 else ())
            with journal.phase(progress, "evaluate"):
                meet_task(server, task)
            with journal.phase(progress, "train"):
                hold(server, engine, journal, "begin")
            if server.method.rounds(task):
                server.begin_rounds()
        for round_ in range(progress.round, server.method.rounds(task)):
            if probe:
                with journal.phase(progress, "geometry"):
                    probe.measure(task, round_)
            with journal.phase(progress, "train"):
                train_round(server, engine, journal, round_)
            progress.round = round_ + 1
            if progress.round % settings.run.checkpoint == 0:
                journal.checkpoint(server, probe.tensors() if probe else {})

        with journal.phase(progress, "task_end"):
            hold(server, engine, journal, "end")
            server.finish_task()
        if probe:
            with journal.phase(progress, "geometry"):
                probe.finish_task(task)
        with journal.phase(progress, "evaluate"):
            evaluation = evaluate(server.predictor(task), server.stream, task, settings, server.cache)
            ways = progress.routing.get("ways", {})
            evaluation.enter(progress.matrix, progress.routing)
        seconds = {phase: total - before.get(phase, 0.0) for phase, total in progress.seconds.items()}
        ranks, dims = server.method.ranks(server.site.known)
        found = {"accuracy": evaluation.means(), "router": evaluation.chosen, "routing": evaluation.found()}
        samples = server.method.samples(server.site.known)
        journal.event(TaskDone(task=task, seconds=seconds, **found, ranks=ranks, dims=dims, samples=samples))
        journal.warn(concerns.after_task(server, evaluation, full, ways))
        progress.task, progress.round, progress.present = task + 1, 0, {}
        journal.checkpoint(server, probe.tensors() if probe else {})


def meet_task(server: Server, task: int) -> None:
    """A task that is not learned yet stands for inputs of no task: would they be noticed?"""
    inside = server.progress.routing.get("inside")
    if inside:
        known = server.predictor(task - 1)
        unknown = evaluate_unknown(known, server.stream, task, server.settings, server.cache, inside)
        server.progress.routing["unknown"] = unknown


def train_round(server: Server, engine: Engine, journal: Journal, round_: int) -> None:
    """One global round: W^(t,e) ← Σ p_k W_k^(t,e,S)."""
    task, started = server.site.task, perf_counter()
    replies: dict[int, dict[str, Any]] = {}
    for exchange in server.method.exchanges:
        if exchange.when == "round" and exchange.due(server.site):
            found = converse(server, engine, journal, exchange, round_)
            replies = found if exchange.trains else replies
    server.count_barren(replies, round_)
    losses = [float(meta["loss"]) for meta in replies.values()]
    loss, seconds = finite(sum(losses) / len(losses)) if losses else None, perf_counter() - started
    journal.event(RoundDone(task=task, round=round_, loss=loss, clients=len(replies), seconds=seconds))
    failing = len(server.progress.failing)
    stuck = server.progress.barren >= PATIENCE and failing >= min(PATIENCE, len(server.progress.present))
    why = f"no client delivered a usable update in {PATIENCE} rounds in a row" if stuck else ""
    why = why or (DIVERGED if server.diverged(losses) else "")
    if why and server.begin_anew():
        journal.undone(server.progress, task, round_, why)
    elif stuck:
        raise RunError(f"{why.capitalize()}; {_reason(server)}.")


def hold(server: Server, engine: Engine, journal: Journal, when: str) -> None:
    """The exchanges at the beginning or the end of a task, one after another."""
    for exchange in server.method.exchanges:
        if exchange.when != when or not exchange.due(server.site):
            continue
        replies = converse(server, engine, journal, exchange)
        if exchange.name == "presence":
            server.note_presence(replies, journal.absent)
            for client, samples in server.too_many().items():
                journal.bounded(server.site.task, client, samples, server.site.most)
        elif exchange.needed and exchange.who != "nobody" and not replies:
            place = f"at the {when} of task {server.site.task + 1}"
            raise RunError(f"No client delivered its {exchange.name} {place}; {_reason(server)}.")


def _reason(server: Server) -> str:
    """The last failure, and what to do."""
    return (
        f"the last reason: {server.progress.last_failure}; mend it and resume, or start again with other settings "
        "(a smaller train.lr if values are not finite)"
    )
