"""Positions in an order in which every device has as much of a causal attention as any other.

Of D devices, device i has half blocks i and 2D - 1 - i of the positions, in this order. The whole
program is computed so, and not each attention: most operators do with each position what they do
with all others, and see nothing of the order. Inputs and parameters with positions are put in it
where they are first read, and so are position numbers (`iota`) and random numbers, which are of an
index; what is returned, and new parameters, are put back. So are the operands of what does see the
order: a shift, a running sum, a slice. Their results are in natural order until they are needed.
No number changes, but for the rounding of sums over positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import replace
from typing import TypeVar

from meshdsl.diagnostics import Diagnostics
from meshdsl.ir.program import Carry, Collected, Stacked
from meshdsl.ir.rewrite import Visitor, free
from meshdsl.ir.types import Dim
from meshdsl.named.builder import Builder
from meshdsl.named.emit import Emit
from meshdsl.named.ir import NamedLoop, NamedOp, NamedProgram, Node, Value, kept, walk
from meshdsl.named.simplify import drop_unused
from meshdsl.ops.opdef import Signature, lookup
from meshdsl.records import dataclass

N = TypeVar("N")


def in_balanced_order(
    program: NamedProgram, parts: Mapping[str, int], keeps: Callable[[NamedOp], bool]
) -> NamedProgram:
    """The program with dims in the order for so many `parts`, by the names of the dims.

    Operators that `keeps` tells know the order themselves.
    """
    orders = _Orders(parts, keeps, set(kept(program)))
    body = tuple(orders.nodes(program.body))

    def natural(value: Value) -> Value:
        return orders.versions[False].get(value, value)

    return drop_unused(
        replace(
            program,
            body=body,
            outputs=tuple(replace(o, value=natural(o.value)) for o in program.outputs),
            updates=tuple(replace(u, new=natural(u.new)) for u in program.updates),
        )
    )


def with_renamed(program: NamedProgram, parts: Mapping[str, N]) -> dict[str, N]:
    """What is given of some dims, also of those that they are renamed into, or from."""
    every = dict(parts)
    pairs = [p for op in walk(program.body) if op.name == "rename" for p in op.attr("pairs")]
    while True:
        more = {
            b.name: every[a.name]
            for pair in pairs
            for a, b in (pair, reversed(pair))
            if a.name in every and b.name not in every
        }
        if not more:
            return every
        every.update(more)


class _Orders(Visitor):
    """Rewrites a program block by block.

    Every value with one of the dims is in balanced or in natural order as it is made, along all of
    them; inputs and parameters are in natural order. `versions` has, by order (whether balanced),
    the version of a value, if there is one; `added` are the operators that make versions, before
    the node at hand. What is `kept` after the program is put in natural order where it is made.
    """

    def __init__(
        self, parts: Mapping[str, int], keeps: Callable[[NamedOp], bool], kept: Set[Value]
    ) -> None:
        self.parts, self.keeps, self.kept = parts, keeps, kept
        self.versions: dict[bool, dict[Value, Value]] = {False: {}, True: {}}
        self.added: list[NamedOp] = []

    def nodes(self, nodes: Iterable[Node]) -> Iterator[Node]:
        """The nodes in place of those of a block."""
        for node in nodes:
            new = self.visit(node)
            yield from (*self.taken(), *new)
            for value in (v for v in node.makes if v in self.kept):
                self.read(value, False, node)
            yield from self.taken()

    def taken(self) -> list[NamedOp]:
        """The operators that have been added, which are to stand here."""
        added, self.added = self.added, []
        return added

    def dims(self, value: Value) -> list[Dim]:
        """The dims of a value that are in an order."""
        return [d for d in value.type.dims if d.name in self.parts]

    def made(self, values: Iterable[Value], balanced: bool) -> None:
        """Note the order in which values are made."""
        self.versions[balanced].update((v, v) for v in values if self.dims(v))

    def read(self, value: Value, balanced: bool, at: Node) -> Value:
        """The version of a value in an order, for a node."""
        here, other = self.versions[balanced], self.versions[not balanced]
        if not self.dims(value):
            return value
        if value not in here and value not in other:
            self.made((value,), False)
        if value not in here:
            here[value] = self._reordered(value, balanced, at)
        return here[value]

    def _reordered(self, value: Value, balanced: bool, at: Node) -> Value:
        """A version in another order; the operators that make it are added."""
        builder = Builder(Diagnostics())
        builder.place(value, 0)
        fields = {"rules_from": value.source, "name_hint": value.label.strip("_")}
        emit, result, dims = Emit(builder, value.span, value, fields), value, self.dims(value)
        for dim in dims:
            halves = Halves(dim, self.parts[dim.name], len(dims) == 1)
            result = (halves.balanced if balanced else halves.natural)(emit, result)
        result = emit.full(result, value.type.dims)
        reordering = (op for op in builder.frames[0].body if isinstance(op, NamedOp))
        self.added += [replace(op, phase=at.phase, origin=at.origin) for op in reordering]
        return result

    # --- nodes -------------------------------------------------------------------------------

    def op(self, op: NamedOp) -> tuple[NamedOp, ...]:
        """An operator on operands in the order that it takes."""
        balanced = self.keeps(op) or (op.phase != "update" and self._is_blind(op))
        ins = tuple(self.read(v, balanced, op) for v in op.ins)
        self.made(op.outs, balanced)
        return (replace(op, ins=ins),) if ins != op.ins else (op,)

    def _is_blind(self, op: NamedOp) -> bool:
        """Whether an operator does the same at each index of the dims, wherever that stands."""
        opdef, attrs = lookup(op.name), dict(op.attrs)
        ins, outs = (tuple(v.type for v in values) for values in (op.ins, op.outs))
        loops = opdef.factors(Signature(ins, outs, attrs)).loops
        ordered = opdef.ordered_dims(ins, attrs)
        for index, type_ in enumerate((*ins, *outs)):
            for name in (n for n in type_.names if n in self.parts):
                over = [f for f in loops if (*f.ins, *f.outs)[index] == name]
                if name in ordered or len(over) != 1 or any(over[0].reads):
                    return False
                along = {n for n in (*over[0].ins, *over[0].outs) if n is not None}
                if any(self.parts.get(n) != self.parts[name] for n in along):
                    return False
        return True

    def loop(self, loop: NamedLoop) -> tuple[NamedLoop]:
        """A loop; one over such a dim carries, slices and collects in natural order."""
        balanced = loop.dim.name not in self.parts and loop.phase != "update"
        inits = [self.read(c.init, balanced, loop) for c in loop.carries]
        outer = [self.read(s.outer, balanced, loop) for s in loop.stacked]
        for value in free(loop):  # once, and not in each iteration
            if balanced and value not in {s.outer for s in loop.stacked}:
                self.read(value, True, loop)
        around, added = {k: dict(v) for k, v in self.versions.items()}, self.taken()
        self.made(loop.enters, balanced)
        body = [*self.nodes(loop.body)]
        nexts = [self.read(c.next, balanced, loop) for c in loop.carries]
        insides = [self.read(c.inside, balanced, loop) for c in loop.collected]
        body += self.taken()
        self.versions, self.added = around, added
        self.made(loop.makes, balanced)
        carries = zip(loop.carries, inits, nexts, strict=True)
        stacked = zip(loop.stacked, outer, strict=True)
        collected = zip(loop.collected, insides, strict=True)
        return (
            replace(
                loop,
                carries=tuple(Carry(i, c.inside, n, c.result) for c, i, n in carries),
                stacked=tuple(Stacked(o, s.inside) for s, o in stacked),
                body=tuple(body),
                collected=tuple(Collected(i, c.outer) for c, i in collected),
            ),
        )


@dataclass(frozen=True, slots=True)
class Halves:
    """The dims by which one goes from an order to the other: of halves, devices and half blocks.

    A device has block i of the first half, and block i of the second half turned round. `alone`
    where the dim is the only one of a tensor in an order: then its parts are split as it is, and
    only half blocks are sent. Two dims cannot be split over the same axes.
    """

    dim: Dim
    parts: int
    alone: bool = True

    def _made_up(self, name: str, size: int) -> Dim:
        return Dim(f"{self.dim.name}.{name}" if self.alone else f"{self.dim.name}.all_{name}", size)

    @property
    def ends(self) -> tuple[Dim, Dim]:
        """The first and the second half of all positions."""
        size = self.dim.size // 2
        return self._made_up("first", size), self._made_up("second", size)

    @property
    def device(self) -> Dim:
        """The devices."""
        return self._made_up("device", self.parts)

    @property
    def split(self) -> tuple[Dim, ...]:
        """The dims that are split as the dim is."""
        return (*self.ends, self.device)

    @property
    def blocks(self) -> tuple[Dim, Dim]:
        """The half blocks of a device, of the first and the second half."""
        size = self.dim.size // self.parts // 2
        return self._made_up("early", size), self._made_up("late", size)

    @property
    def both(self) -> Dim:
        """What a device has."""
        return self._made_up("both", self.dim.size // self.parts)

    def balanced(self, emit: Emit, x: Value) -> Value:
        """`x`, which is in natural order, in balanced order."""
        early, late = self._sliced(emit, x, self.dim, self.ends)
        early, late = (
            emit("split", part, dim=end, into=(self.device, block))
            for part, end, block in zip((early, late), self.ends, self.blocks, strict=True)
        )
        late = emit("reverse", late, dim=self.device)
        x = emit("concat", early, late, target=self.both, sources=self.blocks)
        return emit("merge", x, dims=(self.device, self.both), into=self.dim)

    def natural(self, emit: Emit, x: Value) -> Value:
        """`x`, which is in balanced order, in natural order."""
        x = emit("split", x, dim=self.dim, into=(self.device, self.both))
        early, late = self._sliced(emit, x, self.both, self.blocks)
        late = emit("reverse", late, dim=self.device)
        early, late = (
            emit("merge", part, dims=(self.device, block), into=end)
            for part, end, block in zip((early, late), self.ends, self.blocks, strict=True)
        )
        return emit("concat", early, late, target=self.dim, sources=self.ends)

    def _sliced(self, emit: Emit, x: Value, dim: Dim, into: tuple[Dim, Dim]) -> tuple[Value, Value]:
        half = dim.size // 2
        return (
            emit("slice", x, dim=dim, start=0, stop=half, target=into[0]),
            emit("slice", x, dim=dim, start=half, stop=dim.size, target=into[1]),
        )
