"""Parameters whose stored placement is not that of their use: where they are gathered.

Each use goes through a `load`, whose result is placed by the general rules alone. A
load serves one block of one phase, so that the backward pass gathers again; with `keep` it serves
the whole program. (ZeRO stage 3, Rajbhandari et al. 2020; `reshard_after_forward` in FSDP.)
An operator that narrows a parameter reads it as it is stored, and its result is gathered.

A parameter that a layout stores in another memory is loaded by the same loads, whatever reads it.

Where the copy of the forward pass would still be alive when that of the backward pass is gathered,
one load serves both, and no more is held at any time: around the loss (`_alive_in_both`).
"""

from __future__ import annotations

from dataclasses import replace

from meshdsl.ir.program import OpKind, Stacked, every
from meshdsl.ir.rewrite import Visitor, free, substitute
from meshdsl.named.ir import NamedLoop, NamedOp, NamedProgram, Node, Pin, Value, walk
from meshdsl.ops.opdef import lookup
from meshdsl.placed.layout import Layout
from meshdsl.placed.pipelined import Piped


def with_loads(program: NamedProgram, layout: Layout, pipe: Piped | None = None) -> NamedProgram:
    """The program with a load for every parameter that is not stored as it is used."""
    away = {p.value for p in program.params if p.away}
    moved = {p.value for p in program.params if _moves(p.value, layout)}.union(away)
    if not moved:
        return program
    slices: dict[Value, Value] = {}
    body = _StorageRewrite(layout, moved, pipe, slices, away).nodes(program.body)
    return replace(program, body=substitute(body, {}, origins=slices))


def _moves(value: Value, layout: Layout) -> bool:
    stored, used = layout.bind(value, stored=True), layout.bind(value)
    return stored.placement(layout.mesh) != used.placement(layout.mesh)


def _is_kept(value: Value, layout: Layout) -> bool:
    if not any(rule.keep for rule in layout.rules):
        return False
    causes = layout.bind(value, stored=True).causes.values()
    return any(rule.keep for rule in causes if rule.selector == ("params",))


def _alive_in_both(nodes: tuple[Node, ...], moved: set[Value]) -> frozenset[Value]:
    """The values of which the forward copy is alive when the backward pass gathers its own.

    A gather is issued as soon as what was gathered before it is used, and none before a loop has
    ended (`device/overlap.py`). So a copy is alive if, between its last use of the forward pass and
    the first of the backward pass, nothing else is gathered and no loop runs.
    """
    forward: dict[Value, int] = {}
    first: dict[tuple[Value, str], int] = {}
    for i, node in enumerate(nodes):
        for value in moved.intersection(free(node)) if node.phase != "update" else ():
            first.setdefault((value, node.phase), i)
            if node.phase == "forward":
                forward[value] = i
    loops = {i for i, node in enumerate(nodes) if isinstance(node, NamedLoop)}
    needed, shared = {*first.values()}, set[Value]()
    backward = {v: i for (v, phase), i in first.items() if phase == "backward"}
    for value, i in sorted(backward.items(), key=lambda pair: pair[1]):
        last = forward.get(value, i)
        between = set(range(last + 1, i))
        if last < i and last not in loops and between.isdisjoint(needed | loops):
            shared.add(value)
            needed.discard(i)
    return frozenset(shared)


class _StorageRewrite(Visitor):
    """Rewrites one block. `moved` are the parameters, or slices of them, that need a load.

    `slices` are those of what is loaded whole, with their replacements, in all blocks. Those that
    are `away` are stored in another memory.
    """

    def __init__(
        self,
        layout: Layout,
        moved: set[Value],
        pipe: Piped | None,
        slices: dict[Value, Value],
        away: set[Value],
    ) -> None:
        self.layout, self.moved, self.pipe, self.slices = layout, moved, pipe, slices
        self.away = away
        self.loads: dict[tuple[Value, tuple[Pin, ...] | None, str], Value] = {}
        self.made: list[Node] = []
        self.shared: frozenset[Value] = frozenset()

    def nodes(self, nodes: tuple[Node, ...]) -> list[Node]:
        """The block with its loads, each before its first use."""
        if self.pipe is None:  # else a stage does the passes of other micro-batches in between
            self.shared = _alive_in_both(nodes, self.moved)
        for node in nodes:
            self.made.append(self.visit(node))
        return self.made

    def op(self, op: NamedOp) -> NamedOp:
        """The operator with the loads of what it reads; none of what is narrowed first."""
        if op.phase == "update":
            return op
        read = [v for v in op.ins if v in self.moved]
        if lookup(op.name).narrows:
            read = [v for v in read if v in self.away or _is_kept(v, self.layout)]
        new = {v: self._load(v, op) for v in read}
        return replace(op, ins=tuple(new.get(v, v) for v in op.ins))

    def _load(self, value: Value, reader: Node, pins: tuple[Pin, ...] | None = None) -> Value:
        """The load of a value for a reader and its phase; with `pins`, it is left split so."""
        is_shared = value in self.shared or _is_kept(value, self.layout)
        key = (value, pins, "" if is_shared else reader.phase)
        if key not in self.loads:
            self.loads[key] = replace(value, rules_from=value, pins=pins or value.pins)
            tags = reader.span, reader.phase, None, reader.origin, OpKind.LOAD
            load = NamedOp("identity", (value,), (self.loads[key],), (), *tags)
            self.made.append(load)
        return self.loads[key]

    def _whole_along(self, value: Value, loop: NamedLoop) -> Value:
        """A stack with a part of each slice on every device.

        One that is stored split along the loop's dim is split along another one instead, by an
        exchange before the loop: each iteration then gathers its own slice. Where no other dim
        divides, all is gathered.
        """
        stored = self.layout.bind(value, stored=True).placement(self.layout.mesh)
        axes = stored.axes_of(loop.dim.name)
        if value not in self.moved or not axes or (self.pipe and self.pipe.cuts(loop)):
            return value
        splits = dict(stored.without_dim(loop.dim.name).splits)
        for dim in sorted(value.type.without(loop.dim.name).dims, key=lambda d: -d.size):
            wide = (*splits.get(dim.name, ()), *axes)
            if dim.size % self.layout.mesh.size(*wide) == 0:
                pins = tuple(Pin(d, a, loop.span) for d, a in {**splits, dim.name: wide}.items())
                return self._load(value, loop, pins)
        return self._load(value, loop)

    def _is_over_stages(self, value: Value) -> bool:
        """Whether a parameter is stored split over the stages of a pipeline.

        What all of these send is sent before the first micro-batch.
        """
        if self.pipe is None:
            return False
        stored = self.layout.bind(value, stored=True).placement(self.layout.mesh)
        return any(self.pipe.axis in axes for _, axes in stored.splits)

    def _is_whole(self, stack: Value) -> bool:
        """Whether a stack is loaded before a loop rather than slice by slice."""
        return _is_kept(stack, self.layout) or self._is_over_stages(stack)

    def loop(self, loop: NamedLoop) -> NamedLoop:
        """The loop, its stacks read slice by slice as stored, and each slice loaded inside."""
        if loop.phase == "update":
            return loop
        outside = [*(v for op in walk(loop.body) for v in op.ins), *(c.init for c in loop.carries)]
        stacks = (s.outer for n in every(loop.body) for s in n.stacked)
        outside += filter(self._is_whole, stacks)
        new = {v: self._load(v, loop) for v in dict.fromkeys(outside) if v in self.moved}
        stacked: list[Stacked[Value]] = []
        # Loops inside take the rows of what is in another memory.
        inside = {s.outer for n in every(loop.body) for s in n.stacked}
        away = {v for v in inside if v in self.away and v not in new}
        inner = set(away)
        for item in loop.stacked:
            staged = self.pipe is not None and self.pipe.cuts(loop)
            is_whole = _is_kept(item.outer, self.layout) if staged else self._is_whole(item.outer)
            # A row of the other memory is in one piece.
            turned = item.outer.type.index(loop.dim.name) > 0
            is_whole = is_whole or (item.outer in self.away and turned)
            if item.outer in self.moved and is_whole:
                outer = self._load(item.outer, loop)
                new[item.inside] = replace(item.inside, rules_from=item.outer)
                self.slices[item.inside] = new[item.inside]
                stacked.append(Stacked(outer, item.inside))
                continue
            outer = self._whole_along(item.outer, loop)
            inner.update({item.inside} if item.outer in self.moved else ())
            if outer is item.outer and outer in self.away:
                away.add(item.inside)
            stacked.append(Stacked(outer, item.inside))
        (substituted,) = substitute([replace(loop, stacked=tuple(stacked))], new)
        block = _StorageRewrite(self.layout, inner, self.pipe, self.slices, away)
        return replace(substituted, body=tuple(block.nodes(substituted.body)))
