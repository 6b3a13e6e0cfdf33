"""Updates in place: the new values of parameters take the memory of the old ones.

After ZeRO (Rajbhandari et al. 2020): beside parameters, gradients and states there is room for
what one layer needs, not for all parameters once more. A new value that is cast from a wider copy,
or gathered from blocks, is written over the old value. Parameters that a `repeat` has stacked are
reduced, updated and gathered layer by layer, in one loop for all of them.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeGuard

from meshdsl.device.aliases import shared
from meshdsl.device.ir import (
    Compute,
    DeviceCollected,
    DeviceLoop,
    DeviceProgram,
    Move,
    Node,
    StageRows,
    Var,
    renamed,
)
from meshdsl.device.liveness import kept_after, overwrites
from meshdsl.device.names import Names, names_of
from meshdsl.device.offloaded_updates import streamed
from meshdsl.ir.program import Stacked, every, loops
from meshdsl.ir.rewrite import makes_of, reads_of
from meshdsl.ir.types import LARGE
from meshdsl.ops.opdef import Signature, lookup
from meshdsl.placed.placements import Mesh
from meshdsl.placed.strategies import flops
from meshdsl.records import dataclass


def updated_in_place(program: DeviceProgram) -> DeviceProgram:
    """The program with large parameters updated layer by layer, and in their own memory."""
    if all(new.local.bytes < LARGE for _, new in program.updates):
        return program
    return _in_own_memory(_layer_by_layer(program))


# --- layer by layer ------------------------------------------------------------------------------


def _layer_by_layer(program: DeviceProgram) -> DeviceProgram:
    """The program with a loop for the updates of parameters that are stacked along one dim."""
    of_dims = list(_groups(program))
    if not of_dims:
        return program
    memory = _StoredMemory(program)
    groups = [_Group(program, memory, dim, nodes) for dim, nodes in of_dims]
    body = _in_order(program, groups)
    if body is None:
        return program
    names = Names(names_of(program))
    loops = {group: group.loop(names) for group in groups}
    new = {old: var for group in groups for old, var in group.results.items()}
    nodes = [loops[each] if isinstance(each, _Group) else each for each in body]
    return _on(replace(program, body=tuple(nodes)), new)


def _on(program: DeviceProgram, new: Mapping[Var, Var]) -> DeviceProgram:
    """The program with other variables in the place of some."""
    others = [new.keys().isdisjoint((*reads_of(n), *makes_of(n))) for n in program.body]
    nodes = zip(program.body, others, strict=True)
    body = tuple(node if is_other else renamed(node, new) for node, is_other in nodes)
    outputs = tuple((name, new.get(v, v)) for name, v in program.outputs)
    updates = tuple((old, new.get(v, v)) for old, v in program.updates)
    return replace(program, body=body, outputs=outputs, updates=updates)


class _StoredMemory:
    """Which results may be written over the parameters and states that they replace."""

    def __init__(self, program: DeviceProgram) -> None:
        self.old_of = {new: old for old, new in program.updates if not old.away}
        self.place = {node: i for i, node in enumerate(program.body)}
        self.made_at = {v: i for i, node in enumerate(program.body) for v in makes_of(node)}
        self.last_read = {v: i for i, node in enumerate(program.body) for v in reads_of(node)}
        self.last_read.update(dict.fromkeys(kept_after(program), len(program.body)))
        owners = shared(program)
        self.showing: dict[Var, list[Var]] = defaultdict(list)
        for var in self.last_read:
            self.showing[owners.get(var, var)].append(var)
        self.owners = owners
        self.streamed = {update.cast for update in streamed(program).values()}

    def replaced_by(self, node: Node) -> dict[Var, Var]:
        """The results of a statement, each with what it may be written over."""
        found = ((var, self.old_of[var]) for var in node.makes if var in self.old_of)
        return {new: old for new, old in found if self._may_write(node, new, old)}

    def _may_write(self, node: Node, new: Var, old: Var) -> bool:
        match node:
            case Compute() if lookup(node.name).converts:
                written = node not in self.streamed and new.local.dtype != node.ins[0].local.dtype
            case Compute():
                written = old in [node.ins[i] for i in overwrites(node)]
            case Move():
                written = node.step.kind == "all_gather"
            case _:
                return False
        alike = old.local == new.local and old.placement == new.placement and old.on == new.on
        return written and alike and self._is_dead(old, self.place[node])

    def _is_dead(self, old: Var, at: int) -> bool:
        """Whether nothing that is there before a statement shows a variable after it."""
        every_view = self.showing[self.owners.get(old, old)]
        return all(self.last_read[v] <= at for v in every_view if self.made_at.get(v, -1) < at)


def _groups(program: DeviceProgram) -> Iterator[tuple[str, list[Compute | Move]]]:
    """The operators and moves that a loop over a dim is to have, in order.

    What is computed of the results of one loop, and is needed in another, is between the two: the
    norm of all gradients, by which each is scaled. Parameters are in one loop where no large value
    has to wait for it.
    """
    dims = _stacked_dims(program)
    sliced = {n: d for n in program.body for d in dims if _is_sliced(n, d, program.mesh)}
    level: dict[Node, int] = {}
    makers = {v: node for node in program.body for v in node.makes}
    by_level: dict[tuple[str, int], list[Compute | Move]] = defaultdict(list)
    for node in program.body:
        before = {makers[v] for v in reads_of(node) if v in makers}
        dim = sliced.get(node)
        level[node] = max(
            (level[m] + (m in sliced and sliced[m] != dim) for m in before), default=0
        )
        if dim is not None:
            assert isinstance(node, Compute | Move)
            by_level[dim, level[node]].append(node)
    for (dim, _), nodes in by_level.items():
        together: list[Compute | Move] = []
        for part in (p for p in _connected(nodes) if _is_worth(p, dim)):
            results = {v for n in part for v in n.makes}
            outside = (v for n in part for v in n.reads if v in makers and v not in results)
            if any(makers[v].phase == "update" and v.local.bytes >= LARGE for v in outside):
                # What the update makes for it would be in memory until the loop of all.
                yield dim, part
            else:
                together += part
        if together:
            yield dim, [n for n in nodes if n in together]


def _stacked_dims(program: DeviceProgram) -> tuple[str, ...]:
    """The dims along which parameters are stacked: loops read slices of them."""
    of_rows = {
        s.inside: s.outer for n in every(program.body) for s in n.stacked if type(s) is StageRows
    }
    stored = set(program.params)
    slices = ((s.outer, n.dim.name) for n in loops(program.body, DeviceLoop) for s in n.slices)
    return tuple(dict.fromkeys(dim for outer, dim in slices if of_rows.get(outer, outer) in stored))


def _can_write_into(node: Node) -> TypeGuard[Compute | Move]:
    """Whether the result can be written `into` any variable, not over an operand alone."""
    return isinstance(node, Move) or (isinstance(node, Compute) and lookup(node.name).converts)


def _is_sliced(node: Node, dim: str, mesh: Mesh) -> bool:
    """Whether a statement of the update does the same to each slice along a dim."""
    if node.phase != "update":
        return False
    match node:
        case Compute():
            record = lookup(node.name)
            fits = node.onto is None and (record.converts or bool(record.overwrites))
        case Move():
            fits = node.step.kind in ("all_gather", "reduce_scatter", "slice")
            fits = fits and node.step.dim != dim
        case _:
            return False
    stacks = [v for v in node.reads if dim in v.local.names]
    return fits and all(_has_slices(v, dim, mesh) for v in (*stacks, *node.makes))


def _has_slices(var: Var, dim: str, mesh: Mesh) -> bool:
    """Whether each device has equally many slices of a variable, one after the other."""
    if var.local.names[:1] != (dim,) or var.on is not None:
        return False
    return not var.placement.is_uneven(dim, var.type.size(dim), mesh)


def _connected(nodes: Sequence[Compute | Move]) -> list[list[Compute | Move]]:
    """The nodes in parts, none of which reads what another one makes."""
    parts: list[list[Compute | Move]] = []
    for node in nodes:
        before = [p for p in parts if any(not set(node.reads).isdisjoint(n.makes) for n in p)]
        parts = [p for p in parts if p not in before]
        parts.append([*itertools.chain(*before), node])
    return parts


def _is_worth(nodes: Iterable[Compute | Move], dim: str) -> bool:
    """Whether a loop saves memory: it has a large collective, done slice by slice."""
    return any(
        isinstance(n, Move)
        and n.step.moves
        and max(v.local.bytes for v in (n.source, n.target)) >= LARGE * n.source.local.size(dim)
        for n in nodes
    )


@dataclass(eq=False)
class _Group:
    """Statements that become a loop over `dim`; `results` are its variables for theirs."""

    program: DeviceProgram
    memory: _StoredMemory
    dim: str
    nodes: list[Compute | Move]

    def __post_init__(self) -> None:
        # By result, the parameter or state in whose memory it is.
        self.over = {v: old for n in self.nodes for v, old in self.memory.replaced_by(n).items()}
        self.results: dict[Var, Var] = {}
        # The slice of each variable that the loop reads or makes.
        self.inside: dict[Var, Var] = {}
        self.stacked: list[Stacked[Var]] = []

    @property
    def makes(self) -> tuple[Var, ...]:
        """The variables that the statements make."""
        return tuple(v for n in self.nodes for v in n.makes)

    def loop(self, names: Names) -> DeviceLoop:
        """The loop."""
        self.names = names
        first = self.nodes[0]
        after = self._read_elsewhere()
        body = tuple(map(self._node, self.nodes))
        collected = []
        for var in self.makes:
            if var in after:
                stack = self.over.get(var)
                name = names.fresh(var.name) if stack is None else stack.name
                self.results[var] = replace(var, name=name)
                part = DeviceCollected(self.inside[var], self.results[var], stack=stack)
                collected.append(part)
        return DeviceLoop(
            first.makes[0].local.dims[0],
            (),
            tuple(self.stacked),
            body,
            first.span,
            tuple(collected),
            phase="update",
            index=names.fresh(self.dim),
        )

    def _read_elsewhere(self) -> set[Var]:
        """The variables that others read, too, or that are there at the end."""
        mine = set(self.nodes)
        elsewhere = {v for n in self.program.body if n not in mine for v in reads_of(n)}
        return elsewhere | kept_after(self.program)

    def _node(self, node: Compute | Move) -> Compute | Move:
        """A statement on slices."""
        sources = tuple(map(self._of, node.reads))
        old = self.over.get(node.makes[0]) if _can_write_into(node) else None
        into = None if old is None else self._of(old)
        targets = tuple(self._made(var, into) for var in node.makes)
        if isinstance(node, Move):
            (source,), (target,) = sources, targets
            step = replace(node.step, before=source.placement, after=target.placement)
            move = replace(node, step=step, source=source, target=target, into=into)
            return move.counted(self.program.mesh)
        ins, outs = (tuple(v.local for v in vs) for vs in (sources, targets))
        cost = flops(lookup(node.name), Signature(ins, outs, dict(node.attrs)))
        cost = cost if node.flops else 0
        return replace(node, ins=sources, outs=targets, flops=cost, into=into)

    def _made(self, var: Var, into: Var | None) -> Var:
        """The variable that a statement makes of a slice; it has the name of what it overwrites."""
        name = self.names.fresh(var.name) if into is None else into.name
        self.inside[var] = replace(self._slice(var), name=name)
        return self.inside[var]

    def _of(self, var: Var) -> Var:
        """The slice of a variable; one without the dim is read as it is."""
        if var in self.inside or self.dim not in var.local.names:
            return self.inside.get(var, var)
        slice_ = replace(self._slice(var), name=self.names.fresh(var.name.removesuffix("_stack")))
        self.inside[var] = slice_
        self.stacked.append(Stacked(var, slice_))
        return slice_

    def _slice(self, var: Var) -> Var:
        value = replace(var.value, type=var.value.type.without(self.dim))
        placement, local = var.placement.without_dim(self.dim), var.local.without(self.dim)
        hint = var.hint.removesuffix("_stack")
        hint = f"{hint}_slice" if var.value.role == "state" else hint
        return replace(var, value=value, placement=placement, local=local, hint=hint)


def _in_order(program: DeviceProgram, groups: Sequence[_Group]) -> list[Node | _Group] | None:
    """The statements, and each group where its last update was, unless another needs it before.

    None where a group would overwrite what is still to be read.
    """
    group_of: dict[Node, Node | _Group] = {n: group for group in groups for n in group.nodes}
    where: dict[Node | _Group, int] = {}
    for i, node in enumerate(program.body):
        unit = group_of.get(node, node)
        # Gathers are at the end of a program; their loop is where its last update was.
        if unit is node or isinstance(node, Compute) or unit not in where:
            where[unit] = i
    units = sorted(where, key=lambda unit: where[unit])
    makers = {v: unit for unit in units for v in unit.makes}
    owners, readers = groups[0].memory.owners, defaultdict[Var, list[Node | _Group]](list)
    needs: dict[Node | _Group, dict[Node | _Group, None]] = {unit: {} for unit in units}
    for node in program.body:
        unit = group_of.get(node, node)
        written = [node.ins[i] for i in overwrites(node)] if isinstance(node, Compute) else []
        if isinstance(unit, _Group):
            written += [unit.over[v] for v in node.makes if v in unit.over]
        # What reads memory before it is overwritten stays before that.
        for var in written:
            needs[unit].update(dict.fromkeys(readers[owners.get(var, var)]))
        for var in reads_of(node):
            readers[owners.get(var, var)].append(unit)
            if var in makers:
                needs[unit][makers[var]] = None
        needs[unit].pop(unit, None)
    ordered: dict[Node | _Group, None] = {}
    begun = set[Node | _Group]()

    def put(unit: Node | _Group) -> bool:
        if unit in ordered or unit in begun:
            return unit in ordered
        begun.add(unit)
        is_possible = all(put(other) for other in needs[unit])
        ordered[unit] = None
        return is_possible

    return list(ordered) if all(put(unit) for unit in units) else None


# --- in their own memory -------------------------------------------------------------------------


def _in_own_memory(program: DeviceProgram) -> DeviceProgram:
    """The program with new values of large parameters written over the old ones."""
    memory, new = _StoredMemory(program), dict[Var, Var]()
    body: list[Node] = []
    for node in program.body:
        if _can_write_into(node):
            for var, old in memory.replaced_by(node).items():
                if old.local.bytes >= LARGE:
                    new[var] = replace(var, name=old.name)
                    node = replace(node, into=old)
        body.append(node)
    return _on(replace(program, body=tuple(body)), new) if new else program
