"""Expressions of the syntax tree into operators of the named program."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from meshdsl.diagnostics import (
    DiagnosticError,
    Fix,
    Poisoned,
    Related,
    Span,
    advice,
    all_of,
    counted,
    did_you_mean,
    fail,
    spelled_right,
)
from meshdsl.ir.types import DTYPES, Dim, DType, TensorType
from meshdsl.named.builder import Operand, Scope, Stack, need_tensor
from meshdsl.named.declarations import declared, unknown
from meshdsl.named.ir import Value
from meshdsl.named.size_formulas import how_of, made, size_of
from meshdsl.ops.opdef import Attrs, OpDef, OpError, load_all, lookup, signs
from meshdsl.records import dataclass
from meshdsl.syntax import ast
from meshdsl.syntax.edits import cast_to
from meshdsl.syntax.statement_edits import assigned_first, called_apart, other_dims

if TYPE_CHECKING:
    from meshdsl.named.from_syntax import ProgramBuilder

NEUTRAL = (("mul", 1), ("div", 1), ("add", 0), ("sub", 0))
"""Operators and right operands that change nothing, such as those of the default `g = 1.0`."""


@dataclass(frozen=True, slots=True)
class OperandRef(ast.Ref):
    """An operand in place of a name, passed by the embedded language."""

    operand: Operand


@dataclass(frozen=True, slots=True)
class Literals:
    """An operator whose operands, a condition aside, are literals: its dtype is not yet decided."""

    name: str
    operands: tuple[Operand, ...]
    spans: tuple[Span, ...]
    span: Span
    attrs: Attrs = field(default_factory=dict)


class Expressions:
    """Evaluates expressions in a scope; operators are appended to the builder."""

    def __init__(self, program: ProgramBuilder) -> None:
        self.program = program
        self.builder = program.builder
        self.literals: dict[Operand, Literals] = {}

    def tensor(self, node: ast.Expr, scope: Scope) -> Value:
        """The value of `node`, which must be a tensor; a number becomes an f32 constant."""
        operand = self.evaluate(node, scope)
        if isinstance(operand, Value):
            return operand
        if isinstance(operand, int | float):
            return self.builder.constant(operand, DTYPES["f32"], node.span, scope)
        need_tensor(operand, node.span)

    def evaluate(self, node: ast.Expr, scope: Scope) -> Operand:
        """The one value of `node`."""
        if isinstance(node, OperandRef):
            operand = node.operand
            return self.builder.reach(operand) if isinstance(operand, Value) else operand
        node = _maker_call(node, scope)
        match node:
            case ast.CallExpr():
                return self._result(node, scope)
            case ast.Number() | ast.String():
                return node.value
            case ast.Ref():
                return self.reference(node.name, scope)
            case ast.Unary():
                return self.pointwise(_unary(node.op), (node.operand,), node.span, scope)
            case ast.Binary():
                return self.binary(node, scope)
            case ast.ViewExpr():
                return self.program.views.view(node, scope)
            case ast.Foreign():
                return self.program.refused.expression(node, scope)
        raise AssertionError(node)

    def _result(self, node: ast.CallExpr, scope: Scope) -> Operand:
        """The only result of a call."""
        results = self.program.calls.call(node, scope)
        if len(results) != 1:
            message = f"this yields {counted(len(results), 'tensor')} where one is needed"
            fail("MD0258", message, node.span, help="give each a name: `a, b = …`")
        if results[0] is None:
            raise Poisoned
        return results[0]

    def reference(self, name: ast.Name, scope: Scope) -> Operand:
        """The meaning of a bare name: a tensor, else the size of a dim, else a dtype."""
        if name.text in scope.names:
            operand = scope.names[name.text]
            if operand is None:
                raise Poisoned
            return self.builder.reach(operand) if isinstance(operand, Value) else operand
        if name.text in scope.stacks:
            return self._stack(scope.stacks[name.text], name, scope)
        if name.text in scope.dims or name.text in scope.wrong_dims:
            dim = self.dim(name, scope)
            if dim.name in self.builder.unsized:
                raise Poisoned
            return size_of(dim)
        if name.text in DTYPES:
            return DTYPES[name.text]
        self._unknown_tensor(name, scope)

    def _stack(self, stack: Stack, name: ast.Name, scope: Scope) -> Value:
        """The stack that a loop has left, where another one does not make the name again."""
        if stack.again is None:
            return self.builder.reach(self.builder.stacked(stack, name.span, scope))
        assigned = Related(stack.span, "assigned in the loop before")
        again = Related(stack.again, "assigned here again, in this loop")
        message = f"is `{stack.name}` what the loop before has stacked, or this loop's own?"
        fixes = called_apart(stack.again, f"{stack.name}_again")
        why = "a loop passes on only names that have a value before the loop"
        help = advice(fixes, why) if fixes else f"give one of them another name; {why}"
        fail("MD0120", message, name.span, assigned, again, help=help, fixes=fixes)

    def _unknown_tensor(self, name: ast.Name, scope: Scope) -> NoReturn:
        if name.text in scope.later:
            where = Related(scope.later[name.text], "it is assigned here")
            fixes = assigned_first(name.span, where.span)
            help = advice(fixes, "a loop passes on only names that have a value before the loop")
            if not fixes:
                help = f"assign it before; {help}"
            message = f"`{name.text}` is read before it has a value"
            fail("MD0121", message, name.span, where, help=help, fixes=fixes)
        if name.text in load_all() or name.text in scope.declarations.operators:
            help = f"call it: `{name.text}(…)`"
            fail("MD0102", f"`{name.text}` is an operator, not a tensor", name.span, help=help)
        names = [*scope.names, *scope.stacks, *scope.dims]
        raise DiagnosticError(unknown("MD0102", "tensor", name, names))

    def dim(self, name: ast.Name, scope: Scope) -> Dim:
        """The dim called `name` in a bracket."""
        if name.text in scope.wrong_dims:
            raise Poisoned
        if name.text in scope.dims:
            return scope.dims[name.text]
        dims = list(scope.dims)
        diagnostic = unknown("MD0101", "dim", name, dims)
        fixes = (*diagnostic.fixes, *declared(name, scope.declarations))
        other_help = diagnostic.help if not fixes else None
        why = "`[ ]` holds dims; tensors stand in `( )`" if name.text in scope.names else other_help
        raise DiagnosticError(replace(diagnostic, help=advice(fixes, why), fixes=fixes))

    def dims(self, names: Iterable[ast.Name], scope: Scope) -> tuple[Dim, ...]:
        """The dims of a list in an expression; a name of several stands for all of them."""
        groups = all_of(partial(self._group, n, scope) for n in names)
        return tuple(dim for group in groups for dim in group)

    def _group(self, name: ast.Name, scope: Scope) -> tuple[Dim, ...]:
        """The dims that a name stands for: `...` for those that a function was not told of."""
        if name.text == "..." and not {"..."} & {*scope.groups, *scope.wrong_dims}:
            message = "`...` stands for the other dims of what a `def` is given as `x[..., d]`"
            types = {n: v.type.names for n, v in scope.names.items() if isinstance(v, Value)}
            fixes = other_dims(name.span, types)
            help = advice(fixes) or "name the dims that are meant"
            fail("MD0119", message, name.span, help=help, fixes=fixes)
        if name.text not in scope.groups:
            return (self.dim(name, scope),)
        # A loop around has taken its dim away.
        loops = [frame.dim for frame in self.builder.frames]
        return tuple(d for d in scope.groups[name.text] if d not in loops)

    # --- pointwise ---------------------------------------------------------------------------

    def binary(self, node: ast.Binary, scope: Scope) -> Operand:
        """`left op right`, by name."""
        if node.op == "^":
            return self.power(node, scope)
        return self.pointwise(signs()[node.op], (node.left, node.right), node.span, scope)

    def power(self, node: ast.Binary, scope: Scope) -> Operand:
        """`x ^ n`, as a square or a root where it is one: they are exact or cheaper."""
        base, exponent = self._each((node.left, node.right), scope)
        special = {2: "square", 0.5: "sqrt", 1: "identity"}
        spans = (node.left.span, node.right.span)
        if isinstance(exponent, int | float) and how_of(exponent) is None and exponent in special:
            return self.apply(special[exponent], [base], spans[:1], node.span, scope)
        return self.apply("pow", [base, exponent], spans, node.span, scope)

    def pointwise(
        self, name: str, nodes: tuple[ast.Expr, ...], span: Span, scope: Scope
    ) -> Operand:
        """Apply a pointwise operator; numbers alone are computed now."""
        operands = self._each(nodes, scope)
        return self.apply(name, operands, tuple(n.span for n in nodes), span, scope)

    def _each(self, nodes: Iterable[ast.Expr], scope: Scope) -> list[Operand]:
        """The values of expressions; raises the errors of all of them."""
        return all_of(partial(self.evaluate, node, scope) for node in nodes)

    def apply(
        self, name: str, operands: list[Operand], spans: tuple[Span, ...], span: Span, scope: Scope
    ) -> Operand:
        """Apply a pointwise operator to values; numbers take the dtype of the tensors."""
        numbers = [x for x in operands if isinstance(x, int | float)]
        if len(numbers) == len(operands) and lookup(name).fold is not None:
            return _fold(name, numbers, span)
        if _is_neutral(name, operands):
            return operands[0]
        dtype = self.literal_dtype(name, operands)
        operands = self._of_literals(name, operands, dtype, scope)
        if name in ("floordiv", "mod") and dtype.kind == "int" and operands[1] == 0:
            help = "integers have no infinity; divide by another number"
            fail("MD0261", "an integer is divided by zero", spans[1], help=help)
        if dtype.kind == "int" and any(isinstance(x, float) for x in operands):
            self._refuse_float(operands, spans, dtype, scope)
        values = tuple(
            self.as_value(x, dtype, s, scope) for x, s in zip(operands, spans, strict=True)
        )
        result = self.builder.emit(name, values, {}, span, scope, spans)[0]
        read = operands[1:] if name == "where" else operands
        if result.type.dtype == dtype and all(self.is_literal(x) for x in read):
            self.literals[result] = Literals(name, tuple(operands), spans, span)
        return result

    def _refuse_float(
        self, operands: list[Operand], spans: tuple[Span, ...], dtype: DType, scope: Scope
    ) -> NoReturn:
        """MD0257 for a float beside integers, with the fix that casts these."""
        pairs = list(zip(operands, spans, strict=True))
        number, place = next((x, s) for x, s in pairs if isinstance(x, float))
        of = [s for x, s in pairs if isinstance(x, Value) and x.type.dtype == dtype]
        fixes = tuple(cast_to(s, "f32", safe=False) for s in of[:1] if len(of) == 1)
        if number.is_integer() and how_of(number) is None:
            fixes = (*fixes, Fix.write(place, str(int(number)), safe=False))
        try:
            self.builder.constant(number, dtype, place, scope)
        except DiagnosticError as error:
            (wrong,) = error.diagnostics
            how = how_of(number)
            why = "`/` makes a float of two integers, `//` rounds down"
            also = why if how is not None and how.operator == "div" else None
            help = advice(fixes, also) if fixes else wrong.help
            raise DiagnosticError(replace(wrong, help=help, fixes=fixes)) from None
        raise AssertionError(dtype)

    def literal_dtype(self, name: str, operands: list[Operand]) -> DType:
        """The dtype a number takes: that of the first tensor (of `where`: not the condition).

        A tensor of literals is asked last, since it takes the dtype of the others itself.
        """
        candidates = operands[1:] if name == "where" else operands
        tensors = [x for x in candidates if isinstance(x, Value)]
        tensors.sort(key=self.literals.__contains__)
        return tensors[0].type.dtype if tensors else DTYPES["f32"]

    def is_literal(self, operand: Operand) -> bool:
        """Whether an operand is a number, or made of numbers alone."""
        return isinstance(operand, int | float) or operand in self.literals

    def _of_literals(
        self, name: str, operands: list[Operand], dtype: DType, scope: Scope
    ) -> list[Operand]:
        """The operands; those that are made of literals alone are made of the dtype instead."""
        first = 1 if name == "where" else 0
        return [*operands[:first], *(self.retyped(x, dtype, scope) for x in operands[first:])]

    def retyped(self, operand: Operand, dtype: DType, scope: Scope) -> Operand:
        """An operand that is made of literals alone, made of this dtype if they fit in it."""
        literals = self.literals.get(operand)
        if (
            not isinstance(operand, Value)
            or literals is None
            or operand.type.dtype == dtype
            or not self._fits(literals, dtype)
        ):
            return operand
        operands = self._of_literals(literals.name, list(literals.operands), dtype, scope)
        values = tuple(
            self.builder.reach(self.as_value(x, dtype, s, scope))
            for x, s in zip(operands, literals.spans, strict=True)
        )
        name, span, spans = literals.name, literals.span, literals.spans
        (again,) = self.builder.emit(name, values, literals.attrs, span, scope, spans)
        self.literals[again] = literals
        return again

    def _fits(self, made: Literals, dtype: DType) -> bool:
        """Whether all literals of an operator are of a dtype: an integer is of any number's."""
        read = made.operands[1:] if made.name == "where" else made.operands
        return self.may_be(read, dtype) and _takes(made, dtype)

    def may_be(self, operands: Sequence[Operand], dtype: DType) -> bool:
        """Whether operands are made of literals alone, and all of these are of a dtype."""
        tensors = [self.literals.get(x) for x in operands if isinstance(x, Value)]
        numbers = [x for x in operands if isinstance(x, int | float)]
        fits = dtype.kind == "float" or all(isinstance(x, int) for x in numbers)
        return fits and all(x is not None and self._fits(x, dtype) for x in tensors)

    def as_value(self, operand: Operand, dtype: DType, span: Span, scope: Scope) -> Value:
        """A tensor as it is, a number as a constant of `dtype`."""
        if isinstance(operand, Value):
            return operand
        if isinstance(operand, int | float):
            return self.builder.constant(operand, dtype, span, scope)
        need_tensor(operand, span)


def _maker_call(node: ast.Expr, scope: Scope) -> ast.Expr:
    """`iota[seq]` is a call without `()`: it takes no tensors."""
    if not isinstance(node, ast.ViewExpr) or not isinstance(node.tensor, ast.Ref):
        return node
    if isinstance(node.tensor, OperandRef):
        return node
    name = node.tensor.name
    opdef = load_all().get(name.text) or scope.declarations.operators.get(name.text)
    if opdef is None or name.text in {*scope.names, *scope.stacks} or opdef.surface.arity[1] != 0:
        return node
    return ast.CallExpr(name, node.items, (), (), None, node.span)


def _is_neutral(name: str, operands: list[Operand]) -> bool:
    """Whether a float tensor is combined with a number that changes nothing, whatever the sizes."""
    first, last = operands[0], operands[-1]
    is_float = isinstance(first, Value) and first.type.dtype.kind == "float"
    is_number = isinstance(last, int | float) and how_of(last) is None
    return is_float and is_number and (name, last) in NEUTRAL


def _unary(op: str) -> str:
    return {"-": "neg", "not": "logical_not"}[op]


def _fold(name: str, numbers: list[int | float], span: Span) -> int | float:
    help = "constants are finite numbers; write another expression"
    computed = lookup(name).fold
    assert computed is not None, "only what can be computed is asked for"
    try:
        result = computed(*numbers)
        finite = not isinstance(result, complex) and math.isfinite(result)
    except ZeroDivisionError:
        fail("MD0261", "this constant is divided by zero", span, help=help)
    except OverflowError:
        fail("MD0261", "this constant is larger than any float", span, help=help)
    except ValueError:
        fail("MD0261", "this constant is not a real number", span, help=help)
    if not finite:
        fail("MD0261", "this constant is not a finite number", span, help=help)
    return made(result, name, *numbers)


def _takes(made: Literals, dtype: DType) -> bool:
    """Whether an operator of literals yields a dtype, of operands of that dtype."""
    first = 1 if made.name == "where" else 0
    condition = tuple(x.type for x in made.operands[:first] if isinstance(x, Value))
    dims = [x.type.dims if isinstance(x, Value) else () for x in made.operands[first:]]
    others = (TensorType(d, dtype) for d in dims)
    try:
        return lookup(made.name).infer((*condition, *others), made.attrs)[0].dtype == dtype
    except OpError:
        return False


def option_value(operand: Operand, span: Span) -> Any:
    """The constant given for an option; tensors are refused."""
    if isinstance(operand, Value):
        help = "write a number, a string or a dtype"
        fail("MD0253", "an option is a constant, not a tensor", span, help=help)
    if isinstance(operand, str) and operand in DTYPES:
        return DTYPES[operand]
    return operand


def unknown_function(name: ast.Name, known: list[str], used: Collection[str]) -> NoReturn:
    """Report a call of an unknown function."""
    message = f"unknown function or operator `{name.text}`"
    fixes = spelled_right(name.span, name.text, known)
    close = advice(fixes) or did_you_mean(name.text, known)
    help = close or "operators are listed in grammar/README.md"
    fail("MD0103", message, name.span, help=f"{help}{_others(used)}", fixes=fixes)


def _others(used: Collection[str]) -> str:
    """That operators of installed packages need a `use`, where there are more than those `used`."""
    from meshdsl.named.packages import names

    listed = ", ".join(f"`use {name}`" for name in names() if name not in used)
    return f"; those of installed packages need a line before all else: {listed}" if listed else ""


def surface_name(opdef: OpDef) -> str:
    """The form of a call of the operator, for help lines."""
    items = {
        "dims": "[dim, …]",
        "dims?": "[dim, …]",
        "dim": "[dim]",
        "arrow": "[old -> new]",
        "join": "[(a, b) -> new]",
        "maker": "[dim, …]",
        "filter": "[dim by window -> new]",
        "slide": "[dim by size -> new]",
    }.get(opdef.surface.items, "")
    items = "[dim = index]" if opdef.surface.indexed else items
    out = " -> [dims]" if opdef.surface.states_result else ""
    return f"{opdef.name}{items}(…{out})"
