"""Algorithm 1 of the paper: FedProTIP's training procedure, and that of every other method.

    for every task t:
        who has data of it? (optionally its head begins in closed form, from one exchange of statistics)
        for every round e:      clients train from W^(t,e−1), projected (Eq. 4–5); the server averages (Eq. 6)
        at the end of the task: clients send bases (Eq. 7–9), the server merges them (Eq. 10),
                                clients send references against the merged bases (Eq. 11)

Each of these is an exchange (`methods/exchange.py`), and which ones there are the method says; where clients run is the
engine's business, and what happens when they fail that of `setbacks.py`. A run continues from wherever
`server.progress` stands.
"""

from time import perf_counter
from typing import Any

from fedprotip.evaluation.evaluate import evaluate, evaluate_unknown
from fedprotip.federation import concerns, setbacks
from fedprotip.federation.conversation import converse
from fedprotip.federation.engines.base import Engine
from fedprotip.federation.geometry import Probe
from fedprotip.federation.journal import Journal
from fedprotip.federation.server import Server
from fedprotip.methods.exchange import When
from fedprotip.store.events import RoundDone, TaskDone
from fedprotip.store.records import finite


def run_tasks(server: Server, engine: Engine, journal: Journal, probe: Probe | None = None) -> None:
    """Train all tasks that are left, evaluate after each, and leave checkpoints on the way."""
    progress, watched = server.progress, probe.tensors if probe else dict
    for task in range(progress.task, len(server.stream.tasks)):
        server.begin_task(task)
        full = concerns.full(server)
        if progress.round == 0:
            begin_task(server, engine, journal)

        for round_ in range(progress.round, server.method.rounds(task)):
            if probe:
                with journal.phase(progress, "geometry"):
                    probe.measure(task, round_)
            with journal.phase(progress, "train"):
                train_round(server, engine, journal, round_)
            progress.round = round_ + 1
            if progress.round % server.settings.run.checkpoint == 0:
                journal.checkpoint(server, watched())

        with journal.phase(progress, "task_end"):
            hold(server, engine, journal, "end")
            server.finish_task()
        if probe:
            with journal.phase(progress, "geometry"):
                probe.finish_task(task)
        judge_task(server, journal, full)
        progress.task, progress.round, progress.present = task + 1, 0, {}
        journal.checkpoint(server, watched())


def begin_task(server: Server, engine: Engine, journal: Journal) -> None:
    """All that comes before the first round of a task."""
    task, progress = server.site.task, server.progress
    progress.before = dict(progress.seconds)
    journal.warn(concerns.at_start(server) if task == 0 else ())
    with journal.phase(progress, "evaluate"):
        meet_task(server, task)
    with journal.phase(progress, "train"):
        hold(server, engine, journal, "begin")
    if server.method.rounds(task):
        server.begin_rounds()


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
    for exchange in server.due("round"):
        found = converse(server, engine, journal, exchange, round_)
        replies = found if exchange.trains else replies
    losses = [float(meta["loss"]) for meta in replies.values()]
    loss, seconds = finite(sum(losses) / len(losses)) if losses else None, perf_counter() - started
    journal.event(RoundDone(task=task, round=round_, loss=loss, clients=len(replies), seconds=seconds))
    setbacks.after_round(server, journal, round_, losses)


def hold(server: Server, engine: Engine, journal: Journal, when: When) -> None:
    """The exchanges at the beginning or the end of a task, one after another."""
    for exchange in server.due(when):
        replies = converse(server, engine, journal, exchange)
        setbacks.after_exchange(server, journal, exchange, replies)


def judge_task(server: Server, journal: Journal, full: set[str]) -> None:
    """Evaluate all tasks so far, and say what came of this one; `full` are layers that had no room when it began."""
    task, progress = server.site.task, server.progress
    with journal.phase(progress, "evaluate"):
        evaluation = evaluate(server.predictor(task), server.stream, task, server.settings, server.cache)
        ways = progress.routing.get("ways", {})
        evaluation.enter(progress.matrix, progress.routing)
    seconds = {phase: total - progress.before.get(phase, 0.0) for phase, total in progress.seconds.items()}
    ranks, dims = server.method.ranks(server.site.known)
    figures = {"accuracy": evaluation.means(), "by_task": evaluation.accuracy}
    found = {"router": evaluation.chosen, "routing": evaluation.found()}
    samples = server.method.samples(server.site.known)
    journal.event(TaskDone(task=task, seconds=seconds, **figures, **found, ranks=ranks, dims=dims, samples=samples))
    journal.warn(concerns.after_task(server, evaluation, full, ways))
