"""A small made dataset for tests: a few grey images whose pixels tell sample and class apart."""

import torch

from fedprotip.stream.datasets import Dataset


def made_dataset(train=(6, 5, 4, 3, 2, 1), test=(2, 2, 2, 2, 2, 2), domains=(), shape=(1, 4, 4)):
    """`train[c]` and `test[c]` samples of class c; with `domains` sample i belongs to domain i mod D."""

    def part(counts):
        labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
        images = torch.randint(0, 256, (len(labels), *shape), generator=torch.Generator().manual_seed(len(labels)))
        places = torch.arange(len(labels)) % len(domains) if domains else None
        return images.to(torch.uint8), labels, places

    train_images, train_labels, train_domains = part(train)
    test_images, test_labels, test_domains = part(test)
    return Dataset(
        name="made",
        classes=[f"class {label}" for label in range(len(train))],
        train_images=train_images,
        train_labels=train_labels,
        test_images=test_images,
        test_labels=test_labels,
        mean=(0.5,) * shape[0],
        std=(0.25,) * shape[0],
        domains=tuple(domains),
        train_domains=train_domains,
        test_domains=test_domains,
    )
