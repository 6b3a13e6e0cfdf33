"""Named SBP: the local block of a tensor on each device of a mesh.

Per mesh axis a tensor is split along a dim (`Split`), a full copy (`B`), or partial (`Partial`):
the value is then the elementwise sum, max, min or product of the local parts (OneFlow's SBP with
names for positions). `Placement` stores this per dim, since one dim may be split over several axes.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import field, replace

from meshdsl.backends.runtime.values import Way, block
from meshdsl.ir.types import TensorType
from meshdsl.ops.opdef import Reads, ReduceOp
from meshdsl.placed.sub_axes import Parts, joined, resolved
from meshdsl.records import dataclass

_as_it_is: Callable[[tuple[str, ...]], tuple[str, ...]] = tuple


@dataclass(frozen=True, slots=True)
class Mesh:
    """Named device axes in rank order (row-major: the last axis varies fastest).

    `names` are those of the axes, in order. `moments` are axes whose devices are points in time: a
    device does the part of each of them, one after the other. `given` are dims with the axes over
    which their blocks have given sizes, in order; all other blocks are as equal as they can be.
    `cut` are dims whose blocks a schedule cuts, with the number of micro-batches. `parts` are the
    declared axes that a layout uses in parts; the parts are axes here (`sub_axes`). `declared` are
    the axes as they are declared. `written` gives axes as a reader knows them: all parts of an axis
    in a row are the axis.
    """

    name: str
    axes: tuple[tuple[str, int], ...]
    moments: tuple[tuple[str, int], ...] = ()
    given: tuple[tuple[str, tuple[str, ...], tuple[int, ...]], ...] = ()
    cut: tuple[tuple[str, int], ...] = ()
    parts: Parts = ()
    names: tuple[str, ...] = field(init=False, compare=False, repr=False)
    declared: tuple[tuple[str, int], ...] = field(init=False, compare=False, repr=False)
    written: Callable[[tuple[str, ...]], tuple[str, ...]] = field(
        init=False, compare=False, repr=False
    )
    _sizes: dict[str, int] = field(init=False, compare=False, repr=False)
    _hash: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(name for name, _ in self.axes))
        object.__setattr__(self, "_sizes", dict((*self.axes, *self.moments)))
        declared, written = self.axes, _as_it_is
        if self.parts:
            written = functools.partial(joined, parts=self.parts)
            declared = tuple((a, self.size(*self.known((a,)))) for a in written(self.names))
        object.__setattr__(self, "declared", declared)
        object.__setattr__(self, "written", written)
        object.__setattr__(self, "_hash", hash((self.name, self.axes, self.given)))

    def __hash__(self) -> int:
        return self._hash

    @property
    def every(self) -> tuple[str, ...]:
        """The axes, those in time too."""
        return tuple(self._sizes)

    @property
    def devices(self) -> int:
        """The number of devices."""
        return math.prod(size for _, size in self.axes)

    def size(self, *axes: str) -> int:
        """Product of the sizes of `axes` (1 for none)."""
        product = 1
        for axis in axes:
            product *= self._sizes[axis]
        return product

    def ways(self, dim: str, size: int, axes: tuple[str, ...]) -> tuple[Way, ...]:
        """How a dim of a size is split over each of `axes`, outer first (`values.block`)."""
        ways: list[Way] = [self.size(axis) for axis in axes]
        for sized_dim, over, sizes in self.given:
            if sized_dim == dim and sum(sizes) == size and axes[: len(over)] == over:
                ways[len(over) - 1] = sizes
        return tuple(ways)

    def numbers(
        self, ways: tuple[Way, ...], axes: tuple[str, ...], at: Iterable[int]
    ) -> tuple[int, ...]:
        """The numbers of a block in `ways`, from its coordinates `at` on the axes."""
        numbers, which = [], 0
        for way, axis, number in zip(ways, axes, at, strict=True):
            which = which * self.size(axis) + number
            numbers.append(number if isinstance(way, int) else which)
        return tuple(numbers)

    def is_uneven(self, dim: str, size: int, axes: tuple[str, ...]) -> bool:
        """Whether the blocks of a dim over `axes` may differ in size."""
        if size % self.size(*axes):
            return True
        return bool(self.given) and any(isinstance(w, tuple) for w in self.ways(dim, size, axes))

    def size_or_one(self, axis: str) -> int:
        """The size of an axis; 1 for one the mesh does not have."""
        if self.parts and axis not in self._sizes:
            return self.size(*resolved(axis, self.parts))
        return self._sizes.get(axis, 1)

    def coordinates(self, rank: int) -> dict[str, int]:
        """The coordinate of device `rank` on every axis."""
        coordinates = {}
        for name, size in reversed(self.axes):
            rank, coordinates[name] = divmod(rank, size)
        return {name: coordinates[name] for name in self.names}

    def places(self, axes: Iterable[str]) -> Iterator[dict[str, int]]:
        """The coordinates on some axes, row-major."""
        names = tuple(axes)
        every = itertools.product(*(range(self._sizes[axis]) for axis in names))
        return (dict(zip(names, at, strict=True)) for at in every)

    def sorted(self, axes: tuple[str, ...] | frozenset[str] | set[str]) -> tuple[str, ...]:
        """`axes` in mesh order."""
        return tuple(a for a in self.names if a in axes)

    def known(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """`axes` less those that this mesh does not have, in the order given.

        For an axis that is in parts here, its parts.
        """
        if self.parts:
            parts = (resolved(axis, self.parts) or (axis,) for axis in axes)
            axes = tuple(itertools.chain.from_iterable(parts))
        return tuple(a for a in axes if a in self.names)

    def refined(self, parts: Parts) -> Mesh:
        """The mesh of the same devices whose axes are the `parts` of some of its axes."""
        in_parts = dict(parts)
        axes = ((in_parts.get(name) or ((name, size),)) for name, size in self.axes)
        return replace(self, axes=tuple(itertools.chain.from_iterable(axes)), parts=parts)

    @property
    def whole(self) -> Mesh:
        """The mesh as it is declared, with no axis in parts."""
        return replace(self, axes=self.declared, parts=()) if self.parts else self

    def __str__(self) -> str:
        axes = ", ".join(f"{name}: {size}" for name, size in self.declared)
        return f"{{ {axes} }}" if axes else ""


@dataclass(frozen=True, slots=True)
class Split:
    """Each device along the axis has a block of the dim, all of one size but the last ones."""

    dim: str

    def __str__(self) -> str:
        return f"S({self.dim})"


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Each device along the axis has a replica."""

    def __str__(self) -> str:
        return "B"


@dataclass(frozen=True, slots=True)
class Partial:
    """Each device along the axis has a part; the value is their elementwise `op`."""

    op: ReduceOp = "sum"

    def __str__(self) -> str:
        return "P" if self.op == "sum" else f"P({self.op})"


Component = Split | Broadcast | Partial
B = Broadcast()
_split, _partial = functools.lru_cache(maxsize=1024)(Split), functools.cache(Partial)
"""Those of placements: they are asked for more often than anything else."""


@dataclass(frozen=True, slots=True)
class Window:
    """What each device has of a split dim where an operator reads more, or else, than a block.

    `size` is that of the dim, `loop` that of the operator's loop, which is split over the same
    axes: each of its blocks reads what `reads` says.
    """

    dim: str
    size: int
    reads: Reads
    loop: int

    @property
    def period(self) -> int:
        """The size of a dim whose ends meet; else 0."""
        return self.size if self.reads.fill == "wrap" else 0

    def covers(self, other: Window) -> bool:
        """Whether each device can cut the other window from this one, and fill what is outside."""
        mine, its = self.reads, other.reads
        fits = mine.fill is None or its.fill is None or mine.fill == its.fill
        wider = mine.lo <= its.lo and its.hi <= mine.hi
        return fits and wider and self.hull(other) is not None

    def hull(self, other: Window) -> Window | None:
        """The least window that covers both, as far as it lies in the dim; None without one.

        Both are windows of the same steps along the same dim, whose ends do not meet.
        """
        mine, its = self.reads, other.reads
        steps = [
            (w.dim, w.size, w.loop, w.reads.mul, w.reads.div, w.reads.flip) for w in (self, other)
        ]
        if steps[0] != steps[1] or self.period or other.period:
            return None
        lo, hi = min(mine.lo, its.lo), max(mine.hi, its.hi)
        return replace(self, reads=replace(mine, lo=lo, hi=hi, fill=None))


@dataclass(frozen=True, slots=True)
class Placement:
    """Splits per dim (axes outer to inner) and the partial axes, which share one `op`.

    Axes in neither are `B`. Canonical: dims sorted by name, no dim without axes, `partial` in mesh
    order, `op` None exactly when nothing is partial. Make one with `placement()`.
    `windows` of split dims are in place of their blocks, in the order they were exchanged: only an
    operator with these `Reads` may have such an operand.
    """

    splits: tuple[tuple[str, tuple[str, ...]], ...] = ()
    partial: tuple[str, ...] = ()
    op: ReduceOp | None = None
    windows: tuple[Window, ...] = ()
    _hash: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        # A placement is a key of every table of routes and rows.
        made = hash((self.splits, self.partial, self.op, self.windows))
        object.__setattr__(self, "_hash", made)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Placement):
            return NotImplemented
        if self._hash != other._hash or self.splits != other.splits:
            return False
        mine, its = (self.partial, self.op, self.windows), (other.partial, other.op, other.windows)
        return mine == its

    def __hash__(self) -> int:
        return self._hash

    def axes_of(self, dim: str) -> tuple[str, ...]:
        """The axes `dim` is split over, outer first; empty when it is whole."""
        for split, axes in self.splits:
            if split == dim:
                return axes
        return ()

    def component(self, axis: str) -> Component:
        """The component of the placement along one mesh axis."""
        for dim, axes in self.splits:
            if axis in axes:
                return _split(dim)
        if axis in self.partial:
            assert self.op is not None
            return _partial(self.op)
        return B

    def local(self, type_: TensorType, mesh: Mesh) -> TensorType:
        """The type of the largest local block, or window, of a device."""
        return _local(self, type_, mesh) if self.splits else type_

    def local_at(
        self, largest: TensorType, type_: TensorType, mesh: Mesh, at: Mapping[str, int]
    ) -> TensorType:
        """The type of the `largest` local block, where blocks have given sizes that of `at`.

        `at` are coordinates on the axes over which a dim has such blocks.
        """
        sizes = {}
        for dim, over, _ in mesh.given:
            if not type_.has(dim) or not mesh.is_uneven(dim, type_.size(dim), self.axes_of(dim)):
                continue
            axes = self.axes_of(dim)
            if axes[: len(over)] == over and at.keys() >= {*over}:
                ways = mesh.ways(dim, type_.size(dim), axes)
                inner = (range(mesh.size(axis)) for axis in axes[len(over) :])
                every = itertools.product(*((at[axis],) for axis in over), *inner)
                numbers = (mesh.numbers(ways, axes, each) for each in every)
                sizes[dim] = max(block(type_.size(dim), ways, number)[1] for number in numbers)
        return largest.resized(sizes)

    def is_uneven(self, dim: str, size: int, mesh: Mesh) -> bool:
        """Whether the blocks of `dim` differ in size."""
        return mesh.is_uneven(dim, size, self.axes_of(dim))

    def blocks(self, dim: str, size: int, mesh: Mesh) -> tuple[tuple[int, int], ...]:
        """The [start, stop) of each block of `dim`, in order: by the coordinates on its axes."""
        return _blocks(mesh, dim, size, self.axes_of(dim))

    def held(self, dim: str, size: int, mesh: Mesh) -> tuple[tuple[int, int], ...]:
        """The [start, stop) that each device has of `dim`: its block, or its window."""
        window = next((w for w in self.windows if w.dim == dim), None)
        if window is None:
            return self.blocks(dim, size, mesh)
        blocks = self.blocks(dim, window.loop, mesh)
        return tuple(window.reads.window(o0, o1, size) for o0, o1 in blocks)

    def number(self, dim: str, mesh: Mesh, at: Mapping[str, int]) -> int:
        """Which block of `dim` the device at these coordinates has."""
        number = 0
        for axis in self.axes_of(dim):
            number = number * mesh.size(axis) + at[axis]
        return number

    def shapes(self, type_: TensorType, mesh: Mesh, ranks: Iterable[int]) -> list[list[int]]:
        """The shape that each of some devices has of a tensor."""
        extents, numbers = [], []
        for dim in type_.dims:
            bounds = self.blocks(dim.name, dim.size, mesh)
            extents.append([stop - start for start, stop in bounds])
            numbers.append(numbers_over(mesh, mesh.names, self.axes_of(dim.name)))
        places = [*zip(*numbers, strict=True)] if numbers else [()] * mesh.devices
        shape = {p: [e[n] for e, n in zip(extents, p, strict=True)] for p in {*places}}
        return [shape[places[rank]] for rank in ranks]

    @property
    def plain(self) -> Placement:
        """The same placement with blocks for windows."""
        return Placement(self.splits, self.partial, self.op) if self.windows else self

    def splits_unevenly(self, type_: TensorType, mesh: Mesh) -> bool:
        """Whether devices have blocks of several sizes."""
        return any(self.is_uneven(dim, type_.size(dim), mesh) for dim, _ in self.splits)

    def may_become(self, other: Placement) -> bool:
        """Whether `other` keeps split and partial axes, or has them partial: nothing is sent."""
        gone = (a for d, axes in self.splits for a in axes if a not in other.axes_of(d))
        return set(self.partial).union(gone) <= set(other.partial)

    def is_reduced_to(self, other: Placement) -> bool:
        """Whether `other` keeps these splits, and is partial over fewer axes."""
        kept = all(other.axes_of(dim)[: len(axes)] == axes for dim, axes in self.splits)
        return kept and set(other.partial) < set(self.partial)

    @property
    def reduced(self) -> Placement:
        """The same splits with nothing partial."""
        return Placement(self.splits)

    def less(self, axis: str, mesh: Mesh) -> Placement:
        """The same placement, windows included, not partial over an axis."""
        partial = [other for other in self.partial if other != axis]
        reduced = placement(mesh, dict(self.splits), partial, self.op)
        return replace(reduced, windows=self.windows) if self.windows else reduced

    def without_dim(self, dim: str) -> Placement:
        """The same placement for the tensor less `dim`."""
        return Placement(tuple(s for s in self.splits if s[0] != dim), self.partial, self.op)

    def without_axis(self, axis: str) -> Placement:
        """The same placement of blocks on a mesh that lacks an axis."""
        splits = ((d, tuple(a for a in axes if a != axis)) for d, axes in self.splits)
        partial = tuple(a for a in self.partial if a != axis)
        left = tuple((d, axes) for d, axes in splits if axes)
        return Placement(left, partial, self.op if partial else None, self.windows)

    def written(self, mesh: Mesh) -> Placement:
        """The same placement over axes as a reader knows them (`Mesh.written`)."""
        if not mesh.parts:
            return self
        splits = tuple((dim, mesh.written(axes)) for dim, axes in self.splits)
        return replace(self, splits=splits, partial=mesh.written(self.partial))

    def components(self, mesh: Mesh) -> dict[str, Component]:
        """The component along each axis of a mesh; of one that is in parts here, along each."""
        if not mesh.parts:
            return {axis: self.component(axis) for axis in mesh.names}
        shown, by_axis = self.written(mesh), dict[str, Component]()
        used = {*shown.partial, *(a for _, axes in shown.splits for a in axes)}
        for axis, _ in mesh.declared:
            parts = [a for a in mesh.known((axis,)) if a in used]
            by_axis |= {a: shown.component(a) for a in (mesh.known((axis,)) if parts else (axis,))}
        return by_axis

    def show(self, type_: TensorType, mesh: Mesh | None = None) -> str:
        """`[batch@data, hidden@(x, y), io] partial sum over cols`, in the language's notation.

        Of a `mesh` with axes in parts, over axes as a reader knows them.
        """
        if mesh is not None and mesh.parts:
            return self.written(mesh).show(type_)
        windows = {w.dim: " window" for w in self.windows}
        shown = (_show_dim(d, self.axes_of(d)) + windows.get(d, "") for d in type_.names)
        dims = ", ".join(shown)
        tail = f" partial {self.op} over {', '.join(self.partial)}" if self.partial else ""
        return f"[{dims}]{tail}"


def strides(mesh: Mesh, axes: tuple[str, ...]) -> dict[str, int]:
    """How far apart neighbours along each axis are among the devices along `axes`, row-major."""
    return {axis: mesh.size(*axes[i + 1 :]) for i, axis in enumerate(axes)}


def numbers_over(mesh: Mesh, axes: tuple[str, ...], over: tuple[str, ...]) -> tuple[int, ...]:
    """For each device along `axes`, row-major, its number among those over other axes."""
    stride = strides(mesh, over)
    return weighted(mesh, axes, tuple(stride.get(axis, 0) for axis in axes))


@functools.lru_cache(maxsize=1 << 12)
def weighted(mesh: Mesh, axes: tuple[str, ...], weights: tuple[int, ...]) -> tuple[int, ...]:
    """For each device along `axes`, row-major, the sum of its coordinates times the weights."""
    numbers = [0]
    for axis, stride in zip(axes, weights, strict=True):
        steps = [i * stride for i in range(mesh.size(axis))]
        numbers = [number + step for number in numbers for step in steps]
    return tuple(numbers)


@functools.lru_cache(maxsize=1 << 12)
def _blocks(mesh: Mesh, dim: str, size: int, axes: tuple[str, ...]) -> tuple[tuple[int, int], ...]:
    ways, every = mesh.ways(dim, size, axes), (range(mesh.size(axis)) for axis in axes)
    at = (mesh.numbers(ways, axes, each) for each in itertools.product(*every))
    blocks = (block(size, ways, numbers) for numbers in at)
    return tuple((start, start + extent) for start, extent in blocks)


@functools.lru_cache(maxsize=1 << 16)
def _local(placed: Placement, type_: TensorType, mesh: Mesh) -> TensorType:
    sizes = {d: -(-type_.size(d) // mesh.size(*axes)) for d, axes in placed.splits}
    for dim in sizes if mesh.given else ():
        blocks = placed.blocks(dim, type_.size(dim), mesh)
        sizes[dim] = max(stop - start for start, stop in blocks)
    for window in placed.windows:
        held = placed.held(window.dim, window.size, mesh)
        sizes[window.dim] = max(stop - start for start, stop in held)
    return type_.resized(sizes)


def placement(
    mesh: Mesh,
    splits: Mapping[str, tuple[str, ...]],
    partial: Iterable[str] = (),
    op: ReduceOp | None = None,
) -> Placement:
    """The canonical placement; axes of size 1 are dropped. Equal ones are one object."""
    return _canonical(mesh, tuple(splits.items()), tuple(partial), op)


@functools.lru_cache(maxsize=1 << 16)
def _canonical(
    mesh: Mesh,
    splits: tuple[tuple[str, tuple[str, ...]], ...],
    partial: tuple[str, ...],
    op: ReduceOp | None,
) -> Placement:
    divided = {d: tuple(a for a in axes if mesh.size(a) > 1) for d, axes in splits}
    summed = mesh.sorted({a for a in partial if mesh.size(a) > 1})
    used = [a for axes in divided.values() for a in axes] + list(summed)
    assert len(used) == len(set(used)), f"an axis is used twice: {divided} {summed}"
    return _interned(
        tuple((d, divided[d]) for d in sorted(divided) if divided[d]),
        summed,
        op if summed else None,
    )


@functools.lru_cache(maxsize=1 << 16)
def _interned(
    splits: tuple[tuple[str, tuple[str, ...]], ...], partial: tuple[str, ...], op: ReduceOp | None
) -> Placement:
    return Placement(splits, partial, op)


WHOLE = Placement()


def _show_dim(dim: str, axes: tuple[str, ...]) -> str:
    if not axes:
        return dim
    return f"{dim}@{axes[0]}" if len(axes) == 1 else f"{dim}@({', '.join(axes)})"
