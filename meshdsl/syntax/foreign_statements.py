"""Statements as other languages write them: `let`, `x += y`, `for`, `if`. Each is refused.

They are read, and reported with the statement to write here. Where they have a meaning here, that
takes their place in the tree, so that errors in the rest of the program are found too.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from meshdsl.diagnostics import Diagnostic, DiagnosticError, Edit, Fix, Span, advice
from meshdsl.syntax import ast
from meshdsl.syntax.build_expressions import Makers, TreeBuilder

CODE = "MD0018"

_AUGMENTED = {
    "@": "{x} = einsum({x}, {y} -> [dims of the result])",
    "**": "{x} = {x}^{y}",
    "^": "{x} = {x}^{y}",
}
_IF_LINES = re.compile(
    r"if (?P<c>[^\n]+):[^\n]*\n\s*(?P<y>\w+) = (?P<a>[^\n]+)"
    r"\n\s*else:[^\n]*\n\s*(?P=y) = (?P<b>[^\n]+)"
)
"""An `if` as Python has it, with one assignment in each half."""

Body = Callable[[TreeBuilder, Any], tuple[ast.Statement, ...]]


def statements(assign: Callable[[TreeBuilder, Any], ast.Assign], body: Body) -> Makers:
    """The makers of foreign statements, by the grammar's rules."""
    return {
        "let": lambda b, tree: _let(b, tree, assign),
        "augmented": _augmented,
        "for_": lambda b, tree: _for(b, tree, body),
        "if_": lambda b, tree: _if(b, tree, body),
        "else_": _else,
    }


def _let(b: TreeBuilder, tree: Any, assign: Callable[[TreeBuilder, Any], ast.Assign]) -> ast.Assign:
    word, statement = tree.children
    assignment = assign(b, statement)
    span = Span(b.source, word.start_pos, assignment.span.start)
    line = " ".join(assignment.span.text.split())
    fix = Fix(f"write `{line}`", (Edit(span, ""),))
    message = "`let` is no word of the language: a name gets its value by `=` alone"
    _report(b, message, b.name(word).span, None, fix)
    return assignment


def _augmented(b: TreeBuilder, tree: Any) -> ast.Assign:
    tree_target, sign, tree_value = tree.children
    name, dims = tree_target.children
    target = ast.Target(b.name(name), b.maybe_dims(dims), b.span(tree_target))
    span, value, op = b.span(tree), b.expr(tree_value), str(sign)[:-1]
    form = _AUGMENTED.get(op, "{x} = {x} " + op + " {y}")
    value_text = value.span.text
    plain = isinstance(value, ast.Ref | ast.Number | ast.CallExpr | ast.ViewExpr) or op == "+"
    line = form.format(x=target.name.text, y=value_text if plain else f"({value_text})")
    fix = (Fix(f"write `{line}`", (Edit(span, line),)),) if op != "@" else ()
    message = f"there is no `{sign}`: every value is given by `=`"
    _report(b, message, b.name(sign).span, None if fix else f"write `{line}`", *fix)
    operand = ast.Ref(target.name, target.name.span)
    meaning = {"**": "^"}.get(op, op)
    if meaning == "@":
        raise DiagnosticError
    return ast.Assign((target,), ast.Binary(meaning, operand, value, b.name(sign).span, span), span)


def _for(b: TreeBuilder, tree: Any, body: Body) -> ast.Repeat:
    """A loop over a dim, or over `range` of one; with a colon, its body are the lines below."""
    word, _, _, over, *block = tree.children
    dim = _dim(b.expr(over))
    head = Span(b.source, word.start_pos, over.end_pos)
    if dim is None:
        help = (
            "write `repeat layers { … }` with a dim for the number of rounds: `dim layers = 4`; "
            "operators work on whole dims without a loop"
        )
        _report(b, "there is no `for`: `repeat` loops over a dim", head, help)
        raise DiagnosticError
    line = f"repeat {dim.text} {{"
    edits = (Edit(head, f"repeat {dim.text}"),) if block else _braced(b, head, line)
    fix = Fix(f"write `{line} … }}`", edits)
    said = advice((fix,), f"its body runs once for each index of `{dim.text}`")
    _report(b, "there is no `for`: `repeat` loops over a dim", head, said, fix)
    return ast.Repeat(dim, body(b, block[0]) if block else (), b.span(tree))


def _dim(over: ast.Expr) -> ast.Name | None:
    """The name in `layers` or `range(layers)`."""
    match over:
        case (
            ast.Ref(name=name)
            | ast.CallExpr(function=ast.Name(text="range"), args=(ast.Ref(name=name),))
        ):
            return name
    return None


def _braced(b: TreeBuilder, head: Span, line: str) -> tuple[Edit, ...]:
    """The edits that write `line` for a head with a colon, and `}` behind what is further in."""
    first, text = head.line, b.source.line(head.line)
    margin = text[: len(text) - len(text.lstrip())]
    last = first
    while _is_further_in(b.source.line(last + 1), margin):
        last += 1
    _, end = b.source.bounds(last)
    start = head.start + b.source.text[head.start : b.source.bounds(first)[1]].rindex(":") + 1
    return Edit(Span(b.source, head.start, start), line), Edit(
        Span(b.source, end, end), f"\n{margin}}}"
    )


def _is_further_in(line: str, margin: str) -> bool:
    return bool(line.strip()) and line.startswith(margin) and line[len(margin) :][:1].isspace()


def _if(b: TreeBuilder, tree: Any, body: Body) -> ast.Assign:
    """A choice; of two assignments of one name it is `where`."""
    word, condition, *blocks = tree.children
    span, place = b.span(tree), b.name(word).span
    message = "there is no `if`: tensors choose per element"
    branches = [body(b, block) for block in blocks if getattr(block, "data", "") == "block"]
    match branches:
        case [[ast.Assign(targets=(one,)) as yes], [ast.Assign(targets=(other,)) as no]] if (
            one.name.text == other.name.text
        ):
            chosen = (b.expr(condition), yes.value, no.value)
            texts = ", ".join(part.span.text for part in chosen)
            line = f"{one.span.text} = where({texts})"
            _report(b, message, place, None, Fix.write(span, line))
            call = ast.CallExpr(ast.Name("where", place), None, chosen, (), None, span)
            return ast.Assign((one,), call, span)
    both_branches = _IF_LINES.match(b.source.text, place.start)
    if both_branches is None:
        help = f"write `y = where({b.expr(condition).span.text}, a, b)`, and give `y` both values"
        _report(b, message, place, help)
    else:
        line = "{y} = where({c}, {a}, {b})".format(**both_branches.groupdict())
        replaced = Span(b.source, place.start, both_branches.end())
        _report(b, message, place, None, Fix.write(replaced, line))
    raise DiagnosticError


def _else(b: TreeBuilder, tree: Any) -> ast.Statement:
    """The second half of an `if`, which was reported."""
    if not any(error.code == CODE for error in b.errors):
        help = "write `y = where(condition, a, b)`"
        _report(b, "there is no `else`: tensors choose per element", b.span(tree), help)
    raise DiagnosticError


def _report(b: TreeBuilder, message: str, span: Span, help: str | None, *fixes: Fix) -> None:
    b.errors.append(Diagnostic(CODE, message, span, help=help, fixes=fixes))
