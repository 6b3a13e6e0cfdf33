"""`fan_in` of the initialisation of parameters, from their first use."""

from __future__ import annotations

import math

from meshdsl.ir.program import every
from meshdsl.ir.types import TensorType
from meshdsl.named.builder import PendingParam
from meshdsl.named.ir import NamedOp, Node, Param, Value

_CARRIERS = {"rename", "transpose", "cast", "identity"}
"""Operators through which a parameter is still the same parameter, its dims perhaps renamed."""


def finish_params(pending: tuple[PendingParam, ...], body: tuple[Node, ...]) -> tuple[Param, ...]:
    """Parameters with `fan_in` (elements summed at first use) and `fan_out` (the others)."""
    uses = _first_uses(body)
    finished = []
    for item in pending:
        type_, summed = _follow(item.value, uses)
        fan_in = math.prod(type_.size(d) for d in summed)
        fan_out = max(1, type_.elements // fan_in)
        finished.append(Param(item.value, item.init, fan_in, fan_out, item.typed))
    return tuple(finished)


def _follow(value: Value, uses: dict[Value, NamedOp | Value]) -> tuple[TensorType, tuple[str, ...]]:
    """The type seen by the first real use, and the dims it sums."""
    use = uses.get(value)
    while use is not None:
        if isinstance(use, Value):
            value = use
        elif use.name in _CARRIERS:
            value = use.out
        else:
            return value.type, _summed(use, value)
        use = uses.get(value)
    return value.type, ()


def _summed(op: NamedOp, value: Value) -> tuple[str, ...]:
    is_kernel = op.name in ("conv", "upconv") and value == op.ins[1]
    if op.name not in ("einsum", "sum", "mean", "mul") and not is_kernel:
        return ()
    return tuple(d for d in value.type.names if not op.out.type.has(d))


def _first_uses(body: tuple[Node, ...]) -> dict[Value, NamedOp | Value]:
    uses: dict[Value, NamedOp | Value] = {}
    for node in every(body):
        for item in node.stacked:
            uses.setdefault(item.outer, item.inside)
        if isinstance(node, NamedOp):
            for value in node.ins:
                uses.setdefault(value, node)
    return uses
