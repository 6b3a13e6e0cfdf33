"""Foreign expressions of a program: refused, with the line to write instead, and then understood.

What to write has the types of the operands, so that the rest of the program is built with the
value that was meant, and errors in it are found too. A statement is reported when all of it is
known: its line is written with every foreign part of it replaced.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, fields, replace
from typing import TYPE_CHECKING, Any, cast

from meshdsl.diagnostics import (
    Diagnostic,
    DiagnosticError,
    Edit,
    Fix,
    Source,
    Span,
    did_you_mean,
    fail,
)
from meshdsl.ir.types import DTYPES, Dim
from meshdsl.named.builder import Operand, Scope
from meshdsl.named.foreign import MODULES, row_of, written
from meshdsl.named.foreign_use import ForeignOperand, Use
from meshdsl.named.ir import Value
from meshdsl.ops.opdef import load_all
from meshdsl.records import dataclass
from meshdsl.syntax import ast
from meshdsl.syntax.printer import expression

if TYPE_CHECKING:
    from meshdsl.named.from_syntax import ProgramBuilder

_NO_VALUES = ("None", "True", "False", "true", "false")
_MESSAGES = {
    "sign": "there is no operator `{0}`",
    "method": "tensors have no method `{0}`",
    "member": "tensors have no `.{0}`",
    "choice": "there is no `if`: tensors choose per element",
    "positions": "dims have names here, not positions",
    "function": "there is no function `{0}`",
    "operator": "`{0}` has its dims in `[ ]`",
    "library": "`{0}` is of another library: a tensor of a program has no values for it",
}
_FORMS = (
    "functions are called as `relu(x)`, dims have names: `sum[io](x)`; all are in grammar/README.md"
)


@dataclass(frozen=True, slots=True)
class _Pending:
    """A refused expression: the text to write, and the dims to declare."""

    span: Span
    place: Span
    code: str
    message: str
    text: str
    new: tuple[Dim, ...]


@dataclass(slots=True)
class _Operands:
    """The operands of a foreign expression by their placeholders: as values, and as syntax."""

    values: dict[str, ast.Expr] = field(default_factory=dict)
    texts: dict[str, ast.Expr] = field(default_factory=dict)


def is_foreign(node: ast.CallExpr) -> bool:
    """Whether an operator is called with dims where other libraries have them."""
    opdef = load_all().get(node.function.text)
    if opdef is None:
        return False
    if any(isinstance(arg, ast.Foreign) and arg.kind == "list" for arg in node.args):
        return True
    if opdef.name == "einsum":
        return node.out is None and any(isinstance(arg, ast.String) for arg in node.args)
    options = {name for name, _ in opdef.surface.options}
    named = {k.name.text for k in node.keywords} - options
    if named & {"dim", "axis", "keepdim", "keepdims", "dims", "axes", "num_classes"}:
        return True
    most = opdef.surface.arity[1]
    # `dropout(x, 0.1, seed)` is how it is written here.
    takes_dims = (
        opdef.surface.items in ("dims?", "dim", "dims", "rows") and not opdef.surface.seeded
    )
    return takes_dims and node.items is None and most is not None and len(node.args) > most


class Refusals:
    """Refuses foreign expressions, and goes on with their meaning."""

    def __init__(self, program: ProgramBuilder) -> None:
        self.program = program
        self.pending: list[_Pending] = []
        self.meanings: dict[Span, ast.Expr] = {}
        self.orders: dict[Span, tuple[str, ...]] = {}
        self.shifted: set[Span] = set()
        self.moved = False

    # --- expressions -------------------------------------------------------------------------

    def expression(self, node: ast.Foreign, scope: Scope) -> Operand:
        """The value that a foreign expression means."""
        if node.kind == "list":
            help = "write dims in `[ ]` after the operator: `sum[batch, io](x)`"
            fail("MD0126", "a list is no value of the language", node.span, help=help)
        word, parts = node.word.text, node.parts
        kind: str = node.kind
        if kind in ("method", "member") and self._is_module(parts[0], scope):
            parts, kind = parts[1:], "function"
        elif kind == "positions" and _is_shape(parts[0]):
            shape = cast(ast.Foreign, parts[0])
            word, parts, kind = "size", (shape.parts[0], *parts[1:]), "member"
        return self._refuse(kind, word, parts, node.keywords, node.word.span, node.span, scope)

    def call(self, kind: str, node: ast.CallExpr, scope: Scope) -> Operand:
        """The value that a call means, of an unknown function or with dims given otherwise."""
        name = node.function
        return self._refuse(kind, name.text, node.args, node.keywords, name.span, node.span, scope)

    def _is_module(self, node: ast.Expr | ast.Bounds, scope: Scope) -> bool:
        match node:
            case ast.Ref(name=name):
                return name.text in MODULES and name.text not in {*scope.names, *scope.stacks}
            case ast.Foreign(kind="member", parts=(inner,)):
                return self._is_module(inner, scope)
        return False

    def _refuse(
        self,
        kind: str,
        word: str,
        given: tuple[ast.Expr | ast.Bounds, ...],
        keywords: tuple[ast.Keyword, ...],
        place: Span,
        span: Span,
        scope: Scope,
    ) -> Operand:
        before, row = len(self.pending), row_of(word)
        code = row.code if row else "MD0125"
        message = message_for(kind, place.text)
        operands = _Operands()
        names = [f"_{i}" for i in range(len(given))]
        parts = tuple(
            [self._part(n, g, operands, scope) for n, g in zip(names, given, strict=True)]
        )
        named = {
            k.name.text: self._part(f"_{k.name.text}", k.value, operands, scope) for k in keywords
        }
        new_dims = {d.name: d for p in self.pending[before:] for d in p.new}
        scope = replace(scope, dims={**scope.dims, **new_dims})
        use = Use(word, parts, named, scope.dims)
        tree = written(use)
        if tree is None:
            if self.moved or any(p.shifted for p in use.tensors):
                del self.pending[before:]  # without them, positions would count something else
            fail(code, message, place, help=way_out(word))
        inside = replace(scope, dims={**scope.dims, **use.new})
        try:
            value = self.program.expressions.evaluate(planted(tree, span, operands.values), inside)
        except DiagnosticError:
            fail(code, message, place, help=way_out(word))
        meaning = planted(tree, span, operands.texts)
        self.meanings[span] = meaning
        if use.shifted:
            self.shifted.add(span)
        inner = [p for p in self.pending[before:] if _lies_in(p.span, span)]
        del self.pending[before:]
        new = (*use.new.values(), *(d for p in inner for d in p.new))
        told = _Pending(span, place, code, message, _loose(meaning, span), new)
        self.pending.append(told)
        return self._placed(value, use, span, inside)

    def _placed(self, value: Operand, use: Use, span: Span, scope: Scope) -> Operand:
        """The value with its dims in the order that positions give them."""
        order = use.order
        if not isinstance(value, Value) or order is None or value.type.names == order:
            return value
        if sorted(order) != sorted(value.type.names):
            return value
        dims = tuple(value.type.dims[value.type.index(n)] for n in order)
        self.moved = True
        return self.program.builder.emit("transpose", (value,), {"dims": dims}, span, scope)[0]

    def settle(self, node: ast.Expr, value: Operand, scope: Scope) -> None:
        """Find the order of the dims of a statement's value, where what to write has another."""
        moved, self.moved = self.moved, False
        if not moved or not isinstance(value, Value):
            return
        new = {d.name: d for p in self.pending for d in p.new}
        inside = replace(scope, dims={**scope.dims, **new})
        try:
            operand = self.program.expressions.evaluate(self._resolved(node), inside)
        except DiagnosticError:
            return
        if isinstance(operand, Value) and operand.type.names != value.type.names:
            self.orders[node.span] = value.type.names

    # --- operands ----------------------------------------------------------------------------

    def _part(
        self, ref: str, node: ast.Expr | ast.Bounds, operands: _Operands, scope: Scope
    ) -> ForeignOperand:
        match node:
            case ast.Bounds(start=start, stop=stop):
                return ForeignOperand(ref, bounds=(_integer(start), _integer(stop)))
            case ast.Foreign(kind="list", parts=inner):
                each = [self._part(f"{ref}_{i}", p, operands, scope) for i, p in enumerate(inner)]
                return ForeignOperand(ref, parts=tuple(each))
            case ast.String(value=text):
                return ForeignOperand(ref, text=text)
            case ast.Ref(name=name) if name.text in ("...", *_NO_VALUES, *DTYPES):
                return ForeignOperand(ref, text=name.text)
            case ast.Ref(name=name) if name.text in scope.dims and name.text not in {
                *scope.names,
                *scope.stacks,
            }:
                operands.values[ref] = operands.texts[ref] = node
                return ForeignOperand(ref, dim=scope.dims[name.text])
            case ast.Foreign(kind="member", parts=(inner,)) if self._is_module(inner, scope):
                return ForeignOperand(ref, text=node.word.text)
        assert not isinstance(node, ast.Bounds)
        return self._evaluated(ref, node, operands, scope)

    def _evaluated(
        self, ref: str, node: ast.Expr, operands: _Operands, scope: Scope
    ) -> ForeignOperand:
        from meshdsl.named.expressions import OperandRef

        value = self.program.expressions.evaluate(node, scope)
        operands.texts[ref] = self._resolved(node)
        if not isinstance(value, Value):
            operands.values[ref] = node
            return (
                ForeignOperand(ref, number=value)
                if isinstance(value, int | float)
                else ForeignOperand(ref)
            )
        operands.values[ref] = OperandRef(ast.Name(ref, node.span), node.span, value)
        if node.span in self.shifted:
            return ForeignOperand(ref, dims=value.type.dims, dtype=value.type.dtype, shifted=True)
        return ForeignOperand(ref, dims=value.type.dims, dtype=value.type.dtype)

    def _resolved(self, node: Any) -> Any:
        """The syntax with every foreign part replaced by what to write."""
        if isinstance(node, ast.Foreign | ast.CallExpr) and node.span in self.meanings:
            return self.meanings[node.span]
        return _rebuilt(node, self._resolved)

    # --- reports -----------------------------------------------------------------------------

    def report(self, statement: ast.Statement | None) -> None:
        """Report what was refused in a statement, with its line as it should be."""
        if statement is None or not self.pending:
            return
        mine = [p for p in self.pending if _lies_in(p.span, statement.span)]
        self.pending = [p for p in self.pending if p not in mine]
        if not mine or isinstance(statement, ast.Repeat | ast.Recompute):
            self._rest(mine)
            return
        edits = [Edit(p.span, p.text) for p in mine]
        if isinstance(statement, ast.Assign):
            edits += _ordered(statement.targets, self.orders.get(statement.value.span))
        line = _edited(statement.span, edits)
        for pending in mine:
            own_edits = [e for e in edits if e.span == pending.span or not e.span.text]
            self._tell(pending, line, own_edits)

    def rest(self) -> None:
        """Report what was refused outside of statements."""
        self._rest(self.pending)
        self.pending = []

    def _rest(self, pending: list[_Pending]) -> None:
        for told in pending:
            self._tell(told, told.text, [Edit(told.span, told.text)])

    def _tell(self, told: _Pending, line: str, edits: list[Edit]) -> None:
        declared = ", ".join(f"{d.name} = {d.size}" for d in told.new)
        said = f"write `{line}`"
        if declared:
            said += f", and `dim {declared}` above the program"
            edits = [*edits, Edit(_top(told.span.source), f"dim {declared}\n")]
        inorder = tuple(sorted(edits, key=lambda e: e.span.start))
        fix = Fix(f"write `{told.text}`", inorder, said=said)
        self.program.diagnostics.add(Diagnostic(told.code, told.message, told.place, fixes=(fix,)))


def message_for(kind: str, word: str) -> str:
    """The sentence about a foreign word of a kind."""
    return _MESSAGES[kind].format(word)


def way_out(word: str) -> str:
    """A way out where the operands leave open what was meant."""
    row = row_of(word)
    if row is None:
        return (word not in load_all() and did_you_mean(word, list(load_all()))) or _FORMS
    return row.help or _OPEN.get(row.rule or "", _FORMS)


_OPEN = {
    "contract": "write `einsum(x, w -> [batch, hidden])`: dims missing on the right are summed",
    "einsum": "write `einsum(x, w -> [batch, hidden])`: dims missing on the right are summed",
    "reshaped": "split by `x[model -> (heads, key)]`, merge by `x[(heads, key) -> model]`",
    "rearranged": "split by `x[model -> (heads, key)]`, merge by `x[(heads, key) -> model]`",
    "indexed": "write `x[seq = 0]` to pick, `x[seq = 0:4 -> part]` for a slice",
    "parted": "write `x[seq -> (pieces, part)]` for equal parts, `x[seq = 0:4 -> part]` for one",
    "joined": "write `concat[seq -> all](a, b)`, with a dim `all` of both sizes together",
    "along": "write `sum[io](x)`: the dims in `[ ]` disappear",
    "greatest": "write `top_k[io -> k](x)`, which has two results: values, and their indices",
    "turned": "write `reverse[io](x)`",
    "rolled": "write `roll[io](x, 1)`: what leaves at the end enters first",
    "drawn": "write `uniform[batch, io]()` or `normal[batch, io]()`: the result's dims in `[ ]`",
    "flipped": "write `uniform[batch, io]() < 0.5`: true with this probability",
    "dropped": "write `dropout(x, 0.1)`; `dropout[batch, c](x, 0.1)` drops whole channels",
    "pooled": "write `max_pool[h by 2 -> ho, w by 2 -> wo](x)`, with `stride` and `pad`",
    "convolved": 'write `conv[h by kh, w by kw](x, k, pad="same")`; `upconv` is its transpose',
    "attended": "write `attention[key, mem](q, k, v)`",
    "numbered": "write `iota[seq]`: the indices of a dim",
    "sized": "the name of a dim is its size: `sqrt(key)`",
    "looked_up": "write `table[vocab = ids]`, with a tensor of integers",
    "one_hot": "write `one_hot[vocab](ids)`",
    "converted": "write `cast(x, f32)`",
}


# --- syntax ----------------------------------------------------------------------------------


def planted(tree: Any, span: Span, operands: Mapping[str, ast.Expr]) -> Any:
    """The expression of a rule with its operands, every node of it at `span`."""
    if isinstance(tree, ast.Ref) and tree.name.text in operands:
        return operands[tree.name.text]
    if isinstance(tree, Span):
        return span
    return _rebuilt(tree, lambda part: planted(part, span, operands), spans=True)


def _rebuilt(node: Any, change: Any, *, spans: bool = False) -> Any:
    """A node of the tree with `change` applied to its parts."""
    if isinstance(node, tuple):
        return tuple(change(part) for part in node)
    if type(node).__module__ != ast.__name__:
        return node
    parts = {f.name: getattr(node, f.name) for f in fields(node)}
    kept_spans = {n: p for n, p in parts.items() if not spans and isinstance(p, Span)}
    return type(node)(**{n: kept_spans.get(n) or change(p) for n, p in parts.items()})


def _loose(meaning: ast.Expr, span: Span) -> str:
    """The text of an expression, in parentheses where a neighbour would bind into it."""
    text = expression(meaning)
    if not isinstance(meaning, ast.Binary | ast.Unary):
        return text
    return text if stands_free(span) else f"({text})"


def stands_free(span: Span) -> bool:
    """Whether no operator is beside a place: it is a value, a result or an argument by itself."""
    text = span.source.text
    before = text[max(0, span.start - 200) : span.start].rstrip(" \n")
    after = text[span.end : span.end + 200].lstrip(" ")[:1]
    opens = before.endswith(("=", "(", ",", "[", "return")) and not before.endswith("==")
    return opens and after in ("", "\n", ")", ",", "]", "}", "#")


def _is_shape(node: ast.Expr | ast.Bounds) -> bool:
    return isinstance(node, ast.Foreign) and node.kind == "member" and node.word.text == "shape"


def _integer(node: ast.Expr | None) -> int | None:
    match node:
        case ast.Number(value=int() as value):
            return value
        case ast.Unary(operand=ast.Number(value=int() as value)):
            return -value
    return None


def _lies_in(inner: Span, outer: Span) -> bool:
    return inner.source is outer.source and outer.start <= inner.start and inner.end <= outer.end


def _ordered(targets: tuple[ast.Target, ...], order: tuple[str, ...] | None) -> list[Edit]:
    """The edit that gives the only name on the left the dims in this order."""
    if order is None or len(targets) != 1 or targets[0].dims is not None:
        return []
    end = targets[0].name.span.end
    return [Edit(Span(targets[0].span.source, end, end), f"[{', '.join(order)}]")]


def _edited(span: Span, edits: list[Edit]) -> str:
    """The text of a span with edits inside it, on one line."""
    text, at = "", span.start
    for edit in sorted(edits, key=lambda e: e.span.start):
        text += span.source.text[at : edit.span.start] + edit.text
        at = edit.span.end
    return " ".join((text + span.source.text[at : span.end]).split())


def _top(source: Source) -> Span:
    """The place of a new declaration: before the first line that is no comment."""
    for number in range(1, len(source.starts) + 1):
        line = source.line(number).strip()
        if line and not line.startswith("#"):
            start, _ = source.bounds(number)
            return Span(source, start, start)
    return Span(source, 0, 0)
