"""The record of each collective: its effect on a placement, and the bytes it sends.

Bytes are those of ring algorithms, sent per device (Thakur, Rabenseifner and Gropp 2005;
n devices, b bytes of the local input). They are rounded up to whole bytes.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from meshdsl.backends.runtime.values import (
    Way,
    block,
    group_members,
    overlap,
    parts_of,
    source_rank,
)
from meshdsl.ir.types import TensorType
from meshdsl.ops.opdef import ReduceOp
from meshdsl.placed.placements import (
    Mesh,
    Placement,
    Window,
    numbers_over,
    placement,
    strides,
    weighted,
)
from meshdsl.records import dataclass


@dataclass(frozen=True, slots=True)
class Collective:
    """`wire(n, b)`: bytes sent per device. `moves` is False for steps that stay on the device."""

    kind: str
    wire: Callable[[int, int], int]
    formula: str
    moves: bool = True


COLLECTIVES: dict[str, Collective] = {
    c.kind: c
    for c in (
        Collective("all_gather", lambda n, b: (n - 1) * b, "(n-1)*b"),
        Collective("all_reduce", lambda n, b: -(-2 * (n - 1) * b // n), "2(n-1)/n*b"),
        Collective("reduce_scatter", lambda n, b: -(-(n - 1) * b // n), "(n-1)/n*b"),
        Collective("all_to_all", lambda n, b: -(-(n - 1) * b // n), "(n-1)/n*b"),
        Collective("permute", lambda n, b: b, "b"),
        Collective("send", lambda n, b: b, "b"),
        Collective("exchange", lambda n, b: b, "b"),
        Collective("halo", lambda n, b: b, "what others read of the block"),
        Collective("slice", lambda n, b: 0, "0", moves=False),
        Collective("zero_fill", lambda n, b: 0, "0", moves=False),
        Collective("window", lambda n, b: 0, "0", moves=False),
        Collective("load", lambda n, b: 0, "b"),
        Collective("store", lambda n, b: 0, "b"),
    )
}


WAYS = {"load": "from", "store": "to"}
"""By step between the memory of a device and a tier, the words for its direction."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a reshard.

    `dim` is gathered, or split off (slice, reduce_scatter), or split before (all_to_all, zero_fill
    of a split); `to_dim` is split by an all_to_all instead. `axes` are in mesh order, of a slice
    outer first. A halo, or a `window` where nothing is sent, makes the last window of `after`, of
    the blocks or of a `wider` window. In an exchange, `partners` has for each device along the axis
    the one that it sends to and receives from. Of what all devices have the one `at` this
    coordinate keeps its copy in a zero_fill. A `load` and a `store` are between the memory of
    the device and a `tier` beside it, over no axes: `host` or `disk`.
    """

    kind: str
    axes: tuple[str, ...]
    before: Placement
    after: Placement
    dim: str | None = None
    to_dim: str | None = None
    op: str | None = None
    partners: tuple[int, ...] = ()
    at: int = 0
    tier: str = ""

    @property
    def moves(self) -> bool:
        """Whether the step sends anything, or moves it from one memory to another."""
        return COLLECTIVES[self.kind].moves

    @property
    def streams(self) -> tuple[str, ...]:
        """What it occupies while it moves: the links of its axes, or those to a memory."""
        return (f"{WAYS[self.kind]} {self.tier}",) if self.tier else self.axes

    @property
    def kernels(self) -> int:
        """Passes over memory of a local step: zeros, and a block copied in."""
        if self.moves:
            return 0
        return 2 if self.kind == "zero_fill" and self.dim is not None else 1

    def payload(self, type_: TensorType, mesh: Mesh) -> int:
        """Bytes of the local input, as sent."""
        return self.before.local(type_, mesh).elements * self.bytes(type_)

    def bytes(self, type_: TensorType) -> int:
        """Bytes of an element, as sent."""
        # Maxima and minima of floats are reduced as integers, which no backend sends of two bytes.
        widened = self.op in ("max", "min") and self.moves and type_.dtype.kind == "float"
        return max(type_.dtype.bytes, 4) if widened else type_.dtype.bytes

    def wire(self, type_: TensorType, mesh: Mesh) -> int:
        """The most bytes that a device sends."""
        is_uneven = self.moves and self.is_uneven(type_, mesh)
        if self.kind == "permute" and is_uneven:
            return _most_permuted(self, type_, mesh)
        if self.kind == "halo" or is_uneven:
            return max(_sent_by(self, type_, mesh, self._unlike(type_, mesh)))
        sends = self.sends(mesh)
        return sends(self.payload(type_, mesh)) if sends else 0

    def is_uneven(self, type_: TensorType, mesh: Mesh) -> bool:
        """Whether blocks of the tensor differ in size, before or after."""
        return any(p.splits_unevenly(type_, mesh) for p in (self.before, self.after))

    def sends(self, mesh: Mesh) -> Callable[[int], int] | None:
        """Bytes sent per device as a function of the local bytes; None for a local step."""
        if not self.moves:
            return None
        return functools.partial(COLLECTIVES[self.kind].wire, mesh.size(*self.axes))

    # --- device by device ------------------------------------------------------------------------

    def sent_along(
        self, type_: TensorType, mesh: Mesh, axes: tuple[str, ...], at: Mapping[str, int]
    ) -> tuple[int, ...]:
        """Bytes that each device along `axes` sends, row-major, at the coordinates `at` on others.

        Along an axis that `at` has, too, all send what the one at that coordinate does.
        """
        unlike = self._unlike(type_, mesh)
        sent = _sent_by(self, type_, mesh, unlike)
        steps = strides(mesh, unlike)
        first = sum(at.get(axis, 0) * step for axis, step in steps.items())
        varying = tuple(0 if axis in at else steps.get(axis, 0) for axis in axes)
        return tuple(sent[first + number] for number in weighted(mesh, axes, varying))

    def unlike(self, type_: TensorType, mesh: Mesh) -> tuple[str, ...]:
        """The axes of devices along which some may send more than others."""
        return mesh.sorted(frozenset(self._unlike(type_, mesh)))

    def unlike_moments(self, type_: TensorType, mesh: Mesh) -> tuple[str, ...]:
        """The axes in time along which a device may send more than at others."""
        return tuple(a for a in self._unlike(type_, mesh) if a not in mesh.names)

    def by_device(self, type_: TensorType, mesh: Mesh) -> tuple[int, ...]:
        """Bytes that each device sends, in the order of ranks."""
        return self.sent_along(type_, mesh, mesh.names, {})

    def _unlike(self, type_: TensorType, mesh: Mesh) -> tuple[str, ...]:
        """As `unlike`, with the axes in time."""
        if not self.moves:
            return ()
        unlike = set(_of_other_sizes(self, type_, mesh))
        if self.kind == "halo":
            unlike.update(axis for _, axes in self.before.splits for axis in axes)
        elif self.kind == "permute":
            unlike.update(self.axes)
        return tuple(axis for axis in mesh.every if axis in unlike)

    @property
    def window(self) -> Window:
        """The window that a halo makes."""
        return self.after.windows[-1]

    @property
    def wider(self) -> Window | None:
        """The window that another is cut from."""
        given, made = self.before.windows, self.after.windows
        return given[-1] if given and len(given) == len(made) else None

    def changed(self) -> tuple[dict[str, tuple[str, ...]], dict[str, tuple[str, ...]]]:
        """The splits of a permute, before and after, of the dims whose axes change.

        A micro-batch is on every device, so its axis is none of the permute's.
        """
        old, new = dict(self.before.splits), dict(self.after.splits)
        dims = [d for d in old if old[d] != new[d]]
        before, after = ({d: self._own(p[d]) for d in dims} for p in (old, new))
        return before, after

    def _own(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(axis for axis in axes if axis in self.axes)


@functools.lru_cache(maxsize=1 << 14)
def _sent_by(step: Step, type_: TensorType, mesh: Mesh, axes: tuple[str, ...]) -> tuple[int, ...]:
    """Bytes sent by the devices along `axes`; where others split evenly, all are like the first."""
    if step.kind == "halo":
        first = dict.fromkeys(mesh.every, 0)
        return tuple(_halo_bytes(step, type_, mesh, first | at) for at in mesh.places(axes))
    sent_along = _permuted if step.kind == "permute" else _sent_along
    return tuple(sent_along(step, type_, mesh, axes))


def _of_other_sizes(step: Step, type_: TensorType, mesh: Mesh) -> frozenset[str]:
    """The axes of dims of which devices have more or less, before or after; those in time too."""
    ends = (step.before, step.after)
    uneven = (axes for p in ends for d, axes in p.splits if _differ(p, d, type_.size(d), mesh))
    return frozenset(itertools.chain.from_iterable(uneven))


def _differ(p: Placement, dim: str, size: int, mesh: Mesh) -> bool:
    """Whether the blocks of a dim, or the windows in their place, differ in size."""
    if all(window.dim != dim for window in p.windows):
        return p.is_uneven(dim, size, mesh)
    return len({stop - start for start, stop in _held(p, dim, size, mesh)}) > 1


def _permuted(step: Step, type_: TensorType, mesh: Mesh, axes: tuple[str, ...]) -> Iterator[int]:
    """Bytes that each device along `axes` sends in a permute, row-major."""
    numbers = numbers_over(mesh, axes, step.axes)
    moves = {number: _is_moved(step, mesh, number) for number in {*numbers}}
    extents = _extents_along(step.before, type_, mesh, axes)
    for number, local in zip(numbers, extents, strict=True):
        yield math.prod(local) * step.bytes(type_) if moves[number] else 0


def _most_permuted(step: Step, type_: TensorType, mesh: Mesh) -> int:
    """The most bytes that a device sends in a permute: the largest block that is moved.

    A search for routes asks for each of thousands of permutes. Nearly always one of the first is.
    """
    axes = step._unlike(type_, mesh)
    sizes = map(math.prod, _extents_along(step.before, type_, mesh, axes))
    every = sorted(zip(sizes, numbers_over(mesh, axes, step.axes), strict=True), reverse=True)
    moved = (size for size, number in every if _is_moved(step, mesh, number))
    return next(moved, 0) * step.bytes(type_)


def _is_moved(step: Step, mesh: Mesh, number: int) -> bool:
    """Whether a device along the axes of a permute needs another block than it has."""
    part = {axis: mesh.size(axis) for axis in step.axes}
    return source_rank(part, number, *step.changed()) != number


def _sent_along(step: Step, type_: TensorType, mesh: Mesh, axes: tuple[str, ...]) -> Iterator[int]:
    """Bytes that each device along `axes` sends, row-major."""
    ends = (_extents_along(p, type_, mesh, axes) for p in (step.before, step.after))
    every = [*zip(*ends, strict=True)]
    sent = {each: _sent_of(step, type_, mesh, *each) for each in {*every}}
    return (sent[each] for each in every)


def _sent_of(
    step: Step, type_: TensorType, mesh: Mesh, before: tuple[int, ...], after: tuple[int, ...]
) -> int:
    """Bytes that a device sends whose block has these sizes before and after."""
    names, of, local = type_.names, step.bytes(type_), math.prod(before)
    match step.kind:
        case "all_gather":  # of blocks that are padded to the largest of the group
            assert step.dim is not None
            at, members = names.index(step.dim), mesh.size(*step.axes)
            others = math.prod(n for i, n in enumerate(before) if i != at)
            largest = _largest(after[at], _gathered(step, type_, mesh))
            return (members - 1) * largest * others * of
        case "reduce_scatter":
            return (local - math.prod(after)) * of
        case "all_to_all":
            assert step.to_dim is not None
            extent, remaining = (end[names.index(step.to_dim)] for end in (before, after))
            return local // max(extent, 1) * (extent - remaining) * of
        case _:
            return COLLECTIVES[step.kind].wire(mesh.size(*step.axes), local * of)


def _extents_along(
    p: Placement, type_: TensorType, mesh: Mesh, axes: tuple[str, ...]
) -> Iterator[tuple[int, ...]]:
    """The local sizes of the dims on each device along `axes`, the first ones along all others."""
    windows = {window.dim for window in p.windows}
    sizes = (
        _window_along(p, dim.name, dim.size, mesh, axes)
        if dim.name in windows
        else _extent_along(mesh, dim.name, dim.size, p.axes_of(dim.name), axes)
        for dim in type_.dims
    )
    return zip(*sizes, strict=True) if type_.dims else itertools.repeat((), mesh.size(*axes))


def _window_along(
    p: Placement, dim: str, size: int, mesh: Mesh, axes: tuple[str, ...]
) -> tuple[int, ...]:
    """The sizes of the windows of a dim on each device along `axes`."""
    sizes = [stop - start for start, stop in _held(p, dim, size, mesh)]
    return tuple(sizes[number] for number in numbers_over(mesh, axes, p.axes_of(dim)))


@functools.lru_cache(maxsize=1 << 14)
def _extent_along(
    mesh: Mesh, dim: str, size: int, over: tuple[str, ...], axes: tuple[str, ...]
) -> tuple[int, ...]:
    """The sizes of the blocks of a dim over some axes, on each device along `axes`."""
    ways = mesh.ways(dim, size, over)
    common = tuple(axis for axis in axes if axis in over)
    first = dict.fromkeys(over, 0)
    places = ([(first | at)[a] for a in over] for at in mesh.places(common))
    sizes = [block(size, ways, mesh.numbers(ways, over, at))[1] for at in places]
    return tuple(sizes[number] for number in numbers_over(mesh, axes, common))


def _gathered(step: Step, type_: TensorType, mesh: Mesh) -> tuple[Way, ...]:
    """How the dim that an all_gather joins is split over its axes, the innermost of the dim."""
    assert step.dim is not None
    axes = step.before.axes_of(step.dim)
    return mesh.ways(step.dim, type_.size(step.dim), axes)[-len(step.axes) :]


@functools.lru_cache(maxsize=1 << 14)
def _largest(size: int, ways: tuple[Way, ...]) -> int:
    """The size of the largest block."""
    if all(isinstance(way, int) for way in ways):
        return -(-size // math.prod(way for way in ways if isinstance(way, int)))
    counts = (way if isinstance(way, int) else len(way) for way in ways)
    return max(block(size, ways, at)[1] for at in itertools.product(*map(range, counts)))


def all_gather(mesh: Mesh, p: Placement, dim: str, axes: tuple[str, ...]) -> Step:
    """`S(dim) -> B` over the innermost `axes` of the dim."""
    kept = p.axes_of(dim)[: -len(axes)]
    return Step("all_gather", axes, p, _with(mesh, p, {dim: kept}), dim=dim)


def all_reduce(mesh: Mesh, p: Placement, axes: tuple[str, ...]) -> Step:
    """`P -> B` over `axes`."""
    return Step("all_reduce", axes, p, _reduced(mesh, p, axes), op=p.op)


def reduce_scatter(mesh: Mesh, p: Placement, dim: str, axes: tuple[str, ...]) -> Step:
    """`P -> S(dim)` over `axes`, which become the innermost of the dim."""
    after = _with(mesh, _reduced(mesh, p, axes), {dim: p.axes_of(dim) + axes})
    return Step("reduce_scatter", axes, p, after, dim=dim, op=p.op)


def all_to_all(mesh: Mesh, p: Placement, dim: str, to_dim: str, axes: tuple[str, ...]) -> Step:
    """`S(dim) -> S(to_dim)` over the innermost `axes` of `dim`."""
    changed = {dim: p.axes_of(dim)[: -len(axes)], to_dim: p.axes_of(to_dim) + axes}
    return Step("all_to_all", axes, p, _with(mesh, p, changed), dim=dim, to_dim=to_dim)


def permute(mesh: Mesh, p: Placement, splits: dict[str, tuple[str, ...]]) -> Step:
    """The same blocks on other devices: `splits` has the dims of `p`, equally often split.

    A dim that does not divide has the same blocks only where it is split equally often in turn.
    """
    after = placement(mesh, splits, p.partial, p.op)
    old = dict(p.splits)
    moved = {a for d in old if old[d] != splits[d] for a in (*old[d], *splits[d])}
    return Step("permute", mesh.sorted(moved), p, after)


def send(p: Placement, axis: str) -> Step:
    """The same blocks on the stage behind along `axis`, or in a backward pass before."""
    return Step("send", (axis,), p, p)


def load(p: Placement, tier: str) -> Step:
    """The same block, from the memory of a `tier` to that of the device."""
    return Step("load", (), p, p, tier=tier)


def store(p: Placement, tier: str) -> Step:
    """The same block, from the memory of the device to that of a `tier`."""
    return Step("store", (), p, p, tier=tier)


def exchange(p: Placement, axis: str, partners: tuple[int, ...]) -> Step:
    """The same block for that of the partner along `axis`."""
    return Step("exchange", (axis,), p, p, partners=partners)


def senders(step: Step, mesh: Mesh) -> list[tuple[int, int]]:
    """Pairs of devices of a halo: one that sends, and one that reads of its block."""
    dim, size = step.window.dim, step.window.size
    blocks, read = (p.held(dim, size, mesh) for p in (step.before, step.after))
    pairs = []
    for members in group_members(dict(mesh.axes), step.axes):
        number = {r: step.after.number(dim, mesh, mesh.coordinates(r)) for r in members}
        for source, target in itertools.permutations(members, 2):
            if parts_of(read[number[target]], blocks[number[source]], step.window.period):
                pairs.append((source, target))
    return pairs


def halo(mesh: Mesh, p: Placement, axes: tuple[str, ...], window: Window) -> Step:
    """A window, of the blocks over `axes`, outer first, or of a dim that is whole."""
    after = replace(_with(mesh, p, {window.dim: axes}), windows=(*p.windows, window))
    step = Step("window", mesh.sorted(set(axes)), p, after, dim=window.dim)
    return replace(step, kind="halo") if any(_rows_sent(step, mesh)) else step


def cut(mesh: Mesh, wider: Placement, target: Placement) -> Step | None:
    """A window cut from a wider one of the same blocks; None where that does not have it."""
    if len(wider.windows) != 1 or len(target.windows) != 1 or wider.plain != target.plain:
        return None
    window = target.windows[0]
    if not wider.windows[0].covers(window):
        return None
    axes = mesh.sorted(set(target.axes_of(window.dim)))
    return Step("window", axes, wider, target, dim=window.dim)


@functools.lru_cache(maxsize=4096)
def _rows_sent(step: Step, mesh: Mesh) -> tuple[int, ...]:
    """By block of the window's dim, how many of its elements others read."""
    dim, size = step.window.dim, step.window.size
    if not step.before.axes_of(dim):
        return (0,) * mesh.size(*step.axes)
    blocks, read = (p.held(dim, size, mesh) for p in (step.before, step.after))
    period = step.window.period
    return tuple(
        sum(n for j, w in enumerate(read) if i != j for _, n, _ in parts_of(w, block, period))
        for i, block in enumerate(blocks)
    )


def _halo_bytes(step: Step, type_: TensorType, mesh: Mesh, at: Mapping[str, int]) -> int:
    """The bytes that the device with the coordinates `at` sends in a halo."""
    before, dim, sent = step.before, step.window.dim, 1
    padded = {window.dim for window in padding_windows(before, mesh)}
    for other in type_.dims:
        number = before.number(other.name, mesh, at)
        if other.name == dim:
            sent *= _rows_sent(step, mesh)[number]
        else:
            start, stop = _held(before, other.name, other.size, mesh)[number]
            if other.name in padded:
                start, stop = overlap((start, stop), (0, other.size))
            sent *= max(stop - start, 0)
    return sent * type_.dtype.bytes


def padding_windows(p: Placement, mesh: Mesh) -> tuple[Window, ...]:
    """The windows of a placement in which devices have numbers from beyond the borders.

    Nobody sends these: every device knows them.
    """
    return tuple(
        w
        for w in p.windows
        if isinstance(w.reads.fill, float | int)
        and any(a < 0 or b > w.size for a, b in _held(p, w.dim, w.size, mesh))
    )


@functools.lru_cache(maxsize=4096)
def _held(p: Placement, dim: str, size: int, mesh: Mesh) -> tuple[tuple[int, int], ...]:
    return p.held(dim, size, mesh)


def slice_(mesh: Mesh, p: Placement, dim: str, axes: tuple[str, ...]) -> Step:
    """`B -> S(dim)` over `axes`, outer first: each device keeps its block."""
    return Step("slice", axes, p, _with(mesh, p, {dim: p.axes_of(dim) + axes}), dim=dim)


def zero_fill(mesh: Mesh, p: Placement, axis: str, op: ReduceOp, dim: str | None) -> Step:
    """`B -> P` (one device keeps its copy) or `S(dim) -> P` (zeros around the block)."""
    splits = dict(p.splits)
    if dim is not None:
        splits[dim] = splits[dim][:-1]
    after = placement(mesh, splits, (*p.partial, axis), op)
    return Step("zero_fill", (axis,), p, after, dim=dim, op=op)


def _with(mesh: Mesh, p: Placement, splits: dict[str, tuple[str, ...]]) -> Placement:
    return placement(mesh, dict(p.splits) | splits, p.partial, p.op)


def _reduced(mesh: Mesh, p: Placement, axes: tuple[str, ...]) -> Placement:
    return placement(mesh, dict(p.splits), tuple(a for a in p.partial if a not in axes), p.op)
