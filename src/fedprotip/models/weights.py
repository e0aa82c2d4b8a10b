"""Pretrained weights from a .safetensors or .pth file, with mismatches explained."""

from pathlib import Path
from pickle import UnpicklingError

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fedprotip.errors import UsageError

CLASSIFIERS = ("fc.", "head.", "heads.", "classifier.")
"""Output layers of published checkpoints: left out, as every task gets a head of its own."""


def load_weights(backbone: nn.Module, path: Path, may_differ: tuple[str, ...] = ()) -> None:
    """Overwrite every parameter and buffer of the backbone with those of the file.

    Args:
        may_differ: names that keep their random values when their shape differs (a stem for small images).
    """
    found = {n: t for n, t in _read(path).items() if not n.startswith(CLASSIFIERS)}
    own = backbone.state_dict()
    missing = [n for n in own if n not in found and not n.endswith("num_batches_tracked")]
    unknown = [n for n in found if n not in own]
    if missing or unknown:
        raise UsageError(
            f"model.weights = {str(path)!r} belongs to another architecture: "
            f"{_some('it lacks', missing)}{' and ' if missing and unknown else ''}{_some('it has', unknown)}."
        )
    for name, tensor in found.items():
        if tensor.shape != own[name].shape:
            if name in may_differ:
                continue
            raise UsageError(
                f"model.weights = {str(path)!r}: {name} has shape {tuple(tensor.shape)}, "
                f"the model needs {tuple(own[name].shape)}."
            )
        own[name].copy_(tensor)


def _read(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UsageError(f"model.weights = {str(path)!r} does not exist.") from None
    except (SafetensorError, UnpicklingError, RuntimeError, EOFError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(f"model.weights = {str(path)!r} cannot be read: {reason.rstrip('.')}.") from None
    state = content.get("state_dict", content) if isinstance(content, dict) else content
    if not isinstance(state, dict) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise UsageError(f"model.weights = {str(path)!r} holds no dictionary of tensors.")
    return state


def _some(what: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return f"{what} {', '.join(names[:2])}{more}"
