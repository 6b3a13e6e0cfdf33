"""Export of parameters to a .npz or .safetensors file; parameters of a checkpoint for a run.

`--params` reads these files. One tensor at a time is whole in memory.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch

from meshdsl.backends.engines.ranks import assembled
from meshdsl.backends.runtime.array_files import safetensors_parts, write_npz
from meshdsl.backends.runtime.user_files import replacing_for_good
from meshdsl.backends.runtime.values import Array, Spec, first_replicas
from meshdsl.backends.train.checkpoint import (
    Blocks,
    Checkpoint,
    Checkpoints,
    bytes_of,
    one_at,
    read_block,
)
from meshdsl.backends.weights.writing import write_model
from meshdsl.diagnostics import fail
from meshdsl.named.weights import WeightMap
from meshdsl.records import dataclass


def export_params(
    blocks: Blocks,
    path: str,
    specs: Mapping[str, Spec],
    mesh: dict[str, int],
    weights: WeightMap | None = None,
) -> None:
    """Write the tensors in `specs` to `path`, .npz or .safetensors by its suffix.

    With `weights` it is a model of another program, in a folder or a file. It is written whole or
    not at all, from the blocks of the devices of a mesh. In .npz, bf16 becomes float32, without
    loss. Raises MD0602 (another suffix), MD0501 (it cannot be written), MD0554.
    """
    if weights is None:
        check_suffix(path)

    def tensor(name: str) -> torch.Tensor:
        spec = specs[name]
        ranks = (rank for rank in first_replicas(spec, mesh) if rank in blocks)
        return assembled(spec, mesh, ((r, blocks[r][name].detach().cpu()) for r in ranks))

    try:
        if weights is not None:
            write_model(path, weights, specs, tensor)
        else:
            _WRITERS[Path(path).suffix](path, Whole(specs, tensor))
    except OSError as error:
        reason = error.strerror or str(error)
        fail(
            "MD0501", f"{path} cannot be written: {reason}", help="check its space and permissions"
        )


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
    specs = {
        name: checkpoint.tensors[key]._replace(split={}, blocks=None)
        for name, key in stored.items()
        if key in checkpoint.tensors
    }

    def tensor(name: str) -> torch.Tensor:
        return read_block(checkpoint, stored[name], specs[name], {}, 0)

    with tempfile.TemporaryDirectory(prefix="meshdsl-", ignore_cleanup_errors=True) as folder:
        file = os.path.join(folder, f"{checkpoint.path.name}.safetensors")
        write_safetensors(file, Whole(specs, tensor))
        yield file


def checkpoint_at(path: str) -> Checkpoint:
    """The checkpoint in a folder `step-N`, or the newest one in a folder of several.

    Raises MD0505 where there is none, and as `Checkpoints.latest`.
    """
    checkpoint = Checkpoints(path).latest() or one_at(Path(path))
    if checkpoint is None:
        help = "name a file, or the folder of a checkpoint or of a model (`model.safetensors`)"
        fail("MD0505", f"there is no checkpoint or model in {path}", help=help)
    return checkpoint
