"""Random values for those that a user does not give: `Spec.draw` per input and parameter."""

from __future__ import annotations

import math
from collections.abc import Iterator

from meshdsl.ir.rewrite import Visitor
from meshdsl.named.ir import NamedLoop, NamedOp, NamedProgram, Node, Param, Value
from meshdsl.ops.opdef import lookup

Draw = tuple[object, ...]


def draws(program: NamedProgram) -> dict[Value, Draw]:
    """Per input and parameter: normal floats, integers below the smallest dim they index, coins."""
    bounds = _IndexBounds()
    bounds.block(program.body)
    drawn: dict[Value, Draw] = {v: _of_input(v, bounds) for v in program.inputs}
    drawn.update({p.value: _of_param(p) for p in program.params})
    return drawn


def _of_input(value: Value, bounds: _IndexBounds) -> Draw:
    if value.role == "seed":
        return ("seed",)
    kind = value.type.dtype.kind
    if kind == "float":
        return ("normal", 1.0)
    if kind == "bool":
        return ("coin",)
    ignored = (bounds.ignored[value],) if value in bounds.ignored else ()
    return ("below", bounds.of.get(value, 10), *ignored)


def _of_param(param: Param) -> Draw:
    """The initialiser with its numbers (Glorot and Bengio 2010; He et al. 2015)."""
    kind, args = param.init.kind, param.init.args
    match kind:
        case "glorot":
            limit = math.sqrt(6 / (param.fan_in + param.fan_out))
            return ("uniform", -limit, limit)
        case "he":
            return ("normal", math.sqrt(2 / param.fan_in))
        case "normal" if not args:
            return ("normal", 1 / math.sqrt(param.fan_in))
    return (kind, *args)


def index_bounds(program: NamedProgram) -> dict[Value, int]:
    """For integer tensors: the size of the smallest dim they are used to index."""
    bounds = _IndexBounds()
    bounds.block(program.body)
    return bounds.of


class _IndexBounds(Visitor):
    """The bounds of indices in nodes, from the last to the first, back to their sources."""

    def __init__(self) -> None:
        self.of: dict[Value, int] = {}
        self.ignored: dict[Value, int] = {}

    def block(self, nodes: tuple[Node, ...]) -> None:
        """Add the bounds in the nodes of a block."""
        for node in reversed(nodes):
            self.visit(node)

    def op(self, op: NamedOp) -> None:
        for value, size in _indexed(op):
            self.bind(value, size)
            if "ignore_index" in dict(op.attrs):
                self.ignored[value] = op.attr("ignore_index")
        if len(op.outs) == 1 and op.out in self.of and _moves(op):
            self.pass_on(op.out, op.ins[0])

    def loop(self, loop: NamedLoop) -> None:
        for _ in range(2):  # the bound of a carry binds its value in the iteration before
            for carry in loop.carries:
                self.pass_on(carry.result, carry.next)
                self.pass_on(carry.inside, carry.next)
            self.block(loop.body)
        for carry in loop.carries:
            self.pass_on(carry.inside, carry.init)
        for item in loop.stacked:
            self.pass_on(item.inside, item.outer)

    def pass_on(self, value: Value, source: Value) -> None:
        """Bind what a value is made of by its own bound."""
        if value in self.of:
            self.bind(source, self.of[value])
        if value in self.ignored:
            self.ignored[source] = self.ignored[value]

    def bind(self, value: Value, size: int) -> None:
        """Add a bound of a value."""
        self.of[value] = min(size, self.of.get(value, size))


def _moves(op: NamedOp) -> bool:
    """Whether the result has elements of the first operand, or zeros."""
    record = lookup(op.name)
    return record.view or record.relocates


def _indexed(op: NamedOp) -> Iterator[tuple[Value, int]]:
    """The operand of indices, with the size of the dim they index."""
    at = lookup(op.name).indices
    if at is not None:
        yield op.ins[at], op.attr("dim").size
