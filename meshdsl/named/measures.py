"""What an evaluation reports of a classification beside the outputs: cross-entropy and accuracy."""

from __future__ import annotations

from dataclasses import replace

from meshdsl.diagnostics import Diagnostics
from meshdsl.ir.types import DTYPES
from meshdsl.named.builder import Builder
from meshdsl.named.emit import Emit
from meshdsl.named.ir import NamedOp, NamedProgram, Output, Value

CROSS_ENTROPY, ACCURACY = "cross_entropy", "accuracy"
"""The names of the outputs: the mean over all targets, and the share of targets that are likeliest.

A program's own outputs keep such a name.
"""


def with_measures(program: NamedProgram) -> NamedProgram:
    """The program with both among its outputs, if it has one `cross_entropy` outside of loops.

    Where that ignores targets, the program alone says what its average is.
    """
    entropies = [
        op for op in program.body if isinstance(op, NamedOp) and op.name == "cross_entropy"
    ]
    if len(entropies) != 1 or "ignore_index" in dict(entropies[0].attrs):
        return program
    (op,) = entropies
    builder = Builder(Diagnostics())
    builder.adopt(program)
    emit = Emit(builder, op.span, None)
    measures = {CROSS_ENTROPY: _mean(emit, op.out), ACCURACY: _accuracy(emit, op)}
    taken = {output.name for output in program.outputs}
    added = [Output(n, value, op.span) for n, value in measures.items() if n not in taken]
    body = tuple(builder.frames[0].body)
    return replace(program, body=body, outputs=(*program.outputs, *added))


def _accuracy(emit: Emit, op: NamedOp) -> Value:
    logits, targets = op.ins
    likeliest = emit("argmax", logits, dims=(op.attr("dim"),))
    if likeliest.type.dtype != targets.type.dtype:
        likeliest = emit("cast", likeliest, dtype=targets.type.dtype)
    return _mean(emit, emit("cast", emit("eq", likeliest, targets), dtype=DTYPES["f32"]))


def _mean(emit: Emit, value: Value) -> Value:
    return emit("mean", value, dims=value.type.dims) if value.type.dims else value
