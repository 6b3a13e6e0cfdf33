"""Export of parameters to a .npz or .safetensors file, from a checkpoint or from local blocks.

`--params` reads these files. One tensor at a time is whole in memory.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from meshdsl.backends.engines.in_process import torch_dtype
from meshdsl.backends.runtime.array_files import Refused, safetensors_parts, write_npz
from meshdsl.backends.runtime.user_files import replacing_for_good
from meshdsl.backends.runtime.values import Array, Spec, local_part
from meshdsl.backends.train.checkpoint import (
    Blocks,
    Checkpoint,
    Checkpoints,
    bytes_of,
    check_same,
    one_at,
    read_blocks,
)
from meshdsl.diagnostics import fail


def export_params(
    source: Checkpoint | Blocks,
    path: str,
    specs: Mapping[str, Spec] | None = None,
    mesh: Mapping[str, int] | None = None,
) -> None:
    """Write whole tensors to `path`, .npz or .safetensors by its suffix; whole or not at all.

    From a checkpoint: those in `specs`, or all. From blocks, which `specs` and `mesh` describe: all
    of `specs`; together the blocks have to cover each tensor. In .npz, bf16 becomes float32,
    without loss. Raises MD0541 (a checkpoint of another program), MD0602 (another
    suffix), MD0501 (it cannot be written).
    """
    check_suffix(path)
    tensors = (
        _stored(source, specs) if isinstance(source, Checkpoint) else _held(source, specs, mesh)
    )
    try:
        _WRITERS[Path(path).suffix](path, tensors)
    except OSError as error:
        reason = error.strerror or str(error)
        fail(
            "MD0501", f"{path} cannot be written: {reason}", help="check its space and permissions"
        )
    except Refused as refused:
        fail("MD0501", f"the checkpoint cannot be read: {refused}", help="see what writes there")


def check_suffix(path: str) -> None:
    """Refuse a file that is neither .npz nor .safetensors. Raises MD0602."""
    if Path(path).suffix not in _WRITERS:
        help = f"for instance {Path(path).stem}.safetensors"
        fail("MD0602", f"`{path}`: arrays are written as .npz or .safetensors", help=help)


@dataclass(frozen=True, slots=True)
class Whole(Mapping[str, Array]):
    """Whole tensors by name as numpy arrays, made one at a time by `tensor`."""

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


def _stored(found: Checkpoint, specs: Mapping[str, Spec] | None) -> Whole:
    """The tensors of a checkpoint."""
    chosen = {n: t for n, t in found.tensors.items() if specs is None or n in specs}
    if specs is not None:
        check_same(replace(found, tensors=chosen), specs)
    undivided = {name: _undivided(spec) for name, spec in chosen.items()}

    def tensor(name: str) -> torch.Tensor:
        return read_blocks(found, {name: undivided[name]}, {}, (0,))[0][name]

    return Whole(undivided, tensor)


def _undivided(spec: Spec) -> Spec:
    """A tensor as a device has it that has all of it, its blocks in their own order."""
    return spec._replace(split={}, blocks=None)


def _held(
    blocks: Blocks, specs: Mapping[str, Spec] | None, mesh: Mapping[str, int] | None
) -> Whole:
    """The tensors assembled from the blocks of devices."""
    assert specs is not None, "without specs and mesh nobody knows what the blocks are blocks of"
    assert mesh is not None, "without specs and mesh nobody knows what the blocks are blocks of"

    def tensor(name: str) -> torch.Tensor:
        spec, by_part = specs[name], {}
        for rank, held in blocks.items():
            part = local_part(spec, dict(mesh), rank)
            by_part[str(part)] = part, held[name]
        assembled = torch.empty(
            list(spec.dims.values()), dtype=torch_dtype(spec.dtype), device="cpu"
        )
        filled = sum(block.numel() for _, block in by_part.values())
        assert filled == assembled.numel(), (
            f"the blocks hold {filled} of {assembled.numel()} of {name}"
        )
        for part, block in by_part.values():
            assembled[part] = block.detach().cpu()
        return assembled

    return Whole(specs, tensor)


def write_safetensors(path: str, whole: Whole) -> None:
    """Write a .safetensors file, whole or not at all. Raises OSError."""
    shapes = {name: (spec.dtype, list(spec.dims.values())) for name, spec in whole.specs.items()}
    with replacing_for_good(path) as file:
        file.writelines(safetensors_parts(shapes, lambda name: bytes_of(whole.tensor(name))))


_WRITERS: dict[str, Callable[[str, Whole], None]] = {
    ".npz": write_npz,
    ".safetensors": write_safetensors,
}


# --- parameters for a run ------------------------------------------------------------------------


@contextlib.contextmanager
def as_params(path: str | None, names: Iterable[str]) -> Iterator[str | None]:
    """The path of a file of the parameters `names`, of what `--params` names.

    A file stands for itself. Of a checkpoint (`DIR/step-N`, or the newest of `DIR`) those that it
    has are written to a temporary one; where a run of mixed precision has kept a finer copy of one,
    that is its value. Raises MD0505 where there is no checkpoint, MD0543 where none is whole.
    """
    if path is None or not os.path.isdir(path):
        yield path
        return
    checkpoint = checkpoint_at(path)
    stored = {n: m if (m := f"{n}.master") in checkpoint.tensors else n for n in names}
    chosen = {n: checkpoint.tensors[s] for n, s in stored.items() if s in checkpoint.tensors}
    undivided = {name: _undivided(spec) for name, spec in chosen.items()}

    def tensor(name: str) -> torch.Tensor:
        only = {stored[name]: undivided[name]}
        return read_blocks(checkpoint, only, {}, (0,))[0][stored[name]]

    with tempfile.TemporaryDirectory(prefix="meshdsl-", ignore_cleanup_errors=True) as folder:
        file = os.path.join(folder, f"{checkpoint.path.name}.safetensors")
        write_safetensors(file, Whole(undivided, tensor))
        yield file


def checkpoint_at(path: str) -> Checkpoint:
    """The checkpoint in a folder `step-N`, or the newest one in a folder of several.

    Raises MD0505 where there is none, and as `Checkpoints.latest`.
    """
    checkpoint = Checkpoints(path).latest() or one_at(Path(path))
    if checkpoint is None:
        help = "name the folder that `train --checkpoint` wrote, a step of it, or a file"
        fail("MD0505", f"there is no checkpoint in {path}", help=help)
    return checkpoint
