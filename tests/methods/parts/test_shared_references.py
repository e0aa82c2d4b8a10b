"""One reference per task from sums over clients: that of all their samples together."""

import torch

from fedprotip.inference.route import references
from fedprotip.messages import Message
from fedprotip.methods.parts.references import STATE, pooled
from fedprotip.methods.state import Knowledge

D, TASKS = 6, 2


def bases(tasks=TASKS):
    chance = torch.Generator().manual_seed(0)
    return list(torch.linalg.qr(torch.randn(D, 2 * tasks, generator=chance))[0].split(2, dim=1))


def features(client, task, count):
    return torch.randn(count, D, generator=torch.Generator().manual_seed(10 * client + task)).double() + task


def told(samples, some):
    """The sums that a client tells, for features of every task (n, d); of some tasks it may have none."""
    energies = torch.stack([(samples @ basis.double()).square().sum(1) for basis in some], dim=1)
    return energies.sum(0), energies.square().sum(0), len(samples)


def summed(clients, some):
    rows = [[told(samples, some) for samples in tasks] for tasks in clients]
    values, squares = (torch.stack([sum(row[t][part] for row in rows) for t in range(len(some))]) for part in (0, 1))
    counts = torch.tensor([sum(row[t][2] for row in rows) for t in range(len(some))])
    return Message("reference", {"values": values, "variances": squares, "counts": counts})


def test_sums_give_the_reference_of_all_samples_together():
    clients = [[features(client, task, 5 + client) for task in range(TASKS)] for client in range(3)]
    found = pooled(summed(clients, bases()), Knowledge(STATE))
    every = [torch.cat([tasks[task] for tasks in clients]) for task in range(TASKS)]
    moments, sums = torch.stack([a.T @ a for a in every]), torch.stack([a.sum(0) for a in every])
    plain, _ = references(moments, sums, torch.tensor([len(a) for a in every]), bases())
    torch.testing.assert_close(found["references/values"][0], plain)
    energies = torch.stack([(every[0] @ basis.double()).square().sum(1) for basis in bases()], dim=1)
    torch.testing.assert_close(found["references/variances"][0, 0], energies.var(0, correction=0))
    assert found["references/counts"].tolist() == [[18, 18]]
    assert found["references/clients"].tolist() == [0]


def test_a_task_that_nobody_has_any_more_keeps_its_reference():
    known = Knowledge(STATE)
    known.update(pooled(summed([[features(0, 0, 9)]], bases(1)), known))
    gone = summed([[features(1, 0, 0), features(1, 1, 7)]], bases(2))
    found = pooled(gone, known)
    torch.testing.assert_close(found["references/values"][0, 0, 0].float(), known["references/values"][0, 0, 0])
    assert found["references/values"][0, 0, 1].isnan()
    assert not found["references/values"][0, 1].isnan().any()
    assert found["references/counts"].tolist() == [[9, 7]]
