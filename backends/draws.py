"""Random values for those that a user does not give: `Spec.draw` per input and parameter."""

from __future__ import annotations

import math
from collections.abc import Iterator

from meshdsl.named.ir import NamedLoop, NamedOp, NamedProgram, Node, Param, Value
from meshdsl.ops.opdef import lookup

Draw = tuple[object, ...]


def draws(program: NamedProgram) -> dict[Value, Draw]:
    """Per input and parameter: normal floats, integers below the smallest dim they index, coins."""
    bounds = index_bounds(program)
    drawn: dict[Value, Draw] = {v: _of_input(v, bounds) for v in program.inputs}
    drawn.update({p.value: _of_param(p) for p in program.params})
    return drawn


def _of_input(value: Value, bounds: dict[Value, int]) -> Draw:
    if value.role == "seed":
        return ("seed",)
    kind = value.type.dtype.kind
    if kind == "float":
        return ("normal", 1.0)
    return ("coin",) if kind == "bool" else ("below", bounds.get(value, 10))


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
    bounds: dict[Value, int] = {}
    _bound_block(program.body, bounds)
    return bounds


def _bound_block(nodes: tuple[Node, ...], bounds: dict[Value, int]) -> None:
    """Add the bounds of indices in `nodes`, from the last to the first, back to their sources."""
    for node in reversed(nodes):
        if isinstance(node, NamedLoop):
            _bound_loop(node, bounds)
            continue
        for value, size in _indexed(node):
            _bound(bounds, value, size)
        if len(node.outs) == 1 and node.out in bounds and _moves(node):
            _bound(bounds, node.ins[0], bounds[node.out])


def _bound_loop(loop: NamedLoop, bounds: dict[Value, int]) -> None:
    for _ in range(2):  # the bound of a carry in one iteration binds its value in the one before
        for carry in loop.carries:
            for later in (carry.result, carry.inside):
                if later in bounds:
                    _bound(bounds, carry.next, bounds[later])
        _bound_block(loop.body, bounds)
    inner = [(c.inside, c.init) for c in loop.carries]
    inner += [(s.inside, s.outer) for s in loop.stacked]
    for inside, outer in inner:
        if inside in bounds:
            _bound(bounds, outer, bounds[inside])


def _bound(bounds: dict[Value, int], value: Value, size: int) -> None:
    bounds[value] = min(size, bounds.get(value, size))


def _moves(op: NamedOp) -> bool:
    """Whether the result has elements of the first operand, or zeros."""
    record = lookup(op.name)
    return record.view or record.relocates


def _indexed(op: NamedOp) -> Iterator[tuple[Value, int]]:
    """The operand of indices, with the size of the dim they index."""
    at = lookup(op.name).indexed()
    if at is not None:
        yield op.ins[at], op.attr("dim").size
