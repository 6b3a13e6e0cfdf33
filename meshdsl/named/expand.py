"""Forms of operators whose own dim is split, in operators that can work on parts.

Composites are replaced by their definition in the prelude. `cumsum` becomes a cumsum inside blocks
plus the sum of the blocks before: only one number per block is exchanged; `linear_recurrence` runs
inside blocks, and sends the states at their ends along a tree; `top_k` ranks inside blocks, and
exchanges the best of each. Floats of two bytes are f32 from the first operator of a
definition or a sum to the last, as inside torch's kernels: in f16 a sum of squares soon overflows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from meshdsl.diagnostics import Diagnostics
from meshdsl.ir.rewrite import in_blocks, rewritten, substitute
from meshdsl.ir.types import F32, I32, Dim, TensorType
from meshdsl.named.attention_fusion import ATTENTION, attention_parts
from meshdsl.named.batch_norm_fusion import BATCH_NORMS, batch_norm_parts
from meshdsl.named.builder import Builder, Scope
from meshdsl.named.declarations import Declarations
from meshdsl.named.emit import Emit
from meshdsl.named.from_syntax import ProgramBuilder
from meshdsl.named.identities import OF_STEPS
from meshdsl.named.ignored_targets import counted_loss
from meshdsl.named.ir import NamedLoop, NamedOp, NamedProgram, Node, Value
from meshdsl.named.prelude import prelude
from meshdsl.named.ring_attention import Ring, ring_attention
from meshdsl.ops.opdef import lookup
from meshdsl.ops.requirements import own_dims
from meshdsl.records import dataclass
from meshdsl.syntax import ast

N = TypeVar("N", bound=NamedOp | NamedLoop)


@dataclass(frozen=True, slots=True)
class Expansion:
    """Operators that yield the same output, and rules (dim, axes) for dims that they introduce."""

    ops: tuple[NamedOp, ...]
    rules: tuple[tuple[Dim, tuple[str, ...]], ...] = ()


Axes = tuple[tuple[str, int], ...]
"""Mesh axes, outer first, with their sizes."""


def may_be_expanded(op: NamedOp) -> bool:
    """Whether an operator has another form on some split."""
    return op.name in IN_BLOCKS or lookup(op.name).composite


def expand(op: NamedOp, split: Mapping[str, Axes]) -> Expansion | None:
    """`op` on parts, None if it has no such form. `split`: own dim -> axes with sizes.

    `OF_STEPS` are left out (`identities.py`): what is placed has its gradients. Walks under many
    layouts ask for the same: their programs share its operators.
    """
    return _expanded(op, tuple(split.items()))


@functools.lru_cache(maxsize=1 << 12)
def _expanded(op: NamedOp, axes: tuple[tuple[str, Axes], ...]) -> Expansion | None:
    expanded = _in_blocks_or_parts(op, dict(axes))
    if expanded is None:
        return None
    return replace(expanded, ops=tuple(map(_once_differentiated, expanded.ops)))


def _once_differentiated(op: NamedOp) -> NamedOp:
    """An operator, or the identity that it is where no gradient is taken any more."""
    if op.name in OF_STEPS and op.ins[0].type == op.out.type:
        return replace(op, name="identity", attrs=())
    return op


def _in_blocks_or_parts(op: NamedOp, split: Mapping[str, Axes]) -> Expansion | None:
    if op.name in IN_BLOCKS:
        (dim,) = op.attr("source") if op.name == "top_k" else own_dims(dict(op.attrs))
        if "." in dim.name:  # what blocks exchange: it would be taken apart without end
            return None
        parts = math.prod(size for _, size in split[dim.name])
        if op.name == "top_k" and dim.size % parts:  # no element to add is less than all others
            return None
        return IN_BLOCKS[op.name](op, split)
    if _is_in_parts(op):
        return _in_parts(op)
    return Expansion(_from_prelude(op)) if lookup(op.name).composite else None


def in_ring(op: NamedOp, ring: Ring) -> tuple[Node, ...]:
    """An attention or its gradient in the steps of a ring."""
    emit = _emit(op)
    for value in op.ins:
        emit.builder.place(value, 0)
    return _nodes(emit, ring_attention(op, ring, op.ins, emit), op)


def in_primitives(program: NamedProgram) -> NamedProgram:
    """The program with attentions, batch norms, and what ignores targets taken apart."""

    def primitives(op: NamedOp) -> tuple[NamedOp, ...]:
        if not _is_in_parts(op):
            return (op,)
        return tuple(inner for part in _in_parts(op).ops for inner in primitives(part))

    return replace(program, body=rewritten(program.body, primitives))


def _is_in_parts(op: NamedOp) -> bool:
    """Whether its definition is a function here, not in the prelude."""
    if op.name not in IN_PARTS:
        return False
    option = lookup(op.name).prelude_lacks
    return not option or option in dict(op.attrs)


def _in_parts(op: NamedOp) -> Expansion:
    emit = _emit(op)
    return Expansion(_yield(emit, IN_PARTS[op.name](op, _operands(op, emit), emit), op))


def _from_prelude(op: NamedOp) -> tuple[NamedOp, ...]:
    """The definition of `op` on its operands, where it is called."""
    types = tuple(v.type for v in op.ins)
    body, operands, result = _definition(op.name, op.attrs, types, op.out.type)
    path, functions = op.out.path, op.out.functions
    new = {**dict(zip(operands, op.ins, strict=True)), result: op.out}
    for value in (v for inner in body for v in inner.outs if v not in new):
        name = ".".join((*path, value.name)) if value.name else None
        inside: dict[str, Any] = {
            "path": (*path, *value.path),
            "functions": (*functions, *value.functions),
            "in_library": True,
        }
        new[value] = replace(value, name=name, **inside)
    placed = (_at(o, op) for o in body)
    return substitute(placed, new)


@functools.lru_cache(maxsize=1024)
def _definition(
    name: str, attrs: tuple[tuple[str, Any], ...], ins: tuple[TensorType, ...], out: TensorType
) -> tuple[tuple[NamedOp, ...], tuple[Value, ...], Value]:
    """The operators of a definition in the prelude, its operands and its result: built once."""
    function = prelude().functions[name]
    span = function.name.span
    operands, result = tuple(Value(t, span) for t in ins), Value(out, span)
    op = NamedOp(name, operands, (result,), attrs, span)
    program = ProgramBuilder(Declarations(span.source), Diagnostics())
    emit = _emit(op, program.builder)
    calls = _calls(op)
    scope = Scope({}, {}, prelude(), calls.path, calls.functions)
    dims_of_operator = own_dims(dict(attrs))
    _bind_dims(function, dims_of_operator, scope)
    scope.groups["..."] = tuple(
        dict.fromkeys(d for t in ins for d in t.dims if d not in dims_of_operator)
    )
    for param, value in zip(function.params, _operands(op, emit), strict=False):
        scope.names[param.name.text] = value
    options = dict(attrs)
    for param in function.params[len(ins) :]:
        name, default = param.name.text, param.default
        assert default is not None
        evaluate = program.expressions.evaluate
        scope.names[name] = options[name] if name in options else evaluate(default, scope)
    (computed,) = program.function_body(function, scope)
    assert not program.diagnostics.errors, list(program.diagnostics)
    return _yield(emit, (computed,), op), operands, result


def _bind_dims(function: ast.FunctionDecl, own: tuple[Dim, ...], scope: Scope) -> None:
    """Bind the dim of a definition to the operator's: to all of them where it has several."""
    (parameter,) = function.dims
    if len(own) == 1:
        scope.dims[parameter.text] = own[0]
        return
    scope.groups[parameter.text] = own
    scope.names[parameter.text] = math.prod(d.size for d in own)


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Dims for the blocks of one that is split, for all of them on each device, and of a block.

    `whole` is the dim with blocks of one size: itself, or with elements added to the last ones.
    """

    dim: Dim
    whole: Dim
    blocks: Dim
    every: Dim
    block: Dim
    rules: tuple[tuple[Dim, tuple[str, ...]], ...]

    @classmethod
    def of(cls, dim: Dim, axes: Axes) -> _Blocks:
        """The dims for `dim` over `axes`. A user's name cannot contain a dot."""
        parts = math.prod(size for _, size in axes)
        blocks, every = Dim(f"{dim.name}.blocks", parts), Dim(f"{dim.name}.all_blocks", parts)
        block = Dim(f"{dim.name}.block", -(-dim.size // parts))
        size = parts * block.size
        even = dim if size == dim.size else Dim(f"{dim.name}.padded", size)
        dims = (blocks,) if even == dim else (even, blocks)
        rules = tuple((d, tuple(a for a, _ in axes)) for d in dims)
        return cls(dim, even, blocks, every, block, rules)

    def split(self, emit: Emit, x: Value, fill: float) -> Value:
        """`x` in blocks; each element that is added is `fill`, in the block that it stands in."""
        if self.whole != self.dim:
            after, ends = self.whole.size - self.dim.size, ((self.dim,), (self.whole,))
            source, target = ends
            x = emit("pad", x, source=source, target=target, before=0, after=after, value=fill)
        return emit("split", x, dim=self.whole, into=(self.blocks, self.block))

    def merge(self, emit: Emit, x: Value) -> Value:
        """The inverse of `split`."""
        x = emit("merge", x, dims=(self.blocks, self.block), into=self.whole)
        if self.whole == self.dim:
            return x
        return emit("slice", x, dim=self.whole, start=0, stop=self.dim.size, target=self.dim)


def _running_sum(op: NamedOp, split: Mapping[str, Axes]) -> Expansion:
    """A running sum inside blocks, plus the sum of the blocks before."""
    dim: Dim = op.attr("dim")
    block_dims = _Blocks.of(dim, split[dim.name])
    blocks, every, block = block_dims.blocks, block_dims.every, block_dims.block
    emit = _emit(op)
    (operand,) = _operands(op, emit)
    x = block_dims.split(emit, operand, 0)
    totals = emit.known_as("totals")("sum", x, dims=(block,))
    totals = emit("rename", totals, pairs=((blocks, every),))
    attrs = {**dict(op.attrs), "dim": every, "exclusive": 1}
    others = emit.known_as("offsets")("cumsum", totals, **attrs)
    offsets = emit("rename", others, pairs=((every, blocks),))
    y = emit("add", emit("cumsum", x, **{**dict(op.attrs), "dim": block}), offsets)
    return Expansion(_yield(emit, (block_dims.merge(emit, y),), op), block_dims.rules)


def _recurrence(op: NamedOp, split: Mapping[str, Axes]) -> Expansion:
    """A recurrence inside blocks for the states at their ends, and once more from these.

    The state before each block is a scan over the blocks: of one block, then of twice as many at
    each step of a tree. A step sends one state, and the product of `a` over the blocks that it is
    of. The first block begins with the initial state. A product may overflow where no state does:
    infinity times 0 is 0 here.
    """
    dim, reverse = op.attr("dim"), op.attr("reverse")
    block_dims = _Blocks.of(dim, split[dim.name])
    blocks, block = block_dims.blocks, block_dims.block
    first, last = (blocks.size - 1, 0) if reverse else (0, block.size - 1)
    emit = _emit(op)
    state_of, decay_of = emit.known_as("state"), emit.known_as("decay")
    is_zero, resets_of = emit.known_as("is_zero"), emit.known_as("resets")

    def before(value: Value, by: int, name: str) -> Value:
        of = emit.known_as(f"{name}_before")
        return of("shift", value, dim=blocks, by=-by if reverse else by)

    a, b, *initial = _operands(op, emit)
    a, b = (v if v.type.has(dim.name) else emit.full(v, (dim, *v.type.dims)) for v in (a, b))
    a, b = block_dims.split(emit, a, 1.0), block_dims.split(emit, b, 0.0)
    if initial:
        is_first = emit("eq", emit("iota", dim=blocks), emit.number(first, I32))
        initial = [emit("where", is_first, initial[0], emit.number(0.0, b.type.dtype))]
    inside = emit.known_as("inside")(
        "linear_recurrence", a, b, *initial, dim=block, reverse=reverse
    )
    state = before(state_of("pick", inside, dim=block, index=last), 1, "state")
    zero = emit.number(0.0, b.type.dtype)
    if blocks.size > 2:
        resets = resets_of("any", is_zero("eq", a, zero), dims=(block,))
        decay = decay_of("where", resets, zero, emit("prod", a, dims=(block,)))
        decay = before(decay, 1, "decay")
    step = 1
    while step < blocks.size - 1:
        earlier = before(state, step, "state")
        sent = emit("where", is_zero("eq", earlier, zero), zero, emit("mul", decay, earlier))
        state = state_of("add", state, sent)
        if 2 * step < blocks.size - 1:
            more = before(decay, step, "decay")
            either = is_zero("eq", decay, zero), is_zero("eq", more, zero)
            resets = resets_of("logical_or", *either)
            decay = decay_of("where", resets, zero, emit("mul", decay, more))
        step *= 2
    state = state_of("add", state, *initial) if initial else state
    y = emit("linear_recurrence", a, b, state, dim=block, reverse=reverse)
    return Expansion(_yield(emit, (block_dims.merge(emit, y),), op), block_dims.rules)


def _top_of_tops(op: NamedOp, split: Mapping[str, Axes]) -> Expansion:
    """The greatest elements of the blocks, and the greatest of these with their global indices.

    Candidates are in the order of their blocks, and equals inside a block in that of their
    indices, so that of equals the first is the first of all.
    """
    (dim,), (target,) = op.attr("source"), op.attr("target")
    block_dims = _Blocks.of(dim, split[dim.name])
    size = min(target.size, block_dims.block.size)
    top = Dim(f"{dim.name}.top", size)
    candidates = Dim(f"{dim.name}.candidates", size * block_dims.blocks.size)
    emit = _emit(op)
    emit.builder.place(op.ins[0], 0)

    def gathered(value: Value) -> Value:
        renamed = emit("rename", value, pairs=((block_dims.blocks, block_dims.every),))
        return emit("merge", renamed, dims=(block_dims.every, top), into=candidates)

    x = block_dims.split(emit, op.ins[0], 0)
    best, inside = emit.all("top_k", x, source=(block_dims.block,), target=(top,))
    width = emit.number(block_dims.block.size, I32)
    start = emit("mul", emit("iota", dim=block_dims.blocks), width)
    index = emit("add", inside, start)
    values, place = emit.all("top_k", gathered(best), source=(candidates,), target=(target,))
    which = emit("gather", gathered(index), place, dim=candidates)
    which = emit("transpose", which, dims=op.outs[1].type.dims)
    ops = [o for o in emit.builder.frames[0].body if isinstance(o, NamedOp)]
    substituted = substitute(ops, {values: op.outs[0], which: op.outs[1]})
    placed = (_at(o, op) for o in substituted)
    return Expansion(tuple(placed), block_dims.rules)


IN_BLOCKS = {"cumsum": _running_sum, "linear_recurrence": _recurrence, "top_k": _top_of_tops}
"""Operators that work on the blocks of their own dim, and then on one or a few values of each."""

IN_PARTS = {
    **dict.fromkeys(ATTENTION, attention_parts),
    **dict.fromkeys(BATCH_NORMS, batch_norm_parts),
    "cross_entropy": counted_loss,
}
"""Operators that have the definition of a function here.

Those with a definition in the prelude as well have this one for what it lacks
(`OpDef.prelude_lacks`).
"""


def _at(inner: N, op: NamedOp) -> N:
    """A node of the definition of `op`, at its place and for the same reason."""
    return replace(inner, span=op.span, phase=op.phase, block=op.block, origin=op.origin)


@dataclass(frozen=True, slots=True)
class _InDefinition:
    """The calls that the definition of an operator is inside: its own is the last."""

    path: tuple[str, ...]
    functions: tuple[str, ...]
    in_library: bool = True


def _emit(op: NamedOp, builder: Builder | None = None) -> Emit:
    """Emits the definition of `op`, by itself or where a `builder` is."""
    return Emit(builder or Builder(Diagnostics()), op.span, _calls(op))


def _calls(op: NamedOp) -> _InDefinition:
    first = op.outs[0]
    return _InDefinition((*first.path, op.name), (*first.functions, op.name))


def _operands(op: NamedOp, emit: Emit) -> tuple[Value, ...]:
    """The operands of `op`; floats of two bytes as f32 where the result is one of them."""
    for value in op.ins:
        emit.builder.place(value, 0)
    dtype = op.outs[0].type.dtype
    floats = {v.type.dtype for v in op.ins if v.type.dtype.kind == "float"}
    if dtype not in floats or dtype.bytes >= F32.bytes:
        return op.ins
    return tuple(
        emit.cast(v, F32) if v.type.dtype in floats and v.type.dtype.bytes < F32.bytes else v
        for v in op.ins
    )


def _yield(emit: Emit, results: tuple[object, ...], op: NamedOp) -> tuple[NamedOp, ...]:
    """The operators built, which yield the outputs of `op` itself; all at its place."""
    return tuple(node for node in _nodes(emit, results, op) if isinstance(node, NamedOp))


def _nodes(emit: Emit, results: tuple[object, ...], op: NamedOp) -> tuple[Node, ...]:
    """The same of definitions with loops."""
    new: dict[Value, Value] = {}
    for result, out in zip(results, op.outs, strict=True):
        assert isinstance(result, Value)
        result = emit.cast(result, out.type.dtype)
        if result.type.dims != out.type.dims:
            result = emit("transpose", result, dims=out.type.dims)
        body = emit.builder.frames[0].body
        if result in new or not any(result in node.makes for node in body):
            result = emit("identity", result)
        new[result] = out
    nodes = substitute(emit.builder.frames[0].body, new)
    return in_blocks(nodes, lambda block: [_at(node, op) for node in block])
