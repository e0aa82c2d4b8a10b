"""Are probabilities honest, and are inputs of no learned task recognised?"""

from typing import Any

import torch
from torch import Tensor

BINS = 10


def reliability(confidence: Tensor, correct: Tensor) -> list[dict[str, float]]:
    """Ten bins of confidence: how many answers, their mean confidence, and the share that is right."""
    places = (confidence * BINS).long().clamp(0, BINS - 1)
    found = []
    for place in range(BINS):
        inside = places == place
        if inside.any():
            found.append(
                {
                    "count": int(inside.sum()),
                    "confidence": float(confidence[inside].double().mean()),
                    "accuracy": float(correct[inside].double().mean()),
                }
            )
    return found


def calibration_error(bins: list[dict[str, float]]) -> float:
    """ECE: the mean distance between confidence and accuracy, weighted by the answers of each bin."""
    total = sum(line["count"] for line in bins)
    return sum(line["count"] * abs(line["confidence"] - line["accuracy"]) for line in bins) / max(total, 1)


def auroc(inside: Tensor, outside: Tensor) -> float:
    """How often an unknown sample scores higher than a known one (ties count half): 0.5 is chance, 1 perfect."""
    scores = torch.cat([inside, outside]).double()
    _, places, counts = scores.unique(return_inverse=True, return_counts=True)
    ranks = (counts.cumsum(0) - (counts - 1) / 2)[places]  # the mean rank of equal scores, from 1
    n, m = len(inside), len(outside)
    return float((ranks[n:].sum() - m * (m + 1) / 2) / (n * m))


def summary(confidence: Tensor, correct: Tensor) -> dict[str, Any]:
    bins = reliability(confidence, correct)
    return {"bins": bins, "ece": calibration_error(bins)}
