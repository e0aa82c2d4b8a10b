"""FedLwF: what old heads say about new samples stays what the model of the last task said."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.sites import Ends
from tests.small import small

LWF = {"name": "fedlwf", "strength": 0.7, "temperature": 3.0}
DOMAINS = {"scenario": "domain", "domains": "rotate", "tasks": 3, "task_size": 0}


def later(folder, **sections):
    """A client in the third task whose model has moved since the task began."""
    ends = Ends(small("train.augment=none", method=LWF, **sections), folder)
    for task in range(3):
        site = ends.site(task=task)
    before = site.before()
    with torch.no_grad():
        for parameter in site.network.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    return ends, site, before


@pytest.mark.parametrize("sections", [{}, {"stream": DOMAINS}], ids=["classes", "domains"])
def test_the_loss_is_cross_entropy_and_a_divergence_for_every_old_head(tmp_path, sections):
    """A head that all domains share is one head, however many tasks lie behind."""
    ends, site, before = later(tmp_path, **sections)
    network, own = site.network, 0 if sections else 4
    images, labels = ends.stream.train_batch(2, ends.stream.tasks[2].train[:8])
    found = site.method.loss(ends.local(0, site), images, labels)
    expected = cross_entropy(network(images)[:, own:], labels - own)
    for head in range(1 if sections else 2):
        said, told = (each.heads[head](each.embed(images)) / 3 for each in (network, before))
        apart = (told.softmax(1) * (told.log_softmax(1) - said.log_softmax(1))).sum(1).mean()
        expected = expected + 0.7 * 9 * apart
    torch.testing.assert_close(found, expected)
    moving = [network.get_parameter(name) for name in network.moving]
    for one, other in zip(*(torch.autograd.grad(loss, moving) for loss in (found, expected)), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in before.parameters())


def test_old_heads_move_and_the_first_task_is_learned_as_by_fedavg(tmp_path):
    _, site, _ = later(tmp_path)
    assert {f"heads.{head}.weight" for head in range(3)} <= set(site.network.moving)
    ends = Ends(small(method=LWF), tmp_path / "first")
    images, labels = ends.stream.train_batch(0, ends.stream.tasks[0].train[:8])
    site = ends.site()
    found = site.method.loss(ends.local(0, site), images, labels)
    torch.testing.assert_close(found, cross_entropy(site.network(images), labels))
