"""All that is to be said about an image, as plain values for JSON."""

import math
from typing import Any

from torch import Tensor

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
    nearness = {"relevance": predictor.relevance(heard), "similarity": predictor.similarity(heard)}
    answers = predictor.answers(heard, together, task)
    ((_, part, routed),) = predictor.routed(heard, together, task)
    by_label, by_task = inference.posterior(inference.joint(part, routed)), inference.tasks(part, routed)
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
    predictor: Predictor, probabilities: Tensor, nearness: dict[str, Tensor | None], place: int
) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"name": task.name, "probability": _number(chance)}
        for task, chance in zip(predictor.plan.tasks, probabilities.tolist(), strict=True)
    ]
    for name, values in nearness.items():
        for index, task in enumerate(found):
            task[name] = None if values is None else _number(float(values[place, index]))
    return found


def _number(value: float) -> float | None:
    """JSON has neither NaN nor ∞."""
    return round(value, 6) if math.isfinite(value) else None
