"""Classes, scores and sums for the tests of inference."""

import numpy as np
import torch
from hypothesis import strategies as st

from fedprotip.inference import Router
from fedprotip.inference.answers import Heard, Inference
from fedprotip.inference.candidates import Candidates
from fedprotip.inference.statistics import Sums
from fedprotip.models.heads import Features

seeds = st.integers(0, 5000)
CLASSES = ((3, 1), (0, 5, 4), (2,))
OVERLAP = ((0, 1), (1, 2), (2, 0))


def scores_of(seed, n=7, width=6):
    return torch.tensor(np.random.default_rng(seed).standard_normal((n, width)) * 3)


class Told(Router):
    """Evidence as it is given."""

    def evidence(self, seen):
        return seen.features


def by(way, classes=CLASSES, **fields):
    return Inference(Candidates.of(classes), {}, {"told": way}, "told", **fields)


def alone(inference, heard):
    """Labels and how sure they are, of samples that come alone."""
    routed = inference.route(heard, inference.chosen)
    return routed.labels, inference.sureness(inference.by_label(heard, routed), routed)


def told(inference, scores, evidence):
    """What is heard when experts and the only router say this."""
    return Heard(inference.candidates, scores, {"told": evidence})


def features_of(values):
    """Features that heads and statistics see alike."""
    return Features(values, values)


def filled(seed, d=4, unseen=()):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 6, 200)
    labels = labels[~np.isin(labels, unseen)]
    features = torch.tensor(3 * rng.standard_normal((6, d))[labels] + rng.standard_normal((len(labels), d))).float()
    sums = Sums.zeros(6, d)
    sums.add(features, torch.tensor(labels))
    return sums, features, labels
