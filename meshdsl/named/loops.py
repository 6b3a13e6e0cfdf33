"""`repeat`: a loop carries names from before it, and slices tensors that have its dim.

A name that it is the first to assign is the stack of all iterations afterwards, if it is read.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from meshdsl.diagnostics import Diagnostics, Fix, Poisoned, Related, advice, fail
from meshdsl.ir.program import Carry
from meshdsl.ir.types import DTYPES, Dim
from meshdsl.named.builder import Frame, Operand, Scope, Stack
from meshdsl.named.ir import NamedLoop, Value
from meshdsl.syntax import ast
from meshdsl.syntax.edits import cast_to

if TYPE_CHECKING:
    from meshdsl.named.from_syntax import ProgramBuilder

MAX_LOOPS = 12
"""The greatest depth of loops once calls are inlined; Python itself allows 20 in a program."""

Names = dict[str, Operand | None]


class LoopBuilder:
    """Builds the loops of a program."""

    def __init__(self, program: ProgramBuilder) -> None:
        self.program = program
        self.builder = program.builder

    def repeat(self, node: ast.Repeat, scope: Scope) -> None:
        """One loop: names that existed before are carried, new ones are stacked."""
        body = without_returns(node.body, "loop", self.builder.diagnostics)
        if len(self.builder.frames) > MAX_LOOPS:
            message = f"more than {MAX_LOOPS} loops stand inside each other"
            fail("MD0118", message, node.dim.span, help="merge two of their dims into one")
        outer, collect = dict(scope.names), self.builder.diagnostics.of
        stacks = scope.stacks
        dim = collect(partial(self.program.expressions.dim, node.dim, scope))
        if dim is None:
            self._over_nothing(node, body, scope)
            return
        names = [n for n in dict.fromkeys(assigned(body)) if n in outer]
        scope.stacks = _made_again(stacks, body)
        tried = {n: collect(partial(self._carried, n, outer[n], dim, node, scope)) for n in names}
        inits = {n: value for n, value in tried.items() if value is not None}
        self.builder.frames.append(Frame(dim))
        try:
            insides = {n: self._inside(v) for n, v in inits.items()}
            scope.names = {**outer, **dict.fromkeys(names), **insides}
            self.program.body(body, scope)
            after, frame = scope.names, self.builder.frames[-1]
            nexts = {n: self._next(n, insides[n], after[n], node, scope) for n in insides}
        finally:
            self.builder.frames.pop()
            self._leave(node, dim, outer, stacks, scope)
        carries = tuple(
            Carry(inits[n], insides[n], nexts[n], self._result(nexts[n], insides[n])) for n in inits
        )
        results = {n: c.result for n, c in zip(inits, carries, strict=True)}
        scope.names = {**outer, **dict.fromkeys(names), **results}
        stacked = self.builder.stacks(frame)
        inside, phase = tuple(frame.body), self.builder.phase
        loop = NamedLoop(
            dim, carries, stacked, inside, node.span, phase=phase, block=self.builder.block
        )
        self.builder.frames[-1].body.append(loop)

    def _over_nothing(
        self, node: ast.Repeat, body: tuple[ast.Statement, ...], scope: Scope
    ) -> None:
        """Find the errors in a loop over an unknown dim: it may slice any tensor of before.

        What it carries keeps its type.
        """
        outer, stacks = scope.names, scope.stacks
        scope.names = dict.fromkeys(outer)
        self.program.body(body, scope)
        self._leave(node, None, outer, stacks, scope)

    def _leave(
        self,
        node: ast.Repeat,
        dim: Dim | None,
        outer: Names,
        stacks: dict[str, Stack],
        scope: Scope,
    ) -> None:
        """Take the names that a loop has made out of the scope: after it, they are stacks."""
        depth = len(self.builder.frames) - 1
        places = {name.text: name.span for name in reversed(targets(node.body))}
        assigned_here: dict[str, Operand | Stack | None] = {
            n: s for n, s in scope.stacks.items() if stacks.get(n) is not s and s.depth > depth
        }
        assigned_here.update({n: operand for n, operand in scope.names.items() if n not in outer})
        left = {
            n: Stack(n, dim, x, depth, places.get(n, node.span)) for n, x in assigned_here.items()
        }
        scope.names, scope.stacks = outer, {**stacks, **left}

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
        """The value that a loop hands on; of a wrong one, which is reported, only the type."""
        collect = self.builder.diagnostics.of
        return collect(partial(self._checked, name, inside, operand, node, scope)) or inside

    def _checked(
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
                fixes = _cast_back(name, str(inside.type.dtype), node)
                help = advice(fixes, help) or help
            fail("MD0256", message, value.span, where, help=help, fixes=fixes)
        if value.type.dims != inside.type.dims:
            attrs = {"dims": inside.type.dims}
            value = self.builder.emit("transpose", (value,), attrs, node.span, scope)[0]
        return value

    def _result(self, next_: Value, inside: Value) -> Value:
        result = replace(next_, type=inside.type, pins=())
        self.builder.place(result, len(self.builder.frames) - 1)
        return result


def _made_again(stacks: dict[str, Stack], body: tuple[ast.Statement, ...]) -> dict[str, Stack]:
    """The stacks of loops before, as a loop begins; those whose names it assigns are no more."""
    places = {name.text: name.span for name in reversed(targets(body))}
    return {n: replace(s, again=places.get(n, s.again)) for n, s in stacks.items()}


def _cast_back(name: str, dtype: str, node: ast.Repeat) -> tuple[Fix, ...]:
    """The fix that casts what the last statement of a loop assigns to a name."""
    assignments = [s for s in node.body if isinstance(s, ast.Assign) and name in assigned((s,))]
    if not assignments or len(assignments[-1].targets) > 1:
        return ()
    return (cast_to(assignments[-1].value.span, dtype, safe=False),)


def without_returns(
    body: tuple[ast.Statement, ...], block: str, diagnostics: Diagnostics
) -> tuple[ast.Statement, ...]:
    """The statements of a block (`loop`, `block`) less any `return`, which is reported."""
    word = {"loop": "repeat", "block": "recompute"}[block]
    for statement in body:
        if isinstance(statement, ast.Return):
            refusal = partial(fail, "MD0113", f"`return` inside `{word}`", statement.span)
            diagnostics.of(partial(refusal, help=f"return after the {block}"))
    return tuple(s for s in body if not isinstance(s, ast.Return))


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
            case ast.ParamDecl():
                names.append(statement.target.name)
            case ast.Repeat() | ast.Recompute():
                names += targets(statement.body)
    return names
