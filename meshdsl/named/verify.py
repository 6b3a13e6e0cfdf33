"""The rules for a named program: types of operators agree with their records."""

from __future__ import annotations

from collections.abc import Iterable, Set

from meshdsl.ir.printer import type_text
from meshdsl.ir.types import TensorType
from meshdsl.ir.verify import Verifier
from meshdsl.named.ir import Goal, NamedLoop, NamedOp, NamedProgram, Value
from meshdsl.ops.opdef import lookup


def verify(program: NamedProgram) -> None:
    """Check that values are made once, before they are read, and have the types of their operators.

    A violation is our mistake, hence an assert with a message.
    """
    check = _NamedVerifier()
    entered = (*program.inputs, *(p.value for p in program.params))
    check.define((*entered, *(s.value for s in program.states)))
    check.nodes(program.body)
    check.need((u.new for u in program.updates), "an update")
    for update in program.updates:
        assert update.new.type == update.old.type, f"the update of {update.old.label} is another"
    check.need((o.value for o in program.outputs), "an output")
    if program.goal is not None:
        check.need(program.goal.losses, "a loss")
        _check_groups(program.goal, {p.value for p in program.params})


def _check_groups(goal: Goal, params: Set[Value]) -> None:
    for each in goal.all:
        members = [param for group in each.groups for param in group.params]
        assert params >= {*each.params}, "a goal has what is no parameter"
        assert {*each.params} >= {*members}, "a group has what the loss does not depend on"
        assert len(members) == len({*members}), "a parameter is in two groups"


class _NamedVerifier(Verifier[Value]):
    def label(self, value: Value) -> str:
        return value.label

    def check_value(self, value: Value) -> None:
        outside = f"{value.label} is made in the library, but inside no function"
        assert value.functions or not value.in_library, outside
        source = value.rules_from
        if source is not None and value.name is not None:
            agrees = value.in_library == source.in_library
            assert agrees, f"{value.label} and {source.label}: one is made in the library"

    def check(self, node: NamedOp) -> None:
        self.check_origin(node)
        types = lookup(node.name).infer(tuple(v.type for v in node.ins), dict(node.attrs))
        expected = tuple(v.type for v in node.outs)
        assert types == expected, f"{node.name} yields {_texts(types)}, not {_texts(expected)}"

    def check_loop(self, node: NamedLoop) -> None:
        self.check_origin(node)
        for item in node.stacked:
            actual, expected = item.inside.type, item.outer.type.without(node.dim.name)
            assert actual == expected, f"a slice is {type_text(expected)}, not {type_text(actual)}"
        for carry in node.carries:
            types = {carry.init.type, carry.inside.type, carry.next.type, carry.result.type}
            label = carry.inside.label
            assert len(types) == 1, f"the carry {label} changes its type: {_texts(types)}"
        for collection in node.collected:
            dims = (node.dim, *collection.inside.type.dims)
            actual, expected = collection.outer.type, TensorType(dims, collection.inside.type.dtype)
            assert actual == expected, (
                f"collected is {type_text(expected)}, not {type_text(actual)}"
            )


def _texts(types: Iterable[TensorType]) -> str:
    return ", ".join(map(type_text, types))
