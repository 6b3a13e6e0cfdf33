"""Mixed precision: products in a narrow dtype, sums and losses in f32 (Micikevicius et al. 2018).

Which operators stay wide follows torch's autocast lists.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

from meshdsl.ir.types import F32, DType
from meshdsl.named.casting import Casting
from meshdsl.named.ir import NamedOp, NamedProgram, Value
from meshdsl.ops.opdef import lookup


def mixed(program: NamedProgram, compute: DType, narrow: Container[Value]) -> NamedProgram:
    """The program with the parameters that are `narrow`, and products, in `compute`.

    Inputs, losses, all other parameters, the states that the program assigns and parameters whose
    declarations state a dtype keep theirs.
    """
    rebuild = _Mixed(compute)
    for param in program.params:
        if param.value in narrow and not param.typed:
            rebuild.typed(param.value, compute)
    body = rebuild.nodes(program.body)
    updates = tuple(rebuild.update(u) for u in program.updates)
    result = program.rebuilt((*body, *rebuild.taken()), rebuild.value)
    return replace(result, updates=updates)


class _Mixed(Casting):
    def __init__(self, compute: DType) -> None:
        super().__init__()
        self.compute = compute

    def op(self, op: NamedOp) -> tuple[NamedOp, ...]:
        ins: tuple[Value, ...] = tuple(map(self.value, op.ins))
        floats = [v.type.dtype for v in ins if v.type.dtype.kind == "float"]
        if floats and op.name != "cast":
            dtype = self._dtype(op, floats)
            ins = tuple(self.cast(v, dtype, op) for v in ins)
        types = lookup(op.name).infer(tuple(v.type for v in ins), dict(op.attrs))
        outs = tuple(self.typed(v, t.dtype) for v, t in zip(op.outs, types, strict=True))
        origin = op.origin and op.origin.on(self.value)
        return (*self.taken(), replace(op, ins=ins, outs=outs, origin=origin))

    def _dtype(self, op: NamedOp, floats: list[DType]) -> DType:
        precision = lookup(op.name).precision
        if precision == "compute":
            return self.compute
        widest = max(floats, key=lambda d: d.bytes)
        return max(widest, F32, key=lambda d: d.bytes) if precision == "f32" else widest
