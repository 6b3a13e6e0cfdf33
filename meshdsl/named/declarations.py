"""The declarations of a file, resolved: dims with their sizes, and tables of everything named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from functools import partial
from typing import TYPE_CHECKING, NoReturn, TypeVar

from meshdsl.cluster.profile import load
from meshdsl.diagnostics import (
    Diagnostic,
    DiagnosticError,
    Diagnostics,
    Edit,
    Fix,
    Poisoned,
    Related,
    Source,
    Span,
    advice,
    all_closest,
    all_of,
    did_you_mean,
    fail,
    spelled_right,
)
from meshdsl.ir.types import Dim
from meshdsl.option_edits import one_of
from meshdsl.records import dataclass
from meshdsl.syntax import ast
from meshdsl.syntax.edits import below_dims, without_dim, without_line
from meshdsl.syntax.symbols import ROLES

if TYPE_CHECKING:
    from meshdsl.named.packages import OperatorPackage
    from meshdsl.ops.opdef import OpDef

T = TypeVar("T")

MAX_DIM = 2**31 - 1
"""The largest size of one dim."""

RESERVED_TENSORS = ROLES
"""Selectors of layouts; no tensor may have these names."""


@dataclass(frozen=True, slots=True)
class Declarations:
    """The declarations of a file, by name."""

    source: Source
    dims: Mapping[str, Dim] = field(default_factory=dict)
    dim_spans: Mapping[str, Span] = field(default_factory=dict)
    meshes: Mapping[str, ast.MeshDecl] = field(default_factory=dict)
    layouts: Mapping[str, ast.LayoutDecl] = field(default_factory=dict)
    sbps: Mapping[str, ast.Sbp] = field(default_factory=dict)
    schedules: Mapping[str, ast.ScheduleDecl] = field(default_factory=dict)
    weights: Mapping[str, ast.WeightsDecl] = field(default_factory=dict)
    functions: Mapping[str, ast.FunctionDecl] = field(default_factory=dict)
    programs: Mapping[str, ast.ProgramDecl] = field(default_factory=dict)
    expects: tuple[ast.Expect, ...] = ()
    unsized: frozenset[str] = frozenset()
    """Dims whose size is wrong, and reported; they stand with the size 1."""
    is_library: bool = False
    """Whether they are those of the prelude."""
    packages: Mapping[str, OperatorPackage] = field(default_factory=dict)
    operators: Mapping[str, OpDef] = field(default_factory=dict)
    """The operators of `packages`, by name."""
    lacks_packages: bool = False
    """Whether the file uses packages that could not be loaded, which is reported."""

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of dims, without those that are wrong."""
        return {n: dim.size for n, dim in self.dims.items() if n not in self.unsized}


def declare(
    tree: ast.SourceFile,
    diagnostics: Diagnostics,
    set_dims: Mapping[str, int] | None = None,
    set_in: Mapping[str, Span] | None = None,
) -> Declarations:
    """Resolve the declarations of `tree`; errors go to `diagnostics`, wrong ones are left out.

    `set_dims` are sizes from outside, `set_in` the places of those that a file has.
    """
    source = tree.span.source
    entries = _unique(tree.declarations, diagnostics)
    sizes = _DimSizes(entries["dim"], set_dims or {}, set_in or {}, diagnostics)
    dims = sizes.resolve()
    expects = tuple(d for d in tree.declarations if isinstance(d, ast.Expect))
    _check_profiles(tree.declarations, diagnostics)
    packages = _packages(entries["use"], diagnostics) if entries["use"] else {}
    return Declarations(
        source,
        dims,
        {name: node.name.span for name, node in entries["dim"].items()},
        _of(entries["mesh"], ast.MeshDecl),
        _of(entries["layout"], ast.LayoutDecl),
        _of(entries["sbp"], ast.Sbp),
        _of(entries["schedule"], ast.ScheduleDecl),
        _of(entries["weights"], ast.WeightsDecl),
        _of(entries["def"], ast.FunctionDecl),
        _of(entries["program"], ast.ProgramDecl),
        expects,
        frozenset(sizes.failed),
        packages=packages,
        operators={n: op for package in packages.values() for n, op in package.operators.items()},
        lacks_packages=len(packages) < len(entries["use"]),
    )


def unknown(
    code: str, kind: str, name: ast.Name, known: list[str], help: str | None = None
) -> Diagnostic:
    """`unknown KIND NAME`, with the closest known name as help and fix."""
    fixes = spelled_right(name.span, name.text, known)
    close = advice(fixes) or did_you_mean(name.text, known)
    help = close or help or known_names(kind, known)
    return Diagnostic(code, f"unknown {kind} `{name.text}`", name.span, help=help, fixes=fixes)


def declared(name: ast.Name, declarations: Declarations) -> tuple[Fix, ...]:
    """The fix that declares a dim below those of the file; its size is for the user to say."""
    line = f"dim {name.text} = 1"
    edit = added_dim(line, declarations)
    if edit is None or edit.span.source is not name.span.source:
        return ()
    return (Fix.declare(line, edit),)


def added_dim(line: str, declarations: Declarations) -> Edit | None:
    """The edit that adds a `dim` line below those of a file; None for the library."""
    if declarations.is_library:
        return None
    return below_dims(line, declarations.source, declarations.dim_spans.values())


def constant_integer(node: ast.Expr, sizes: Mapping[str, int], largest: int = MAX_DIM) -> int:
    """The value of constant integer arithmetic over dims; raises a diagnostic when it is not that.

    The result must be in 1 … `largest`. Nothing larger than 64 bits is computed on the way.
    """
    value = _integer(node, sizes)
    if value < 1:
        message = f"a size must be at least 1, and this is {value}"
        fixes = (Fix.write(node.span, "1", safe=False),)
        help = advice(fixes, "or another whole number of 1 or more")
        fail("MD0105", message, node.span, help=help, fixes=fixes)
    if value > largest:
        _too_large(node.span)
    return value


def declared_integer(node: ast.Expr, declarations: Declarations, largest: int = MAX_DIM) -> int:
    """`constant_integer` over the dims of a file; Poisoned where the size of one is wrong."""
    if declarations.unsized.intersection(_references(node)):
        _poisoned(node, list(declarations.dims))
    return constant_integer(node, declarations.sizes, largest)


def _poisoned(node: ast.Expr, known: list[str]) -> NoReturn:
    """Raise what is wrong with a size that depends on a wrong one: its unknown names."""
    names = [n.name for n in ast.walk(node) if isinstance(n, ast.Ref)]
    errors = [unknown("MD0101", "dim", n, known) for n in names if n.text not in known]
    raise DiagnosticError(*errors) if errors else Poisoned


# --- duplicates ------------------------------------------------------------------------------


def _unique(
    nodes: tuple[ast.Declaration, ...], diagnostics: Diagnostics
) -> dict[str, dict[str, ast.NamedDeclaration]]:
    tables: dict[str, dict[str, ast.NamedDeclaration]] = {k: {} for k in ast.KEYWORDS.values()}
    for node in nodes:
        if isinstance(node, ast.Expect):
            continue
        kind = ast.KEYWORDS[type(node)]
        old = tables[kind].setdefault(node.name.text, node)
        if old is not node:
            diagnostics.add(_twice(kind, node, old.name))
    return tables


def _of(entries: dict[str, ast.NamedDeclaration], type_: type[T]) -> dict[str, T]:
    return {name: node for name, node in entries.items() if isinstance(node, type_)}


def _twice(kind: str, node: ast.NamedDeclaration, old: ast.Name) -> Diagnostic:
    name = node.name
    gone = without_dim(node) if isinstance(node, ast.DimDecl) else without_line(node.span)
    fixes = (Fix("remove the second one", (Edit(gone, ""),), safe=False),)
    return Diagnostic(
        "MD0104",
        f"`use {name.text}` is written twice"
        if kind == "use"
        else f"{kind} `{name.text}` is declared twice",
        name.span,
        related=(Related(old.span, "first declared here"),),
        help=advice(fixes, None if kind == "use" else "or give it another name"),
        fixes=fixes,
    )


def _packages(
    entries: dict[str, ast.NamedDeclaration], diagnostics: Diagnostics
) -> dict[str, OperatorPackage]:
    """The packages that a file uses, less those that cannot be loaded, which is reported."""
    from meshdsl.named.packages import load

    steps = {name: partial(load, name, node.name.span) for name, node in entries.items()}
    by_name = {name: diagnostics.of(step) for name, step in steps.items()}
    return {name: package for name, package in by_name.items() if package is not None}


def _check_profiles(nodes: tuple[ast.Declaration, ...], diagnostics: Diagnostics) -> None:
    """Report profiles of meshes that there are not."""
    for node in nodes:
        if isinstance(node, ast.MeshDecl) and node.profile:
            diagnostics.of(partial(load, node.profile.text, node.profile.span))


# --- sizes of dims ---------------------------------------------------------------------------


class _DimSizes:
    """Evaluates `dim` declarations in any order, each once."""

    def __init__(
        self,
        entries: dict[str, ast.NamedDeclaration],
        set_dims: Mapping[str, int],
        set_in: Mapping[str, Span],
        diagnostics: Diagnostics,
    ) -> None:
        self.entries = _of(entries, ast.DimDecl)
        self.set_dims = set_dims
        self.set_in = set_in
        self.diagnostics = diagnostics
        self.sizes: dict[str, int] = {}
        self.failed: set[str] = set()

    def resolve(self) -> dict[str, Dim]:
        self._check_set()
        for name in self.entries:
            self._resolve_from(name)
        return {name: Dim(name, self.sizes.get(name, 1)) for name in self.entries}

    def _check_set(self) -> None:
        for name, size in self.set_dims.items():
            if name not in self.entries:
                span, entries = self.set_in.get(name), list(self.entries)
                fixes = spelled_right(span, name, entries) if span is not None else ()
                if span is None:
                    meant = all_closest(name, entries)
                    old = f"{name}={size}"
                    fixes = one_of("--set", (f"{dim}={size}" for dim in meant), old)
                message, span = f"`--set {name}`: no such dim", span or _option(name)
                help = advice(fixes) or known_names("dim", entries)
                self.diagnostics.add(Diagnostic("MD0115", message, span, help=help, fixes=fixes))
            elif not 1 <= size <= MAX_DIM:
                message = f"the size of a dim lies in 1 … {MAX_DIM}"
                help = f"choose one: `--set {name}=N`"
                span = _option(f"{name}={size}")
                self.diagnostics.add(Diagnostic("MD0106", message, span, help=help))

    def _resolve_from(self, name: str) -> None:
        """Resolve `name` and the dims it depends on, with an explicit stack: chains may be long."""
        stack = {name: None}
        while stack:
            current = next(reversed(stack))
            waiting = next((n for n in self._needs(current) if not self._is_done(n)), None)
            if waiting is None:
                self._evaluate(current)
                del stack[current]
            elif waiting in stack:
                names = list(stack)
                self._cycle(names[names.index(waiting) :])
            else:
                stack[waiting] = None

    def _is_done(self, name: str) -> bool:
        return name in self.sizes or name in self.failed

    def _needs(self, name: str) -> list[str]:
        if name in self.set_dims or name in self.sizes or name in self.failed:
            return []
        return [r for r in _references(self.entries[name].value) if r in self.entries]

    def _evaluate(self, name: str) -> None:
        if name in self.sizes or name in self.failed:
            return
        if name in self.set_dims:
            if 1 <= self.set_dims[name] <= MAX_DIM:
                self.sizes[name] = self.set_dims[name]
            else:
                self.failed.add(name)
            return
        try:
            node = self.entries[name].value
            if any(r in self.failed for r in _references(node)):
                _poisoned(node, list(self.entries))
            self.sizes[name] = constant_integer(node, self.sizes)
        except DiagnosticError as error:
            self.diagnostics.add(*error.diagnostics)
            self.failed.add(name)

    def _cycle(self, names: list[str]) -> None:
        circle = " -> ".join([*names, names[0]])
        spans = [self.entries[name].name.span for name in names]
        message = f"the size of `{names[0]}` depends on itself: {circle}"
        others = tuple(Related(span, "and this on it") for span in spans[1:2])
        edit = Edit(self.entries[names[0]].value.span, "1")
        fixes = (Fix(f"write `dim {names[0]} = 1`, or another size", (edit,), safe=False),)
        self.diagnostics.add(Diagnostic("MD0107", message, spans[0], related=others, fixes=fixes))
        self.failed.update(names)


def _option(text: str) -> Span:
    """The place of a setting from the command line."""
    return Span(Source("--set", text), 0, len(text))


def _references(node: ast.Expr) -> list[str]:
    match node:
        case ast.Ref():
            return [node.name.text]
        case ast.Unary():
            return _references(node.operand)
        case ast.Binary():
            return _references(node.left) + _references(node.right)
    return []


_SIZE_SIGNS = {"**": "^"}
"""Operators of other languages, and those of sizes that mean the same."""


def _integer(node: ast.Expr, sizes: Mapping[str, int]) -> int:
    match node:
        case ast.Number(value=int() as value):
            return _bounded(value, node.span)
        case ast.Ref():
            if node.name.text not in sizes:
                raise DiagnosticError(unknown("MD0101", "dim", node.name, list(sizes)))
            return sizes[node.name.text]
        case ast.Unary(op="-"):
            return -_integer(node.operand, sizes)
        case ast.Binary(op="+" | "-" | "*" | "/" | "//" | "%" | "^"):
            sides = (partial(_integer, side, sizes) for side in (node.left, node.right))
            left, right = all_of(sides)
            return _bounded(_arithmetic(node, left, right), node.span)
        case ast.Foreign(kind="sign", word=word) if word.text in _SIZE_SIGNS:
            sign = _SIZE_SIGNS[word.text]
            message = f"there is no operator `{word.text}`"
            fail("MD0018", message, word.span, fixes=(Fix.write(word.span, sign),))
    fail(
        "MD0105",
        "a size is constant integer arithmetic over numbers and dims",
        node.span,
        help="use integers, dims, `+ - * / // % ^` and parentheses",
    )


def _arithmetic(node: ast.Binary, left: int, right: int) -> int:
    match node.op:
        case "+":
            return left + right
        case "-":
            return left - right
        case "*":
            return left * right
        case "/":
            return _divide(node, left, right)
        case "//" | "%":
            if right == 0:
                message = f"{left} is divided by zero"
                fail("MD0105", message, node.span, help="sizes are whole numbers")
            return left // right if node.op == "//" else left % right
    if right < 0:
        fail("MD0105", "a size has no negative power", node.span, help="sizes are whole numbers")
    if right * max(abs(left), 2).bit_length() > 256:
        _too_large(node.span)
    return int(left**right)


def _divide(node: ast.Binary, left: int, right: int) -> int:
    if right == 0 or left % right:
        message = f"{left} does not divide by {right} without remainder"
        fixes = (Fix.write(node.op_span, "//", safe=False),) if right and left > right else ()
        help = advice(fixes, "sizes are whole numbers")
        fail("MD0105", message, node.span, help=help, fixes=fixes)
    return left // right


def _bounded(value: int, span: Span) -> int:
    if abs(value) >= 2**63:
        _too_large(span)
    return value


def _too_large(span: Span) -> None:
    help = "choose a smaller size; several dims together may have up to 2^63 - 1 elements"
    fail("MD0106", f"this size is larger than {MAX_DIM} (2^31 - 1)", span, help=help)


def known_names(kind: str, known: list[str]) -> str:
    """The first of the names that a help lists."""
    if not known:
        return f"no {kind} is declared"
    more = ", …" if len(known) > 8 else ""
    return f"known: {', '.join(f'`{name}`' for name in known[:8])}{more}"
