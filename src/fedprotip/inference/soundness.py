"""Whether what a run folder knows can be true, before answers are made of it.

Hashes prove that files are those of the manifest, not that somebody made them well. Everything here raises ValueError
with a few words. Groups that a method of one's own has are its own business.
"""

import torch
from torch import Tensor

from fedprotip.inference.calibration import BINS, MEASURES, SURE, TEMPERATURES, networks
from fedprotip.inference.experts import BIRTH, feature_map
from fedprotip.inference.statistics import GROUP
from fedprotip.models import Network
from fedprotip.store.files import Tensors
from fedprotip.stream.plan import Plan

_CLIENTS, _VALUES, _VARIANCES, _REFERRED = (
    f"references/{part}" for part in ("clients", "values", "variances", "counts")
)

MOST = 2.0**60
"""Samples of all clients: 2⁴⁰ of each of a million."""


def check_model(own: Tensors, weights: Tensors) -> None:
    """Weights for a network whose tensors have the same names and shapes."""
    for name, tensor in weights.items():
        if tensor.dtype != own[name].dtype:
            raise ValueError(f"{name} is {tensor.dtype}, and should be {own[name].dtype}")
        _finite(f"model/{name}", tensor)


def check_knowledge(knowledge: Tensors, plan: Plan, network: Network) -> None:
    """What `inference/` reads of the knowledge of a run with this plan and this network."""
    features = network.features
    tasks, answers = len(plan.tasks), sum(len(task.classes) for task in plan.tasks)
    for group, born in ((GROUP, False), (BIRTH, True)):
        if not any(name.startswith(f"{group}/") for name in knowledge):
            continue
        _check_statistics(knowledge, group, answers)
        held = knowledge[f"{group}/sketches"].shape[1:]
        for name, options in plan.answering.experts.items():
            if "directions" in options and bool(options.get("born", False)) == born:
                how = feature_map(network, options)
                if (how.out, how.columns) != held:
                    raise ValueError(f"the expert {name!r} needs sketches of {how.out} × {how.columns}, not {held}")
    if any(name.startswith("calibration/") for name in knowledge):
        ways = len(plan.answering.tried)
        _shaped(knowledge, "calibration/loss", (ways, len(TEMPERATURES)))
        _shaped(knowledge, "calibration/right", (ways,))
        if "calibration/asked" in knowledge:  # none of three is in run folders of older versions
            _shaped(knowledge, "calibration/asked", (1,))
        if "calibration/hits" in knowledge:
            _shaped(knowledge, "calibration/hits", (ways, len(TEMPERATURES), 2, SURE))
        if "calibration/apart" in knowledge:
            _shaped(knowledge, "calibration/apart", (ways, ways))
        rows = len(networks(plan.answering)) * len(MEASURES)
        if (_shaped(knowledge, "calibration/distances", (rows, BINS)) < 0).any():
            raise ValueError("calibration/distances has negative counts")
    routing = sorted(name for name in knowledge if name.startswith("subspaces/routing/"))
    if routing and len(routing) != tasks:
        raise ValueError(f"there are {len(routing)} routing bases for {tasks} tasks")
    for name in routing:
        _shaped(knowledge, name, (features, -1))
    if any(name.startswith("references/") for name in knowledge):
        clients = len(_shaped(knowledge, _CLIENTS, (-1,)))
        counts = _shaped(knowledge, _REFERRED, (clients, tasks))
        if counts.is_floating_point() or (counts < 0).any():
            raise ValueError(f"{_REFERRED} are no counts")
        for name in (_VALUES, _VARIANCES):  # NaN: the client has none
            found = _shaped(knowledge, name, (clients, tasks, tasks), gaps=True)
            if (found < 0).any():
                raise ValueError(f"{name} has negative numbers")


def _check_statistics(knowledge: Tensors, group: str, answers: int) -> None:
    sums = _shaped(knowledge, f"{group}/sums", (answers, -1))
    width = sums.shape[1]
    counts = _shaped(knowledge, f"{group}/counts", (answers,))
    moment = _shaped(knowledge, f"{group}/moment", (width * (width + 1) // 2,))
    _shaped(knowledge, f"{group}/sketches", (answers, width, -1))
    if {tensor.dtype for tensor in (sums, counts, moment)} != {torch.float64}:
        raise ValueError("statistics are not float64")
    if (counts < 0).any() or (counts > MOST).any():
        raise ValueError(f"{group}/counts are negative, or more than all clients can have")


def _shaped(knowledge: Tensors, name: str, shape: tuple[int, ...], gaps: bool = False) -> Tensor:
    """A tensor of this shape, −1 for any size; `gaps`: it may have NaN, but no infinity."""
    tensor = knowledge[name]
    fits = len(shape) == tensor.dim() and all(
        want in (-1, have) for want, have in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, and should have {shape}")
    _finite(name, tensor.nan_to_num(0.0, torch.inf, -torch.inf) if gaps else tensor)
    return tensor


def _finite(name: str, tensor: Tensor) -> None:
    if tensor.is_floating_point() and tensor.sum().isfinite():  # one that is not would be in the sum, in less time
        return
    if tensor.is_complex() or (tensor.is_floating_point() and not tensor.isfinite().all()):
        raise ValueError(f"{name} has values that are not finite")
