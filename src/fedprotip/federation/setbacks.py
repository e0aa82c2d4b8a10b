"""What the server does about clients that are missing, say nothing usable or make training diverge."""

from typing import Any

from fedprotip.errors import RunError
from fedprotip.federation.journal import Journal
from fedprotip.federation.server import Server
from fedprotip.methods.exchange import Exchange

PATIENCE = 3
"""Rounds in a row without any usable update after which the run stops, when as many different clients were asked (or
all there are): something is wrong with all of them, not with one."""

DIVERGED = "the loss of most clients exploded (a smaller train.lr, or a client that works against the others)"


def after_exchange(server: Server, journal: Journal, exchange: Exchange, replies: dict[int, dict[str, Any]]) -> None:
    """At the beginning or the end of a task: note who is there, and stop where nobody said what is needed.

    A task for which nobody has data is not begun: the run can be resumed when somebody has.
    """
    task = server.site.task
    if exchange.counts:
        server.note_presence(replies, journal.absent)
        if not server.progress.present:
            name = server.stream.tasks[task].name
            why = "none of them has data of it" if replies else f"the last reason: {server.progress.last_failure}"
            raise RunError(f"No client takes part in task {task + 1} ({name}): {why}. Resume the run when one does.")
        for client, samples in server.too_many().items():
            journal.bounded(task, client, samples, server.site.most)
    elif exchange.needed and exchange.who != "nobody" and not replies:
        place = f"at the {exchange.when} of task {task + 1}"
        raise RunError(f"No client delivered its {exchange.name} {place}; {_reason(server)}.")


def after_round(server: Server, journal: Journal, round_: int, losses: list[float]) -> None:
    """Where losses explode or nobody delivers, the rounds of the task begin anew; where that is no help, the run stops.

    Args:
        losses: of the clients whose updates could be used.
    """
    server.count_barren(bool(losses), round_)
    progress = server.progress
    stuck = progress.barren >= PATIENCE and len(progress.failing) >= min(PATIENCE, len(progress.present))
    why = f"no client delivered a usable update in {PATIENCE} rounds in a row" if stuck else ""
    why = why or (DIVERGED if server.diverged(losses) else "")
    if why and server.begin_anew():
        journal.undone(progress, server.site.task, round_, why)
    elif stuck:
        raise RunError(f"{why.capitalize()}; {_reason(server)}.")


def _reason(server: Server) -> str:
    """The last failure, and what to do."""
    return (
        f"the last reason: {server.progress.last_failure}; mend it and resume, or start again with other settings "
        "(a smaller train.lr if values are not finite or out of all proportion)"
    )
