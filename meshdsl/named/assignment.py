"""`name := value`: state of the program's own, such as running averages, weight averages, caches.

The state is a parameter that is assigned and not minimised. All reads in a step are of the value
that the step began with, wherever they stand; the next step begins with the assigned one. (As a
`tf.Variable` in a graph of Mesh-TensorFlow, whose assignments run at the end of the step.)
"""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING

from meshdsl.diagnostics import (
    DiagnosticError,
    Edit,
    Fix,
    Poisoned,
    Related,
    Span,
    advice,
    both,
    fail,
)
from meshdsl.named.builder import Operand, Scope, Stack, kind_of
from meshdsl.named.calls import mismatch, summed
from meshdsl.named.declarations import unknown
from meshdsl.named.ir import Update, Value
from meshdsl.records import dataclass
from meshdsl.syntax import ast
from meshdsl.syntax.edits import cast_to, without_line
from meshdsl.syntax.statement_edits import after_loop, of_each_iteration

if TYPE_CHECKING:
    from meshdsl.named.from_syntax import ProgramBuilder


_ASSIGNS = re.compile(r"\s*(:=)")


@dataclass(frozen=True, slots=True)
class _Assigned:
    """The value of a state, all iterations' where loops are around, and the place."""

    new: Value | Stack
    span: Span
    scope: Scope


class AssignmentBuilder:
    """The `:=` statements of a program."""

    def __init__(self, program: ProgramBuilder) -> None:
        self.program = program
        self.builder = program.builder
        self.assigned: dict[Value, _Assigned] = {}

    def update(self, node: ast.UpdateStatement, scope: Scope) -> None:
        """Record what a parameter is in the next step."""
        evaluate = partial(self.program.expressions.evaluate, node.value, scope)
        param, operand = both(partial(self._state, node.name, scope), evaluate)
        self.program.refused.settle(node.value, operand, scope)
        self.assign(param, operand, node, scope)

    def assign(
        self, param: Value, operand: Operand, node: ast.UpdateStatement, scope: Scope
    ) -> None:
        """Record a value of a parameter's type, or of its slice in the loops around."""
        self._need_once(param, node)
        value = self._typed(self.builder.reach(param), operand, node, scope)
        if all(value not in earlier.makes for earlier in self.builder.frames[-1].body):
            (value,) = self.builder.emit("identity", (value,), {}, node.span, scope)
        new: Value | Stack = value
        for depth, frame in reversed(list(enumerate(self.builder.frames[1:]))):
            new = Stack(param.label, frame.dim, new, depth, node.name.span)
        self.assigned[param] = _Assigned(new, node.name.span, scope)

    def _state(self, name: ast.Name, scope: Scope) -> Value:
        """The parameter that a name means in the body that declares it."""
        if name.text in scope.stacks and name.text not in scope.names:
            # After the loop that declares it, a parameter has the dim of the loop.
            stack = self.program.expressions.reference(name, scope)
            return self.own(name, stack, name.text in scope.params)
        if name.text not in scope.names:
            help = f"declare it above: `param {name.text}[dims] = zeros()`"
            params = [n for n in scope.params if n in scope.names]
            raise DiagnosticError(unknown("MD0102", "tensor", name, params, help))
        operand = scope.names[name.text]
        if operand is None:
            raise Poisoned
        return self.own(name, operand, name.text in scope.params)

    def own(self, name: ast.Name, found: Operand, declared: bool) -> Value:
        """`found` as a state, if it is a parameter; `declared`: that body declares such a name."""
        if isinstance(found, Value) and found.role == "param" and declared:
            return found
        what = kind_of(found)
        fixes = _named(name)
        help = advice(fixes, f"or declare `param {name.text}[dims] = zeros()`")
        if isinstance(found, Value) and found.role == "input":
            what = "an input"
        elif isinstance(found, Value) and found.role == "param":
            what, help = "a parameter of the caller", "return the new value, and assign it there"
            fixes = ()
        elif declared:
            what = "another tensor by now"
        where = (Related(found.span, "made here"),) if isinstance(found, Value) else ()
        message = f"`:=` assigns parameters, and `{name.text}` is {what}"
        fail("MD0137", message, name.span, *where, help=help, fixes=fixes)

    def _need_once(self, param: Value, node: ast.UpdateStatement) -> None:
        if param in self.assigned:
            where = Related(self.assigned[param].span, "first assigned here")
            fixes = (Fix("remove the line", (Edit(without_line(node.span), ""),), safe=False),)
            help = advice(fixes, "or write the new value in one statement")
            message = f"`{param.label}` is assigned twice"
            fail("MD0138", message, node.name.span, where, help=help, fixes=fixes)
        loops = [frame.dim for frame in self.builder.frames if frame.dim is not None]
        for loop in loops:
            if not param.type.has(loop.name):
                message = f"every iteration over `{loop.name}` would assign `{param.label}`"
                where = Related(param.span, f"this is {param.type}")
                ways = of_each_iteration(node.span, param.span) + after_loop(node.span)
                told = advice(ways) or "declare it in the loop, or assign it after the loop"
                fail("MD0139", message, node.name.span, where, help=told, fixes=ways)

    def _typed(
        self, state: Value, operand: Operand, node: ast.UpdateStatement, scope: Scope
    ) -> Value:
        """The new value with the dims of the state, in their order; MD0140 for another type."""
        span = node.value.span
        if isinstance(operand, int | float) and not state.type.dims:
            operand = self.builder.constant(operand, state.type.dtype, span, scope)
        if not isinstance(operand, Value):
            message = f"`{node.name.text}` is {state.type}, and this is {kind_of(operand)}"
            ones = f"ones[{', '.join(state.type.names)}]() * "
            if not isinstance(operand, int | float):
                fail("MD0140", message, span, help=f"make a tensor of it: `{ones}…`")
            filled = Fix.write(span, f"{ones}{span.text}", safe=False)
            fail("MD0140", message, span, fixes=(filled,))
        problem = mismatch(operand, state.type.dims, rest=False)
        fixes = () if problem is None else summed(operand, state.type.dims, span)
        if problem is None and operand.type.dtype != state.type.dtype:
            problem = f"this tensor is {operand.type}"
            fixes = (cast_to(span, str(state.type.dtype), safe=False),)
        if problem is not None:
            where = Related(state.span, "declared here")
            help = advice(fixes, f"`{node.name.text}` is {state.type}, and stays so")
            fail("MD0140", f"`{node.name.text}`: {problem}", span, where, help=help, fixes=fixes)
        if operand.type.dims == state.type.dims:
            return operand
        attrs = {"dims": state.type.dims}
        return self.builder.emit("transpose", (operand,), attrs, span, scope)[0]

    def finish(self) -> tuple[Update, ...]:
        """The updates of a whole program; what a loop assigns is collected over its iterations."""
        return tuple(Update(param, self._whole(param, a)) for param, a in self.assigned.items())

    def _whole(self, param: Value, made: _Assigned) -> Value:
        new = made.new
        if isinstance(new, Stack):
            new = self.builder.stacked(new, made.span, made.scope)
        new = self.builder.current(new)
        if new.type.dims == param.type.dims:
            return new
        attrs = {"dims": param.type.dims}
        return self.builder.emit("transpose", (new,), attrs, made.span, made.scope)[0]


def _named(name: ast.Name) -> tuple[Fix, ...]:
    """The fix that names what is computed, by `=`."""
    sign = _ASSIGNS.match(name.span.source.text, name.span.end)
    if sign is None:
        return ()
    title = f"write `{name.text} = …`"
    return (Fix(title, (Edit(Span(name.span.source, *sign.span(1)), "="),), safe=False),)
