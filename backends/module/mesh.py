"""A `torch.distributed` DeviceMesh as the mesh of a program: axes, this device's place, groups."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from meshdsl.backends.runtime.values import Spec
from meshdsl.diagnostics import DiagnosticError, fail


class Team:
    """The processes of a DeviceMesh; one process by itself for None.

    `axes` are its dims with their sizes, `rank` is this process's row-major place among them.
    """

    def __init__(self, mesh: DeviceMesh | None) -> None:
        self.mesh = mesh
        self.axes: dict[str, int] = {} if mesh is None else _axes(mesh)
        self.rank = 0 if mesh is None else _rank(mesh)
        self.device = torch.device("cpu") if mesh is None else _device(mesh.device_type)
        self._groups: dict[tuple[str, ...], Any] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Team:
        """Itself: processes are not copied."""
        return self

    @contextmanager
    def here(self) -> Iterator[None]:
        """Where new tensors are made on this process's device, and no dtype is chosen by torch."""
        with ExitStack() as stack:
            if self.device.type != "cpu":
                stack.enter_context(self.device)
            if torch.is_autocast_enabled(self.device.type):
                stack.enter_context(torch.autocast(self.device.type, enabled=False))
            yield

    def group(self, axes: tuple[str, ...]) -> Any:
        """The group of processes that differ along `axes` only, in mesh order.

        Its members have to ask for it alike, in the same order as for others.
        """
        assert self.mesh is not None, "one process has no groups"
        if axes not in self._groups:
            members = self.members(axes)
            found: Any = None
            if len(axes) == 1:
                found = self.mesh.get_group(axes[0])
            elif len(members) == dist.get_world_size():
                found = dist.group.WORLD
            else:
                found = dist.new_group(members, use_local_synchronization=True)
            self._groups[axes] = found
        return self._groups[axes]

    def groups(self, wanted: Sequence[tuple[str, ...]]) -> dict[str, Any]:
        """The groups over sets of axes, as emitted programs name them."""
        return {"+".join(axes): self.group(axes) for axes in wanted}

    def members(self, axes: tuple[str, ...]) -> list[int]:
        """The global ranks of the processes that differ from this one along `axes` only."""
        assert self.mesh is not None
        at = self.mesh.get_coordinate()
        assert at is not None
        names = list(self.axes)
        index = tuple(slice(None) if name in axes else at[dim] for dim, name in enumerate(names))
        found: list[int] = self.mesh.mesh[index].flatten().tolist()
        return found

    def first_makes(self, make: Callable[[], str]) -> str:
        """What the first process makes, told to all; its error is everybody's.

        One compiles for all: that is less work, and a search that runs out of time may end
        differently elsewhere. All processes of the mesh have to call it.
        """
        if self.mesh is None or self.mesh.size() == 1:
            return make()
        axes = tuple(self.axes)
        first = self.members(axes)[0]
        told: list[Any] = [None]
        try:
            told = [(make() if self.rank == 0 else "", (), "")]
        except DiagnosticError as error:
            told = [("", error.diagnostics, "")]
        except Exception as error:
            told = [("", (), f"{type(error).__name__}: {error}")]
            raise
        finally:  # the others wait to be told, whatever it is
            group = self.group(axes)
            dist.broadcast_object_list(told, src=first, group=group, device=self.device)
        text, diagnostics, failure = told[0]
        if diagnostics:
            raise DiagnosticError(*diagnostics)
        assert not failure, f"the first process could not compile: {failure}"
        assert isinstance(text, str)
        return text

    def placements(self, name: str, spec: Spec) -> tuple[Placement, ...]:
        """A tensor's splits as DTensor says them. MD0562: DTensor has no such placement."""
        found: list[Placement] = [Replicate() for _ in self.axes]
        order = list(self.axes)
        for position, dim in enumerate(spec.dims):
            axes = spec.split.get(dim, ())
            if list(axes) != sorted(axes, key=order.index):
                _refuse_order(name, dim, axes, order)
            for axis in axes:
                found[order.index(axis)] = Shard(position)
        return tuple(found)

    def is_expressible(self, spec: Spec) -> bool:
        """Whether DTensor has a placement for these splits."""
        order = list(self.axes)
        return all(list(a) == sorted(a, key=order.index) for a in spec.split.values())


def check_same(team: Team, axes: Mapping[str, int]) -> None:
    """Refuse a DeviceMesh that is not the mesh a plan was made for (MD0560)."""
    alone = team.mesh is None and math.prod(axes.values()) == 1
    if alone or team.axes == dict(axes):
        return
    wanted = _shown(axes)
    message = f"the plan is for the mesh {wanted}, and the DeviceMesh is {_shown(team.axes)}"
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


def _refuse_order(name: str, dim: str, axes: Sequence[str], order: Sequence[str]) -> None:
    written = ", ".join(axes)
    message = (
        f"`{name}` has `{dim}` split over ({written}), outer first, and the DeviceMesh has "
        f"{', '.join(order)}: a DTensor splits in the order of its mesh"
    )
    sorted_axes = ", ".join(sorted(axes, key=order.index))
    help = (
        f"write `{dim} -> ({sorted_axes})`, or make the DeviceMesh with its dims in that order; "
        "`whole_state_dict()` works with any"
    )
    fail("MD0562", message, help=help)
