"""What it costs at least to bring a tensor from one placement to another: a table per tensor.

A state has a component per mesh axis: whole, partial, split along a dim, or `ANY` of them. Tables
are shortest paths over the steps of `placed/reshard.py` (Floyd and Warshall), less what makes a
route dearer: axes of one dim have no order, local steps take nothing, nothing is rounded up. So no
route costs less than its entry, in bytes sent or in seconds.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeAlias

from meshdsl.backends.runtime.lazy_numpy import np
from meshdsl.cluster.timing import Timing
from meshdsl.ir.types import TensorType
from meshdsl.ops.opdef import ReduceOp
from meshdsl.placed.collectives import COLLECTIVES
from meshdsl.placed.layout import MOST_UNEVEN
from meshdsl.placed.placements import B, Component, Mesh, Partial, Placement, Split, placement
from meshdsl.records import dataclass

if TYPE_CHECKING:
    import numpy.typing as npt

Table: TypeAlias = "npt.NDArray[np.float64]"

ANY = "any"
"""A component that may be whichever is cheapest."""

MOST_STATES = 1_000
"""States of one tensor: beyond, tables take too long."""


@dataclass(frozen=True, slots=True)
class StateMove:
    """A collective `kind` over `axes` (a bit set), or a local step, from a state to another.

    `parts`: how many blocks there are before.
    """

    source: int
    target: int
    kind: str
    axes: int
    parts: int


class TypeStates:
    """The states of tensors of one type on the axes of a mesh that have several devices."""

    def __init__(self, type_: TensorType, mesh: Mesh, ops: tuple[ReduceOp, ...]) -> None:
        self.type, self.mesh = type_, mesh
        self.axes = tuple(a for a, size in mesh.axes if size > 1)
        self.sizes = tuple(mesh.size(a) for a in self.axes)
        self.components: tuple[Component, ...] = (
            B,
            *(Partial(op) for op in ops),
            *(Split(d.name) for d in type_.dims),
        )
        self.numbers: dict[object, int] = {c: i for i, c in enumerate(self.components)}
        self.numbers[ANY] = len(self.components)
        self.width = len(self.numbers)
        self.weights = tuple(self.width**i for i in reversed(range(len(self.axes))))
        self.dims = tuple(_masks(d.size, self.sizes) for d in type_.dims)
        self.ops = len(ops)

    @property
    def count(self) -> int:
        """The number of states, with those of `ANY`."""
        return int(self.width ** len(self.axes))

    @functools.cached_property
    def valid(self) -> npt.NDArray[np.bool_]:
        """Whether each state may occur; one with `ANY` may."""
        every = itertools.product(range(self.width), repeat=len(self.axes))
        return np.array([self._is_valid(state) for state in every], bool)

    def _is_valid(self, state: tuple[int, ...]) -> bool:
        partial = {c for c in state if 0 < c <= self.ops}
        masks = self.masks(state)
        return len(partial) < 2 and all(m in ok for m, ok in zip(masks, self.dims, strict=True))

    def masks(self, state: tuple[int, ...]) -> list[int]:
        """The axes that split each dim, as bit sets."""
        masks = [0] * len(self.dims)
        for axis, c in enumerate(state):
            if self.ops < c < self.width - 1:
                masks[c - 1 - self.ops] |= 1 << axis
        return masks

    def of(self, state: int) -> tuple[int, ...]:
        """The components of a state, by their numbers."""
        return tuple(state // w % self.width for w in self.weights)

    def number(self, state: tuple[int, ...]) -> int:
        """The number of a state."""
        return sum(c * w for c, w in zip(state, self.weights, strict=True))

    def placement(self, state: int) -> Placement:
        """The placement of a state; axes of one dim in the order of the mesh, `ANY` whole."""
        splits: dict[str, tuple[str, ...]] = {}
        partial, op = [], None
        for axis, c in zip(self.axes, self.of(state), strict=True):
            component = self.components[c] if c < len(self.components) else B
            if isinstance(component, Split):
                splits[component.dim] = (*splits.get(component.dim, ()), axis)
            elif isinstance(component, Partial):
                partial.append(axis)
                op = component.op
        return placement(self.mesh, splits, partial, op)

    @functools.cached_property
    def settled(self) -> npt.NDArray[np.intp]:
        """The valid states without `ANY`."""
        valid = np.flatnonzero(self.valid)
        return np.array([s for s in valid if self.width - 1 not in self.of(int(s))], np.intp)

    @functools.cached_property
    def stored(self) -> npt.NDArray[np.intp]:
        """The valid states without `ANY` in which nothing is partial."""
        partial = range(1, self.ops + 1)
        return np.array([s for s in self.settled if not set(partial) & {*self.of(int(s))}])


def _masks(size: int, ways: tuple[int, ...]) -> frozenset[int]:
    """The sets of axes that may split a dim of a size: all, or on a huge mesh those that divide.

    A rule may leave blocks of several sizes, even empty ones.
    """
    any_ = math.prod(ways) <= MOST_UNEVEN
    parts = (
        math.prod(n for i, n in enumerate(ways) if mask >> i & 1) for mask in range(1 << len(ways))
    )
    return frozenset(mask for mask, n in enumerate(parts) if any_ or size % n == 0)


# --- steps ---------------------------------------------------------------------------------------


def steps(states: TypeStates) -> Iterator[StateMove]:
    """Every step between the valid states of a type: the same where dims divide alike."""
    for number in map(int, states.settled):
        state = states.of(number)
        parts = math.prod(n for c, n in zip(state, states.sizes, strict=True) if c > states.ops)
        for kind, axes, after in (*_sent(states, state), *_free(states, state)):
            if states.valid[there := states.number(after)]:
                yield StateMove(number, there, kind, sum(1 << i for i in axes), parts)


Change = tuple[str, tuple[int, ...], tuple[int, ...]]
"""A step by its kind, the axes it is over, and the state that it leads to."""


def _sent(states: TypeStates, state: tuple[int, ...]) -> Iterator[Change]:
    """Collectives: over any of the axes of a dim, or of those that are partial."""
    ops, splits = states.ops, range(states.ops + 1, states.width - 1)
    for c in {*state} - {0}:
        over = [i for i, other in enumerate(state) if other == c]
        alone, into = ("all_reduce", "reduce_scatter") if c <= ops else ("all_gather", "all_to_all")
        for axes in _subsets(over):
            yield alone, axes, _put(state, axes, 0)
            yield from ((into, axes, _put(state, axes, to)) for to in splits if to != c)
    for i, j in itertools.combinations(range(len(state)), 2):
        alike = states.sizes[i] == states.sizes[j] and state[i] != state[j]
        if alike and not any(0 < c <= ops for c in (state[i], state[j])):
            yield "permute", (i, j), _put(_put(state, (i,), state[j]), (j,), state[i])


def _free(states: TypeStates, state: tuple[int, ...]) -> Iterator[Change]:
    """Local steps: a block of what is whole, or zeros for the parts of the others."""
    for axis, c in enumerate(state):
        if c == 0:
            for to in range(1, states.width - 1):
                kind = "zero_fill" if to <= states.ops else "slice"
                yield kind, (axis,), _put(state, (axis,), to)
        elif c > states.ops:
            for to in range(1, states.ops + 1):
                yield "zero_fill", (axis,), _put(state, (axis,), to)


def _subsets(of: list[int]) -> Iterator[tuple[int, ...]]:
    for size in range(1, len(of) + 1):
        yield from itertools.combinations(of, size)


def _put(state: tuple[int, ...], axes: tuple[int, ...], component: int) -> tuple[int, ...]:
    return tuple(component if i in axes else c for i, c in enumerate(state))


# --- tables --------------------------------------------------------------------------------------


class ReshardTables:
    """The tables of all types on a mesh; with `timing` in seconds, else in bytes per device."""

    def __init__(self, mesh: Mesh, ops: tuple[ReduceOp, ...], timing: Timing | None = None) -> None:
        self.mesh, self.ops, self.timing = mesh, ops, timing
        self.known: dict[TensorType, TypeStates] = {}
        self.tables: dict[object, Table] = {}
        self.steps: dict[object, tuple[StateMove, ...]] = {}
        self.locals: dict[object, TensorType] = {}

    def states(self, type_: TensorType) -> TypeStates:
        """The states of a type."""
        if type_ not in self.known:
            self.known[type_] = TypeStates(type_, self.mesh, self.ops)
        return self.known[type_]

    def local(self, states: TypeStates, number: int) -> TensorType:
        """The type of the largest block of a device in a state."""
        key = states.type, number
        if key not in self.locals:
            parts = {
                dim.name: math.prod(n for i, n in enumerate(states.sizes) if mask >> i & 1)
                for dim, mask in zip(states.type.dims, states.masks(states.of(number)), strict=True)
            }
            sizes = {d: -(-states.type.size(d) // n) for d, n in parts.items() if n > 1}
            self.locals[key] = states.type.resized(sizes) if sizes else states.type
        return self.locals[key]

    def table(self, type_: TensorType) -> Table:
        """The least cost from each state (row) to each other one; infinite without a way."""
        states = self.states(type_)
        if self.timing is not None:
            return self._of((type_.bytes, states.dims), states, type_.bytes)
        return self._of(states.dims, states, 1.0) * type_.bytes

    def _of(self, key: object, states: TypeStates, whole: float) -> Table:
        if key not in self.tables:
            if states.dims not in self.steps:
                self.steps[states.dims] = tuple(steps(states))
            table = np.full((states.count, states.count), math.inf)
            costs: dict[tuple[str, int, int], float] = {}
            for step in self.steps[states.dims]:
                about = step.kind, step.axes, step.parts
                if about not in costs:
                    costs[about] = self._cost(*about, whole, states)
                at = step.source, step.target
                table[at] = min(table[at], costs[about])
            self.tables[key] = _with_any(_closed(table, states), states)
        return self.tables[key]

    def _cost(self, kind: str, mask: int, parts: int, whole: float, states: TypeStates) -> float:
        """What a step costs: local ones nothing."""
        if not COLLECTIVES[kind].moves:
            return 0.0
        axes = tuple(a for i, a in enumerate(states.axes) if mask >> i & 1)
        if self.timing is not None:
            return self.timing.collective(kind, axes, int(whole / parts)).seconds
        devices = self.mesh.size(*axes)
        sent = COLLECTIVES[kind].wire(devices, devices) / devices * whole / parts
        # Devices of one number on both axes keep their blocks, in another permute others may: the
        # device that sends most sends the mean of all at least.
        return sent * (1 - devices**-0.5) if kind == "permute" else sent


def _closed(found: Table, states: TypeStates) -> Table:
    """The shortest paths."""
    np.fill_diagonal(found, 0.0)
    for middle in states.settled:
        np.minimum(found, found[:, middle, None] + found[None, middle, :], out=found)
    return found


def _with_any(found: Table, states: TypeStates) -> Table:
    """The table with the rows and columns of `ANY`: the least of all components."""
    count, width = len(states.axes), states.width
    cube = found.reshape((width,) * (2 * count))
    for axis in range(2 * count):
        components = np.take(cube, range(width - 1), axis)
        cube = np.concatenate([components, components.min(axis, keepdims=True)], axis)
    return cube.reshape(found.shape)
