"""Passes over the named program: contractions, loop-invariant code motion, dead code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from meshdsl.ir.rewrite import in_blocks, makers, needed, rewritten, rewritten_block
from meshdsl.ir.types import F32, F64
from meshdsl.named.ir import NamedLoop, NamedOp, NamedProgram, Node, Value, kept, uses_of
from meshdsl.named.origins import with_kept_origins
from meshdsl.ops.opdef import lookup

# --- operators that are merged with their operands -----------------------------------------------


Rule = Callable[[NamedOp, dict[Value, NamedOp], Counter[Value]], tuple[NamedOp, ...]]
"""The operators in place of one, by the makers in its block and the number of reads of values."""


def _merged(program: NamedProgram, rule: Rule) -> NamedProgram:
    uses = uses_of(program)

    def block(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        by_result = makers(nodes)
        return rewritten_block(nodes, lambda op: rule(op, by_result, uses))

    return replace(program, body=in_blocks(program.body, block))


# --- sum[k](a * b) is einsum(a, b -> …) -------------------------------------------------------


def contract_products(program: NamedProgram, is_step: bool) -> NamedProgram:
    """Replace the `sum` of a product with no other use by an einsum, which never stores it.

    Not before products become narrow (`compute`): what is a sum for the program stays wide.
    """
    goal = program.goal
    if not is_step and goal is not None and goal.optimizer.compute is not None:
        return program
    return _merged(program, _contracted)


def _contracted(
    op: NamedOp, made: dict[Value, NamedOp], uses: Counter[Value]
) -> tuple[NamedOp, ...]:
    if op.name != "sum" or not _is_hidden_product(op.ins[0], made, uses):
        return (op,)
    operands = _operands(op.ins[0], made, uses)
    constants = [v for v in operands if v in made and made[v].name == "constant"]
    tensors = [v for v in operands if v not in constants]
    if len(tensors) < 2 or op.out.type.dtype.kind == "bool":
        return (op,)
    dims = (("dims", op.out.type.dims),)
    if not constants:
        return (replace(op, name="einsum", ins=tuple(tensors), attrs=dims),)
    value = replace(op.out, name=None, pins=())
    made_ops = [replace(op, name="einsum", ins=tuple(tensors), outs=(value,), attrs=dims)]
    for constant in constants[:-1]:
        value = _scaled(made_ops, value, constant, replace(op.out, name=None, pins=()), op)
    _scaled(made_ops, value, constants[-1], op.out, op)
    return tuple(made_ops)


def _scaled(ops: list[NamedOp], value: Value, constant: Value, out: Value, op: NamedOp) -> Value:
    ops.append(replace(op, name="mul", ins=(value, constant), outs=(out,), attrs=()))
    return out


def _is_hidden_product(value: Value, made: dict[Value, NamedOp], uses: Counter[Value]) -> bool:
    """Whether a value is a product without a name and with one use: its removal is invisible."""
    plain = value.name is None and not value.pins and uses[value] == 1
    return plain and value in made and made[value].name == "mul"


def _operands(value: Value, made: dict[Value, NamedOp], uses: Counter[Value]) -> list[Value]:
    if not _is_hidden_product(value, made, uses):
        return [value]
    return [leaf for v in made[value].ins for leaf in _operands(v, made, uses)]


# --- sum(x^2) is one reduction ------------------------------------------------------------------

_OF_SQUARES = {"sum": "squared_norm", "mean": "mean_square"}
"""What a reduction over all dims is called, of squares that nothing else reads."""


def contract_squares(program: NamedProgram) -> NamedProgram:
    """Replace the sum or mean of all squares by a reduction that does not store them.

    That is how losses are written and norms of gradients are taken. In a narrow dtype each square
    is rounded, and stays.
    """
    return _merged(program, _of_squares)


def _of_squares(
    op: NamedOp, made: dict[Value, NamedOp], uses: Counter[Value]
) -> tuple[NamedOp, ...]:
    if op.name not in _OF_SQUARES or op.out.type.dims:
        return (op,)
    square = made.get(op.ins[0])
    plain = op.ins[0].name is None and not op.ins[0].pins and uses[op.ins[0]] == 1
    wide = op.out.type.dtype in (F32, F64)
    if square is None or square.name != "square" or not (plain and wide):
        return (op,)
    return (replace(op, name=_OF_SQUARES[op.name], ins=square.ins),)


# --- the sum of an `unpick` of every index is a stack ----------------------------------------


def stack_picks(program: NamedProgram) -> NamedProgram:
    """Replace the sum of an `unpick` of each index of a dim by a stack of their operands.

    The gradient of a tensor of which every part is read by itself, such as the gates of an LSTM, is
    such a sum: of tensors that are 0 but for one part.
    """
    return _merged(program, _stack)


def _stack(op: NamedOp, made: dict[Value, NamedOp], uses: Counter[Value]) -> tuple[NamedOp, ...]:
    if op.name != "add":
        return (op,)
    parts = [made.get(v) for v in _addends(op, made, uses)]
    parts_by_index = {p.attr("index"): p for p in parts if p is not None and p.name == "unpick"}
    first = parts[0]
    if first is None or len(parts_by_index) < len(parts):
        return (op,)
    dim, at = first.attr("dim"), first.attr("at")
    alike = all(p.attr("dim") == dim and p.out.type == op.out.type for p in parts_by_index.values())
    if not alike or len(parts) < dim.size:
        return (op,)
    ins = tuple(parts_by_index[i].ins[0] for i in range(dim.size))
    return (replace(op, name="stack", ins=ins, attrs=(("dim", dim), ("at", at))),)


def _addends(op: NamedOp, made: dict[Value, NamedOp], uses: Counter[Value]) -> list[Value]:
    """The terms of a sum: `op` is an addition, and so are operands that nothing else reads.

    The terms of a gradient are all called as it is.
    """
    terms: list[Value] = []
    for value in op.ins:
        inner = made.get(value)
        is_hidden = value.name in (None, op.out.name) and not value.pins and uses[value] == 1
        if is_hidden and inner is not None and inner.name == "add":
            terms += _addends(inner, made, uses)
        else:
            terms.append(value)
    return terms


# --- einsum(a -> …) of every dim is a transpose -------------------------------------------------


def name_transposes(program: NamedProgram) -> NamedProgram:
    """Replace einsums that only reorder dims by transposes, which are views of their operand."""
    return replace(program, body=rewritten(program.body, lambda op: (_transposed(op),)))


def _transposed(op: NamedOp) -> NamedOp:
    reorders = op.name == "einsum" and len(op.ins) == 1
    if not reorders or len(op.ins[0].type.dims) != len(op.out.type.dims):
        return op
    return replace(op, name="transpose")


# --- loop-invariant code motion -----------------------------------------------------------------


def hoist_invariants(program: NamedProgram) -> NamedProgram:
    """Compute operators that yield the same in every iteration of a loop once, before it.

    Readers of a parameter stay: it is gathered where it is used, and a copy of it would be live as
    long as the loop runs. So do makers of constants that feed nothing that moves.
    """
    return replace(program, body=in_blocks(program.body, _hoisted))


def _hoisted(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    return tuple(h for n in nodes for h in (_out_of(n) if isinstance(n, NamedLoop) else (n,)))


def _out_of(loop: NamedLoop) -> tuple[Node, ...]:
    """The operators that leave a loop, and the loop without them."""
    inside = {*loop.enters, *(v for node in loop.body for v in node.makes)}
    moved: list[NamedOp] = []
    for node in loop.body:
        if isinstance(node, NamedOp) and _may_leave(node, loop) and inside.isdisjoint(node.ins):
            moved.append(node)
            inside.difference_update(node.outs)
    # Makers cost nothing inside the loop.
    read: set[Value] = set()
    leaving: list[NamedOp] = []
    for op in reversed(moved):
        if op.ins or not read.isdisjoint(op.outs):
            read.update(op.ins)
            leaving.append(replace(op, block=None))
    gone = {v for op in leaving for v in op.outs}
    stay = tuple(node for node in loop.body if gone.isdisjoint(node.makes))
    return (*reversed(leaving), replace(loop, body=stay))


def _may_leave(op: NamedOp, loop: NamedLoop) -> bool:
    """Whether an operator may move before a loop, if it reads nothing that is made in it."""
    plain = op.phase == "forward" and not lookup(op.name).overwrites
    reads_param = any(v.role == "param" for v in op.ins)
    return plain and not reads_param and not any(v.type.has(loop.dim.name) for v in op.outs)


# --- dead code -------------------------------------------------------------------------------


def drop_unused(program: NamedProgram) -> NamedProgram:
    """Remove operators, loops, carries and slices whose results nobody reads, if there are any."""
    return with_kept_origins(program, eliminate_dead_code(program))


def eliminate_dead_code(program: NamedProgram) -> NamedProgram:
    """Remove what no output, update or loss needs; origins may name values that are gone."""
    body = needed(program.body, set(kept(program)))
    return program if body == program.body else replace(program, body=body)
