"""Fixes that move, rename or complete statements, whose source is read again.

They are for the ways out of messages about the order of statements and about names of one loop.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshdsl.diagnostics import Edit, Fix, Span
from meshdsl.syntax import ast
from meshdsl.syntax.edits import inserted, without_entry, without_line
from meshdsl.syntax.enclosing import enclosing
from meshdsl.syntax.parse import parse


def _names(node: object, kind: type[ast.Ref] | type[ast.Target]) -> set[str]:
    """The names that a statement reads (`Ref`) or assigns (`Target`)."""
    return {n.name.text for n in ast.walk(node) if isinstance(n, kind)}


def _around(span: Span) -> list[tuple[tuple[ast.Statement, ...], int]]:
    """The blocks around a place, from the outermost on, each with the statement that has it."""
    file, problems = parse(span.source)
    found: list[tuple[tuple[ast.Statement, ...], int]] = []
    for node in ast.walk(file) if not problems else ():
        if not isinstance(node, ast.ProgramDecl | ast.FunctionDecl | ast.Repeat | ast.Recompute):
            continue
        for at, statement in enumerate(node.body):
            if statement.span.start <= span.start and span.end <= statement.span.end:
                found.append((node.body, at))
    return found


def _indent(span: Span) -> str:
    """What is before the first character of a line."""
    start = span.source.bounds(span.line)[0]
    before = span.source.text[start : span.start]
    return before if not before.strip() else ""


def _moved(node: Span, before: Span | None, after: Span | None, title: str) -> tuple[Fix, ...]:
    """The fix that moves a whole line before another statement, or after it."""
    line = without_line(node)
    target = before if before is not None else after
    if target is None or line == node or not _indent(target):
        return ()
    number = node.source.position(target.start if before is not None else target.end)[0]
    start, end = node.source.bounds(number)
    text = f"{_indent(target)}{node.text}"
    if before is not None:
        put = Edit(Span(node.source, start, start), f"{text}\n")
    else:
        put = Edit(Span(node.source, end, end), f"\n{text}")
    return (Fix(title, (Edit(line, ""), put), safe=False),)


def assigned_first(read: Span, assigned: Span) -> tuple[Fix, ...]:
    """The fix that lets a name be assigned before it is read, if one line can be moved for that."""
    pairs = zip(_around(read), _around(assigned), strict=False)
    block, first, last = next(
        ((a, at, there) for (a, at), (b, there) in pairs if a is b or (a == b and at < there)),
        ((), 0, 0),
    )
    if not first < last:
        return ()
    reader, maker, between = block[first], block[last], block[first + 1 : last]
    others = {name for node in (reader, *between) for name in _names(node, ast.Target)}
    if isinstance(maker, ast.Assign) and not others & _names(maker, ast.Ref):
        return _moved(maker.span, reader.span, None, f"move `{maker.span.text}` before this line")
    makes = _names(reader, ast.Target)
    if isinstance(reader, ast.Assign) and not any(
        makes & _names(node, ast.Ref) for node in (*between, maker)
    ):
        name = assigned.text
        return _moved(reader.span, None, maker.span, f"move the line after that of `{name}`")
    return ()


def of_each_iteration(update: Span, param: Span) -> tuple[Fix, ...]:
    """The fix that declares a parameter in the loop that alone has to do with it."""
    loop, declared = enclosing(update, ast.Repeat), enclosing(param, ast.ParamDecl)
    program = enclosing(update, ast.ProgramDecl)
    if loop is None or declared is None or program is None:
        return ()
    name = declared.target.name.text
    for node in ast.walk(program):
        if isinstance(node, ast.Ref | ast.UpdateStatement) and node.name.text == name:
            if not loop.span.start <= node.span.start < loop.span.end:
                return ()
    first = loop.body[0].span
    return _moved(declared.span, first, None, f"declare `{name}` in the loop: one each iteration")


def after_loop(update: Span) -> tuple[Fix, ...]:
    """The fix that moves an assignment after its loop, which carries all that it reads."""
    around = _around(update)
    if len(around) < 2:
        return ()
    (outer, at), (body, index) = around[-2:]
    before = {name for node in outer[:at] for name in _names(node, ast.Target)}
    program = enclosing(update, ast.ProgramDecl)
    inputs = {p.name.text for p in program.params} if program is not None else set[str]()
    assigned = {name for node in body for name in _names(node, ast.Target)}
    if assigned & _names(body[index], ast.Ref) - before - inputs:
        return ()
    return _moved(body[index].span, None, outer[at].span, "assign it after the loop")


def called_apart(again: Span, new: str) -> tuple[Fix, ...]:
    """The fix that gives a name, from the statement on that assigns it again, another name."""
    program = enclosing(again, ast.ProgramDecl)
    names = [
        node.name.span
        for node in ast.walk(program)
        if isinstance(node, ast.Ref | ast.Target)
        and node.name.text == again.text
        and node.span.start >= again.start
    ]
    if not names:
        return ()
    return (Fix(f"call this one `{new}`", tuple(Edit(s, new) for s in names), safe=False),)


def _bare(program: ast.ProgramDecl, name: str) -> Iterator[tuple[ast.Return | None, Span]]:
    """The uses of a name; with its `return` where it is one of several values there."""
    returns = [n for n in ast.walk(program) if isinstance(n, ast.Return) and len(n.values) > 1]
    for node in ast.walk(program):
        if isinstance(node, ast.Ref) and node.name.text == name:
            yield next((r for r in returns if node in r.values), None), node.span


def without_gradient(place: Span) -> tuple[Fix, ...]:
    """The fix that leaves a tensor out of a `grad`, and its gradient out of what is returned."""
    node, program = enclosing(place, ast.Assign), enclosing(place, ast.ProgramDecl)
    call = node.value if node is not None else None
    if node is None or program is None or not isinstance(call, ast.CallExpr):
        return ()
    at = next((n for n, arg in enumerate(call.args) if arg.span == place), 0)
    if at < 1 or len(node.targets) != len(call.args) - 1 or len(node.targets) < 2:
        return ()
    target = node.targets[at - 1]
    uses = list(_bare(program, target.name.text))
    if any(returned is None for returned, _ in uses):
        return ()
    spans = [place, target.span, *(span for _, span in uses)]
    title = f"leave out `{place.text}` and `{target.name.text}`"
    return (Fix(title, tuple(Edit(without_entry(s), "") for s in spans), safe=False),)


def as_many_names(node: ast.Assign, count: int) -> tuple[Fix, ...]:
    """The fix that gives an assignment as many names as there are tensors."""
    names = [target.name.text for target in node.targets]
    last = node.targets[-1].span
    if count > len(names):
        more = ", ".join(f"{names[-1]}{n}" for n in range(2, count - len(names) + 2))
        return (inserted(last.end, f", {more}", last, f"add `{more}`"),)
    program = enclosing(node.span, ast.ProgramDecl)
    surplus = names[count:]
    if program is None or count < 1 or any(use for name in surplus for use in _bare(program, name)):
        return ()
    gone = Span(last.source, node.targets[count - 1].span.end, last.end)
    title = f"leave out {' and '.join(f'`{name}`' for name in surplus)}"
    return (Fix(title, (Edit(gone, ""),), safe=False),)


def other_dims(dots: Span, types: dict[str, tuple[str, ...]]) -> tuple[Fix, ...]:
    """The fix that names the dims of the operands, `types` by name, in place of `...`."""
    call = enclosing(dots, ast.CallExpr)
    if call is None:
        return ()
    bracket = {name.text for name in call.out or ()}
    for item in call.items or ():
        bracket |= {item.dim.text} if isinstance(item, ast.DimItem) else set()
    operands = [arg.name.text for arg in call.args if isinstance(arg, ast.Ref)]
    if len(operands) != len(call.args) or not set(operands) <= set(types):
        return ()
    dims = dict.fromkeys(dim for name in operands for dim in types[name])
    missing = ", ".join(dim for dim in dims if dim not in bracket)
    return (Fix.write(dots, missing, safe=False),) if missing else ()
