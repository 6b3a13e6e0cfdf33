"""How values that a user does not give are made up: `Spec.draw` per input and parameter."""

from __future__ import annotations

import math

from meshdsl.named.ir import Op, Param, Program, Value, walk

Draw = tuple[object, ...]


def draws(program: Program) -> dict[Value, Draw]:
    """Per input and parameter: normal floats, integers below the smallest dim they index, coins."""
    bounds = _index_bounds(program)
    found: dict[Value, Draw] = {v: _of_input(v, bounds) for v in program.inputs}
    found.update({p.value: _of_param(p) for p in program.params})
    return found


def _of_input(value: Value, bounds: dict[Value, int]) -> Draw:
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


def _index_bounds(program: Program) -> dict[Value, int]:
    """For integer tensors: the size of the smallest dim they are used to index."""
    bounds: dict[Value, int] = {}
    for op in reversed(list(walk(program.body))):
        for value, size in _indexed(op):
            bounds[value] = min(size, bounds.get(value, size))
        if op.name in ("identity", "rename", "transpose", "split", "merge") and op.out in bounds:
            size = bounds[op.out]
            bounds[op.ins[0]] = min(size, bounds.get(op.ins[0], size))
    return bounds


def _indexed(op: Op) -> list[tuple[Value, int]]:
    match op.name:
        case "gather" | "cross_entropy":
            return [(op.ins[1], op.attr("dim").size)]
        case "one_hot":
            return [(op.ins[0], op.attr("dim").size)]
    return []
