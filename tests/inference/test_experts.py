"""Experts against plain products, and the sums they are made of."""

import torch

from fedprotip.inference.experts import HeadExpert, LinearExpert
from fedprotip.inference.statistics import FeatureMap
from fedprotip.models import Network
from tests.inference.samples import CLASSES, features_of


def test_heads_answer_in_the_order_of_candidates_and_a_shared_head_for_every_task():
    features = torch.randn(4, 3)
    own, shared = Network(torch.nn.Linear(3, 3), 3, False), Network(torch.nn.Linear(3, 3), 3, True)
    for task, classes in enumerate(CLASSES):
        own.add_head(classes, 0, task)
        shared.add_head((0, 1), 0, task)
    found = HeadExpert(own, 3)(features_of(features))
    torch.testing.assert_close(found, torch.cat([head(features) for head in own.heads], 1))
    torch.testing.assert_close(HeadExpert(shared, 2)(features_of(features)), shared.heads[0](features).repeat(1, 2))


def test_a_linear_expert_sees_mapped_features():
    features, change = torch.randn(4, 3), FeatureMap(3, 10, 0)
    weights, bias = torch.randn(6, 10), torch.randn(6)
    found = LinearExpert(weights, bias, change)(features_of(features))
    torch.testing.assert_close(found, change(features) @ weights.T + bias)
