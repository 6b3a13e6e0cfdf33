"""`repeat`: a loop carries names from before it, and slices tensors that have its dim."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from meshdsl.diagnostics import Fix, Poisoned, Related, fail
from meshdsl.ir.program import Carry
from meshdsl.ir.types import DTYPES, Dim
from meshdsl.named.builder import Frame, Operand, Scope
from meshdsl.named.ir import Loop, Value
from meshdsl.syntax import ast
from meshdsl.syntax.edits import cast_to

if TYPE_CHECKING:
    from meshdsl.named.from_syntax import ProgramBuilder

MAX_LOOPS = 12
"""The greatest depth of loops once calls are inlined; Python itself allows 20 in a program."""


class Loops:
    """Builds the loops of a program."""

    def __init__(self, program: ProgramBuilder) -> None:
        self.program = program
        self.builder = program.builder

    def repeat(self, node: ast.Repeat, scope: Scope) -> None:
        """One loop: names that existed before are carried, new ones stay inside."""
        for statement in node.body:
            if isinstance(statement, ast.Return):
                help = "return after the loop"
                fail("MD0113", "`return` inside `repeat`", statement.span, help=help)
        if len(self.builder.frames) > MAX_LOOPS:
            message = f"more than {MAX_LOOPS} loops stand inside each other"
            fail("MD0118", message, node.dim.span, help="merge two of their dims into one")
        dim = self.program.expressions.dim(node.dim, scope)
        outer = dict(scope.names)
        names = [n for n in dict.fromkeys(assigned(node.body)) if n in outer]
        inits = {n: self._carried(n, outer[n], dim, node, scope) for n in names}
        self.builder.frames.append(Frame(dim))
        try:
            insides = {n: self._inside(v) for n, v in inits.items()}
            scope.names = {**outer, **insides}
            self.program.body(node.body, scope)
            after, frame = scope.names, self.builder.frames[-1]
            nexts = {n: self._next(n, insides[n], after[n], node, scope) for n in names}
        finally:
            new = [n for n in scope.names if n not in outer]
            places = {name.text: name.span for name in reversed(targets(node.body))}
            scope.local_to_loop.update({n: places.get(n, node.span) for n in new})
            scope.names = outer
            self.builder.frames.pop()
        carries = tuple(
            Carry(inits[n], insides[n], nexts[n], self._result(nexts[n], insides[n])) for n in names
        )
        scope.names = outer | {n: c.result for n, c in zip(names, carries, strict=True)}
        stacked = self.builder.stacks(frame)
        body, phase = tuple(frame.body), self.builder.phase
        loop = Loop(dim, carries, stacked, body, node.span, phase=phase, block=self.builder.block)
        self.builder.frames[-1].body.append(loop)

    def _carried(
        self, name: str, operand: Operand | None, dim: Dim, node: ast.Repeat, scope: Scope
    ) -> Value:
        if operand is None:
            raise Poisoned
        value = operand
        if isinstance(value, int | float):
            value = self.builder.constant(value, DTYPES["f32"], node.span, scope)
        assert isinstance(value, Value)
        value = self.builder.reach(value)
        if value.type.has(dim.name):
            message = f"`{name}` is carried through the loop and has its dim `{dim.name}`"
            help = "assign to another name inside, or rename the dim"
            where = Related(value.span, f"`{name}` is {value.type}")
            fail("MD0256", message, node.dim.span, where, help=help)
        return value

    def _inside(self, init: Value) -> Value:
        inside = replace(init, role="activation", pins=())
        self.builder.place(inside, len(self.builder.frames) - 1)
        return inside

    def _next(
        self, name: str, inside: Value, operand: Operand | None, node: ast.Repeat, scope: Scope
    ) -> Value:
        if operand is None:
            raise Poisoned
        if not isinstance(operand, Value):
            assert isinstance(operand, int | float), "names stand for tensors and numbers"
            operand = self.builder.constant(operand, inside.type.dtype, node.span, scope)
        value = self.builder.reach(operand)
        same = set(value.type.dims) == set(inside.type.dims)
        if not same or value.type.dtype != inside.type.dtype:
            where = Related(inside.span, f"it enters the loop as {inside.type}")
            message = f"`{name}` leaves an iteration as {value.type}"
            help = "what a loop carries keeps its dims and dtype"
            fixes: tuple[Fix, ...] = ()
            if same:
                help += f"; cast it back: `cast({name}, {inside.type.dtype})`"
                fixes = _cast_back(name, str(inside.type.dtype), node)
            fail("MD0256", message, value.span, where, help=help, fixes=fixes)
        if value.type.dims != inside.type.dims:
            attrs = {"dims": inside.type.dims}
            value = self.builder.emit("transpose", (value,), attrs, node.span, scope)[0]
        return value

    def _result(self, next_: Value, inside: Value) -> Value:
        result = replace(next_, type=inside.type, pins=())
        self.builder.place(result, len(self.builder.frames) - 1)
        return result


def _cast_back(name: str, dtype: str, node: ast.Repeat) -> tuple[Fix, ...]:
    """The fix that casts what the last statement of a loop assigns to a name."""
    found = [s for s in node.body if isinstance(s, ast.Assign) and name in assigned((s,))]
    if not found or len(found[-1].targets) > 1:
        return ()
    return (cast_to(found[-1].value.span, dtype, safe=False),)


def assigned(statements: tuple[ast.Statement, ...]) -> list[str]:
    """The names that statements assign to tensors, including those of blocks inside."""
    return [name.text for name in targets(statements)]


def targets(statements: tuple[ast.Statement, ...]) -> list[ast.Name]:
    """The assigned names of `assigned`, with their places."""
    names: list[ast.Name] = []
    for statement in statements:
        match statement:
            case ast.Assign():
                names += [t.name for t in statement.targets]
            case ast.Param():
                names.append(statement.target.name)
            case ast.Repeat() | ast.Recompute():
                names += targets(statement.body)
    return names
