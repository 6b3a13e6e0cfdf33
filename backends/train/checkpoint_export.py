"""Parameters as one plain file, .npz or .safetensors, from a checkpoint or from held blocks.

What is written here is read by `--params`. One tensor at a time is whole in memory.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from meshdsl.backends.runtime.files import write_npz
from meshdsl.backends.runtime.values import Array, Spec, local_part
from meshdsl.backends.train.checkpoint import Blocks
from meshdsl.backends.train.checkpoint_folder import DiskError
from meshdsl.backends.train.checkpoint_found import Found, check_same
from meshdsl.backends.train.checkpoint_plan import read_blocks, torch_dtype
from meshdsl.diagnostics import fail
from meshdsl.ir.types import DTYPES

SAFETENSORS_NAMES = {
    **{"f32": "F32", "f64": "F64", "bf16": "BF16", "f16": "F16"},
    **{"i32": "I32", "i64": "I64", "bool": "BOOL"},
}
"""What .safetensors calls our dtypes."""


def export_params(
    source: Found | Blocks,
    path: str,
    specs: Mapping[str, Spec] | None = None,
    mesh: Mapping[str, int] | None = None,
) -> None:
    """Write whole tensors to `path`, .npz or .safetensors by its suffix; whole or not at all.

    From a checkpoint: those in `specs`, or all. From blocks, which `specs` and `mesh` describe: all
    of `specs`; between them the blocks have to cover each tensor. In .npz, bf16 becomes float32,
    which holds the same numbers. Raises MD0541 (a checkpoint of another program), MD0602 (another
    suffix), MD0501 (it cannot be written).
    """
    check_suffix(path)
    whole = _stored(source, specs) if isinstance(source, Found) else _held(source, specs, mesh)
    try:
        _WRITERS[Path(path).suffix](path, whole)
    except OSError as error:
        reason = error.strerror or str(error)
        fail(
            "MD0501", f"{path} cannot be written: {reason}", help="check its space and permissions"
        )
    except DiskError as error:
        fail("MD0501", f"the checkpoint cannot be read: {error}", help="see what writes there")


def check_suffix(path: str) -> None:
    """Refuse a file that is neither .npz nor .safetensors. Raises MD0602."""
    if Path(path).suffix not in _WRITERS:
        help = f"for instance {Path(path).stem}.safetensors"
        fail("MD0602", f"`{path}`: arrays are written as .npz or .safetensors", help=help)


@dataclass(frozen=True, slots=True)
class Whole(Mapping[str, Array]):
    """Whole tensors that are made one at a time, as `tensor` does it; as numpy arrays by name."""

    specs: Mapping[str, Spec]
    tensor: Callable[[str], torch.Tensor]

    def __getitem__(self, name: str) -> Array:
        tensor = self.tensor(name)
        array: Array = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)


def _stored(found: Found, specs: Mapping[str, Spec] | None) -> Whole:
    """The tensors of a checkpoint."""
    chosen = {n: t for n, t in found.tensors.items() if specs is None or n in specs}
    if specs is not None:
        check_same(replace(found, tensors=chosen), specs)
    whole = {name: Spec(t.dtype, dict(t.dims), {}) for name, t in chosen.items()}

    def tensor(name: str) -> torch.Tensor:
        return read_blocks(found.path, {name: whole[name]}, {}, (0,))[0][name]

    return Whole(whole, tensor)


def _held(
    blocks: Blocks, specs: Mapping[str, Spec] | None, mesh: Mapping[str, int] | None
) -> Whole:
    """The tensors that the blocks of devices make up."""
    assert specs is not None, "without specs and mesh nobody knows what the blocks are blocks of"
    assert mesh is not None, "without specs and mesh nobody knows what the blocks are blocks of"

    def tensor(name: str) -> torch.Tensor:
        spec, found = specs[name], {}
        for rank, held in blocks.items():
            part = local_part(spec, dict(mesh), rank)
            found[str(part)] = part, held[name]
        whole = torch.empty(list(spec.dims.values()), dtype=torch_dtype(spec.dtype), device="cpu")
        filled = sum(block.numel() for _, block in found.values())
        assert filled == whole.numel(), f"the blocks hold {filled} of {whole.numel()} of {name}"
        for part, block in found.values():
            whole[part] = block.detach().cpu()
        return whole

    return Whole(specs, tensor)


def write_safetensors(path: str, whole: Whole) -> None:
    """Write a .safetensors file, whole or not at all; the same tensors give the same bytes.

    Eight bytes with the length of the header, the header as JSON padded with spaces, the data.
    Raises OSError.
    """
    partial = Path(path).with_name(f".{Path(path).name}.{os.getpid()}")
    header = _header(whole.specs)
    try:
        with open(partial, "wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            for name in whole:
                file.write(_bytes(whole.tensor(name)))
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _header(specs: Mapping[str, Spec]) -> bytes:
    """The table of tensors, of a length that keeps the data aligned to 8 bytes."""
    table, end = {}, 0
    for name, spec in specs.items():
        start, sizes = end, list(spec.dims.values())
        end += math.prod(sizes) * DTYPES[spec.dtype].bytes
        kind = SAFETENSORS_NAMES[spec.dtype]
        table[name] = {"dtype": kind, "shape": sizes, "data_offsets": [start, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def _bytes(tensor: torch.Tensor) -> memoryview:
    """The elements of a tensor in row-major order, little-endian."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


_WRITERS: dict[str, Callable[[str, Whole], None]] = {
    ".npz": write_npz,
    ".safetensors": write_safetensors,
}
