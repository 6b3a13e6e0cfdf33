"""What other libraries write about tensors, refused with the line of Python to write instead.

The table is that of the language (`foreign.toml`); what its rules write is put into Python here,
with the operands as the user wrote them and the names that dims have where the line stands.
"""

from __future__ import annotations

import ast as python
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from meshdsl.api.dims import Dim, DType
from meshdsl.api.errors import ProgramError, told
from meshdsl.api.sizes import number_of
from meshdsl.api.source_location import Site, here, key_of
from meshdsl.diagnostics import Diagnostic, DiagnosticError, Edit, Fix, Span, fail
from meshdsl.ir import types
from meshdsl.named.foreign import RENAMED, row_of, written
from meshdsl.named.foreign_use import ForeignOperand, Use
from meshdsl.named.refused import message_for, planted, stands_free, way_out
from meshdsl.ops.opdef import load_all
from meshdsl.records import dataclass
from meshdsl.syntax import ast
from meshdsl.syntax.parse import parse_expression

if TYPE_CHECKING:
    from meshdsl.api.recorded import RecordedVariable
    from meshdsl.api.tracer import Tracer
    from meshdsl.named.builder import Frame
    from meshdsl.named.ir import Value

MEMBERS = frozenset({"T", "mT", "H"})
"""Members of other libraries' tensors that are no methods."""


class Handle:
    """A value of the program being traced, as refusals see it: a `Tensor`."""

    __slots__ = ("_frame", "_tracer", "_value", "_variable")

    def __init__(
        self, tracer: Tracer, value: Value, frame: Frame, variable: RecordedVariable
    ) -> None:
        self._tracer, self._value, self._frame, self._variable = tracer, value, frame, variable


@dataclass(frozen=True, slots=True)
class ForeignMethod:
    """A method of other libraries' tensors, or a function of theirs (`tensor` None): refuses."""

    tensor: Handle | None
    word: str

    def __call__(self, *args: Any, **named: Any) -> NoReturn:
        """Refuse the call."""
        given = args if self.tensor is None else (self.tensor, *args)
        refuse("function" if self.tensor is None else "method", self.word, given, named)


def is_foreign(word: str) -> bool:
    """Whether a method, or a function, of this name is one of other libraries."""
    return row_of(word) is not None or word in RENAMED or word in load_all()


def is_foreign_call(name: str, args: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Whether an operator is called with dims as other libraries take them."""
    opdef = load_all().get(name)
    if opdef is None or row_of(name) is None:
        return False
    own_options = {option for option, _ in opdef.surface.options} | {"out"}
    most = opdef.surface.arity[1]
    extra = most is not None and len(args) > most and opdef.surface.items != "none"
    listed = any(isinstance(arg, str | list | tuple) for arg in args)
    return extra or listed or bool(set(options) - own_options)


@told
def refuse(kind: str, word: str, args: Sequence[Any], named: Mapping[str, Any]) -> NoReturn:
    """Refuse what is being evaluated in the user's file: `word` of `args`, the receiver first."""
    site = here()
    row = row_of(word)
    code, message = row.code if row else "MD0125", message_for(kind, word)
    operands = _Given(site)
    operands.by_name = row is not None and row.rule == "contract"
    nodes = operands.nodes(kind, len(args))
    parts = tuple(operands.part(f"_{i}", a, nodes[i]) for i, a in enumerate(args))
    options = {n: operands.part(f"_{n}", v, operands.keyword(n)) for n, v in named.items()}
    use = Use(word, parts, options, operands.known)
    if any(map(_is_array, args)):
        help = "give arrays to the program as inputs, or as its parameters"
        fail("MD0815", "an array is no tensor of the program", site.span, help=help)
    tree, writer = written(use), _Python(operands, use)
    indexed = site.span.source.text[site.span.end :].startswith("[")
    if tree is None or (use.shifted and indexed):
        fail(code, message, site.span, help=_QUOTED.sub(writer.quoted, way_out(word)))
    if _is_natural(operands, use, tree, site):
        use.order = None
    line, fix = _line(site, writer, tree)
    help = f"write `{line}`"
    raise ProgramError(Diagnostic(code, message, site.span, help=help, fixes=(fix,)))


def _is_array(found: Any) -> bool:
    """Whether it is an array of another library: values, which go into programs as inputs."""
    return (
        hasattr(found, "__array__") and number_of(found) is None and not isinstance(found, Handle)
    )


_QUOTED = re.compile(r"`([^`]+)`")
_ATOMS = (
    python.Name, python.Call, python.Attribute, python.Subscript, python.Constant, python.Tuple,
    python.List,
)  # fmt: skip
"""Expressions that bind as tightly as a name."""


# --- operands ------------------------------------------------------------------------------------


class _Given:
    """The operands of an expression: as parts of a rule, and as the user wrote them."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.texts: dict[str, str] = {}
        self.is_atom: dict[str, bool] = {}
        self.by_name = False
        self.values: dict[str, Any] = {}
        self.parts: dict[str, ForeignOperand] = {}
        self.variables = dict(_dims_of(site.frame))
        self.known = {d.name: types.Dim(d.name, d.size) for d in self.variables.values()}

    def nodes(self, kind: str, count: int) -> list[python.expr | None]:
        """The syntax of the operands; None where it is not known."""
        nodes: list[python.expr | None]
        match self.site.node:
            case python.BinOp(left=left, right=right):
                nodes = [left, right]
            case python.AugAssign(target=target, value=value):
                nodes = [target, value]
            case python.Subscript(value=value, slice=index):
                nodes = [value, *(index.elts if isinstance(index, python.Tuple) else [index])]
            case python.Call(func=python.Attribute(value=value), args=args) if kind == "method":
                nodes = [value, *args]
            case python.Call(args=args):
                nodes = list(args)
            case python.Attribute(value=value):
                nodes = [value]
            case _:
                nodes = []
        plain = len(nodes) == count and not any(isinstance(n, python.Starred) for n in nodes)
        return nodes if plain else [None] * count

    def keyword(self, name: str) -> python.expr | None:
        """The syntax of an argument with a name."""
        node = self.site.node
        if not isinstance(node, python.Call):
            return None
        return next((k.value for k in node.keywords if k.arg == name), None)

    def part(self, ref: str, found: Any, node: python.expr | None) -> ForeignOperand:
        """An operand as a rule sees it; its text is kept."""
        self.texts[ref] = self._text(found, node)
        self.values[ref] = found
        self.is_atom[ref] = node is None or isinstance(node, _ATOMS)
        part = self.parts[ref] = self._made(ref, found, node)
        return part

    def _made(self, ref: str, found: Any, node: python.expr | None) -> ForeignOperand:
        if isinstance(found, Handle):
            type_ = found._value.type
            return ForeignOperand(ref, dims=type_.dims, dtype=type_.dtype)
        if isinstance(found, Dim):
            self.known.setdefault(found.name, types.Dim(found.name, found.size))
            return ForeignOperand(ref, dim=types.Dim(found.name, found.size))
        if isinstance(found, tuple | list):
            nodes = node.elts if isinstance(node, python.Tuple | python.List) else []
            each = nodes if len(nodes) == len(found) else [None] * len(found)
            pairs = zip(found, each, strict=True)
            return ForeignOperand(
                ref, parts=tuple(self.part(f"{ref}_{i}", *p) for i, p in enumerate(pairs))
            )
        if isinstance(found, slice):
            return ForeignOperand(ref, bounds=(found.start, found.stop))
        if found is None or found is ... or isinstance(found, bool):
            return ForeignOperand(ref, text="..." if found is ... else str(found))
        number = number_of(found)
        if number is not None:
            return ForeignOperand(ref, number=number)
        if isinstance(found, DType):
            return ForeignOperand(ref, text=found.name)
        return ForeignOperand(
            ref, text=found if isinstance(found, str) else getattr(found, "__name__", str(found))
        )

    def _text(self, found: Any, node: python.expr | None) -> str:
        file = self.site.file
        match node:
            case python.Call(
                func=python.Attribute(attr="einsum"),
                args=[inner],
                keywords=[python.keyword(arg="out")],
            ) if self.by_name:
                node = inner  # it only reorders dims, and they are met by name
        if node is None or file is None:
            return found._value.label or "x" if isinstance(found, Handle) else repr(found)
        return file.span(key_of(node)).text


def _dims_of(frame: FrameType | None) -> Iterator[tuple[str, Dim]]:
    """The variables that are dims where a line stands."""
    if frame is not None:
        for scope in (frame.f_globals, frame.f_locals):
            yield from ((n, variable) for n, variable in scope.items() if isinstance(variable, Dim))


# --- Python --------------------------------------------------------------------------------------

_LEVELS = {"or": 1, "and": 2, "+": 4, "-": 4, "*": 5, "/": 5, "//": 5, "%": 5, "^": 7}
_COMPARE, _NEGATION, _ATOM = 0, 6, 9
_SIGNS = {"^": "**", "and": "&", "or": "|"}


class _Python:
    """Expressions of the language as Python."""

    def __init__(self, given: _Given, use: Use) -> None:
        self.given, self.use = given, use
        frame = given.site.frame
        scope = {**frame.f_globals, **frame.f_locals} if frame is not None else {}
        ours = [n for n, v in scope.items() if getattr(v, "__name__", "") == "meshdsl"]
        self.md = ours[0] if ours else "md"

    def quoted(self, found: re.Match[str]) -> str:
        """A form of the language between backticks, as one of Python."""
        tree = parse_expression(found[1])
        return found[0] if tree is None else f"`{self.text(tree)}`"

    def text(self, node: ast.Expr, level: int = 0) -> str:
        """The text, in parentheses if it binds less tightly than `level`."""
        own, text = self._leveled(node)
        return text if own >= level else f"({text})"

    def _leveled(self, node: ast.Expr) -> tuple[int, str]:
        match node:
            case ast.Number(value=value):
                return _ATOM, repr(value)
            case ast.String(value=value):
                return _ATOM, repr(value)
            case ast.Ref(name=name):
                level = _ATOM if self.given.is_atom.get(name.text, True) else _COMPARE
                return level, self.name(name.text)
            case ast.Unary(op=op, operand=operand):
                return _NEGATION, ("-" if op == "-" else "~") + self.text(operand, _NEGATION)
            case ast.Binary(op=op, left=left, right=right):
                level = _LEVELS.get(op, _COMPARE)
                sign = _SIGNS.get(op, op)
                text = f"{self.text(left, level or 1)} {sign} {self.text(right, level + 1)}"
                return level, text
            case ast.CallExpr():
                return _ATOM, self._call(node)
            case ast.ViewExpr():
                return _ATOM, self._view(node)
        raise AssertionError(node)

    def name(self, name: str) -> str:
        """An operand, a dtype, or a dim by its variable, or made where it stands."""
        if name in self.given.texts:
            return self.given.texts[name]
        if name in types.DTYPES:
            return f"{self.md}.{name}"
        names = [v for v, d in self.given.variables.items() if d.name == name]
        if names:
            return name if name in names else names[0]
        dim = self.use.new.get(name) or self.given.known.get(name) or self._unbound(name)
        return f'{self.md}.dim("{name}", {dim.size})' if dim else name

    def _unbound(self, name: str) -> types.Dim | None:
        """A dim of an operand that no variable holds: one that an expression made in its place."""
        dims = (d for part in self.given.parts.values() for d in part.dims or ())
        return next((d for d in dims if d.name == name), None)

    def _call(self, node: ast.CallExpr) -> str:
        # `put[mem = i](x, new)` is `md.put[mem](x, new, i)`.
        at = [i for i in node.items or () if isinstance(i, ast.PickItem)]
        item_texts = [self.name(i.dim.text) if i in at else self._item(i) for i in node.items or ()]
        items = "" if node.items is None else f"[{', '.join(item_texts)}]"
        args = [self.text(a) for a in (*node.args, *(i.index for i in at))]
        args += [f"{k.name.text}={self.text(k.value)}" for k in node.keywords]
        if node.out is not None:
            args.append(f"out=[{', '.join(self.name(n.text) for n in node.out)}]")
        name = "logical_not" if node.function.text == "not" else node.function.text
        return f"{self.md}.{name}{items}({', '.join(args)})"

    def _view(self, node: ast.ViewExpr) -> str:
        if isinstance(node.tensor, ast.Ref) and node.tensor.name.text in load_all():
            return f"{self.md}.{node.tensor.name.text}[{', '.join(map(self._item, node.items))}]"
        text, arrows = self.text(node.tensor, _ATOM), []
        for item in node.items:
            if isinstance(item, ast.ArrowItem):
                arrows.append(self._item(item))
                continue
            text += f"[{', '.join(arrows)}]" if arrows else ""
            text, arrows = text + self._item(item), []
        return text + (f"[{', '.join(arrows)}]" if arrows else "")

    def _item(self, item: ast.Item) -> str:
        match item:
            case ast.DimItem(dim=dim):
                return self.name(dim.text)
            case ast.ArrowItem(sources=sources, targets=targets):
                return f"{self._group(sources)} >> {self._group(targets)}"
            case ast.ByItem(dim=dim, window=window, target=target):
                of = isinstance(window, ast.Name) and self.name(window.text)
                size = of or str(window.value if isinstance(window, ast.Number) else "")
                out = "" if target is None else f" >> {self.name(target.text)}"
                return f"{self.name(dim.text)}.by({size}){out}"
            case ast.PickItem(dim=dim, index=ast.Ref(name=name) as index):
                part = self.given.parts.get(name.text)
                method = "pick" if part is None or part.dims is None else "gather"
                return f".{method}({self.name(dim.text)}, {self.text(index)})"
            case ast.PickItem(dim=dim, index=index):
                return f".pick({self.name(dim.text)}, {self.text(index)})"
            case ast.SliceItem(dim=dim, start=start, stop=stop, target=target):
                ends = ("None" if end is None else self.text(end) for end in (start, stop))
                part_of = "" if target is None else self.name(target.text)
                return f".slice({self.name(dim.text)}, {', '.join(ends)}, {part_of})"
        raise AssertionError(item)

    def _group(self, names: Sequence[ast.Name]) -> str:
        texts = [self.name(n.text) for n in names]
        return texts[0] if len(texts) == 1 else f"({', '.join(texts)})"


def _line(site: Site, writer: _Python, tree: ast.Expr) -> tuple[str, Fix]:
    """The user's line as it should be, and the fix that makes it so."""
    text = writer.text(tree)
    order = writer.use.order
    if order is not None and isinstance(site.names, str):
        dims = ", ".join(writer.name(n) for n in order)
        text = f'{writer.md}.name("{site.names}", {text}, [{dims}])'
    elif order is not None:
        dims = ", ".join(writer.name(n) for n in order)
        text = f"{writer.md}.einsum({text}, out=[{dims}])"
    elif isinstance(tree, ast.Binary | ast.Unary) and not stands_free(site.span):
        text = f"({text})"
    if isinstance(site.node, python.AugAssign):
        text = f"{writer.given.texts['_0']} = {text}"
    fix = Fix(f"write `{text}`", (Edit(site.span, text),))
    return edited(site, site.span, text), fix


def _is_natural(given: _Given, use: Use, tree: ast.Expr, site: Site) -> bool:
    """Whether what is written has its dims in the order that positions give them."""
    from meshdsl.named.expressions import OperandRef
    from meshdsl.named.ir import Value

    span, handles = site.span, [v for v in given.values.values() if isinstance(v, Handle)]
    if not handles:
        return False
    tracer = handles[0]._tracer
    values: dict[str, ast.Expr] = {}
    for ref, value in given.values.items():
        if isinstance(value, Handle):
            values[ref] = OperandRef(ast.Name(ref, span), span, value._value)
        elif number_of(value) is not None and not isinstance(value, Dim):
            values[ref] = ast.Number(number_of(value) or 0, span)
        elif isinstance(value, Dim):
            values[ref] = ast.Ref(ast.Name(value.name, span), span)
    scope = replace(tracer.scope, dims={**tracer.known, **given.known, **use.new})
    try:
        operand = tracer.expressions.evaluate(planted(tree, span, values), scope)
    except DiagnosticError:
        return False
    return isinstance(operand, Value) and operand.type.names == use.order


def chosen(site: Site) -> str | None:
    """The line that chooses per element instead of the `if` around a condition; None for none."""
    if site.file is None or site.file.tree is None or site.node is None:
        return None
    writer, condition = _Python(_Given(site), Use("if", (), {}, {})), key_of(site.node)

    def text(node: python.AST) -> str:
        assert site.file is not None, "the line is known"
        return site.file.span(key_of(node)).text

    for node in python.walk(site.file.tree):
        match node:
            case python.IfExp(test=test, body=yes, orelse=no) if key_of(test) == condition:
                replacement = f"{writer.md}.where({text(test)}, {text(yes)}, {text(no)})"
                return edited(site, site.file.span(key_of(node)), replacement)
            case python.If(
                test=test,
                body=[python.Assign(targets=[python.Name(id=name)], value=yes)],
                orelse=[python.Assign(targets=[python.Name(id=other)], value=no)],
            ) if key_of(test) == condition and name == other:
                return f"{name} = {writer.md}.where({text(test)}, {text(yes)}, {text(no)})"
            case python.BoolOp(op=op, values=values) if key_of(node) == condition:
                sign = "&" if isinstance(op, python.And) else "|"
                replacement = f" {sign} ".join(f"({text(v)})" for v in values)
                return edited(site, site.file.span(key_of(node)), replacement)
            case python.UnaryOp(op=python.Not(), operand=operand) if key_of(node) == condition:
                return edited(site, site.file.span(key_of(node)), f"~({text(operand)})")
            case python.Compare(left=left, comparators=[middle, right]) if (
                key_of(node) == condition
            ):
                one, other = (_SIGN[type(op)] for op in node.ops)
                replacement = (
                    f"({text(left)} {one} {text(middle)}) & ({text(middle)} {other} {text(right)})"
                )
                return edited(site, site.span, replacement)
    return None


_SIGN: Mapping[type, str] = {
    python.Lt: "<", python.LtE: "<=", python.Gt: ">", python.GtE: ">=", python.Eq: "==",
    python.NotEq: "!=",
}  # fmt: skip


def first_dim(site: Site, dims: Sequence[str]) -> str | None:
    """The line with the first dim of a tensor instead of its length."""
    if not dims:
        return None
    writer = _Python(_Given(site), Use("len", (), {}, {}))
    return edited(site, site.span, writer.name(dims[0]))


def compiled(site: Site) -> str | None:
    """The line that compiles a program before it calls it; None where the call is not known."""
    match site.node:
        case python.Call(func=func) if site.file is not None:
            span = site.file.span(key_of(func))
            return edited(site, span, f"{span.text}.compile()")
    return None


def edited(site: Site, span: Span, text: str) -> str:
    """The line around a span with `text` in its place; `text` alone where it is several lines."""
    first, last = span.line, span.source.position(max(span.start, span.end - 1))[0]
    if site.file is None or first != last or not span.text:
        return text
    start, end = span.source.bounds(first)
    source_text = span.source.text
    return f"{source_text[start : span.start]}{text}{source_text[span.end : end]}".strip()
