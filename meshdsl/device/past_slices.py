"""What a slice of a sequence reads of the slices before it: buffers over all micro-batches.

A dim of positions may be cut, too, where nothing reads a later position than its own, as causal
attention does (Li et al. 2021, TeraPipe). The keys and values of all slices are then in a buffer of
the stage. Each slice puts its own into it, and attends to the buffer: the positions of slices that
are still to come are 0, and hidden by the triangle.

On the way back, a slice has gradients of all keys and values that it has read. They are added up
in a second buffer. What a slice takes of it is whole when all later slices have gone back: passes
are in the order of the slices, and back in reverse (`Verified.reverses`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from meshdsl.device.costs import with_flops
from meshdsl.device.ir import Compute, DeviceLoop, DeviceProgram, Node, Var
from meshdsl.device.names import Names
from meshdsl.ir.program import Carry, Leaf, Stacked
from meshdsl.ir.rewrite import reads_of
from meshdsl.ir.types import Dim, DType, TensorType
from meshdsl.ops.opdef import lookup
from meshdsl.placed.pipelined import Piped
from meshdsl.placed.placements import Mesh, placement
from meshdsl.records import dataclass


def earlier_dims(node: Compute) -> Mapping[str, str]:
    """The dims that a call reads up to the position of a result, each with the dim of that."""
    of = lookup(node.name).earlier
    return {} if of is None else of(tuple(v.type for v in node.ins), dict(node.attrs))


# The value that makes the elements, the dim of positions, and the dims that readers know it by.
BufferKey = tuple[Var, str, tuple[Dim, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """What all slices have of a value: zeros before the loop, written and added to in place.

    One of a loop on the stages is of all its iterations, which each have their slice of it.
    """

    zeros: Compute
    carry: Carry[Var]


class PastSlices:
    """The buffers of a program that is cut along an axis in time."""

    def __init__(self, program: DeviceProgram, pipe: Piped, mesh: Mesh, names: Names) -> None:
        self.pipe, self.mesh, self.names = pipe, mesh, names
        self.buffers: dict[BufferKey, Buffer] = {}
        # The loops around the block that is being made, innermost last, and of these the slices of
        # buffers that are read there.
        self.loops: list[DeviceLoop] = []
        self.slices: list[dict[Buffer, Var]] = [{}]
        # What shows the same elements: a relabelled value, a slice of what a loop has collected.
        self.shown: dict[Var, Var] = {}
        self.names_of: dict[Var, str] = {}
        self._follow(program.body)

    def _follow(self, nodes: tuple[Node, ...]) -> None:
        for node in nodes:
            if isinstance(node, Compute) and node.name == "rename":
                self.shown[node.out] = node.ins[0]
                self.names_of[node.ins[0]] = node.out.name
            self.shown.update((s.inside, s.outer) for s in node.stacked)
            self.shown.update((c.outer, c.inside) for c in node.collected)
            self._follow(node.body)

    def origin(self, var: Var) -> Var:
        """What makes the elements of a value in the forward pass."""
        while var in self.shown:
            var = self.shown[var]
        return var

    # --- loops ---------------------------------------------------------------------------------

    def enter(self, loop: DeviceLoop) -> None:
        """Begin the block of a loop."""
        self.loops.append(loop)
        self.slices.append({})

    def leave(self) -> tuple[Stacked[Var], ...]:
        """End it: the slices of buffers that each of its iterations has."""
        self.loops.pop()
        return tuple(Stacked(b.carry.inside, v) for b, v in self.slices.pop().items())

    @property
    def fits(self) -> bool:
        """Whether the block that is being made may have buffers: an iteration of a stage."""
        return len(self.loops) == 1 and self.pipe.cuts(self.loops[0])

    # --- buffers -------------------------------------------------------------------------------

    def key(self, var: Var, dim: str) -> BufferKey:
        """What the buffer of a value is found by, in the forward pass and in the backward one.

        A value that is read under two names of its dims (`k` and `k[key -> val]`) has two buffers.
        """
        return self.origin(var), dim, var.type.dims

    def slice_of(self, var: Var, dim: str, dtype: DType) -> tuple[Var, bool]:
        """What the iteration of a stage has of the buffer of a value, and whether it is new there.

        It is of all slices of the sequence along `dim`.
        """
        here, buffer = self.slices[-1], self._buffer(var, dim, dtype)
        is_new = buffer not in here
        if is_new:
            here[buffer] = replace(
                var,
                name=self.names.fresh(f"{buffer.carry.inside.name}_row"),
                value=replace(var.value, type=replace(var.value.type, dtype=dtype)),
                local=replace(var.local, dtype=dtype),
            )
        return here[buffer], is_new

    def _iterations(self, loop: DeviceLoop) -> Dim:
        """The dim of a loop on the stages, of all of them: that of what it has slices of."""
        stacks = (*(s.outer for s in loop.stacked), *(c.outer for c in loop.collected))
        dims = (dim for stack in stacks for dim in stack.type.dims)
        return next((dim for dim in dims if dim.name == loop.dim.name), loop.dim)

    def _buffer(self, var: Var, dim: str, dtype: DType) -> Buffer:
        key = self.key(var, dim)
        if key not in self.buffers:
            (loop,) = self.loops
            name = self.names.fresh(f"{self.names_of.get(var, key[0].name)}_slices")
            type_ = TensorType((self._iterations(loop), *var.type.dims), dtype)
            splits = {**dict(var.placement.splits), loop.dim.name: (self.pipe.axis,)}
            placed = placement(self.mesh, splits)
            value = var.value.alike(type=type_, name=None, name_hint=name)
            all_slices = Var(name, value, placed, placed.local(type_, self.mesh), name)
            attrs = (("dims", type_.dims), ("dtype", dtype))
            zeros = with_flops(Compute("zeros", (), (all_slices,), attrs, loop.span, loop.phase))
            inside = replace(all_slices)
            self.buffers[key] = Buffer(
                zeros, Carry(all_slices, inside, inside, replace(all_slices))
            )
        return self.buffers[key]


def without_unread(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """Statements without slices of stacks that nothing reads, and lists that nothing reads then."""
    narrowed = tuple(_without_slices(node) for node in nodes)
    read = {v for node in narrowed for v in reads_of(node)}
    return tuple(
        node
        if isinstance(node, Leaf)
        else replace(node, collected=tuple(c for c in node.collected if c.outer in read))
        for node in narrowed
    )


def _without_slices(node: Node) -> Node:
    if isinstance(node, Leaf):
        return node
    read = {*node.ends, *(v for inner in node.body for v in reads_of(inner))}
    return replace(node, stacked=tuple(s for s in node.stacked if s.inside in read))
