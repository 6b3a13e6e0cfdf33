"""Parse tree to syntax tree, the lower half: names, lists of dims and expressions.

The grammar's rules have the names that the tables here are keyed by.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import Any, cast

from meshdsl.diagnostics import Diagnostic, DiagnosticError, Edit, Fix, Source, Span, fail
from meshdsl.records import dataclass
from meshdsl.syntax import ast
from meshdsl.syntax.edits import removal, without_entry
from meshdsl.syntax.literals import number_value, string_value


@dataclass(frozen=True, slots=True)
class TreeBuilder:
    """Makes the nodes of one file; errors are collected, and the nodes around them left out."""

    source: Source
    errors: list[Diagnostic] = field(default_factory=list)

    def span(self, tree: Any) -> Span:
        """The span of a parse tree."""
        return Span(self.source, tree.start_pos, tree.end_pos)

    def name(self, token: Any) -> ast.Name:
        """A word as a name."""
        return ast.Name(str(token), Span(self.source, token.start_pos, token.end_pos))

    def maybe_name(self, token: Any) -> ast.Name | None:
        """A word as a name, or None where it was not written."""
        return None if token is None else self.name(token)

    def names(self, tree: Any) -> tuple[ast.Name, ...]:
        """All words of a tree as names."""
        return tuple([self.name(token) for token in tree.children])

    def maybe_names(self, tree: Any) -> tuple[ast.Name, ...] | None:
        """All words of a tree as names, or None where it was not written."""
        return None if tree is None else self.names(tree)

    def axes(self, tree: Any) -> tuple[ast.Name, ...]:
        """Mesh axes; `none` is no axis."""
        names = self.names(tree)
        return () if [name.text for name in names] == ["none"] else names

    def expr(self, tree: Any) -> ast.Expr:
        """An expression."""
        return cast(ast.Expr, EXPRESSIONS[tree.data](self, tree))

    def maybe_expr(self, tree: Any) -> ast.Expr | None:
        """An expression, or None where it was not written."""
        return None if tree is None else self.expr(tree)

    def dims(self, tree: Any) -> tuple[ast.DimRef, ...]:
        """A list of dims in brackets, with or without pins."""
        return tuple([_dim_ref(self, child) for child in tree.children])

    def maybe_dims(self, tree: Any) -> tuple[ast.DimRef, ...] | None:
        """A list of dims, or None where it was not written."""
        return None if tree is None else self.dims(tree)

    def number(self, token: Any) -> ast.Number:
        """A word as a number."""
        span = self.name(token).span
        return ast.Number(number_value(str(token), span), span)

    def string(self, token: Any) -> ast.String:
        """A word as a string."""
        span = self.name(token).span
        return ast.String(string_value(str(token), span), span)

    def maybe_number(self, token: Any) -> ast.Number | None:
        """A word as a number, or None where it was not written."""
        return None if token is None else self.number(token)

    def all_of(self, trees: list[Any], makers: Makers) -> tuple[Any, ...]:
        """A node per tree, without those that are broken or found wrong now."""
        nodes = []
        for tree in trees:
            if tree.data == "broken":
                continue
            try:
                nodes.append(makers[tree.data](self, tree))
            except DiagnosticError as error:
                self.errors.extend(error.diagnostics)
        return tuple(nodes)


Maker = Callable[[TreeBuilder, Any], Any]
Makers = dict[str, Maker]


def node_maker(node: Callable[..., Any], *fields: Maker | None) -> Maker:
    """The maker of a node whose fields are the children of its tree, in order, and its span.

    `fields` read the children, one each; a child that has None is punctuation, and skipped.
    """

    def make(b: TreeBuilder, tree: Any) -> Any:
        pairs = zip(fields, tree.children, strict=True)
        return node(*[read(b, child) for read, child in pairs if read is not None], b.span(tree))

    return make


def tuple_maker(read: Maker) -> Maker:
    """The maker of a tuple: the children of a tree, all read by `read`."""
    return lambda b, tree: tuple([read(b, child) for child in tree.children])


def _dim_ref(b: TreeBuilder, tree: Any) -> ast.DimRef:
    dim, *pins = tree.children
    pinned = [b.axes(pin) for pin in pins if pin is not None]
    return ast.DimRef(b.name(dim), pinned[0] if pinned else None, b.span(tree))


def _string(b: TreeBuilder, tree: Any) -> ast.String:
    span = b.span(tree)
    return ast.String(string_value(str(tree.children[0]), span), span)


def _binary(b: TreeBuilder, tree: Any) -> ast.Binary:
    left, op, right = tree.children
    op_span = b.name(op).span
    return ast.Binary(str(op), b.expr(left), b.expr(right), op_span, b.span(tree))


def make_items(b: TreeBuilder, tree: Any) -> tuple[ast.Item, ...]:
    """What stands in `[ ]`."""
    if _has_positions(tree):
        help = "`[ ]` holds the names of dims: `sum[io](x)`, `x[seq = 0]`"
        fail("MD0126", "dims have names here, not positions", b.span(tree), help=help)
    return tuple([_ITEMS[item.data](b, item) for item in tree.children])


def _view(b: TreeBuilder, tree: Any) -> ast.ViewExpr | ast.Foreign:
    """`x[items]`, where `x` is a name (rule `bracketed`) or any other tensor (rule `view`)."""
    head, items = tree.children
    if _has_positions(items):
        return _positions(b, tree)
    if not items.children:
        help = "say what the view does: `x[seq = 0]` picks, `x[seq -> mem]` renames"
        fail("MD0015", "nothing stands in the brackets of this view", b.span(items), help=help)
    if hasattr(head, "data"):
        return ast.ViewExpr(b.expr(head), make_items(b, items), b.span(tree))
    name = b.name(head)
    return ast.ViewExpr(ast.Ref(name, name.span), make_items(b, items), b.span(tree))


def make_call(b: TreeBuilder, tree: Any) -> ast.CallExpr:
    """A call, in a place for calls only or for any expression."""
    head, arguments = tree.children
    *argument_trees, out = arguments.children
    function, items = (head.children) if hasattr(head, "data") else (head, None)
    return ast.CallExpr(
        b.name(function),
        None if items is None else make_items(b, items),
        tuple([b.expr(arg) for arg in argument_trees if arg.data != "keyword"]),
        make_keywords(b, argument_trees),
        None if out is None else tuple([b.name(dim.children[0]) for dim in out.children]),
        b.span(tree),
    )


def make_keywords(b: TreeBuilder, given: list[Any]) -> tuple[ast.Keyword, ...]:
    """The arguments with names among those of a call."""
    keywords: dict[str, ast.Keyword] = {}
    for arg in given:
        if arg.data != "keyword":
            if keywords:
                message = "an argument without a name comes after one with a name"
                first, span = next(iter(keywords.values())).span, b.span(arg)
                moved = Edit(Span(span.source, first.start, first.start), f"{span.text}, ")
                edits = (moved, Edit(without_entry(span), ""))
                fix = Fix("put the arguments without names first", edits, safe=False)
                fail("MD0015", message, span, fixes=(fix,))
            continue
        keyword = ast.Keyword(b.name(arg.children[0]), b.expr(arg.children[1]), b.span(arg))
        if keyword.name.text in keywords:
            message = f"the argument `{keyword.name.text}` is given twice"
            fail("MD0015", message, keyword.span, fixes=(removal(keyword.span),))
        keywords[keyword.name.text] = keyword
    return tuple(keywords.values())


# --- as other languages write it ---------------------------------------------------------------


def _sign(b: TreeBuilder, tree: Any) -> ast.Foreign:
    left, sign, right = tree.children
    return ast.Foreign("sign", b.name(sign), (b.expr(left), b.expr(right)), (), b.span(tree))


def _member(b: TreeBuilder, tree: Any) -> ast.Foreign:
    tensor, name = tree.children
    return ast.Foreign("member", b.name(name), (b.expr(tensor),), (), b.span(tree))


def _method(b: TreeBuilder, tree: Any) -> ast.Foreign:
    tensor, name, arguments = tree.children
    argument_trees = arguments.children[:-1]
    parts = (b.expr(tensor), *(b.expr(arg) for arg in argument_trees if arg.data != "keyword"))
    return ast.Foreign(
        "method", b.name(name), parts, make_keywords(b, argument_trees), b.span(tree)
    )


def _choice(b: TreeBuilder, tree: Any) -> ast.Foreign:
    one, word, condition, _, other = tree.children
    parts = (b.expr(condition), b.expr(one), b.expr(other))
    return ast.Foreign("choice", b.name(word), parts, (), b.span(tree))


def _list(b: TreeBuilder, tree: Any) -> ast.Foreign:
    span = b.span(tree)
    parts = tuple([b.expr(child) for child in tree.children])
    return ast.Foreign("list", ast.Name("[]", span), parts, (), span)


def _positions(b: TreeBuilder, tree: Any) -> ast.Foreign:
    """`x[0, :]`, of which at least one item is a position."""
    head, items = tree.children
    tensor = b.expr(head) if hasattr(head, "data") else ast.Ref(b.name(head), b.name(head).span)
    parts = tuple([_place(b, item) for item in items.children])
    return ast.Foreign(
        "positions", ast.Name("[:]", b.span(items)), (tensor, *parts), (), b.span(tree)
    )


def _place(b: TreeBuilder, tree: Any) -> ast.Expr | ast.Bounds:
    span = b.span(tree)
    if tree.data == "positions":
        start, stop = (None if end is None else _index(b, end) for end in tree.children)
        return ast.Bounds(start, stop, span)
    if tree.data == "dim_item":
        return ast.Ref(b.name(tree.children[0]), span)
    if tree.data == "position":
        return _index(b, tree)
    help = "name every dim in the brackets: `x[batch = 0, seq = 1:4 -> part]`"
    fail("MD0015", "dims by name stand here beside positions", span, help=help)


def _index(b: TreeBuilder, tree: Any) -> ast.Expr:
    *sign, word = tree.children
    span = b.span(tree)
    if word.type == "STRING":
        return ast.String(string_value(str(word), span), span)
    number = ast.Number(number_value(str(word), span), span)
    return ast.Unary("-", number, span) if sign else number


def _has_positions(items: Any) -> bool:
    return any(item.data in ("position", "positions") for item in items.children)


def _window(b: TreeBuilder, token: Any) -> ast.Name | ast.Number:
    """The size of a window: a dim or a number."""
    return b.name(token) if token.type == "NAME" else b.number(token)


EXPRESSIONS: Makers = {
    "number": lambda b, tree: b.number(tree.children[0]),
    "string": _string,
    "ref": node_maker(ast.Ref, TreeBuilder.name),
    "unary": node_maker(ast.Unary, lambda b, sign: str(sign), TreeBuilder.expr),
    "binary": _binary,
    "call": make_call,
    "view": _view,
    "bracketed": _view,
    "sign": _sign,
    "member": _member,
    "method": _method,
    "choice": _choice,
    "list_": _list,
}

_ITEMS: Makers = {
    "dim_item": node_maker(ast.DimItem, TreeBuilder.name),
    "arrow_item": node_maker(ast.ArrowItem, TreeBuilder.names, TreeBuilder.names),
    "by_item": node_maker(ast.ByItem, TreeBuilder.name, _window, TreeBuilder.maybe_name),
    "pick_item": node_maker(ast.PickItem, TreeBuilder.name, TreeBuilder.expr),
    "slice_item": node_maker(
        ast.SliceItem,
        TreeBuilder.name,
        TreeBuilder.maybe_expr,
        TreeBuilder.maybe_expr,
        TreeBuilder.maybe_name,
    ),
}
