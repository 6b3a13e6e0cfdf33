"""Exchanges of rows by number: an all_to_all sends no padding.

Rows of groups lie before padding (`ops/grouped_einsum.py`), and a tensor has room for as many as
there may be. Where such a tensor is resharded by an all_to_all, sender and receiver know from the
sizes of the groups which rows are there. Only these are sent, and the receiver fills zeros in,
where the padding is zeros or nothing reads it. The placed program knows nothing of it: what is read
of the tensor is the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from meshdsl.device.counted_rows import CountedRows, Promise
from meshdsl.device.ir import Compute, DeviceProgram, Move, Node, Var
from meshdsl.device.names import Names, names_of
from meshdsl.ir.program import every
from meshdsl.named.ir import Value
from meshdsl.ops.grouped_einsum import batch_dims
from meshdsl.ops.opdef import GroupedRows, lookup
from meshdsl.placed import collectives
from meshdsl.placed.placements import Placement
from meshdsl.records import dataclass


@dataclass(frozen=True, slots=True)
class _Padding:
    """Along `row` a variable is 0 after as many elements as the `sizes` of groups add up to."""

    row: str
    sizes: Var


@dataclass(frozen=True, slots=True)
class _Filling:
    """At most `rows` of all positions along a row and the dims `blocks` are filled."""

    blocks: tuple[str, ...] = ()
    rows: int = 0
    promise: Promise | None = None


def counted_exchanges(program: DeviceProgram) -> DeviceProgram:
    """The program with the all_to_alls of tensors with padding as exchanges of rows by number."""
    exchanges = _Exchanges(program)
    outside = {v.value: (v,) for v in (*program.inputs, *program.params, *program.states)}
    return replace(program, body=exchanges.block(program.body, outside))


class _Exchanges:
    def __init__(self, program: DeviceProgram) -> None:
        self.mesh = program.mesh
        self.names = Names(names_of(program))
        self.fillings: dict[Value, _Filling] = {}
        for sizes, filling in _fillings(program.body):
            self.fillings.setdefault(sizes, filling)
        self.readers = _readers(program)

    def block(
        self, nodes: tuple[Node, ...], around: Mapping[Value, tuple[Var, ...]]
    ) -> tuple[Node, ...]:
        """The nodes of a block; `around` are the versions of values from outside."""
        versions = {value: list(every_one) for value, every_one in around.items()}
        padding: dict[Var, _Padding] = {}
        early: set[Node] = set()
        rewritten: list[Node] = []
        for i, node in enumerate(nodes):
            if node in early:
                continue
            before: list[Node] = []
            if node.body:
                inner = {v: tuple(every_one) for v, every_one in versions.items()}
                inner.update((var.value, (var,)) for var in node.enters)
                node = node.with_body(partial(self.block, around=inner))
            if isinstance(node, Compute):
                padding.update(_padded(node, padding))
            if isinstance(node, Move) and node.step.kind == "all_reduce":
                padding.update(_passed_on(node, padding))
            if isinstance(node, Move) and node.step.kind == "all_to_all":
                padding.update(_passed_on(node, padding))
                before, node = self._counted(node, padding, versions, nodes[i + 1 :])
                early.update(before)
                rewritten += before
            rewritten.append(node)
            for var in (v for n in (*before, node) for v in n.makes):
                versions.setdefault(var.value, []).append(var)
        return tuple(rewritten)

    def _counted(
        self,
        node: Move,
        padding: Mapping[Var, _Padding],
        versions: Mapping[Value, list[Var]],
        later: tuple[Node, ...],
    ) -> tuple[list[Node], Move]:
        """What has to be done before an exchange by number, and that; or the move as it is."""
        padded, step = padding.get(node.source) or self._ignored(node.target), node.step
        if padded is None or step.is_uneven(node.source.type, self.mesh):
            return [], node
        sizes, dims = padded.sizes, padded.sizes.type.names
        if step.dim not in dims or step.to_dim not in dims or step.before.axes_of(padded.row):
            return [], node
        here, there = (
            Placement(tuple(s for s in p.splits if s[0] in dims)) for p in (step.before, step.after)
        )
        size_versions = versions.get(sizes.value, [])
        leaving = next((v for v in size_versions if v.placement == here), None)
        arriving = next((v for v in size_versions if v.placement == there), None)
        before: list[Node] = []
        if leaving is not None and arriving is None:
            before = [self._of_sizes(leaving, there, (step.dim, step.to_dim), node, later)]
            (arriving,) = before[0].makes
        elif arriving is not None and leaving is None:
            before = [self._of_sizes(arriving, here, (step.to_dim, step.dim), node, later)]
            (leaving,) = before[0].makes
        if leaving is None or arriving is None:
            return [], node
        most, balanced = self._bytes(node, padded)
        filling = self.fillings.get(sizes.value, _Filling())
        promise = filling.promise if step.to_dim in filling.blocks else None
        rows = CountedRows(leaving, arriving, padded.row, most, balanced, promise)
        return before, replace(node, rows=rows).counted(self.mesh)

    def _ignored(self, var: Var) -> _Padding | None:
        """The padding that all readers of a variable pass over, as if it were zeros."""
        paddings = [_passed_over(node, var) for node in self.readers.get(var, [])]
        first = paddings[0] if paddings else None
        alike = all(f and first and f.sizes.value == first.sizes.value for f in paddings)
        return first if alike else None

    def _of_sizes(
        self,
        sizes: Var,
        after: Placement,
        dims: tuple[str, str],
        node: Move,
        later: Iterable[Node],
    ) -> Move:
        """The exchange of the sizes, that of the program itself where it comes later.

        `dims` are the one that it joins, and the one that it splits.
        """
        for other in later:
            if not isinstance(other, Move) or other.source is not sizes:
                continue
            if other.target.placement == after:
                return other
        exchange = collectives.all_to_all(self.mesh, sizes.placement, *dims, node.step.axes)
        name, local = f"{sizes.hint}_moved", after.local(sizes.type, self.mesh)
        target = Var(self.names.fresh(name), sizes.value, after, local, name)
        about = (node.span, node.words, node.phase)
        return Move(exchange, sizes, target, 0, 0, *about).counted(self.mesh)

    def _bytes(self, node: Move, found: _Padding) -> tuple[int, int]:
        """The bytes that a device sends at most, and where each group has as many rows."""
        step, local, mesh = node.step, node.source.local, self.mesh
        filling = self.fillings.get(found.sizes.value, _Filling())
        others = mesh.size(*step.axes)
        padded = step.wire(node.source.type, mesh)
        positions = math.prod(
            node.source.type.size(n) for n in (*filling.blocks, found.row) if local.has(n)
        )
        rows = filling.rows or positions
        here = math.prod(local.size(n) for n in (*filling.blocks, found.row) if local.has(n))
        each = local.elements // here * step.bytes(node.source.type)
        if step.to_dim in filling.blocks:
            most = each * min(rows, here - here // others)
        else:
            most = (each - each // others) * min(rows, here)
        return min(most, padded), -(-padded * rows // positions)


def _readers(program: DeviceProgram) -> dict[Var, list[Node | None]]:
    """What reads each variable; None stands for the end of a loop or of the program."""
    readers: dict[Var, list[Node | None]] = {}
    for node in every(program.body):
        for var in node.reads:
            readers.setdefault(var, []).append(node)
        for var in node.ends:
            readers.setdefault(var, []).append(None)
    for var in (*(v for _, v in program.outputs), *(new for _, new in program.updates)):
        readers.setdefault(var, []).append(None)
    return readers


def _passed_over(node: Node | None, var: Var) -> _Padding | None:
    """The padding of a variable that an operator does not read."""
    if not isinstance(node, Compute) or node.ins.count(var) != 1:
        return None
    grouped = lookup(node.name).grouped
    if grouped is None or node.ins.index(var) not in grouped.skips:
        return None
    return _padding_of(node, grouped)


def _padding_of(node: Compute, grouped: GroupedRows) -> _Padding:
    """Where the rows of an operator on groups of rows end."""
    types = tuple(v.type for v in node.ins)
    return _Padding(grouped.row(types, dict(node.attrs)), node.ins[grouped.sizes])


def _fillings(nodes: Iterable[Node]) -> Iterator[tuple[Value, _Filling]]:
    """By the sizes of groups, how many rows these may have in all, as the products say."""
    for node in every(nodes):
        grouped = lookup(node.name).grouped if isinstance(node, Compute) else None
        if isinstance(node, Compute) and grouped is not None and grouped.filled is not None:
            types = tuple(v.type for v in node.ins)
            blocks, rows = grouped.filled(types, dict(node.attrs))
            row = grouped.row(types, dict(node.attrs))
            room = types[0].size(row)
            of = math.prod(types[0].size(n) for n in (*blocks, row))
            promise = Promise(rows, room, node.span) if rows < of else None
            yield node.ins[grouped.sizes].value, _Filling(blocks, rows, promise)


def _padded(node: Compute, padding: Mapping[Var, _Padding]) -> Iterator[tuple[Var, _Padding]]:
    """The padding of the result of an operator, where it has one."""
    record = lookup(node.name)
    if record.grouped is not None and record.grouped.is_zero:
        yield node.out, _padding_of(node, record.grouped)
    elif record.keeps_zeros and node.ins:
        paddings = [padding.get(v) for v in node.ins]
        first = paddings[0]
        alike = all(
            f is not None
            and first is not None
            and (f.row, f.sizes.value) == (first.row, first.sizes.value)
            for f in paddings
        )
        dims = () if first is None else (first.row, *batch_dims(first.sizes.type, node.out.type))
        if first is not None and alike and all(v.type.has(n) for v in node.ins for n in dims):
            yield node.out, first


def _passed_on(node: Move, padding: Mapping[Var, _Padding]) -> Iterator[tuple[Var, _Padding]]:
    """The padding of what a collective makes of whole rows."""
    if node.source in padding:
        yield node.target, padding[node.source]
