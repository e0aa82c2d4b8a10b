"""Class by class and site by site: what test samples were taken for, one at a time."""

import base64
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedprotip.evaluation.portions import Portion
from fedprotip.settings import Settings
from fedprotip.store.answers import PAIRS, SIDE, most_confused
from fedprotip.stream import Stream


class ByClass:
    """Collects the answers for all test samples, and counts them."""

    def __init__(self, stream: Stream, settings: Settings) -> None:
        self._stream, self._examples = stream, settings.evaluate.examples
        self._parts: list[Tensor] = []

    def add(self, portion: Portion, labels: Tensor, said: Tensor) -> None:
        """The test samples of the next tasks: their true labels (n,) and the answers (n,)."""
        tests = np.concatenate([self._stream.tasks[task].test for task in portion.tasks])
        self._parts.append(torch.stack([portion.owners, torch.from_numpy(tests), labels.cpu(), said.cpu()]))

    def result(self) -> dict[str, Any]:
        """What the record `Answers` holds; nothing where nothing was tested."""
        tasks, tests, labels, said = torch.cat(self._parts, 1)
        if not len(labels):
            return {}
        pairs, counts = torch.stack([labels, said]).unique(dim=1, return_counts=True)
        taken = torch.cat([pairs, counts[None]]).T.tolist()
        own = self._stream.test_owners
        return {
            "classes": self._stream.dataset.classes[: 1 + max(max(task.classes) for task in self._stream.tasks)],
            "taken": taken,
            "sites": expected_sites(self._stream, tasks, labels, said == labels)
            if own is None
            else measured_sites(self._stream, torch.from_numpy(own)[tests], said == labels),
            "examples": [
                {"true": true, "said": wrong, **thumbnail(self._stream.dataset.test_images[sample[None]][0])}
                for true, wrong, _ in most_confused(taken)[:PAIRS]
                for sample in tests[(labels == true) & (said == wrong)].unique()[: self._examples]
            ],
        }


def measured_sites(stream: Stream, owners: Tensor, right: Tensor) -> dict[str, Any]:
    """Accuracy (%) of the test samples that each client holds: `owners` (n,), and whether each is answered right."""
    clients, places = owners.unique(return_inverse=True)
    samples = torch.bincount(places)
    accuracy = 100 * torch.bincount(places, right.double()) / samples
    return _sites(stream, True, clients.tolist(), accuracy.tolist(), samples.tolist())


def expected_sites(stream: Stream, tasks: Tensor, labels: Tensor, right: Tensor) -> dict[str, Any]:
    """Accuracy (%) to be expected at each client: that of the classes of every task, at its own mix of them.

    Its mix is that of the samples it trains on. `tasks`, `labels`, `right`: of all test samples (n,).
    """
    classes, train_labels = len(stream.dataset.classes), stream.dataset.train_labels.numpy()
    seen = int(tasks.max()) + 1
    places = tasks * classes + labels
    tested = torch.bincount(places, minlength=seen * classes).view(seen, classes).numpy()
    correct = torch.bincount(places, right.double(), seen * classes).view(seen, classes).numpy()
    share = np.divide(correct, tested, out=np.zeros_like(correct), where=tested > 0)
    sums: dict[int, np.ndarray] = {}
    for task in range(seen):
        for client in stream.clients(task):
            mix = np.bincount(train_labels[stream.client_samples(task, client)], minlength=classes) * (tested[task] > 0)
            sums[client] = sums.get(client, np.zeros(2)) + np.array([mix @ share[task], mix.sum()])
    known = {client: found for client, found in sorted(sums.items()) if found[1]}
    accuracy = [float(100 * expected / samples) for expected, samples in known.values()]
    return _sites(stream, False, list(known), accuracy, [int(samples) for _, samples in known.values()])


def thumbnail(image: Tensor) -> dict[str, Any]:
    """An image (c, h, w) at a side of at most SIDE pixels, grey or in colour."""
    image = image[None, : 3 if len(image) >= 3 else 1].float()
    height, width = image.shape[2:]
    if max(height, width) > SIDE:
        sides = [max(1, round(side * SIDE / max(height, width))) for side in (height, width)]
        image = torch.nn.functional.interpolate(image, sides, mode="area")
    pixels = image[0].round().clamp(0, 255).byte().permute(1, 2, 0).contiguous().numpy()
    return {"shape": list(pixels.shape), "pixels": base64.b64encode(pixels.tobytes()).decode("ascii")}


def _sites(
    stream: Stream, measured: bool, clients: list[int], accuracy: list[float], samples: list[int]
) -> dict[str, Any]:
    names = stream.client_names
    return {
        "measured": measured,
        "names": [names.get(client, f"client {client}") for client in clients],
        "accuracy": accuracy,
        "samples": samples,
    }
