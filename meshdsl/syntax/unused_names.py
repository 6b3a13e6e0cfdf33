"""Warnings about what a file defines to no effect: names never used, inputs never read.

They are for files without errors: a misspelt use would make its definition look unused. A name
that begins with `_` is never reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from meshdsl.diagnostics import Diagnostic, Edit, Fix, Related, Span, advice
from meshdsl.syntax import ast
from meshdsl.syntax.edits import without_dim, without_line
from meshdsl.syntax.printer import expression, scheduled
from meshdsl.syntax.rename import renamed
from meshdsl.syntax.symbols import TENSORS, Symbol, Symbols, symbols

Rules = dict[tuple[tuple[str, ...], str], tuple[tuple[str, ...], bool]]
"""The rules of a layout: the axes and `keep` by selector and dim."""


def lint_symbols(file: ast.SourceFile) -> tuple[Diagnostic, ...]:
    """The warnings of a file without errors, in the order of its text."""
    table = symbols(file)
    warnings = [*_unused(table), *_shadowed(table), *_doubled(table)]
    return tuple(sorted(warnings, key=lambda d: d.span.start if d.span else 0))


# --- never used ------------------------------------------------------------------------------


def _unused(known: Symbols) -> Iterator[Diagnostic]:
    selectors = _selectors(known.file)
    sizes_alone = all(isinstance(d, ast.DimDecl) for d in known.file.declarations)
    for symbol in known.every:
        if symbol.name.startswith("_") or not symbol.definitions:
            continue
        if symbol.kind in TENSORS and all(s.start in selectors for s in symbol.references):
            yield from _unused_tensor(known, symbol)
        elif symbol.kind == "dim" and not symbol.references and not sizes_alone:
            yield _unused_dim(known, symbol)
        elif symbol.kind == "schedule" and not symbol.references:
            yield _unused_schedule(known, symbol)


def _selectors(file: ast.SourceFile) -> set[int]:
    """Where names stand in rules and expectations: these use no value."""
    paths: list[tuple[ast.Name, ...]] = []
    for node in ast.walk(file):
        match node:
            case ast.RuleDecl() | ast.SettingDecl():
                paths.append(node.selector)
            case ast.SbpEntry():
                paths += [node.tensor, node.at]
            case ast.ExpectPlacement():
                paths.append(node.tensor)
            case ast.WeightsEntry():
                paths += node.params
            case ast.GroupSetting() | ast.GroupOptimizer():
                paths += node.selectors
            case ast.StoredPath():
                paths.append(node.path)
    starts = {name.span.start for path in paths for name in path}
    return starts | {start + len("d_") for start in starts}


def _unused_tensor(known: Symbols, symbol: Symbol) -> Iterator[Diagnostic]:
    name = symbol.name
    hide = _hidden(known, symbol)
    match symbol.kind:
        case "tensor":
            if any(_others_are_used(known, n) for n in symbol.nodes if isinstance(n, ast.Assign)):
                return
            message = f"`{name}` is computed and never used"
            fixes = (*_removed(symbol, safe=True), *hide)
            yield _warning("MD0132", message, symbol, advice(fixes, "or return it"), *fixes)
        case "param":
            message = f"the parameter `{name}` is never used"
            yield _warning("MD0133", message, symbol, None, *_removed(symbol, safe=False), *hide)
        case "input":
            message = f"the input `{name}` is never used"
            yield _warning("MD0133", message, symbol, advice(hide, "or remove it"), *hide)
        case "argument":
            assert isinstance(symbol.inside, ast.FunctionDecl)
            message = f"`{symbol.inside.name.text}` never uses its argument `{name}`"
            yield _warning("MD0133", message, symbol, advice(hide, "or remove it"), *hide)


def _others_are_used(known: Symbols, node: ast.Assign) -> bool:
    """Whether another name of the same assignment is used: all of its tensors must have names."""
    names = [target.name for target in node.targets]
    return len(names) > 1 and any(
        symbol.references for name in names for symbol in known.at(name.span.start)
    )


def _removed(symbol: Symbol, safe: bool) -> tuple[Fix, ...]:
    """The removal of all statements that define a tensor."""
    spans = [node.span for node in symbol.nodes if isinstance(node, ast.Assign | ast.ParamDecl)]
    edits = tuple(Edit(without_line(span), "") for span in dict.fromkeys(spans))
    lines = "the line" if len(edits) == 1 else "the lines"
    return (Fix(f"remove {lines} of `{symbol.name}`", edits, safe),)


def _hidden(known: Symbols, symbol: Symbol) -> tuple[Fix, ...]:
    """The fix that says that something is meant to be unused: a `_` before its name."""
    new = f"_{symbol.name}"
    edits = renamed(known, symbol, new)
    return () if isinstance(edits, Diagnostic) else (Fix(f"call it `{new}`", edits, safe=False),)


def _unused_dim(known: Symbols, symbol: Symbol) -> Diagnostic:
    if symbol.inside is not None:
        message = f"`{symbol.inside.name.text}` never uses its dim `{symbol.name}`"
        hide = _hidden(known, symbol)
        return _warning("MD0134", message, symbol, advice(hide, "or remove it"), *hide)
    edits = tuple(Edit(without_dim(d), "") for d in symbol.nodes if isinstance(d, ast.DimDecl))
    remove = Fix(f"remove the dim `{symbol.name}`", edits, safe=False)
    message = f"the dim `{symbol.name}` is never used"
    return _warning("MD0134", message, symbol, None, remove, *_hidden(known, symbol))


def _unused_schedule(known: Symbols, symbol: Symbol) -> Diagnostic:
    edits = tuple(
        Edit(without_line(n.span), "") for n in symbol.nodes if isinstance(n, ast.ScheduleDecl)
    )
    remove = Fix(f"remove the schedule `{symbol.name}`", edits, safe=False)
    message = f"no layout has the schedule `{symbol.name}`"
    fixes = (remove, *_hidden(known, symbol))
    help = advice(fixes, f"or end a layout with `with {symbol.name}`")
    return _warning("MD0142", message, symbol, help, *fixes)


def _warning(code: str, message: str, symbol: Symbol, help: str | None, *fixes: Fix) -> Diagnostic:
    return Diagnostic(code, message, symbol.definitions[0], "warning", help=help, fixes=fixes)


# --- shadowed inputs -------------------------------------------------------------------------


def _shadowed(known: Symbols) -> Iterator[Diagnostic]:
    """Inputs and arguments that are assigned before they are read: their value goes nowhere."""
    for symbol in known.every:
        if symbol.kind not in ("input", "argument") or symbol.name.startswith("_"):
            continue
        first = next((n for n in symbol.nodes if isinstance(n, ast.Assign | ast.ParamDecl)), None)
        if first is None or any(first.span.end >= s.start for s in _read(symbol)):
            continue
        said = "input" if symbol.kind == "input" else "argument"
        fixes = _apart(known, symbol, first)
        yield Diagnostic(
            "MD0136",
            f"the {said} `{symbol.name}` is replaced before it is read",
            next(s for s in symbol.definitions if s.start >= first.span.start),
            "warning",
            related=(Related(symbol.definitions[0], f"the {said}"),),
            help=advice(fixes, f"or leave the {said} out")
            if fixes
            else f"give the new tensor another name, or leave the {said} out",
            fixes=fixes,
        )


def _read(symbol: Symbol) -> Iterable[Span]:
    """The uses of a symbol in the body of its program or function."""
    assert symbol.inside is not None
    body = symbol.inside.span
    return (span for span in symbol.references if body.start <= span.start < body.end)


def _apart(known: Symbols, symbol: Symbol, first: ast.Assign | ast.ParamDecl) -> tuple[Fix, ...]:
    """The fix that gives the new tensor, made by `first`, a name of its own, if that is free.

    There is none where a loop makes it and it is read after that: the loop carries the input, and
    would stack a tensor of its own.
    """
    new = f"{symbol.name}_new"
    if any(other.name == new for other in known.every):
        return ()
    assert symbol.inside is not None
    loops = [n.span for n in ast.walk(symbol.inside) if isinstance(n, ast.Repeat)]
    around = [s for s in loops if s.start <= first.span.start < s.end]
    if any(not s.start <= read.start < s.end for s in around for read in _read(symbol)):
        return ()
    spans = sorted([*symbol.definitions[1:], *_read(symbol)], key=lambda span: span.start)
    edits = tuple(Edit(span, new) for span in spans)
    return (Fix(f"call the new tensor `{new}`", edits, safe=False),)


# --- layouts ---------------------------------------------------------------------------------


def _doubled(known: Symbols) -> Iterator[Diagnostic]:
    """Layouts with the rules and the schedule of an earlier one, those that they extend counted."""
    layouts = {s.name: s for s in known.every if s.kind == "layout" and s.definitions}
    seen: dict[tuple[object, ...], Symbol] = {}
    for name, symbol in layouts.items():
        rules = frozenset(_rules(name, layouts).items())
        first = seen.setdefault((rules, _scheduled(name, layouts)), symbol)
        if first is symbol or name.startswith("_"):
            continue
        node = symbol.nodes[0]
        assert isinstance(node, ast.LayoutDecl)
        remove = Fix(f"remove layout `{name}`", (Edit(without_line(node.span), ""),), safe=False)
        yield Diagnostic(
            "MD0135",
            f"layout `{name}` has the same rules as `{first.name}`",
            symbol.definitions[0],
            "warning",
            related=(Related(first.definitions[0], "the other layout"),),
            help="remove one of them" if symbol.references else advice((remove,)),
            fixes=() if symbol.references else (remove,),
        )


def _chain(name: str, layouts: dict[str, Symbol]) -> list[ast.LayoutDecl]:
    """A layout and its bases, the nearest first."""
    chain: dict[str, ast.LayoutDecl] = {}
    while name in layouts and name not in chain:
        node = layouts[name].nodes[0]
        assert isinstance(node, ast.LayoutDecl)
        chain[name] = node
        name = node.base.text if node.base else ""
    return list(chain.values())


def _scheduled(name: str, layouts: dict[str, Symbol]) -> str:
    """The schedule of a layout, or that of the nearest base which has one; empty for none."""
    found = (node.schedule for node in _chain(name, layouts))
    return next((scheduled(call) for call in found if call is not None), "")


def _rules(name: str, layouts: dict[str, Symbol]) -> Rules:
    """The rules of a layout over those of its bases."""
    rules: Rules = {}
    for node in reversed(_chain(name, layouts)):
        for rule in node.rules:
            key = tuple(part.text for part in rule.selector), rule.dim.text
            rules[key] = tuple(axis.text for axis in rule.axes), rule.keep
        for setting in node.settings:
            key = tuple(part.text for part in setting.selector), setting.name.text
            rules[key] = (expression(setting.value),), False
    return rules
