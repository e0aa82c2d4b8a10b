"""FedProx: the pull towards the model that was received."""

import torch
from torch.nn.functional import cross_entropy

from tests.sites import Ends
from tests.small import small


def test_the_pull_is_mu_times_the_way_from_the_model_received(tmp_path):
    ends = Ends(small("train.augment=none", method={"name": "fedprox", "mu": 0.3}), tmp_path)
    ends.site()
    site = ends.site(task=1)
    local, network = ends.local(0, site), site.network
    images, labels = ends.stream.train_batch(1, ends.stream.tasks[1].train[:8])
    site.method.begin_round(local)
    moving = [network.get_parameter(name) for name in network.moving]
    ways = [0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(0)) for p in moving]
    with torch.no_grad():
        for parameter, way in zip(moving, ways, strict=True):
            parameter.add_(way)
    plain = cross_entropy(network(images)[:, 2:], labels - 2)
    found = site.method.loss(local, images, labels)
    torch.testing.assert_close(found, plain + 0.15 * sum(way.square().sum() for way in ways))
    one, other = (torch.autograd.grad(loss, moving) for loss in (found, plain))
    for with_pull, without, way in zip(one, other, ways, strict=True):
        torch.testing.assert_close(with_pull - without, 0.3 * way, atol=1e-5, rtol=1e-4)
