"""A syntax tree as text in canonical form; parsing it gives the same tree but for its places.

Brackets are written where the grammar needs them. Lines longer than `WIDTH` are broken in theirs.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from meshdsl.syntax import ast

WIDTH = 100
INDENT = "  "

OR, AND, NOT, COMPARE, SUM, PRODUCT, NEGATION, POWER, ATOM = range(9)
"""Precedence of expressions, loosest first: the levels of the grammar."""

_SIDES = {
    "or": (OR, OR, AND),
    "and": (AND, AND, NOT),
    "+": (SUM, SUM, PRODUCT),
    "-": (SUM, SUM, PRODUCT),
    "*": (PRODUCT, PRODUCT, NEGATION),
    "/": (PRODUCT, PRODUCT, NEGATION),
    "//": (PRODUCT, PRODUCT, NEGATION),
    "%": (PRODUCT, PRODUCT, NEGATION),
    "^": (POWER, ATOM, NEGATION),
}
"""The level of a binary operator, and the least levels of its operands."""

_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n", "\t": r"\t"})


def print_file(tree: ast.SourceFile) -> str:
    """The text of a whole file; neighbouring declarations of one kind are grouped."""
    parts = []
    for kind, group in itertools.groupby(tree.declarations, type):
        nodes = list(group)
        texts = [_dims(nodes)] if kind is ast.DimDecl else [_declaration(node) for node in nodes]
        apart = "\n\n" if kind in (ast.FunctionDecl, ast.ProgramDecl) else "\n"
        parts.append(apart.join("\n".join(_wrapped(text)) for text in texts))
    return "".join(f"{part}\n" for part in "\n\n".join(parts).splitlines())


# --- declarations ----------------------------------------------------------------------------


def _dims(nodes: Iterable[ast.Declaration]) -> str:
    found = [f"{n.name.text} = {expression(n.value)}" for n in nodes if isinstance(n, ast.DimDecl)]
    return f"dim {', '.join(found)}"


def _declaration(node: ast.Declaration) -> str:
    match node:
        case ast.UseDecl():
            return f"use {node.name.text}"
        case ast.MeshDecl():
            axes = [f"{a.name.text}: {expression(a.size)}" for a in node.axes]
            profile = f" on {node.profile.text}" if node.profile else ""
            return _braces(f"mesh {node.name.text} =", axes, profile)
        case ast.LayoutDecl():
            base = f" extends {node.base.text}" if node.base else ""
            rules = [*map(rule, node.rules), *map(rule, node.settings)]
            used = "" if node.schedule is None else f" with {scheduled(node.schedule)}"
            return _braces(f"layout {node.name.text}{base}", rules, used)
        case ast.Sbp():
            return _braces(f"sbp {node.name.text}", [_sbp_entry(e) for e in node.entries])
        case ast.ScheduleDecl():
            return schedule(node)
        case ast.WeightsDecl():
            return _braces(f"weights {node.name.text}", [weights_entry(e) for e in node.entries])
        case ast.Expect():
            return _expect(node)
        case ast.FunctionDecl():
            return _function(node)
        case ast.ProgramDecl():
            params = ", ".join(_tensor(p, "[]") for p in node.params)
            return "\n".join(_block(f"program {node.name.text}({params})", node.body))
    raise AssertionError(f"dims are printed together: {node}")


def rule(node: ast.RuleDecl | ast.SettingDecl) -> str:
    """A rule or a setting of a layout: `params: model -> data`, `grads: reduce = bf16`."""
    selector = f"{_path(node.selector)}: " if node.selector else ""
    if isinstance(node, ast.SettingDecl):
        return f"{selector}{node.name.text} = {expression(node.value)}"
    keep = " keep" if node.keep else ""
    return f"{selector}{node.dim.text} -> {_group(node.axes) or 'none'}{keep}"


def scheduled(call: ast.CallExpr) -> str:
    """The schedule of a layout: `one_f_one_b[batch](8)`, or `mine`."""
    return _call(call) if call.args or call.keywords else _call(call).removesuffix("()")


def schedule(node: ast.ScheduleDecl) -> str:
    """A schedule, each row on lines of its own."""
    options = ", ".join(map(_keyword, node.options))
    rows = (line for row in node.rows for line in _row(row))
    return "\n".join([f"schedule {node.name.text}({options}) {{", *rows, "}"])


def _row(row: ast.ScheduleRow) -> list[str]:
    """The actions of one device, on lines that are full."""
    text = " ".join([f"{expression(row.device)}:", *map(_action, row.actions)])
    return textwrap.wrap(text, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT)


def _action(node: ast.ScheduleAction) -> str:
    return node.text.text + ("" if node.stage is None else f"@{expression(node.stage)}")


def _sbp_entry(entry: ast.SbpEntry) -> str:
    use = f" at {_path(entry.at)}" if entry.at else ""
    return f"{_path(entry.tensor)}{use}: ({_listed(entry.components)})"


def group_setting(setting: ast.GroupSetting | ast.GroupOptimizer) -> str:
    """A setting of some parameters: `embed: lr = 1e-4`, `(a, b): frozen`, `w: sgd(0.1)`."""
    if isinstance(setting, ast.GroupOptimizer):
        return f"{_paths(setting.selectors)}: {expression(setting.optimizer)}"
    value = "" if setting.value is None else f" = {expression(setting.value)}"
    return f"{_paths(setting.selectors)}: {setting.name.text}{value}"


def weights_entry(entry: ast.WeightsEntry | ast.IgnoredKeys | ast.WeightsGroup) -> str:
    """An entry of a block of weights: `head: "lm_head.weight"[vocab, model] or embed`."""
    if isinstance(entry, ast.WeightsGroup):
        head = f"under {' or '.join(map(expression, entry.prefixes))}"
        return _braces(head, [weights_entry(inner) for inner in entry.entries])
    if isinstance(entry, ast.IgnoredKeys):
        return f"ignore {expression(entry.pattern)}"
    return f"{_paths(entry.params)}: {' or '.join(map(_stored, entry.places))}"


def _paths(paths: Sequence[tuple[ast.Name, ...]]) -> str:
    listed = ", ".join(map(_path, paths))
    return f"({listed})" if len(paths) > 1 else listed


def _stored(place: ast.FileTensor | ast.StoredPath) -> str:
    if isinstance(place, ast.StoredPath):
        return _path(place.path)
    return f"{expression(place.key)}[{', '.join(map(file_dim, place.dims))}]"


def file_dim(dim: ast.FileDim) -> str:
    """A dim of a tensor in a file: `model`, `(heads, key)`, `hidden + hidden`."""
    match dim:
        case ast.FileMerged():
            return f"({', '.join(map(file_dim, dim.dims))})"
        case ast.FileJoined():
            return " + ".join(map(file_dim, dim.parts))
        case ast.FileUnit():
            size = "" if dim.size is None else f" = {_word(dim.size)}"
            return f"{_word(dim.dim)}{size}"


def _word(word: ast.Name | ast.Number) -> str:
    return word.text if isinstance(word, ast.Name) else expression(word)


def _expect(node: ast.Expect) -> str:
    program = f" for {node.program.text}" if node.program else ""
    mesh = f" on {node.mesh.text}" if node.mesh else ""
    policy = f" with {node.policy.text}" if node.policy else ""
    head = f"expect {node.layout.text}{program}{mesh}{policy}"
    return _braces(head, [_expected(e) for e in node.entries])


def _expected(entry: ast.ExpectPlacement | ast.ExpectCount) -> str:
    if isinstance(entry, ast.ExpectPlacement):
        return f"{_path(entry.tensor)}: {_dim_refs(entry.dims)}"
    over = "" if entry.axes is None else f" over {_group(entry.axes)}"
    return f"{entry.what.text}{over}: {expression(entry.value)}"


def _function(node: ast.FunctionDecl) -> str:
    dims = f"[{', '.join(d.text for d in node.dims)}]" if node.dims else ""
    result = "" if node.result is None else f" -> {_dim_refs(node.result)}"
    params = ", ".join(map(_tensor, node.params))
    return "\n".join(_block(f"def {node.name.text}{dims}({params}){result}", node.body))


def _tensor(node: ast.TensorParam, scalar: str = "") -> str:
    """A tensor parameter; `scalar` is the text behind the name of one without dims."""
    dims = _dim_refs(node.dims) if node.dims else scalar
    dtype = f": {node.dtype.text}" if node.dtype else ""
    default = "" if node.default is None else f" = {expression(node.default)}"
    return f"{node.name.text}{dims}{dtype}{default}"


def _braces(head: str, entries: Sequence[str], tail: str = "") -> str:
    """A block on one line, or one entry per line where that is too long."""
    line = f"{head} {{ {', '.join(entries)} }}{tail}" if entries else f"{head} {{}}{tail}"
    if len(line) <= WIDTH and "\n" not in line:
        return line
    inside = (textwrap.indent(entry, INDENT) for entry in entries)
    return "\n".join([f"{head} {{", *inside, f"}}{tail}"])


# --- statements ------------------------------------------------------------------------------


def _block(head: str, body: Sequence[ast.Statement]) -> Iterator[str]:
    if not body:
        yield f"{head} {{}}"
        return
    yield f"{head} {{"
    for statement in body:
        yield from (INDENT + line for line in _statement(statement))
    yield "}"


def _statement(node: ast.Statement) -> Iterator[str]:
    match node:
        case ast.Assign():
            yield f"{', '.join(map(_target, node.targets))} = {expression(node.value)}"
        case ast.UpdateStatement():
            yield f"{node.name.text} := {expression(node.value)}"
        case ast.ParamDecl():
            dtype = f": {node.dtype.text}" if node.dtype else ""
            init = "" if node.init is None else f" = {expression(node.init)}"
            yield f"param {_target(node.target)}{dtype}{init}"
        case ast.Repeat():
            yield from _block(f"repeat {node.dim.text}", node.body)
        case ast.Recompute():
            yield from _block("recompute", node.body)
        case ast.Return():
            yield f"return {_listed(node.values)}"
        case ast.Minimize():
            head = f"minimize {expression(node.value)} with {expression(node.optimizer)}"
            settings = [group_setting(setting) for setting in node.groups]
            yield from _braces(head, settings).splitlines() if settings else (head,)


def _target(node: ast.Target) -> str:
    return node.name.text + ("" if node.dims is None else _dim_refs(node.dims))


def _dim_refs(dims: Sequence[ast.DimRef]) -> str:
    return f"[{', '.join(map(_dim_ref, dims))}]"


def _dim_ref(node: ast.DimRef) -> str:
    return node.dim.text + ("" if node.axes is None else f"@{_group(node.axes) or 'none'}")


# --- expressions -----------------------------------------------------------------------------


def expression(node: ast.Expr, level: int = OR) -> str:
    """The text of an expression, in parentheses if it binds less tightly than `level`.

    `level` counts those of the grammar, from `OR` to `ATOM`.
    """
    binding, text = _leveled(node)
    return text if binding >= level else f"({text})"


def _leveled(node: ast.Expr) -> tuple[int, str]:
    match node:
        case ast.Number():
            return ATOM, number(node.value)
        case ast.String():
            return ATOM, f'"{node.value.translate(_ESCAPES)}"'
        case ast.Ref():
            return ATOM, node.name.text
        case ast.Unary(op="-"):
            return NEGATION, f"-{expression(node.operand, NEGATION)}"
        case ast.Unary():
            return NOT, f"not {expression(node.operand, NOT)}"
        case ast.Binary():
            return _binary(node)
        case ast.CallExpr():
            return ATOM, _call(node)
        case ast.ViewExpr():
            return ATOM, f"{expression(node.tensor, ATOM)}[{', '.join(map(_item, node.items))}]"
        case ast.Foreign():
            return ATOM, node.span.text  # as it was written: a message says what to write
    raise AssertionError(node)


def _binary(node: ast.Binary) -> tuple[int, str]:
    own, left, right = _SIDES.get(node.op, (COMPARE, SUM, SUM))
    sign = node.op if node.op == "^" else f" {node.op} "
    return own, f"{expression(node.left, left)}{sign}{expression(node.right, right)}"


def number(value: int | float) -> str:
    """A number in the usual notation: digits, or the shorter form with an exponent."""
    text = repr(value)
    if isinstance(value, int):
        return text
    mantissa, _, exponent = f"{value:e}".partition("e")
    short = f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}" if exponent else text
    is_shorter = "e" in text or len(short) + 3 < len(text)
    return short if is_shorter and float(short) == value else text


def _call(node: ast.CallExpr) -> str:
    items = "" if node.items is None else f"[{', '.join(map(_item, node.items))}]"
    arguments = [expression(a) for a in node.args]
    arguments += map(_keyword, node.keywords)
    out = "" if node.out is None else f" -> [{', '.join(n.text for n in node.out)}]"
    return f"{node.function.text}{items}({', '.join(arguments)}{out})"


def _keyword(node: ast.Keyword) -> str:
    return f"{node.name.text}={expression(node.value)}"


def _item(node: ast.Item) -> str:
    match node:
        case ast.DimItem():
            return node.dim.text
        case ast.ArrowItem():
            return f"{_group(node.sources)} -> {_group(node.targets)}"
        case ast.ByItem():
            window = node.window
            size = window.text if isinstance(window, ast.Name) else expression(window)
            target = "" if node.target is None else f" -> {node.target.text}"
            return f"{node.dim.text} by {size}{target}"
        case ast.PickItem():
            return f"{node.dim.text} = {expression(node.index)}"
        case ast.SliceItem():
            start, stop = ("" if n is None else expression(n) for n in (node.start, node.stop))
            target = "" if node.target is None else f" -> {node.target.text}"
            return f"{node.dim.text} = {start}:{stop}{target}"
    raise AssertionError(node)


def _listed(nodes: Sequence[ast.Expr]) -> str:
    return ", ".join(map(expression, nodes))


def _group(names: Sequence[ast.Name]) -> str:
    text = ", ".join(n.text for n in names)
    return f"({text})" if len(names) > 1 else text


def _path(names: Sequence[ast.Name]) -> str:
    return ".".join(n.text for n in names)


# --- long lines --------------------------------------------------------------------------------
def _wrapped(text: str) -> Iterator[str]:
    """The lines of `text`; of one that is too long, the widest bracket is written over several.

    The text between its commas gets a line of its own, broken further if it must be.
    """
    for line in text.split("\n"):
        yield from _broken(line) if len(line) > WIDTH else [line]


def _broken(line: str) -> Iterator[str]:
    indent = line[: len(line) - len(line.lstrip())]
    if line.startswith("dim "):
        yield from _filled(line)
        return
    bracket = _widest(line)
    if bracket is None:
        yield line
        return
    start, end = bracket
    yield line[: start + 1]
    parts = list(_parts(line[start + 1 : end]))
    for index, part in enumerate(parts):
        comma = "," if index < len(parts) - 1 else ""
        yield from _wrapped(f"{indent}{INDENT}{part}{comma}")
    yield from _wrapped(f"{indent}{line[end:]}")


def _filled(line: str) -> Iterator[str]:
    """A long `dim` declaration as several that fill their lines."""
    current = ""
    for entry in line.removeprefix("dim ").split(", "):
        longer = f"{current}, {entry}" if current else f"dim {entry}"
        if len(longer) > WIDTH and current:
            yield current
            longer = f"dim {entry}"
        current = longer
    yield current


def _widest(line: str) -> tuple[int, int] | None:
    """The places of the outermost parentheses with the longest text; else, of square brackets."""
    pairs: list[tuple[int, int]] = []
    square: list[tuple[int, int]] = []
    opened: list[int] = []
    for at, char in enumerate(line):
        if char in "([":
            opened.append(at)
        elif char in ")]" and opened:
            start = opened.pop()
            if not opened:
                (pairs if char == ")" else square).append((start, at))
    return max(pairs or square, key=lambda p: p[1] - p[0], default=None)


def _parts(text: str) -> Iterator[str]:
    """The texts between the outermost commas."""
    depth, start = 0, 0
    for at, char in enumerate(text):
        depth += (char in "([") - (char in ")]")
        if char == "," and not depth:
            yield text[start:at].strip()
            start = at + 1
    yield text[start:].strip()
