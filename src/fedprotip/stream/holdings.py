"""The samples that one site can read."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedprotip.stream.stream import Stream


@dataclass(frozen=True)
class Holding:
    """What one client has of every task: to train on, and held back."""

    stream: Stream
    client: int

    def samples(self, task: int) -> np.ndarray:
        """Training samples of a task (indices); empty where it has none."""
        return self.stream.client_samples(task, self.client)

    def held_back(self, task: int) -> np.ndarray:
        """Samples of a task that it does not train on (`clients.held_back`)."""
        return self.stream.held_back(task, self.client)

    def labels(self, task: int) -> Tensor:
        """The labels of its training samples (n,)."""
        return self._labels(self.samples(task))

    def held_back_labels(self, task: int) -> Tensor:
        """The labels of the samples that it does not train on (n,)."""
        return self._labels(self.held_back(task))

    def _labels(self, samples: np.ndarray) -> Tensor:
        return self.stream.dataset.train_labels[torch.from_numpy(samples)]
