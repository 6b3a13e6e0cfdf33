"""Random numbers in a program: the stream and seed of each call, and programs without dropout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from meshdsl.diagnostics import Fix, Span, advice, fail
from meshdsl.ir.rewrite import Rebuild, reads_of
from meshdsl.ir.types import I64, TensorType
from meshdsl.named.builder import Operand, Scope, kind_of
from meshdsl.named.ir import NamedLoop, NamedOp, NamedProgram, Value, walk
from meshdsl.ops.opdef import OpDef
from meshdsl.syntax import ast
from meshdsl.syntax.edits import argument, removal

if TYPE_CHECKING:
    from meshdsl.named.from_syntax import ProgramBuilder


class Streams:
    """The streams that the calls of one program draw from: no two share one.

    `seeds` is the seed of the run, an input of the program, if a call draws from it.
    """

    def __init__(self, program: ProgramBuilder) -> None:
        self.program, self.builder = program, program.builder
        self.seeds: tuple[Value, ...] = ()

    def drawing(
        self,
        opdef: OpDef,
        operands: tuple[Value, ...],
        attrs: Mapping[str, Any],
        spans: Sequence[Span],
        node: ast.CallExpr,
        scope: Scope,
    ) -> tuple[tuple[Value, ...], dict[str, Any]]:
        """The operands of a call with its seed and the indices of loops, and its attributes."""
        tensors = opdef.surface.arity[0]
        seeds: list[tuple[Operand, Span]] = []
        seeds += [*zip(operands, spans, strict=True)][tensors:]
        option = attrs["seed"]
        if option is not None:
            places = [k.value.span for k in node.keywords if k.name.text == "seed"]
            by_position = node.args[-1].span if node.args else node.span
            seeds.append((option, places[0] if places else by_position))
        if len(seeds) > 1:
            second = seeds[1][1]
            fixes = (removal(argument(second)),) if second != node.span else ()
            message = f"`{opdef.name}` is given two seeds"
            fail("MD0251", message, second, help=None if fixes else "remove one", fixes=fixes)
        seed = self._seed(opdef, *seeds[0], scope) if seeds else self.seed(node.span)
        path, _ = scope.enter(opdef.name)
        numbers = (self.builder.reach(seed), *self.builder.loop_indices(node.span, scope))
        others = {name: value for name, value in attrs.items() if name != "seed"}
        return (*operands[:tensors], *numbers), {**others, "stream": ".".join(path)}

    def seed(self, span: Span) -> Value:
        """The seed of the run; in training, that of the step."""
        if not self.seeds:
            name, taken = "seed", {v.label for v in self.program.inputs}
            while name in taken:
                name += "_"
            seed = self.builder.value(TensorType((), I64), span, name=name, role="seed")
            self.builder.place(seed, 0)
            self.seeds = (seed,)
        return self.builder.reach(self.seeds[0])

    def _seed(self, opdef: OpDef, operand: Operand, span: Span, scope: Scope) -> Value:
        """The seed that a call is given: an integer, or a tensor of one. Raises MD0231."""
        if isinstance(operand, Value):
            if operand.type.dtype.kind != "int" or operand.type.dims:
                _refuse(opdef, operand, span)
            return operand
        if not isinstance(operand, int) or not -(2**63) <= operand < 2**63:
            _refuse(opdef, operand, span)
        return self.builder.constant(operand, I64, span, scope)


def _refuse(opdef: OpDef, operand: Operand, span: Span) -> NoReturn:
    others = [name for name, _ in opdef.surface.options if name in ("rate", "std")]
    fixes = []
    if others and isinstance(operand, float) and argument(span) == span:
        text = f"{others[0]}={span.text}"
        fixes.append(Fix.write(span, text, safe=False))
    fixes.append(removal(argument(span), "leave it out: the run brings its own"))
    message = f"the seed of `{opdef.name}` is one integer, and this is {kind_of(operand)}"
    fail("MD0231", message, span, help=advice(fixes, "or write an integer"), fixes=tuple(fixes))


# --- programs without dropout --------------------------------------------------------------------


def without_dropout(program: NamedProgram) -> NamedProgram:
    """The program as it is evaluated: nothing is dropped, and a seed that nobody reads is gone."""
    from meshdsl.named.simplify import drop_unused

    if not any(op.name == "dropout" for op in walk(program.body)):
        return program
    program = drop_unused(replace(program, body=_WithoutDropout().nodes(program.body)))
    read = {v for node in program.body for v in reads_of(node)}
    inputs = tuple(v for v in program.inputs if v.role != "seed" or v in read)
    return replace(program, inputs=inputs)


class _WithoutDropout(Rebuild):
    """Identities for dropout; in place of one that has no name, operators read its operand."""

    def op(self, op: NamedOp) -> tuple[NamedOp]:
        ins = tuple(map(self.value, op.ins))
        if op.name != "dropout":
            return (replace(op, ins=ins),)
        if not op.out.name and not op.out.pins:
            self.new[op.out] = ins[0]
        return (replace(op, name="identity", ins=ins[:1], attrs=()),)

    def loop(self, loop: NamedLoop) -> tuple[NamedLoop]:
        return (replace(loop, body=self.nodes(loop.body)),)
