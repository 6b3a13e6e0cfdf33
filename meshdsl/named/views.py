"""Views `x[…]`: rename, split, merge, pick, slice and gather, from their bracket items."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from meshdsl.diagnostics import DiagnosticError, Poisoned, Related, Span, all_of, both, fail
from meshdsl.ir.types import Dim
from meshdsl.named.builder import Scope
from meshdsl.named.call_fixes import WrittenCall
from meshdsl.named.ir import Value
from meshdsl.named.size_formulas import size_of
from meshdsl.ops.opdef import Attrs
from meshdsl.syntax import ast
from meshdsl.syntax.symbols import parts

if TYPE_CHECKING:
    from meshdsl.named.from_syntax import ProgramBuilder


PLACELESS = WrittenCall(None, operands=())
"""A view of what earlier items yield, which is no expression of its own."""


class Views:
    """Applies the items of a bracket in order; neighbouring renames are simultaneous."""

    def __init__(self, program: ProgramBuilder) -> None:
        self.program = program

    def view(self, node: ast.ViewExpr, scope: Scope) -> Value:
        """The value of `tensor[items]`."""
        if any(isinstance(i, ast.DimItem) and i.dim.text in scope.names for i in node.items):
            return self._by_position(node, scope)
        try:
            return self._view(node, scope)
        except DiagnosticError as error:
            if error.is_last:
                raise
            errors = [*error.diagnostics]
        # What comes after a mistake has unknown names of its own.
        try:
            self.names(node.items, scope)
        except DiagnosticError as error:
            errors += error.diagnostics
        raise DiagnosticError(*errors) if errors else Poisoned

    def names(self, items: tuple[ast.Item, ...], scope: Scope) -> None:
        """Resolve every name in a bracket; raises the errors of all of them."""
        dim, value = self.program.expressions.dim, self.program.expressions.evaluate
        dims, values = zip(*map(parts, items), strict=True) if items else ((), ())
        steps: list[Callable[[], object]] = []
        steps += [partial(dim, n, scope) for group in dims for n in group if n.text != "..."]
        steps += [partial(value, n, scope) for group in values for n in group]
        all_of(steps)

    def _view(self, node: ast.ViewExpr, scope: Scope) -> Value:
        value = self.program.expressions.tensor(node.tensor, scope)
        renames: list[ast.ArrowItem] = []
        for item in node.items:
            if _is_rename(item):
                assert isinstance(item, ast.ArrowItem)
                renames.append(item)
                continue
            value = self._rename(value, renames, scope)
            renames = []
            value = self._item(value, item, scope)
        return self._rename(value, renames, scope)

    def _by_position(self, node: ast.ViewExpr, scope: Scope) -> Value:
        """`x[ids]`, as other libraries index: refused, and understood."""
        refs = [ast.Ref(i.dim, i.span) for i in node.items if isinstance(i, ast.DimItem)]
        word = ast.Name("[:]", node.items[0].span)
        foreign = ast.Foreign("positions", word, (node.tensor, *refs), (), node.span)
        operand = self.program.refused.expression(foreign, scope)
        assert isinstance(operand, Value), "a view of a tensor is one"
        return operand

    def _rename(self, value: Value, items: list[ast.ArrowItem], scope: Scope) -> Value:
        if not items:
            return value
        span = items[0].span.to(items[-1].span)
        pairs = tuple(
            (self._own(value, i.sources[0], scope), self._dim(i.targets[0], scope)) for i in items
        )
        return self._emit("rename", (value,), {"pairs": pairs}, span, scope)

    def _item(self, value: Value, item: ast.Item, scope: Scope) -> Value:
        match item:
            case ast.ArrowItem():
                return self._split_or_merge(value, item, scope)
            case ast.PickItem():
                return self._pick(value, item, scope)
            case ast.SliceItem():
                return self._slice(value, item, scope)
        fail(
            "MD0252",
            "this is not a view",
            item.span,
            help="rename `[a -> b]`, split `[a -> (b, c)]`, merge `[(a, b) -> c]`, pick `[a = 0]`, "
            "slice `[a = 0:4 -> b]`, gather `[a = ids]`",
        )

    def _split_or_merge(self, value: Value, item: ast.ArrowItem, scope: Scope) -> Value:
        if len(item.sources) == 1:
            dim = self._own(value, item.sources[0], scope)
            into = tuple(self._dim(t, scope) for t in item.targets)
            return self._emit("split", (value,), {"dim": dim, "into": into}, item.span, scope)
        if len(item.targets) != 1:
            help = (
                "split into one step `[a -> (b, c)]` or merge `[(a, b) -> c]`, one after the other"
            )
            fail("MD0252", "several dims cannot become several dims", item.span, help=help)
        dims = tuple(self._own(value, s, scope) for s in item.sources)
        attrs = {"dims": dims, "into": self._dim(item.targets[0], scope)}
        return self._emit("merge", (value,), attrs, item.span, scope)

    def _pick(self, value: Value, item: ast.PickItem, scope: Scope) -> Value:
        dim, index = both(
            partial(self._own, value, item.dim, scope),
            partial(self.program.expressions.evaluate, item.index, scope),
        )
        if isinstance(index, Value):
            edited = WrittenCall(None, operands=(None, item.index.span))
            return self._emit("gather", (value, index), {"dim": dim}, item.span, scope, edited)
        if not isinstance(index, int):
            help = f"write `[{dim.name} = 0]`, or index by a tensor of integers"
            message = "an index is an integer or an integer tensor"
            fail("MD0253", message, item.index.span, help=help)
        attrs = {"dim": dim, "index": index}
        edited = WrittenCall(None, {"index": item.index.span}, ())
        return self._emit("pick", (value,), attrs, item.span, scope, edited)

    def _slice(self, value: Value, item: ast.SliceItem, scope: Scope) -> Value:
        dim = self._own(value, item.dim, scope)
        start = self._bound(item.start, 0, scope)
        stop = self._bound(item.stop, size_of(dim), scope)
        if item.target is None:
            part = f"[{dim.name} = {start}:{stop} -> part]"
            help = f"a dim has one size in a file; name the part: `{part}`"
            fail("MD0252", "a slice needs a name for its dim", item.span, help=help)
        attrs = {
            "dim": dim,
            "start": start,
            "stop": stop,
            "target": self._dim(item.target, scope),
        }
        return self._emit("slice", (value,), attrs, item.span, scope)

    def _bound(self, node: ast.Expr | None, default: int, scope: Scope) -> int:
        if node is None:
            return default
        bound = self.program.expressions.evaluate(node, scope)
        if not isinstance(bound, int):
            help = "use numbers and dims; `[dim = ids]` gathers by a tensor"
            fail("MD0253", "the bounds of a slice are constant integers", node.span, help=help)
        return bound

    def _dim(self, name: ast.Name, scope: Scope) -> Dim:
        return self.program.expressions.dim(name, scope)

    def _own(self, value: Value, name: ast.Name, scope: Scope) -> Dim:
        """A dim that the tensor must have."""
        dim = self._dim(name, scope)
        if not value.type.has(dim.name):
            help = f"its dims are {', '.join(f'`{d}`' for d in value.type.names) or 'none'}"
            where = Related(value.span, f"this is {value.type}")
            fail("MD0252", f"this tensor has no dim `{dim.name}`", name.span, where, help=help)
        return dim

    def _emit(
        self,
        name: str,
        ins: tuple[Value, ...],
        attrs: Attrs,
        span: Span,
        scope: Scope,
        edited: WrittenCall = PLACELESS,
    ) -> Value:
        spans = tuple(v.span for v in ins)
        return self.program.builder.emit(name, ins, attrs, span, scope, spans, written=edited)[0]


def _is_rename(item: ast.Item) -> bool:
    return isinstance(item, ast.ArrowItem) and len(item.sources) == len(item.targets) == 1
