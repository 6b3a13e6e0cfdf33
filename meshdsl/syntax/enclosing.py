"""What is around a place of a text: the statement or declaration that a fix is about.

For the ways out of a message alone, whose source is read again.
"""

from __future__ import annotations

from typing import TypeVar

from meshdsl.diagnostics import Diagnostic, Edit, Fix, Span
from meshdsl.syntax import ast
from meshdsl.syntax.parse import parse
from meshdsl.syntax.rename import renamed
from meshdsl.syntax.symbols import symbols

N = TypeVar("N", bound=ast.Statement | ast.ProgramDecl | ast.CallExpr)


def enclosing(span: Span, kind: type[N]) -> N | None:
    """The innermost node of a kind around a span; None in a text that cannot be read."""
    file, problems = parse(span.source)
    around = [
        node
        for node in ast.walk(file)
        if isinstance(node, kind) and node.span.start <= span.start and span.end <= node.span.end
    ]
    return None if problems else min(around, key=lambda n: n.span.end - n.span.start, default=None)


def optimizer_of(goal: Span) -> Span | None:
    """The optimizer of a `minimize`, as it is written; None in Python."""
    node = enclosing(goal, ast.Minimize)
    return None if node is None else node.optimizer.span


def called(name: Span, new: str) -> tuple[Fix, ...]:
    """The fix that renames what is declared at a place, wherever it is used."""
    file, problems = parse(name.source)
    table = symbols(file)
    for symbol in () if problems else table.at(name.start):
        edits = renamed(table, symbol, new)
        if not isinstance(edits, Diagnostic):
            return (Fix(f"call it `{new}`", edits, safe=False),)
    return ()


def unwrapped(block: ast.Recompute) -> Fix:
    """The fix that removes a block around its statements."""
    source, first, last = block.span.source, block.body[0].span, block.body[-1].span
    head = Edit(Span(source, block.span.start, first.start), "")
    tail = Edit(Span(source, last.end, block.span.end), "")
    return Fix("remove the block around its statements", (head, tail), safe=False)


def is_used_only_in(span: Span, name: Span) -> bool:
    """Whether all uses of what is declared at a place are within a span."""
    file, problems = parse(name.source)
    named_there = () if problems else symbols(file).at(name.start)
    uses = [use for symbol in named_there for use in symbol.references]
    return bool(named_there) and all(span.start <= u.start and u.end <= span.end for u in uses)
