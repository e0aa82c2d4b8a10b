"""Everything that crosses between a client and the server: named tensors + a little JSON.

A message knows its size, turns into bytes (safetensors, no pickle) and is checked on arrival.
"""

import json
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

PRECISIONS = {"float32": torch.float32, "bf16": torch.bfloat16}
"""What models and bases can travel as (`train.wire`)."""

ORTHONORMAL_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
"""Largest |UᵀU − I| entry accepted from a client; our own extraction stays below 1e-6, and 4e-3 when rounded."""


LARGEST = sys.float_info.max
"""An integer of a message may be larger than any float; NaN and infinity are not at most this either."""


SAMPLES = 2**40
"""A client has no more samples than this: sums of such counts stay exact, and products with them finite."""


class BadMessage(Exception):
    """A message that must not be used; the text says why."""


@dataclass(frozen=True)
class Spec:
    """What a tensor of a message must look like; a size of -1 is free, up to `at_most`."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    orthonormal: bool = False
    at_most: int | None = None


@dataclass(frozen=True)
class Message:
    """One message of a kind (model, basis, reference, …).

    Its tensors are contiguous from the start, as they are after a journey as bytes: how a tensor lies in memory
    decides how products of it are rounded on some machines, and no result may depend on the engine.
    """

    kind: str
    tensors: dict[str, Tensor] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        plain = {name: tensor.detach().contiguous() for name, tensor in self.tensors.items()}
        object.__setattr__(self, "tensors", plain)

    @property
    def nbytes(self) -> int:
        """Payload: the tensors and the JSON, without the container's own header."""
        payload = sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())
        try:
            return payload + (len(json.dumps(self.meta)) if self.meta else 0)
        except (ValueError, TypeError, RecursionError):  # nothing that can travel
            return payload

    def to_bytes(self) -> bytes:
        # clone: the container refuses tensors that share memory
        tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in self.tensors.items()}
        return save_tensors(tensors, metadata={"kind": self.kind, "meta": json.dumps(self.meta)})

    @classmethod
    def from_bytes(cls, data: bytes) -> "Message":
        """The message of `to_bytes`; damaged bytes raise BadMessage."""
        try:
            # cloned: what is read in place is not aligned like other tensors
            tensors = {name: tensor.clone() for name, tensor in load_tensors(data).items()}
            (length,) = struct.unpack("<Q", data[:8])
            header = json.loads(data[8 : 8 + length])["__metadata__"]
            meta = json.loads(header["meta"])
            kind = header["kind"]
        except (SafetensorError, struct.error, KeyError, ValueError, TypeError, RuntimeError) as error:
            raise BadMessage(f"not a readable message ({error})") from None
        if not isinstance(meta, dict) or not isinstance(kind, str):
            raise BadMessage("not a readable message (metadata)")
        return cls(kind, tensors, meta)

    def check_meta(self, *names: str) -> None:
        """BadMessage unless the metadata has these entries and no others."""
        if self.meta.keys() != set(names):
            missing, extra = sorted(set(names) - self.meta.keys()), sorted(self.meta.keys() - set(names))
            raise BadMessage(f"metadata missing: {missing}, unexpected: {extra}")

    def check_numbers(self, *names: str) -> None:
        """BadMessage unless the metadata has these entries as finite numbers."""
        for name in names:
            value = self.meta.get(name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST:
                raise BadMessage(f"{name} = {value!r} is not a finite number")

    def check(self, kind: str, specs: Mapping[str, Spec]) -> "Message":
        """This message, if it has exactly these tensors, well-shaped and finite; else BadMessage."""
        if self.kind != kind:
            raise BadMessage(f"a {kind!r} message was expected, a {self.kind!r} message came")
        if self.tensors.keys() != specs.keys():
            missing = sorted(specs.keys() - self.tensors.keys())
            extra = sorted(self.tensors.keys() - specs.keys())
            raise BadMessage(f"tensors missing: {missing}, unexpected: {extra}")
        for name, spec in specs.items():
            _check_tensor(name, self.tensors[name], spec)
        return self


Parcel = list[Message]
"""What a client is sent at once: a question, and before it whatever it lacks to answer."""


def pack_parcel(parcel: Parcel) -> bytes:
    """All messages of a parcel, each behind its length."""
    parts = [message.to_bytes() for message in parcel]
    return b"".join(struct.pack("<Q", len(part)) + part for part in parts)


def unpack_parcel(data: bytes) -> Parcel:
    """The parcel of `pack_parcel`; damaged bytes raise BadMessage."""
    parcel, place = Parcel(), 0
    while place < len(data):
        if place + 8 > len(data):
            raise BadMessage("not a readable parcel (it ends within a length)")
        (length,) = struct.unpack_from("<Q", data, place)
        part = data[place + 8 : place + 8 + length]
        if len(part) < length:
            raise BadMessage("not a readable parcel (it ends within a message)")
        parcel.append(Message.from_bytes(part))
        place += 8 + length
    return parcel


def _check_tensor(name: str, tensor: Tensor, spec: Spec) -> None:
    if tensor.dtype != spec.dtype:
        raise BadMessage(f"{name} is {tensor.dtype}, expected {spec.dtype}")
    fits = len(tensor.shape) == len(spec.shape) and all(
        want in (-1, have) for want, have in zip(spec.shape, tensor.shape, strict=True)
    )
    if not fits:
        raise BadMessage(f"{name} has shape {tuple(tensor.shape)}, expected {spec.shape}")
    if spec.at_most is not None and tensor.shape[-1] > spec.at_most:
        raise BadMessage(f"{name} has {tensor.shape[-1]} columns, at most {spec.at_most} are possible")
    if tensor.is_floating_point() and not torch.isfinite(tensor).all():
        raise BadMessage(f"{name} has values that are not finite")
    if spec.orthonormal and tensor.shape[1]:
        gram = tensor.double().T @ tensor.double()
        error = (gram - torch.eye(tensor.shape[1], dtype=gram.dtype, device=gram.device)).abs().max().item()
        if error > ORTHONORMAL_TOLERANCE[tensor.dtype]:
            raise BadMessage(f"{name} is not orthonormal (error {error:.1e})")
