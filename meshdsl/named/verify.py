"""What is legal in a named program. A violation is our mistake, hence an assert with a message."""

from __future__ import annotations

from meshdsl.ir.types import TensorType
from meshdsl.named.ir import Loop, Node, Op, Program, Value
from meshdsl.ops.opdef import lookup


def verify(program: Program) -> None:
    """Values are defined once, before use; operators' types are what their records say."""
    entered = [*program.inputs, *(p.value for p in program.params)]
    entered += [s.value for s in program.states]
    known = set(entered)
    assert len(known) == len(entered), "a value is entered twice"
    _verify_nodes(program.body, known)
    for update in program.updates:
        assert update.new in known, f"the update of {update.old.label} is not defined"
        assert update.new.type == update.old.type, f"the update of {update.old.label} is another"
    for output in program.outputs:
        assert output.value in known, f"output {output.name} is not defined"


def _verify_nodes(nodes: tuple[Node, ...], known: set[Value]) -> None:
    for node in nodes:
        if isinstance(node, Loop):
            _verify_loop(node, known)
        else:
            _verify_op(node, known)


def _verify_op(op: Op, known: set[Value]) -> None:
    for value in op.ins:
        assert value in known, f"{op.name} reads {value.label}, which is not defined"
    types = lookup(op.name).infer(tuple(v.type for v in op.ins), dict(op.attrs))
    assert types == tuple(v.type for v in op.outs), f"{op.name} yields {types}, not its outputs"
    _define(op.outs, known)


def _verify_loop(loop: Loop, known: set[Value]) -> None:
    inner = set(known)
    for item in loop.stacked:
        assert item.outer in known, f"the stack {item.outer.label} is not defined"
        assert item.inside.type == item.outer.type.without(loop.dim.name)
        inner.add(item.inside)
    for carry in loop.carries:
        assert carry.init in known, f"the carry {carry.init.label} is not defined"
        types = {carry.init.type, carry.inside.type, carry.next.type, carry.result.type}
        assert len(types) == 1, f"the carry {carry.inside.label} changes its type: {types}"
        inner.add(carry.inside)
    _verify_nodes(loop.body, inner)
    for carry in loop.carries:
        assert carry.next in inner, f"{carry.next.label} is not defined at the end of the loop"
    for made in loop.collected:
        assert made.inside in inner, f"{made.inside.label} is not defined in the loop"
        dims = (loop.dim, *made.inside.type.dims)
        assert made.outer.type == TensorType(dims, made.inside.type.dtype)
    _define(loop.makes, known)


def _define(values: tuple[Value, ...], known: set[Value]) -> None:
    for value in values:
        assert value not in known, f"{value.label} is defined twice"
        known.add(value)
