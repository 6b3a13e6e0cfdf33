"""What the manifest of a checkpoint may hold: the types of its fields, and what fits together.

Nothing of a manifest is believed before it was here: somebody may have written it by hand.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from meshdsl.backends.runtime.array_files import SAFETENSORS_DTYPES
from meshdsl.backends.runtime.values import Spec

MOST_DEVICES = 1 << 20
"""The most devices of a mesh that a checkpoint is read from."""

Size = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_FILE = re.compile(r"device-(\d{1,9})(?:-\d{1,9})?\.safetensors")


class Forged(ValueError):
    """A manifest that no save has written; the message says why."""


class _Strict(Struct, forbid_unknown_fields=True):
    pass


class StoredFile(_Strict):
    """The size and the checksum of a file."""

    bytes: Size
    blake2b: Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]


class StoredTensor(_Strict):
    """A tensor: its dims in order, and which axes each is split over, outer first."""

    dtype: str
    dims: list[tuple[str, Size]]
    split: dict[str, list[str]]
    parts: list[str] = []
    blocks: dict[str, list[list[Size]]] | None = None

    def spec(self) -> Spec:
        """The tensor with its splits at the save."""
        split = {dim: tuple(axes) for dim, axes in self.split.items()}
        blocks = self.blocks or None
        return Spec(self.dtype, dict(self.dims), split, parts=tuple(self.parts), blocks=blocks)


class About(Struct):
    """What is read of the description of a run; there may be more in it."""

    seed: int = 0
    size: Size | None = None
    data: str | dict[str, str | None] | None = None
    order: str | None = None
    vocabulary: str | None = None
    tokens: str | None = None
    program: str = ""
    layout: str = ""
    mesh: str = ""
    meshdsl: str = ""
    plan: str = ""
    rule: str = ""


class Manifest(_Strict):
    """The manifest of a checkpoint, less its version and checksum."""

    step: Annotated[int, Meta(ge=0, lt=10**18)]
    meta: dict[str, Any]
    mesh: list[tuple[str, Annotated[int, Meta(ge=1, le=MOST_DEVICES)]]]
    tensors: dict[str, StoredTensor]
    files: dict[str, StoredFile]


def checked(content: Mapping[str, Any]) -> Manifest:
    """The manifest that JSON held. Raises Forged for one that no save writes."""
    try:
        manifest = msgspec.convert(content, Manifest)
        msgspec.convert(manifest.meta, About)
    except msgspec.ValidationError as error:
        raise Forged(f"{error}") from None
    mesh = dict(manifest.mesh)
    _require(len(mesh) == len(manifest.mesh), "an axis of its mesh occurs twice")
    devices = math.prod(mesh.values())
    _require(devices <= MOST_DEVICES, f"its mesh has {devices:,} devices")
    for name, tensor in manifest.tensors.items():
        _check_tensor(name, tensor, mesh)
    _check_files(manifest, devices)
    return manifest


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise Forged(problem)


def _check_tensor(name: str, tensor: StoredTensor, mesh: Mapping[str, int]) -> None:
    """Refuse a tensor that cannot lie on the mesh as it is said to."""
    dims = dict(tensor.dims)
    over = [axis for axes in tensor.split.values() for axis in axes] + tensor.parts
    _require(tensor.dtype.upper() in SAFETENSORS_DTYPES, f"{name} is {tensor.dtype}")
    _require(len(dims) == len(tensor.dims), f"a dim of {name} occurs twice")
    _require(tensor.split.keys() <= dims.keys(), f"{name} is split along a dim it does not have")
    _require({*over} <= mesh.keys(), f"{name} is split over an axis that the mesh does not have")
    _require(len(set(over)) == len(over), f"{name} is split over an axis twice")
    for dim, blocks in (tensor.blocks or {}).items():
        _require(dim in dims, f"{name} has blocks of a dim it does not have")
        lying = [index for block in blocks for index in block]
        # Compared by length first: a size may be any number.
        is_partition = len(lying) == dims[dim] and sorted(lying) == [*range(len(lying))]
        _require(is_partition, f"the blocks of {name} along {dim} overlap, or leave something out")
        on = tensor.split.get(dim, [])
        fits = len(blocks) <= 1 or (bool(on) and mesh[on[0]] == len(blocks))
        _require(fits, f"{name} has {len(blocks)} blocks along {dim}")


def _check_files(found: Manifest, devices: int) -> None:
    """Refuse files of other names, or of fewer bytes than there are elements."""
    for name in found.files:
        device = _FILE.fullmatch(name)
        is_file = device is not None and int(device[1]) < devices
        _require(is_file, f"{name!r} is no file of a checkpoint of {devices} devices")
    most = sum(file.bytes for file in found.files.values())
    _require(sum(map(_bytes, found.tensors.values())) <= most, "its tensors are larger than it")


def _bytes(tensor: StoredTensor) -> int:
    """The bytes of a whole tensor."""
    width = int(SAFETENSORS_DTYPES[tensor.dtype.upper()][2:])
    return width * math.prod(size for _, size in tensor.dims)


def check_header(
    file: str, arrays: Iterable[tuple[str, str, list[int]]], expected: Mapping[str, Any]
) -> None:
    """Refuse a file whose arrays are not the blocks that the manifest says. Raises Forged."""
    held = {name: (dtype, shape) for name, dtype, shape in arrays}
    _require(held == expected, f"{file} has other arrays than the manifest says")
