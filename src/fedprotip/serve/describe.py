"""All that is to be said about an image, as plain values for JSON."""

import math
from typing import Any

from fedprotip.inference.answers import Heard
from fedprotip.inference.predictor import Predictor

MOST = 5
"""Classes that are named, the likeliest first."""


def describe(
    predictor: Predictor, heard: Heard, together: bool = False, task: int | None = None
) -> list[dict[str, Any]]:
    """An answer for every image, with the likeliest classes, and what speaks for each task."""
    inference, names = predictor.inference, predictor.classes_
    found: list[dict[str, Any]] = []
    near = {"relevance": predictor.relevance(heard), "similarity": predictor.similarity(heard)}
    nearness = {name: None if values is None else values.tolist() for name, values in near.items()}
    ((_, part, routed),) = predictor.routed(heard, together, task)
    by_label = inference.by_label(part, routed)
    by_task = inference.tasks(by_label, routed).tolist()
    answers = predictor.worded(part, routed, by_label)
    largest = by_label.topk(min(MOST, by_label.shape[1]), dim=1)
    for place, answer in enumerate(answers):
        classes = zip(largest.indices[place].tolist(), largest.values[place].tolist(), strict=True)
        found.append(
            {
                "label": answer.label,
                "probability": _number(answer.probability),
                "task": answer.task,
                "task_name": predictor.plan.tasks[answer.task].name,
                "task_probability": _number(answer.task_probability),
                "unusual": _number(answer.unusual),
                "classes": [{"label": names[label], "probability": _number(p)} for label, p in classes],
                "tasks": _tasks(predictor, by_task[place], nearness, place),
            }
        )
    return found


def _tasks(
    predictor: Predictor, probabilities: list[float], nearness: dict[str, list[list[float]] | None], place: int
) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"name": task.name, "probability": _number(chance)}
        for task, chance in zip(predictor.plan.tasks, probabilities, strict=True)
    ]
    for name, values in nearness.items():
        for index, task in enumerate(found):
            task[name] = None if values is None else _number(values[place][index])
    return found


def _number(value: float) -> float | None:
    """JSON has neither NaN nor ∞."""
    return round(value, 6) if math.isfinite(value) else None
