"""The stages of a pipeline, as a walk through the named program meets them.

Stages are never at one micro-batch together. So what its passes make of a micro-batch is not
reduced over the stages before the passes are done: it leaves them in parts, is carried in parts,
or, where a stage reads all of it, is made of whole operands.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from meshdsl.ir.program import OpKind, kind_of
from meshdsl.ir.rewrite import makes_of, reads_of
from meshdsl.named import ir as named
from meshdsl.named.ir import NamedLoop, NamedOp, NamedProgram, Value, loops_of
from meshdsl.placed.pipelined import Piped, of_batch
from meshdsl.placed.placements import Placement, placement
from meshdsl.placed.request import Request
from meshdsl.placed.strategies import OnStages


class NeededWhole(Exception):
    """A walk cannot go on: stages read all of a value of which each makes a part.

    They may make it of whole operands, where a request says so (`Request.whole`).
    """

    def __init__(self, value: Value) -> None:
        super().__init__(f"{value.label} is needed whole")
        self.value = value


class CarriedInParts(Exception):
    """A loop has to be placed again: each stage keeps its part of some of what it carries."""

    def __init__(self, kept: dict[Value, Placement]) -> None:
        super().__init__("parts of stages are carried")
        self.kept = kept


class StageWalk:
    """The stages that a walk is on, and what they make.

    `in_flight` is what the passes make of a micro-batch, `whole` what of that is made of whole
    operands; both grow by what operators are rewritten in. `carried` is what loops carry that are
    not on the stages, `depth` the number of loops around that are.
    """

    def __init__(self, request: Request, pipe: Piped) -> None:
        self.request, self.pipe, self.mesh = request, pipe, request.mesh
        self.program: NamedProgram = request.program
        self.in_flight, self.whole = {*self._made}, {*request.whole}
        self.carried: set[Value] = set()
        self.depth = 0
        self._origins: dict[Value, Value] = {}

    # --- what the passes make --------------------------------------------------------------------

    @cached_property
    def _made(self) -> frozenset[Value]:
        """What the passes of the program itself make of a micro-batch."""
        cut = self.pipe.cut
        if cut is not None:
            return frozenset(of_batch(self.program, cut)).difference(self.program.inputs)
        micro = [loop for loop in loops_of(self.program) if loop.dim.name == self.pipe.micro]
        return frozenset(v for loop in micro for v in (*makes_of(loop), *loop.enters))

    @cached_property
    def _ahead(self) -> frozenset[Value]:
        """What is made once, before the passes that read it."""
        makers = {v: node for node in self.program.body for v in node.makes}
        ahead: set[Value] = set()
        left = [v for n in self.program.body if self._is_of_passes(n) for v in reads_of(n)]
        while left:
            value = left.pop()
            if value in makers and value not in ahead and value not in self._made:
                ahead.add(value)
                left += reads_of(makers[value])
        return frozenset(ahead)

    def _is_of_passes(self, node: named.Node) -> bool:
        leaves = kind_of(node) is OpKind.STAGE_OUTPUT
        return not leaves and any(v in self._made for v in makes_of(node))

    @cached_property
    def _of_parameters(self) -> frozenset[NamedOp]:
        """The operators of the forward pass that read parameters alone, and numbers."""
        determined, ops = {p.value for p in self.program.params}, set[NamedOp]()
        for op in self.program.body:
            if not isinstance(op, NamedOp) or op.phase != "forward":
                continue
            if determined.issuperset(op.ins):
                ops.add(op)
                determined.update(op.outs)
        return frozenset(ops)

    @cached_property
    def _batch_axes(self) -> tuple[str, ...]:
        """The axes over which inputs have the dim that a schedule cuts."""
        has = ((v, d) for v in self.program.inputs for d, _ in self.mesh.cut if v.type.has(d))
        return next((self.request.ruled(v).axes_of(d) for v, d in has), ())

    def note_rewritten(self, op: NamedOp, parts: tuple[NamedOp, ...]) -> None:
        """What an operator of the passes is rewritten in is of the passes, and as whole."""
        if self.in_flight.isdisjoint(op.outs):
            return
        new = [v for part in parts for v in part.outs if v not in op.outs]
        self.in_flight.update(new)
        self.whole.update(() if self.whole.isdisjoint(op.outs) else new)
        origin = self._origins.get(op.outs[0], op.outs[0])
        self._origins.update(dict.fromkeys(new, origin))

    # --- operators -------------------------------------------------------------------------------

    def of(self, op: NamedOp) -> OnStages | None:
        """The stages of an operator of the passes; None of one that all devices do."""
        if self.in_flight.isdisjoint(op.outs):
            return None
        kind = "waits" if self.whole.isdisjoint(op.outs) else "whole"
        # What a loop carries is carried in parts where it becomes so (`check_carried`).
        in_parts = tuple([v in self.in_flight and v not in self.carried for v in op.ins])
        axis = self.pipe.axis
        return OnStages(axis, "alone" if self.depth else kind, in_parts, self._batch_axes)

    def off_stages(self, target: Placement, op: NamedOp) -> Placement:
        """A placement of what is made before the passes, added up where stages have parts of it.

        Micro-batches cannot: they are never on all stages at once.
        """
        axis = self.pipe.axis
        if axis not in target.partial:
            return target
        if op not in self._of_parameters and self._ahead.isdisjoint(op.outs):
            return target
        partial = [other for other in target.partial if other != axis]
        return placement(self.mesh, dict(target.splits), partial, target.op if partial else None)

    def check_reduced(self, value: Value, source: Placement, need: Placement) -> None:
        """Raise NeededWhole for what a pass makes in parts, and reads the whole of."""
        if value not in self.in_flight or value in self.whole:
            return
        if self.pipe.axis in source.partial and self.pipe.axis not in need.partial:
            raise NeededWhole(self._origins.get(value, value))

    # --- loops -----------------------------------------------------------------------------------

    def enter(self, loop: NamedLoop, carried: Mapping[Value, Placement]) -> None:
        """Go on inside of a loop."""
        self.depth += self.pipe.cuts(loop)
        self.carried.update(() if self.depth else carried)

    def leave(self, loop: NamedLoop) -> None:
        """Go on behind a loop."""
        self.depth -= self.pipe.cuts(loop)

    def check_carried(
        self,
        loop: NamedLoop,
        natural: Mapping[Value, Placement],
        wants: Mapping[Value, Placement],
    ) -> None:
        """Raise CarriedInParts where iterations would add up what stages have parts of.

        `natural` are the placements in which an iteration leaves the carries, `wants` those that
        they are to have.
        """
        axis, ends = self.pipe.axis, dict[Value, Placement]()
        for carry in loop.carries:
            value, want, placed = carry.inside, wants[carry.inside], natural[carry.inside]
            flies = carry.next in self.in_flight and carry.next not in self.whole
            if flies and placed.op == "sum" and axis in placed.partial and not want.partial:
                ends[value] = placement(self.mesh, dict(want.splits), (axis,), "sum")
        if ends:
            raise CarriedInParts(ends)

    # --- blocks of the stages --------------------------------------------------------------------

    def leaving(self, here: Placement) -> Placement:
        """The placement of what leaves the passes: each stage has a part of it, or a block."""
        if here.axes_of(self.pipe.dim):
            return here
        partial = (*here.partial, self.pipe.axis)
        return placement(self.mesh, dict(here.splits), partial, here.op or "sum")

    def stacked(self, here: Placement) -> Placement:
        """The placement of a stack of which each stage has a block."""
        splits = {d: tuple(a for a in axes if a != self.pipe.axis) for d, axes in here.splits}
        blocks = {**splits, self.pipe.dim: (self.pipe.axis,)}
        return placement(self.mesh, blocks, here.partial, here.op)

    def collected(self, part: Placement) -> Placement:
        """The placement of all iterations of a value: a block on each stage."""
        splits = {**dict(part.splits), self.pipe.dim: (self.pipe.axis,)}
        return placement(self.mesh, splits, part.partial, part.op)
