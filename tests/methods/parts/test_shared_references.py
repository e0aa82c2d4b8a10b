"""One reference per task from sums over clients: that of all their samples together."""

from types import SimpleNamespace

import pytest
import torch

from fedprotip.inference.route import references
from fedprotip.messages import BadMessage, Message
from fedprotip.methods.parts import references as exchange
from fedprotip.methods.parts.references import PARTS, STATE, SharedReferences, pooled
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


class Told:
    """A client at the end of a task: `refer` says what it knows about all of them."""

    def __init__(self, task):
        self.task = task


def test_what_was_summed_before_is_not_summed_again(monkeypatch):
    """The second sum without a client would tell its part; new tasks and new bases are in no earlier sum."""
    whole = dict(zip(PARTS, (torch.full((3, 3), 2.0), torch.ones(3, 3), torch.tensor([4, 5, 6])), strict=True))
    monkeypatch.setattr(exchange, "refer", lambda local: Message("reference", whole))
    told = SharedReferences().answer(Told(2)).tensors
    for part in ("values", "variances"):
        assert not told[part][:2, :2].any()
        assert (told[part][2] > 0).all()
        assert (told[part][:, 2] > 0).all()
        assert (whole[part] > 0).all()  # the client keeps all of it


def test_references_of_earlier_tasks_stay_whoever_is_lost_afterwards():
    known, clients = Knowledge(STATE), [[features(one, task, 5 + one) for task in range(2)] for one in range(3)]
    known.update(pooled(summed([[tasks[0]] for tasks in clients], bases(1)), known))
    later = summed(clients[:2], bases(2))  # the third is gone
    for part in ("values", "variances"):
        later.tensors[part][0, 0] = 0
    found = pooled(later, known)
    torch.testing.assert_close(found["references/values"][0, 0, 0].float(), known["references/values"][0, 0, 0])
    assert found["references/counts"].tolist() == [[18, 11]]
    first = torch.cat([tasks[0] for tasks in clients[:2]]).double()
    energy = (first @ bases(2)[1].double()).square().sum(1).mean()
    torch.testing.assert_close(found["references/values"][0, 0, 1], energy.sqrt())  # by the counts that came with it


def test_squares_of_energies_fit_their_sums():
    """Also of clients that are not alike, and of energies that vanish as they are rounded for a sum."""
    shared, site = SharedReferences(), SimpleNamespace(task=1)
    uneven = summed([[features(0, 0, 1), features(0, 1, 1)], [100 * features(1, 0, 1), features(1, 1, 900)]], bases())
    shared.check(uneven, site)
    for tiny in (1e-3, 1e-6, 0.0):
        one = {"values": torch.full((2, 2), tiny), "variances": torch.full((2, 2), 3 * tiny**2)}
        rounded = {name: (part.double() * 2**16).round() / 2**16 for name, part in one.items()}
        shared.check(Message("reference", {**rounded, "counts": torch.ones(2, dtype=torch.int64)}), site)
    uneven.tensors["variances"][0, 1] = 3.1 * uneven.tensors["values"][0, 1] ** 2
    with pytest.raises(BadMessage, match="a variance is larger"):
        shared.check(uneven, site)
