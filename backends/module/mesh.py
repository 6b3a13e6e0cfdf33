"""A `torch.distributed` DeviceMesh as the mesh of a program: axes, this device's rank, groups."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from meshdsl.backends.engines.ranks import Axes, Ranks
from meshdsl.backends.runtime.values import Spec
from meshdsl.diagnostics import fail


class MeshRanks(Ranks):
    """A process of a DeviceMesh; a single process for None.

    The axes of `mesh` are the dims of `device_mesh`. Groups are made at their first use.
    """

    def __init__(self, device_mesh: DeviceMesh | None) -> None:
        self.device_mesh = device_mesh
        if device_mesh is None:
            super().__init__({}, where=torch.device("cpu"))
            return
        axes, where = _axes(device_mesh), _device(device_mesh.device_type)
        super().__init__(axes, _rank(device_mesh), dist, where=where)

    def group(self, axes: Axes) -> Any:
        """The group of processes that differ along `axes` only, in mesh order.

        All its members have to call this, in the same order for all groups.
        """
        name = "+".join(axes)
        if name not in self._groups:
            self._groups[name] = self._made(axes)
        return self._groups[name]

    def _made(self, axes: Axes) -> Any:
        assert self.device_mesh is not None, "one process has no groups"
        if len(axes) == 1 and axes[0] in self.mesh:
            return self.device_mesh.get_group(axes[0])
        every = self.device_mesh.mesh.flatten()
        members = [int(every[place]) for place in self.members(axes)]
        if len(members) == dist.get_world_size():
            return dist.group.WORLD
        return dist.new_group(members, use_local_synchronization=True)

    @contextmanager
    def here(self) -> Iterator[None]:
        """A context: new tensors are on this process's device, and autocast is off."""
        with ExitStack() as stack:
            if self.where.type != "cpu":
                stack.enter_context(self.where)
            if torch.is_autocast_enabled(self.where.type):
                stack.enter_context(torch.autocast(self.where.type, enabled=False))
            yield

    def placements(self, name: str, spec: Spec) -> tuple[Placement, ...]:
        """A tensor's splits and partial sums as DTensor placements.

        An axis that splits a dim after axes that the mesh has further in is strided, as
        tensor-parallel parameters under FSDP are. Raises MD0562 for uneven blocks of these.
        """
        assert not spec.blocks, "sizes of stages belong to a schedule, which a module has none of"
        placements: list[Placement] = [Replicate() for _ in self.mesh]
        order = list(self.mesh)
        for position, (dim, size) in enumerate(spec.dims.items()):
            axes = spec.split.get(dim, ())
            for number, axis in enumerate(axes):
                earlier = (a for a in axes[:number] if order.index(a) > order.index(axis))
                factor = math.prod(self.mesh[a] for a in earlier)
                if factor == 1:
                    placements[order.index(axis)] = Shard(position)
                    continue
                if size % math.prod(self.mesh[a] for a in axes):
                    _refuse_order(name, dim, size, axes, order)
                placements[order.index(axis)] = _StridedShard(position, split_factor=factor)
        for axis in spec.parts:
            placements[order.index(axis)] = Partial()
        return tuple(placements)

    def as_dtensor(self, name: str, spec: Spec, local: torch.Tensor) -> torch.Tensor:
        """This device's block as a DTensor; itself without a DeviceMesh. Gradients go through."""
        if self.device_mesh is None:
            return local
        # DTensor would take all blocks to be as large as this one.
        shape = torch.Size(spec.dims.values())
        stride = torch.empty(shape, device="meta").stride()
        placements = self.placements(name, spec)
        return DTensor.from_local(local, self.device_mesh, placements, shape=shape, stride=stride)


def is_strided(placement: Placement) -> bool:
    """Whether an axis splits a dim after axes that are further in on the mesh."""
    return isinstance(placement, _StridedShard)


def check_same(ranks: MeshRanks, axes: Mapping[str, int]) -> None:
    """Refuse a DeviceMesh that is not the mesh a plan was made for (MD0560)."""
    alone = ranks.device_mesh is None and math.prod(axes.values()) == 1
    if alone or ranks.mesh == dict(axes):
        return
    wanted = _shown(axes)
    message = f"the plan is for the mesh {wanted}, and the DeviceMesh is {_shown(ranks.mesh)}"
    sizes = f"({', '.join(map(str, axes.values()))},)" if axes else "(1,)"
    help = f"make it with `init_device_mesh(…, {sizes}, mesh_dim_names={tuple(axes)!r})`"
    fail("MD0560", message, help=help)


def _shown(axes: Mapping[str, int]) -> str:
    return "{" + ", ".join(f"{name}: {size}" for name, size in axes.items()) + "}"


def _axes(mesh: DeviceMesh) -> dict[str, int]:
    if not isinstance(mesh, DeviceMesh):
        message = f"a DeviceMesh is needed, and this is a {type(mesh).__name__}"
        help = 'make one: `init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))`'
        fail("MD0560", message, help=help)
    if mesh.mesh_dim_names is None:
        help = "name them as the layout does: `init_device_mesh(…, mesh_dim_names=(…))`"
        fail("MD0560", "the dims of the DeviceMesh have no names", help=help)
    ranks = mesh.mesh.flatten().tolist()
    if ranks != sorted(set(ranks)):
        message = f"the ranks of the DeviceMesh are not in ascending order: {ranks}"
        help = "list them in row-major order, as `init_device_mesh` does"
        fail("MD0560", message, help=help)
    return dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))


def _rank(mesh: DeviceMesh) -> int:
    at = mesh.get_coordinate()
    if at is None:
        message = f"this process, rank {dist.get_rank()}, is not in the DeviceMesh"
        fail("MD0560", message, help="make the module only on processes that are in it")
    rank = 0
    for position, size in zip(at, mesh.shape, strict=True):
        rank = rank * size + position
    return rank


def _device(kind: str) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, torch.get_device_module(kind).current_device())


def _refuse_order(
    name: str, dim: str, size: int, axes: Sequence[str], order: Sequence[str]
) -> None:
    written = ", ".join(axes)
    message = (
        f"`{name}` has `{dim} = {size}` split unevenly over ({written}), outer first, and the "
        f"DeviceMesh has {', '.join(order)}: a DTensor splits unevenly only in that order"
    )
    sorted_axes = ", ".join(sorted(axes, key=order.index))
    help = (
        f"write `{dim} -> ({sorted_axes})`, make the DeviceMesh with its dims in the order of the "
        f"layout, or give `{dim}` a size that divides evenly"
    )
    fail("MD0562", message, help=help)
