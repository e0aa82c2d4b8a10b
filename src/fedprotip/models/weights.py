"""Pretrained weights from a .safetensors or .pth file, with mismatches explained."""

import warnings
import zipfile
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fedprotip.errors import UsageError, listed, shortened

CLASSIFIERS = ("fc.", "head.", "heads.", "extras.", "classifier.")
"""Output layers of published checkpoints, and what runs have beside the backbone: left out, a run has its own."""
PACKED = 100
"""A file that unpacks to so many times its size is no work of torch, which does not compress."""
WRAPPERS = ("module.", "backbone.")
"""Prefixes that DataParallel and the model.safetensors of a run put before every name."""


@runtime_checkable
class Adapts(Protocol):
    """A backbone that takes weights of a somewhat different shape."""

    def adapted(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of a file as this backbone can use them; the others unchanged."""


def load_weights(backbone: nn.Module, path: Path) -> None:
    """Overwrite every parameter and buffer of the backbone with those of the file."""
    own = backbone.state_dict()
    found = _named_as(own, _read(path))
    missing = [n for n in own if n not in found and not n.endswith("num_batches_tracked")]
    unknown = sorted(n for n in found if n not in own)
    if missing or unknown:
        faults = [_some(what, names) for what, names in (("it lacks", missing), ("it has", unknown)) if names]
        raise UsageError(f"model.weights = {str(path)!r} belongs to another architecture: {', and '.join(faults)}.")
    for name, tensor in found.items():
        kind = _unusable(tensor, own[name])
        if kind:
            raise UsageError(
                f"model.weights = {str(path)!r}: {name} is {kind}; the model needs plain floating-point numbers, "
                "so save it again as such."
            )
    if isinstance(backbone, Adapts):
        found = backbone.adapted(found)
    for name, tensor in found.items():
        if tensor.shape != own[name].shape:
            raise UsageError(
                f"model.weights = {str(path)!r}: {name} has shape {tuple(tensor.shape)}, "
                f"the model needs {tuple(own[name].shape)}."
            )
        if not own[name].copy_(tensor).isfinite().all():
            raise UsageError(f"model.weights = {str(path)!r}: {name} holds values that are not finite.")


def _unusable(tensor: Tensor, wanted: Tensor) -> str:
    """What a tensor is that cannot be copied into a plain one of numbers without changing them; empty when it can."""
    kinds = {
        "nested": tensor.is_nested,
        "quantised": tensor.is_quantized,
        "sparse": not tensor.is_nested and tensor.layout != torch.strided,
        "without values (on device meta)": tensor.is_meta,
        "complex": tensor.is_complex(),
        f"of {str(tensor.dtype).removeprefix('torch.')}": wanted.is_floating_point() and not _known_floats(tensor),
    }
    return next((kind for kind, found in kinds.items() if found), "")


def _known_floats(tensor: Tensor) -> bool:
    """Whether it holds floating-point numbers, one in each element."""
    return tensor.is_floating_point() and not str(tensor.dtype).endswith("_x2")


def _read(path: Path) -> dict[str, Tensor]:
    try:
        if not path.is_file():
            raise UsageError(f"model.weights = {str(path)!r} is not a file.")
        path.open("rb").close()
    except OSError as error:
        raise UsageError(f"model.weights = {str(path)!r} cannot be read: {error.strerror}.") from None
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        _refuse_bombs(path)
        with warnings.catch_warnings(action="ignore"):  # of old kinds of tensors, which are refused by name
            content = torch.load(path, map_location="cpu", weights_only=True)
    except UsageError:
        raise
    except SafetensorError as error:
        reason = shortened(" ".join(str(error).split())).rstrip(".")
        raise UsageError(f"model.weights = {str(path)!r} is damaged: {reason}.") from None
    except Exception:  # torch raises whatever a broken file leads it to, and advises to load evil ones all the same
        raise UsageError(
            f"model.weights = {str(path)!r} is damaged or holds more than tensors, which is never loaded."
        ) from None
    state = content.get("state_dict", content) if isinstance(content, dict) else content
    if not isinstance(state, dict) or not all(isinstance(n, str) and isinstance(t, Tensor) for n, t in state.items()):
        raise UsageError(f"model.weights = {str(path)!r} holds no dictionary of tensors.")
    return state


def _refuse_bombs(path: Path) -> None:
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as file:
            unpacked = sum(entry.file_size for entry in file.infolist())
        if unpacked > PACKED * path.stat().st_size:
            raise UsageError(
                f"model.weights = {str(path)!r} would unpack to {unpacked:,} bytes, {PACKED} times its size and more: "
                "torch writes no such file, and it is not loaded."
            )


def _named_as(own: dict[str, Tensor], found: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a file under the names of the backbone, without the classifier."""
    named = {}
    for name, tensor in found.items():
        for wrapper in WRAPPERS:
            name = name if name in own else name.removeprefix(wrapper)
        if name in own or not name.startswith(CLASSIFIERS):
            named[name] = tensor
    return named


def _some(what: str, names: list[str]) -> str:
    return f"{what} {listed([shortened(name, 60) for name in names], 2)}"
