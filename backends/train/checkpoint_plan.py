"""Blocks of tensors to and from `torch.distributed.checkpoint`.

torch knows a split tensor as chunks: offsets and sizes in the whole. Its own planners take them
from DTensors, whose placements cannot say every split of ours (an axis of the mesh inside another);
these planners take them from `local_part`. What is written is torch's plain format.
"""

from __future__ import annotations

import math
import pickle
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from meshdsl.backends.runtime.files import regular
from meshdsl.backends.runtime.values import Spec, coordinates, local_part
from meshdsl.backends.train.checkpoint_folder import DiskError, describe
from meshdsl.ir.types import DTYPES

Place = tuple[str, tuple[int, ...]]
"""One block: the name of its tensor and where it begins in the whole."""


def torch_dtype(dtype: str) -> torch.dtype:
    """The torch dtype of one of ours."""
    found = getattr(torch, DTYPES[dtype].torch.removeprefix("torch."))
    assert isinstance(found, torch.dtype), f"{dtype} is no dtype of torch"
    return found


def chunk_of(spec: Spec, mesh: Mapping[str, int], rank: int) -> ChunkStorageMetadata:
    """The part of a tensor that device `rank` holds."""
    part = local_part(spec, dict(mesh), rank)
    sizes = torch.Size([p.stop - p.start for p in part])
    return ChunkStorageMetadata(torch.Size([p.start for p in part]), sizes)


def is_first(spec: Spec, mesh: Mapping[str, int], rank: int) -> bool:
    """Whether `rank` is the first of the devices that hold the same block of a tensor."""
    splitting = {axis for axes in spec.split.values() for axis in axes}
    at = coordinates(dict(mesh), rank)
    return all(position == 0 for axis, position in at.items() if axis not in splitting)


class SaveBlocks(DefaultSavePlanner):
    """Plans what one process writes: the blocks of its devices that no earlier device holds."""

    def __init__(
        self,
        blocks: Mapping[int, Mapping[str, torch.Tensor]],
        specs: Mapping[str, Spec],
        mesh: Mapping[str, int],
    ) -> None:
        super().__init__(flatten_state_dict=False)
        self.specs, self.mesh = specs, mesh
        self.blocks: dict[Place, torch.Tensor] = {}
        for rank, held in blocks.items():
            for name, spec in specs.items():
                chunk, block = chunk_of(spec, mesh, rank), held[name]
                shown = f"device {rank} holds {block.dtype}{list(block.shape)} of {name}"
                expected = (torch_dtype(spec.dtype), chunk.sizes)
                assert (block.dtype, block.shape) == expected, f"{shown}, not {expected}"
                if is_first(spec, mesh, rank):
                    self.blocks[name, tuple(chunk.offsets)] = block

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take nothing from `state_dict`, which is empty: the blocks are known."""
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        """One item per block, and the names as torch's own tools want them."""
        items = [self._item(name, offsets) for name, offsets in self.blocks]
        self.plan = SavePlan(items, planner_data=None)
        return self.plan

    def _item(self, name: str, offsets: tuple[int, ...]) -> WriteItem:
        block, whole = self.blocks[name, offsets], torch.Size(self.specs[name].dims.values())
        chunk = ChunkStorageMetadata(torch.Size(offsets), block.shape)
        data = TensorWriteData(chunk, TensorProperties(dtype=block.dtype), whole)
        return WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The plans of all processes, in one order whatever the layout."""
        plans, metadata = super().create_global_plan(all_plans)
        metadata.planner_data = {name: (name,) for name in self.specs}
        return plans, metadata

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """The block that an item stands for."""
        index = write_item.index
        assert index.offset is not None, f"{index.fqn} has no offsets"
        return self.blocks[index.fqn, tuple(index.offset)].detach()


class LoadBlocks(DefaultLoadPlanner):
    """Plans what one process reads: the pieces of the stored chunks that its blocks are made of."""

    def __init__(self, blocks: Mapping[Place, torch.Tensor]) -> None:
        super().__init__(flatten_state_dict=False)
        self.blocks = blocks
        self.stored: Metadata | None = None

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take the table of stored chunks."""
        self.stored = metadata

    def create_local_plan(self) -> LoadPlan:
        """Items that fill every block, each element once; an assertion says so."""
        assert self.stored is not None, "the metadata was not read"
        items: list[ReadItem] = []
        for (name, offsets), block in self.blocks.items():
            stored = self.stored.state_dict_metadata[name]
            assert isinstance(stored, TensorStorageMetadata), f"{name} is no tensor"
            assert stored.properties.dtype == block.dtype, f"{name} is {stored.properties.dtype}"
            chunk = ChunkStorageMetadata(torch.Size(offsets), block.shape)
            found = create_read_items_for_chunk_list(name, stored, [chunk])
            filled = sum(math.prod(item.lengths) for item in found)
            assert filled == block.numel(), f"{filled} of {block.numel()} elements of {name}"
            items += found
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Where in a block the values of an item go."""
        index = read_item.dest_index
        assert index.offset is not None, f"{index.fqn} has no offsets"
        block = self.blocks[index.fqn, tuple(index.offset)]
        for dim, (start, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            block = block.narrow(dim, start, length)
        return block

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Do nothing: the values are where they belong."""


class Writer(FileSystemWriter):
    """torch's writer, less what differs from save to save: the same state gives the same bytes."""

    def storage_meta(self) -> StorageMeta:
        """Neither the path of the folder nor a random name."""
        return StorageMeta()


_METADATA = "torch.distributed.checkpoint.metadata"
_KNOWN = {
    *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta")),
    *((_METADATA, name) for name in ("TensorStorageMetadata", "ChunkStorageMetadata")),
    *((_METADATA, name) for name in ("TensorProperties", "_MEM_FORMAT_ENCODING")),
    *(("torch", dtype.torch.removeprefix("torch.")) for dtype in DTYPES.values()),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
}
"""The classes in the metadata of a checkpoint of ours."""


class _Unpickler(pickle.Unpickler):
    """Refuses whatever is not in such metadata, for a pickle can name any code to run."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise pickle.UnpicklingError(f"its metadata names {module}.{name}, which is refused")
        return super().find_class(module, name)


class Reader(FileSystemReader):
    """torch's reader, but the metadata cannot run code. Raises DiskError where it cannot be read.

    It is read here, for torch would log what goes wrong with a traceback.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        try:
            with open(folder / ".metadata", "rb", opener=regular) as file:
                found = _Unpickler(file).load()
        except OSError as error:
            raise DiskError(describe(error)) from None
        except (pickle.UnpicklingError, EOFError) as error:
            raise DiskError(str(error)) from None
        assert isinstance(found, Metadata), "the metadata of a checkpoint is something else"
        self.metadata = found

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The table of stored chunks."""
        return self.metadata


def write_blocks(
    folder: Path,
    blocks: Mapping[int, Mapping[str, torch.Tensor]],
    specs: Mapping[str, Spec],
    mesh: Mapping[str, int],
    group: Any,
) -> None:
    """Write blocks into `folder`, together with the processes of `group`, and onto the disk.

    Raises DiskError on every process when one of them cannot write.
    """
    planner = SaveBlocks(blocks, specs, mesh)
    with _alone(), _told():
        save(
            {},
            storage_writer=Writer(folder),
            planner=planner,
            process_group=group,
            no_dist=group is None,
        )


def read_blocks(
    folder: Path, specs: Mapping[str, Spec], mesh: Mapping[str, int], ranks: Sequence[int]
) -> dict[int, dict[str, torch.Tensor]]:
    """What each of `ranks` holds of the stored tensors, in memory of its own, on the CPU.

    Every process reads for itself. Raises DiskError when the files cannot be read.
    """
    blocks: dict[Place, torch.Tensor] = {}
    found: dict[int, dict[str, torch.Tensor]] = {rank: {} for rank in ranks}
    copies: list[tuple[int, Place]] = []
    for rank in ranks:
        for name, spec in specs.items():
            chunk = chunk_of(spec, mesh, rank)
            key = (name, tuple(chunk.offsets))
            if key in blocks:
                copies.append((rank, key))
                continue
            block = torch.empty(chunk.sizes, dtype=torch_dtype(spec.dtype), device="cpu")
            blocks[key] = found[rank][name] = block
    with _alone(), _told():
        load({}, storage_reader=Reader(folder), planner=LoadBlocks(blocks), no_dist=True)
    for rank, (name, offsets) in copies:
        found[rank][name] = blocks[name, offsets].clone()
    return {rank: {name: held[name] for name in specs} for rank, held in found.items()}


@contextmanager
def _alone() -> Iterator[None]:
    """Without torch's warning that a process without a group works by itself: it is meant to."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


@contextmanager
def _told() -> Iterator[None]:
    """Turn what torch gathered from the processes into the first error of the system among it.

    Errors of another kind (an interrupt, a mistake of ours) go on as they are.
    """
    try:
        yield
    except CheckpointException as gathered:
        failures = {rank: error for rank, (error, _) in sorted(gathered.failures.items())}
        for error in failures.values():
            if not isinstance(error, (OSError, RuntimeError)):
                raise error from None
        raise DiskError(_first(failures)) from next(iter(failures.values()), None)


def _first(failures: Mapping[int, BaseException]) -> str:
    """The first error that a process had, in a line."""
    error = next(iter(failures.values()))
    said = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return next(iter(said.splitlines()), type(error).__name__)
