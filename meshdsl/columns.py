"""Columns of a comparison: parsed from options, and compiled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import field, replace

from meshdsl.diagnostics import (
    Diagnostic,
    DiagnosticError,
    Diagnostics,
    Edit,
    Fix,
    Source,
    Span,
    fail,
)
from meshdsl.named.declarations import Declarations, unknown
from meshdsl.pipeline import Compilation, Options
from meshdsl.placed.layout import axes_of, resolve_mesh
from meshdsl.placed.place import check_policy
from meshdsl.records import dataclass
from meshdsl.syntax import ast
from meshdsl.syntax.edits import removal

OPTIONS = {"layout": "--layouts", "sbp": "--sbp"}

MOST_LAYOUTS = 4
"""The layouts of a file that are compared where none are named."""


@dataclass(frozen=True, slots=True)
class Wish:
    """The request for one column.

    `kind` is `layout` or `sbp`, `name` None for the first layout. A `positional` column is the same
    program as the one under its layout, shown by positions.
    """

    kind: str
    name: str | None
    reduce: str
    positional: bool = False


@dataclass(slots=True)
class Column:
    """One column: its letter, the stages of its compilation, and its diagnostics.

    `same_as` is the letter of an earlier column with an identical program.
    """

    letter: str
    wish: Wish
    made: Compilation | None = None
    diagnostics: Diagnostics = field(default_factory=Diagnostics)
    same_as: str | None = None

    @property
    def works(self) -> bool:
        """Whether the column compiled."""
        return self.made is not None

    @property
    def title(self) -> str:
        """The title `layout hybrid, --reduce immediate`."""
        name = self.made.placed.layout if self.made else self.wish.name
        how = f"{self.wish.kind} {name}" if name not in (None, "none") else "no layout"
        as_sbp = ", as positional SBP" if self.wish.positional else ""
        return f"{how}, --reduce {self.wish.reduce}{as_sbp}"


# --- requests --------------------------------------------------------------------------------


def wishes(
    declarations: Declarations,
    layouts: str | None,
    sbps: str | None,
    policies: str | None,
    default: str,
    mesh: str | None = None,
) -> tuple[Wish, ...]:
    """The requested columns: the product of the options.

    By default the layouts of the file on the mesh of the first, at most `MOST_LAYOUTS`. Where there
    is one, or one is named: its program, the same as positional SBP, and reduced immediately.
    Raises a diagnostic for an unknown name, and for a column that is requested twice.
    """
    reduces = [part for part, _ in _policies(policies)] if policies is not None else [default]
    placed = [*_named(declarations, "layout", layouts), *_named(declarations, "sbp", sbps)]
    if len(placed) > 1 or policies is not None:
        first = placed or [_first(declarations)]
        return tuple(Wish(kind, name, policy) for kind, name in first for policy in reduces)
    kind, name = placed[0] if placed else _first(declarations)
    now = Wish(kind, name, default)
    fitting = layouts_on(declarations, mesh)
    if len(fitting) > 1 and not placed:
        return tuple(replace(now, name=name) for name in fitting[:MOST_LAYOUTS])
    derived = (replace(now, positional=True),) if kind == "layout" else ()
    return (now, *derived, replace(now, reduce="immediate"))


def layouts_on(
    declarations: Declarations, mesh: str | None, layout: str | None = None, sbp: str | None = None
) -> list[str]:
    """The layouts of a file all of whose axes are on a mesh.

    For None it is the mesh of `layout` or `sbp`, and of the first layout where neither is given.
    """
    if not declarations.layouts:
        return []
    if layout is None and sbp is None:
        layout = next(iter(declarations.layouts))
    axes = set(resolve_mesh(declarations, mesh, layout, sbp).names)
    return [name for name in declarations.layouts if axes_of(declarations, name) <= axes]


def _first(declarations: Declarations) -> tuple[str, str | None]:
    if declarations.layouts or not declarations.sbps:
        return "layout", next(iter(declarations.layouts), None)
    return "sbp", next(iter(declarations.sbps))


def _policies(text: str) -> Iterator[tuple[str, Span]]:
    spans: dict[str, Span] = {}
    for part, span in _joined(_parts(text, "--reduce")):
        check_policy(part, span)
        _once(part, span, spans)
        yield part, span


def _named(
    declarations: Declarations, kind: str, text: str | None
) -> Iterator[tuple[str, str | None]]:
    """The layouts or `sbp` blocks of a list, each known and named once."""
    if text is None:
        return
    if kind == "layout" and not text.strip():
        yield kind, ""  # the empty layout
        return
    names = list(declarations.layouts if kind == "layout" else declarations.sbps)
    spans: dict[str, Span] = {}
    for part, span in _joined(_parts(text, OPTIONS[kind])):
        if part not in names and not (kind == "layout" and ":" in part):
            word = "layout" if kind == "layout" else "`sbp` block"
            raise DiagnosticError(unknown("MD0108", word, ast.Name(part, span), names))
        _once(part, span, spans)
        yield kind, part


def _once(part: str, span: Span, found: dict[str, Span]) -> None:
    if part in found:
        message = f"the column `{part}` is asked for twice"
        fix = removal(span, f"leave out one `{part}`")
        help = f"{fix.title}: equal columns say nothing new"
        fail("MD0606", message, span, help=help, fixes=(fix,))
    found[part] = span


def _parts(text: str, option: str) -> Iterator[tuple[str, Span]]:
    """The parts of a list with their spans; a `;` is kept as a mark for `_joined`."""
    source = Source(option, text)
    start = 0
    for part in text.replace(";", ",;").split(","):
        bare = part.removeprefix(";")
        first = start + len(bare) - len(bare.lstrip())
        span = Span(source, first, first + max(1, len(bare.strip())))
        start += len(bare) + 1
        if not bare.strip():
            comma = Span(source, first - 1, first) if first else Span(source, 0, 1)
            fix = Fix("leave out the comma", (Edit(comma, ""),))
            help = f"{fix.title}; columns are written `{option} a,b`"
            fail("MD0601", f"`{option}` has an empty place", span, help=help, fixes=(fix,))
        yield part.strip(), span


def _joined(parts: Iterator[tuple[str, Span]]) -> Iterator[tuple[str, Span]]:
    """`a`, `batch:x`, `io:y` as `a`, `batch:x,io:y`: adjacent rules make one layout up to `;`."""
    held: list[tuple[str, Span]] = []
    for part, span in parts:
        rule = ":" in part
        if held and not (rule and ":" in held[-1][0] and not part.startswith(";")):
            yield _join(held)
            held = []
        held.append((part.removeprefix(";").strip(), span))
    if held:
        yield _join(held)


def _join(parts: Sequence[tuple[str, Span]]) -> tuple[str, Span]:
    return ",".join(part for part, _ in parts), parts[0][1].to(parts[-1][1])


# --- compilation -----------------------------------------------------------------------------


def compile_columns(made: Compilation, asked: Sequence[Wish]) -> list[Column]:
    """Every column of a program, placed and lowered.

    A column that cannot be placed keeps its diagnostics; equal columns share a program.
    """
    columns: list[Column] = []
    for number, wish in enumerate(asked):
        letter = chr(ord("A") + number) if number < 26 else str(number + 1)
        plain = replace(wish, positional=False)
        twin = next((c for c in columns if replace(c.wish, positional=False) == plain), None)
        if twin is not None:
            columns.append(Column(letter, wish, twin.made, twin.diagnostics, twin.letter))
        else:
            columns.append(_compiled(Column(letter, wish), made))
    return columns


def _compiled(column: Column, made: Compilation) -> Column:
    options = options_of(column.wish, made.options)
    try:
        column.made = made.under(options, column.diagnostics).checked()
    except DiagnosticError as error:
        column.diagnostics.add(*error.diagnostics)
    return column


def options_of(wish: Wish, chosen: Options) -> Options:
    """The options under which a column compiles."""
    if wish.kind == "layout":
        return replace(chosen, layout=wish.name, reduce=wish.reduce)
    return replace(chosen, layout=None, sbp=wish.name, reduce=wish.reduce)


def raise_if_none_works(columns: Sequence[Column]) -> None:
    """Raise all errors if no column compiled."""
    if not any(c.works for c in columns):
        problems: list[Diagnostic] = [d for c in columns for d in c.diagnostics]
        raise DiagnosticError(*dict.fromkeys(problems))
