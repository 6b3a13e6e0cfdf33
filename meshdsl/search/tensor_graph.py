"""Every tensor for itself (space L3): the placements of all operators of a program at once.

A node is an operator with its rows, one per axis; a stored tensor, a carry or a slice with the
states it may be in. An edge is a tensor between the node that makes it and one that reads it: it
costs at least what `reshard_tables.py` says. So the least sum bounds every plan from below, also
one that no rules can say (Alpa and AutoParallel search such plans). To stay below whatever a walk
does:

- A tensor that several operators read costs the way to one of them: none of its versions is made
  twice, and all ways may go together as far as the longest.
- A collective that others may hide takes no time. One that is waited for as soon as it is sent,
  since no other operator stands between maker and reader, does.
- Single numbers are left out; a composite whose own dim is split, and an einsum of many operands,
  cost what their products cost at least.

Operators that a placed program has beside these (loads, parts of composites) only cost more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, TypeAlias

from meshdsl.backends.runtime.lazy_numpy import np
from meshdsl.ir.rewrite import Visitor
from meshdsl.ir.types import TensorType
from meshdsl.named import ir as named
from meshdsl.named.cse import cse
from meshdsl.named.ir import Value
from meshdsl.ops.opdef import ReduceOp, Signature
from meshdsl.placed.placements import Partial, Split
from meshdsl.placed.sharding_rules import Call, call_of, legal_rows
from meshdsl.placed.strategies import flops
from meshdsl.records import dataclass
from meshdsl.search.problem import Problem
from meshdsl.search.reshard_tables import ANY, MOST_STATES, ReshardTables, Table
from meshdsl.search.space import Weigh, on_parts, own_dims, seconds

if TYPE_CHECKING:
    import numpy.typing as npt

Numbers: TypeAlias = "npt.NDArray[np.intp]"
Costs: TypeAlias = "npt.NDArray[np.float64]"

MOST_CHOICES = 100_000
"""Choices of all nodes together: beyond, nothing is bounded."""


class TooMany(Exception):
    """The nodes would have more than MOST_CHOICES choices, or a tensor too many states."""


@dataclass(frozen=True, slots=True)
class Pick:
    """The choices of a call: the states of operands and results, seconds (or nothing), FLOPs."""

    ins: tuple[Numbers, ...]
    outs: tuple[Numbers, ...]
    cost: Costs
    flops: Costs


@dataclass(frozen=True, slots=True, eq=False)
class TensorNode:
    """Something with choices: its `cost` and FLOPs by choice, for all iterations."""

    name: str
    cost: Costs
    flops: Costs
    op: named.NamedOp | None = None
    value: Value | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Edge:
    """A tensor between two nodes: its states by their choices, and the cost between states."""

    source: int
    target: int
    made: Numbers
    read: Numbers
    cost: Table
    value: Value


@dataclass(slots=True)
class Tensors:
    """The nodes and edges of a problem. `most` are the FLOPs that a device may do."""

    problem: Problem
    most: float
    moves: ReshardTables
    nodes: list[TensorNode] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)


def tensors(problem: Problem, most: float = math.inf) -> Tensors:
    """The nodes and edges of a problem. Raises TooMany."""
    return _Builder(problem, most).built()


@dataclass(frozen=True, slots=True)
class _ValueReader:
    """A node that reads a value, in the states `read` by its choices; `at`: a place in a block."""

    node: int
    read: Numbers
    at: object = None


class _Builder(Visitor):
    """Nodes by the walk over a program; then an edge per tensor and reader."""

    def __init__(self, problem: Problem, most: float) -> None:
        self.problem = problem
        self.program = cse(problem.program, lambda one, other: True)
        self.timed = problem.objective == "time"
        ops = _arising(self.program)
        self.moves = ReshardTables(problem.mesh, ops, problem.timing if self.timed else None)
        self.graph = Tensors(problem, most, self.moves)
        self.picks: dict[Call, Pick] = {}
        self.made: dict[Value, tuple[int, Numbers]] = {}
        self.trips: dict[Value, int] = {}
        self.readers: dict[Value, list[_ValueReader]] = {}
        self.followers = dict(_followers(self.program.body)) if self.timed else {}
        self.choices = 0

    def built(self) -> Tensors:
        stored = (*(p.value for p in self.program.params), *(s.value for s in self.program.states))
        for value in (*self.program.inputs, *stored):
            self._free(value, 1, stored=True)
        self._block(self.program.body, 1)
        for output in self.program.outputs:
            states = self.moves.states(output.value.type)
            node = self._node(output.name, len(states.stored), value=output.value)
            self._read(output.value, node, states.stored)
        for update in self.program.updates:
            self._read(update.new, *self.made[update.old])
        for value, readers in self.readers.items():
            self.graph.edges.extend(self._edges(value, readers))
        return self.graph

    # --- nodes -------------------------------------------------------------------------------

    def _node(self, name: str, count: int, *, value: Value | None = None) -> int:
        zeros = np.zeros(count)
        return self._add(TensorNode(name, zeros, zeros, value=value))

    def _add(self, node: TensorNode) -> int:
        self.choices += len(node.cost)
        if self.choices > MOST_CHOICES:
            raise TooMany
        self.graph.nodes.append(node)
        return len(self.graph.nodes) - 1

    def _free(self, value: Value, trips: int, stored: bool = False) -> None:
        """A node for a value that may be in any state; one that is stored is not partial."""
        self.trips[value] = trips
        states = self.moves.states(value.type)
        allowed = states.stored if stored else states.settled
        self.made[value] = self._node(value.label, len(allowed), value=value), allowed

    def _block(self, nodes: Sequence[named.Node], trips: int) -> None:
        for node in nodes:
            self.visit(node, trips)

    def op(self, op: named.NamedOp, trips: int) -> None:
        """A node for an operator that runs so often, with a choice for each of its rows."""
        call = call_of(op)
        if call not in self.picks:
            self.picks[call] = _Rows(call, self.moves, self._weigh).pick()
        pick = self.picks[call]
        self.trips.update(dict.fromkeys(op.outs, trips))
        node = self._add(TensorNode(op.outs[0].label, pick.cost * trips, pick.flops * trips, op))
        for value, read in zip(op.ins, pick.ins, strict=True):
            self._read(value, node, read, op)
        self.made.update((v, (node, m)) for v, m in zip(op.outs, pick.outs, strict=True))

    def _weigh(self, call: Call, local: Signature) -> float:
        """The seconds of a call where time counts, else nothing."""
        if not self.timed:
            return 0.0
        assert self.problem.timing is not None
        return seconds(self.problem.timing)(call, local)

    def loop(self, loop: named.NamedLoop, trips: int) -> None:
        """Nodes for what a loop carries, takes slices of and collects, and for its body."""
        inside = trips * loop.repeats
        for carry in loop.carries:
            self._free(carry.inside, inside)
            self._read(carry.init, *self.made[carry.inside])
            self.made[carry.result] = self.made[carry.inside]
            self.trips[carry.result] = trips
        for item in loop.stacked:
            self._free(item.inside, inside)
            node, states = self.made[item.inside]
            self._read(item.outer, node, self._wider(states, item.inside, item.outer))
        self._block(loop.body, inside)
        for carry in loop.carries:
            self._read(carry.next, *self.made[carry.inside])
        for collection in loop.collected:
            self.trips[collection.outer] = trips
            states = self.moves.states(collection.inside.type).settled
            node = self._node(collection.outer.label, len(states), value=collection.outer)
            self._read(collection.inside, node, states)
            self.made[collection.outer] = (
                node,
                self._wider(states, collection.inside, collection.outer),
            )

    def _wider(self, states: Numbers, inside: Value, outer: Value) -> Numbers:
        """The states of a stack, whole along the dim of its loop, by those of a slice."""
        narrow, wide = self.moves.states(inside.type), self.moves.states(outer.type)
        as_in = [wide.numbers[c] for c in narrow.components]
        return np.array([wide.number(tuple(as_in[c] for c in narrow.of(int(s)))) for s in states])

    def _read(self, value: Value, node: int, read: Numbers, at: object = None) -> None:
        self.readers.setdefault(value, []).append(_ValueReader(node, read, at))

    # --- edges -------------------------------------------------------------------------------

    def _edges(self, value: Value, readers: list[_ValueReader]) -> Iterator[Edge]:
        source, states = self.made[value]
        if self.timed:
            follower = self.followers.get(value)
            readers = [r for r in readers if r.at is follower][:1] if follower else []
        others = [r for r in readers if r.node != source]
        if not others:
            return
        if self.moves.states(value.type).count > MOST_STATES:
            raise TooMany
        table = self.moves.table(value.type) * self.trips[value]
        for reader in others:
            yield Edge(source, reader.node, states, reader.read, table, value)


def _followers(nodes: Sequence[named.Node]) -> Iterator[tuple[Value, named.NamedOp]]:
    """The first result of an operator, and its first reader if nothing computes in between."""
    last: named.NamedOp | None = None
    for node in nodes:
        yield from _followers(node.body)
        op = node if isinstance(node, named.NamedOp) else None
        if last is not None and op is not None and _reads_at_once(op, last.outs[0]):
            yield last.outs[0], op
        last = op


def _reads_at_once(op: named.NamedOp, value: Value) -> bool:
    """Whether an operator reads a value before it computes anything of others."""
    is_first = bool(op.ins) and op.ins[0] is value
    return is_first or (value in op.ins and not call_of(op).opdef.composite)


def _arising(program: named.NamedProgram) -> tuple[ReduceOp, ...]:
    """The operations of partial values that can arise: sums, and those of reductions here."""
    calls = {call_of(op) for op in named.walk(program.body)}
    rows = (r for c in calls for r in legal_rows(c))
    beginning = (r for r in rows if not any(isinstance(c, Partial) for c in r.ins))
    ops: set[ReduceOp] = {c.op for r in beginning for c in r.outs if isinstance(c, Partial)}
    return tuple(sorted({"sum", *ops}))


# --- the choices of a call -----------------------------------------------------------------------

Line = tuple[tuple[object, ...], tuple[object, ...], bool]
"""A row along an axis: components of operands and results, and whether the call is in parts."""


class _Rows:
    """The choices of one call: a row along each axis."""

    def __init__(self, call: Call, moves: ReshardTables, weigh: Weigh) -> None:
        self.call, self.moves, self.weigh = call, moves, weigh
        self.types = (*call.ins, *call.outs)
        self.states = tuple(moves.states(t) for t in self.types)
        self.axes = len(self.states[0].axes)

    def pick(self) -> Pick:
        """The choices that are legal."""
        lines = list(dict.fromkeys(self._lines()))
        if len(lines) ** self.axes > MOST_CHOICES:
            raise TooMany
        shape = (len(lines),) * self.axes
        rows = np.indices(shape).reshape(self.axes, -1) if self.axes else np.zeros((0, 1), int)
        taken = [self._numbers(lines, rows, i) for i in range(len(self.types))]
        is_legal = np.ones(rows.shape[1], bool)
        for states, numbers in zip(self.states, taken, strict=True):
            is_legal &= states.valid[numbers]
        if self.call.opdef.legal is not None:
            is_legal &= np.array(
                [self._is_legal(lines, rows[:, i]) for i in range(len(is_legal))], bool
            )
        rows, taken = rows[:, is_legal], [numbers[is_legal] for numbers in taken]
        cost, work = self._costs(lines, rows, taken)
        count = len(self.call.ins)
        return Pick(tuple(taken[:count]), tuple(taken[count:]), cost, work)

    def _lines(self) -> Iterator[Line]:
        call = self.call
        if call.name == "einsum" and len(call.ins) > 2:  # in pairs, in some order
            yield (ANY,) * len(call.ins), (ANY,) * len(call.outs), True
            return
        for row in legal_rows(call):
            partial = (c.op for c in (*row.ins, *row.outs) if isinstance(c, Partial))
            if all(op in self.moves.ops for op in partial):
                yield row.ins, row.outs, False
        if not on_parts(call):
            return
        loops = call.opdef.factors(call.signature).loops
        for dim in own_dims(call):
            has = [
                t.has(dim) and all(f.ins[i] != dim for f in loops) for i, t in enumerate(call.ins)
            ]
            ins = tuple(Split(dim) if has_dim else ANY for has_dim in has)
            yield ins, (ANY,) * len(call.outs), True

    def _numbers(self, lines: list[Line], rows: Numbers, index: int) -> Numbers:
        """The states of an operand or result, by choice."""
        states = self.states[index]
        totals = np.zeros(rows.shape[1], np.intp)
        line_numbers = np.array([states.numbers.get((*a, *b)[index], -1) for a, b, _ in lines])
        for weight, row in zip(states.weights, rows, strict=True):
            totals += weight * line_numbers[row]
        return totals

    def _is_legal(self, lines: list[Line], rows: Numbers) -> bool:
        """Whether an operator that asks for more than rows has it so."""
        if any(lines[i][2] for i in rows):
            return True
        legal = self.call.opdef.legal
        assert legal is not None
        sizes = self.states[0].sizes
        ways: list[dict[str, int]] = [{}, {}]
        for size, i in zip(sizes, rows, strict=True):
            for counts, part in zip(ways, (lines[i][0][:1], lines[i][1][:1]), strict=True):
                for c in part:
                    if isinstance(c, Split):
                        counts[c.dim] = counts.get(c.dim, 1) * size
        return legal(self.call.signature, *ways)

    def _costs(self, lines: list[Line], rows: Numbers, taken: list[Numbers]) -> tuple[Costs, Costs]:
        """Seconds and FLOPs by choice: the same where local tensors are of the same sizes."""
        cost, work = np.zeros(rows.shape[1]), np.zeros(rows.shape[1])
        apart = np.array([line[2] for line in lines], bool)
        per_device = self._in_parts()
        cost_of: dict[tuple[object, ...], tuple[float, float]] = {}
        sides = list(zip(self.states, taken, strict=True))
        for i in range(rows.shape[1]):
            if apart[rows[:, i]].any():
                work[i] = per_device
                continue
            local = tuple(self.moves.local(states, int(numbers[i])) for states, numbers in sides)
            if local not in cost_of:
                cost_of[local] = self._weighed(local)
            cost[i], work[i] = cost_of[local]
        return cost, work

    def _weighed(self, local: tuple[TensorType, ...]) -> tuple[float, float]:
        count = len(self.call.ins)
        signature = Signature(local[:count], local[count:], dict(self.call.attrs))
        work = flops(self.call.opdef, signature)
        return self.weigh(self.call, signature), work

    def _in_parts(self) -> float:
        """FLOPs of a device at least, where a call is taken apart: those of its products."""
        call = self.call
        if call.name == "einsum":
            return 0.0
        products = (c for c in on_parts(call) if len(c.ins) > 1 and c.opdef.flops is not None)
        total = sum(flops(c.opdef, c.signature) for c in products)
        return total / self.moves.mesh.devices
