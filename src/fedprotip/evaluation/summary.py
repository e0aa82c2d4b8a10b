"""From where a run stands to its summary."""

from collections.abc import Iterable, Mapping
from typing import Any

from fedprotip.evaluation.metrics import average_accuracy, forgetting, mean
from fedprotip.methods.parts.private import DELTA, epsilon
from fedprotip.settings import Settings
from fedprotip.store.events import Event, RoundDone, TaskDone
from fedprotip.store.results import Privacy, RoutingOverTasks, Summary


def summarise(
    settings: Settings, progress: dict[str, Any], events: Iterable[Event], peak_gpu_mb: float | None
) -> Summary:
    """The summary of a run that stands at `progress` (the server's numbers, as saved in a checkpoint)."""
    matrix, routing = progress["matrix"], progress["routing"]
    events = list(events)
    done = {event.task: event for event in events if isinstance(event, TaskDone)}
    last = done.get(progress["task"] - 1)
    by_task, confusion = routing.get("by_task", {}), routing.get("confusion", {})
    accuracy = {mode: average_accuracy(rows) for mode, rows in matrix.items()}
    shares = {mode: mean(values) for mode, values in by_task.items()}
    routers = {
        way: {key: mean(values) for key, values in figures.items()} for way, figures in routing.get("ways", {}).items()
    }
    figures = {
        "method": settings.method.name,
        "scenario": settings.stream.scenario,
        "tasks": progress["task"],
        "clients": len(settings.clients.active(progress["task"] - 1)),
        "seed": settings.run.seed,
        "accuracy": accuracy,
        "forgetting": {mode: forgetting(rows) for mode, rows in matrix.items()},
        "routing": shares | {f"{mode}_by_task": values for mode, values in by_task.items()},
        "routing_over_tasks": routing_over_tasks(done, progress["task"]),
        "router": last.router if last else "",
        "routers": routers,
        **{key: routing.get(key, {}) for key in ("confidence", "unknown", "sweeps")},
        "drift": routing.get("drift", []),
        "matrix": matrix,
        "confusion": confusion,
        "bytes": progress["bytes"],
        "samples": last.samples if last else {},
        "seconds": progress["seconds"] | {"total": sum(progress["seconds"].values())},
        "cpu_seconds": progress["cpu_seconds"],
        "peak_rss_mb": progress["peak_rss_mb"],
        "peak_gpu_mb": peak_gpu_mb,
        "failures": {"count": sum(progress["failures"].values()), "by_reason": progress["failures"]},
        "privacy": privacy(settings, sum(isinstance(event, RoundDone) for event in events)),
    }
    return Summary.model_validate(figures)


def privacy(settings: Settings, sums: int) -> Privacy | None:
    """What noise promises after so many sums of updates, an extended run's own included; None: nothing.

    Rounds without a sum count too: the server may have seen it before it was refused.
    """
    if not (settings.method.secure and settings.method.secure_noise and sums):
        return None
    return Privacy(epsilon=epsilon(settings.method.secure_noise, sums), delta=DELTA, sums=sums)


def routing_over_tasks(done: Mapping[int, TaskDone], tasks: int) -> dict[str, RoutingOverTasks]:
    """Mode → how the configured router did after each task, as the events tell."""
    found = [done[task].routing.get(done[task].router, {}) if task in done else {} for task in range(tasks)]
    modes = dict.fromkeys(mode for by_mode in found for mode in by_mode)
    return {mode: RoutingOverTasks.of([by_mode.get(mode) for by_mode in found]) for mode in modes}
