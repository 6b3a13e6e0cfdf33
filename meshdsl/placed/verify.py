"""Verifier of a placed program: rows of operators, routes of reshards, placements of loops."""

from __future__ import annotations

from meshdsl.ir.program import OpKind
from meshdsl.ir.verify import Verifier
from meshdsl.named.ir import Value
from meshdsl.placed.ir import Apply, PlacedLoop, PlacedProgram, PlacedTensor, Reshard
from meshdsl.placed.pipelined import Piped
from meshdsl.placed.placements import Mesh, Placement, placement
from meshdsl.placed.sharding_rules import call_of
from meshdsl.placed.strategies import is_legal


def verify(program: PlacedProgram) -> None:
    """Check that placements fit their tensors, rows are legal, and routes end at their targets.

    A violation is our mistake, hence an assert with a message.
    """
    check = _PlacedVerifier(program.mesh, program.pipe)
    check.define((*program.inputs, *(p.tensor for p in program.params), *program.states))
    check.nodes(program.body)
    check.need((tensor for _, tensor in program.outputs), "an output")
    for name, tensor in program.outputs:
        assert not tensor.placement.partial, f"output {name} is partial"
        assert not tensor.placement.windows, f"output {name} is a window"
    check.need((new for _, new in program.updates), "an update")
    for old, new in program.updates:
        assert new.placement == old.placement, f"{old.value.label} changes its placement"


class _PlacedVerifier(Verifier[PlacedTensor]):
    def __init__(self, mesh: Mesh, pipe: Piped | None) -> None:
        super().__init__()
        self.mesh, self.pipe = mesh, pipe

    def label(self, value: PlacedTensor) -> str:
        return f"a version of {value.value.label}"

    def check_value(self, value: PlacedTensor) -> None:
        """Check that blocks are equal, dims exist, axes serve once, partial axes share an op."""
        p = value.placement
        again = placement(self.mesh, dict(p.splits), p.partial, p.op)
        assert p.plain == again, f"not canonical: {p}"
        assert all(p.axes_of(w.dim) for w in p.windows), f"a window of a whole dim: {p}"
        p.local(value.type, self.mesh)

    def check(self, node: Apply | Reshard) -> None:
        if isinstance(node, Reshard):
            _check_route(node)
            return
        self.check_origin(node)
        if node.kind is not None:
            self.check_placed(node, node.kind)
            return
        ins, outs = (tuple(t.placement for t in ts) for ts in (node.ins, node.outs))
        legal = is_legal(call_of(node), ins, outs, self.mesh)
        assert legal, f"{node.name}: {ins} -> {outs} is no legal row on every axis"

    def check_placed(self, node: Apply, kind: OpKind) -> None:
        """Check the placements of an operator of a kind, which no row of its factors has."""
        (source,), (result,) = ([t.placement for t in ts] for ts in (node.ins, node.outs))
        if kind is OpKind.LOAD:
            assert result == source, "a load leaves a parameter as it is stored"
            return
        if kind is OpKind.STAGE_OUTPUT:
            assert self.pipe is not None, "without stages nothing leaves them"
            parts = {*source.partial, self.pipe.axis}
            is_sum = result.splits == source.splits and set(result.partial) == parts
            assert result == source or is_sum, f"{source} leaves the stages as {result}"
            return
        dim = node.attr("dim").name
        assert set(source.partial) == set(result.axes_of(dim)), f"{source} in parts is {result}"

    def named(self, value: PlacedTensor) -> Value:
        return value.value

    def check_loop(self, node: PlacedLoop) -> None:
        self.check_origin(node)
        dim = node.dim.name
        axes = (self.pipe.axis,) if self.pipe and self.pipe.cuts(node) else ()
        for item in node.stacked:
            assert item.outer.placement.axes_of(dim) == axes, "the loop's dim is split"
        ends = (*(c.init for c in node.carries), *node.ends, *(s.outer for s in node.stacked))
        assert not any(t.placement.windows for t in ends), "a loop hands on a window"
        for carry in node.carries:
            versions = (carry.init, carry.inside, carry.next, carry.result)
            assert len({t.placement for t in versions}) == 1, "a carry changes its placement"
        for part in node.collected:
            label = part.inside.value.label
            same = part.inside.placement == part.outer.placement.without_dim(dim)
            same = same and part.outer.placement.axes_of(dim) == axes
            assert same, f"{label} changes when collected"


def _check_route(node: Reshard) -> None:
    here: Placement = node.source.placement
    assert not here.windows or node.target.placement.windows, "blocks are made of a window"
    for step in node.route.steps:
        assert step.before == here, "the route is broken"
        here = step.after
    assert here == node.target.placement, "the route ends elsewhere"
