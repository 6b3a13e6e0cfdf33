"""Meshes and layouts written in Python, as the declarations that a file would have."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from meshdsl.api.argument_types import kind_of
from meshdsl.api.dims import Dim, check_name
from meshdsl.api.errors import told
from meshdsl.api.schedules import Schedule
from meshdsl.api.schedules import given as given_schedule
from meshdsl.api.sizes import Size, number_of
from meshdsl.api.source_location import Site, here, with_span
from meshdsl.diagnostics import DiagnosticError, Source, Span, fail
from meshdsl.named.declarations import Declarations
from meshdsl.placed.sub_axes import sub_axis
from meshdsl.report.document import mesh_text
from meshdsl.syntax import ast
from meshdsl.syntax.printer import rule, scheduled

Rules = Mapping[Any, Any] | str | Iterable[str]
"""Rules of a layout: `{"batch": "rows"}`, `"batch:rows,hidden:cols"`, or rules of the language."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """Named mesh axes with their sizes; the order is rank order, row-major."""

    name: str
    axes: tuple[tuple[str, int], ...]
    span: Span

    @property
    def devices(self) -> int:
        """The number of devices."""
        count = 1
        for _, size in self.axes:
            count *= size
        return count

    def __repr__(self) -> str:
        return f"mesh {self.name} = {mesh_text(dict(self.axes))}"

    def __str__(self) -> str:
        from meshdsl.report.views.parts import MeshView

        return f"{self!r}\n{MeshView(self.name, self.axes)}"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        from meshdsl.report.views.parts import MeshView

        return {"text/plain": str(self), "text/html": MeshView(self.name, self.axes).html()}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the picture (`.svg`) or a page (`.html`), as views do."""
        from meshdsl.report.views.parts import MeshView

        MeshView(self.name, self.axes).save(path)

    def syntax(self) -> ast.MeshDecl:
        """The declaration."""
        axes = tuple(
            ast.MeshAxis(ast.Name(a, self.span), ast.Number(n, self.span), self.span)
            for a, n in self.axes
        )
        return ast.MeshDecl(ast.Name(self.name, self.span), axes, None, self.span)


Entry = ast.RuleDecl | ast.SettingDecl


@dataclass(frozen=True, slots=True)
class Layout:
    """Rules `dim -> axis` and settings under a name; what extends another overrides its own."""

    name: str
    rules: tuple[Entry, ...]
    base: Layout | None
    span: Span
    schedule: Schedule | None = None

    def __repr__(self) -> str:
        base = f" extends {self.base.name}" if self.base else ""
        used = f" with {scheduled(self.schedule.call)}" if self.schedule else ""
        # A layout that has no name of its own has its rules for one.
        name = f"layout {self.name}{base} " if self.name.isidentifier() else ""
        return f"{name}{{ {', '.join(map(rule, self.rules))} }}{used}"

    def syntax(self) -> Iterator[ast.LayoutDecl]:
        """The declaration of this layout, and of those it extends."""
        base = ast.Name(self.base.name, self.span) if self.base else None
        rules = tuple(r for r in self.rules if isinstance(r, ast.RuleDecl))
        settings = tuple(r for r in self.rules if isinstance(r, ast.SettingDecl))
        call = self.schedule.call if self.schedule else None
        name = ast.Name(self.name, self.span)
        yield ast.LayoutDecl(name, base, rules, call, self.span, settings, recorded=True)
        if self.base is not None:
            yield from self.base.syntax()

    def tables(self) -> Iterator[ast.ScheduleDecl]:
        """The declarations of the schedules that it and those it extends have."""
        if self.schedule is not None and self.schedule.table is not None:
            yield self.schedule.table
        if self.base is not None:
            yield from self.base.tables()


@dataclass(frozen=True, slots=True)
class ArgumentPlace:
    """The argument of a call that gives a mesh or a layout."""

    site: Site
    name: str
    position: int

    @property
    def span(self) -> Span:
        """The span of the whole argument."""
        return self.site.argument(self.name, self.position)

    def entry(self, key: str) -> Span:
        """The span of one entry of an argument that is written as a dict."""
        return self.site.entry(key, self.name, self.position)


# --- meshes --------------------------------------------------------------------------------------


@told
def mesh(
    shape: Mapping[str, int | Dim | Size] | str | None = None, /, **axes: int | Dim | Size
) -> Mesh:
    """A mesh: `square = md.mesh(rows=2, cols=2)`, or `md.mesh({"rows": 2, "cols": 2})`.

    Its name is that of the variable it is assigned to. A string is in the form of the language, as
    meshes are printed: `md.mesh("{ rows: 2, cols: 2 }")`.

    >>> import meshdsl as md
    >>> pod = md.mesh(data=2, tp=4)
    >>> pod.devices
    8

    Raises:
        ProgramError: a size is not a whole number of 1 or more (MD0105).
    """
    site = here()
    name = site.names if isinstance(site.names, str) else "mesh"
    place = ArgumentPlace(site, "shape", 0)
    if isinstance(shape, str):
        shape = _axes_of_text(shape)
    spans = {a: place.entry(a) for a in shape or {}} | {a: site.argument(a) for a in axes}
    return _mesh(name, {**(shape or {}), **axes}, spans, site.span)


def _axes_of_text(text: str) -> dict[str, int]:
    """The axes of a mesh that is written as the language has it, or `rows:2,cols:2`."""
    from meshdsl.placed.layout import resolve_mesh

    return dict(resolve_mesh(Declarations(Source("mesh", "")), text).axes)


def _mesh(name: str, axes: Mapping[str, Any], spans: Mapping[str, Span], place: Span) -> Mesh:
    sized_axes = []
    for axis, size in axes.items():
        span = spans[axis]
        check_name("mesh axis", axis, span)
        if axis == "none":
            fail("MD0109", "`none` cannot name a mesh axis", span, help="choose another name")
        number = number_of(size)
        if not isinstance(number, int) or not 1 <= number < 2**31:
            message = f"the size of mesh axis `{axis}` is no whole number of 1 or more: {size!r}"
            fail("MD0105", message, span, help="write `md.mesh(rows=2, cols=2)`")
        sized_axes.append((axis, int(number)))
    return Mesh(name, tuple(sized_axes), place)


def with_mesh(
    declarations: Declarations, given: Any, place: ArgumentPlace
) -> tuple[Declarations, str | None]:
    """The declarations with a mesh given in any form, and the name to request it by."""
    span = place.span
    if isinstance(given, Mapping):
        given = _mesh("mesh", given, {a: place.entry(a) for a in given}, span)
    if isinstance(given, Mesh):
        meshes = {**declarations.meshes, given.name: given.syntax()}
        return replace(declarations, meshes=meshes), given.name
    if given is None or isinstance(given, str):
        return declarations, given
    help = "write `md.mesh(rows=2, cols=2)`"
    fail("MD0815", f"a mesh is needed here, not {kind_of(given)}", span, help=help)


# --- layouts -------------------------------------------------------------------------------------


@told
def layout(
    rules: Rules | None = None,
    /,
    *,
    extends: Layout | None = None,
    schedule: Schedule | str | None = None,
    **dims: Any,
) -> Layout:
    """A layout: `hybrid = md.layout(batch="rows", hidden="cols")`. Its name is the variable's.

    Rules come in any of these forms:

    - by name, or as a dict: `md.layout({"batch": "rows", "hidden": ("x", "y"), "seq": None})`; a
      selector is written before a colon: `{"params: model": "data"}`;
    - the string of Mesh-TensorFlow: `"batch:rows,hidden:cols"`;
    - over a part of an axis: `md.layout(kv="tp.2", group="tp.2.4", hidden="tp")`;
    - rules of the language, in one string or several: `["params: model -> data", "seq -> none"]`,
      settings such as `"grads: reduce = bf16"` among them.

    A pipeline has a `schedule`: `"one_f_one_b[batch](8)"`, or what `md.scheduled` makes.

    Raises:
        ProgramError: an entry is no rule (MD0818), or the schedule is none (MD0533).
    """
    site = here()
    place = ArgumentPlace(site, "rules", 0)
    written_name = ""
    if isinstance(rules, str) and is_whole(rules):
        written_out = _whole(rules, place.span)
        first, schedule = written_out.rules, schedule or written_out.schedule
        written_name = written_out.name
    else:
        first = (*_rules(rules, place),)
    all_rules = (*first, *(_of_pair(d, axes, site.argument(d)) for d, axes in dims.items()))
    used = given_schedule(schedule, site.argument("schedule"))
    variable = site.names if isinstance(site.names, str) else ""
    name = variable or written_name or _layout_name(all_rules, used)
    return Layout(name, all_rules, extends, site.span, used)


def with_layout(
    declarations: Declarations, given: Any, place: ArgumentPlace
) -> tuple[Declarations, str | None]:
    """The declarations with a layout given in any form, and the name to request it by."""
    if given is None or (isinstance(given, str) and given in declarations.layouts):
        return declarations, given
    if isinstance(given, str) and not is_written_out(given):
        return declarations, given
    if isinstance(given, str) and is_whole(given):
        printed = _whole(given, place.span)
        name = printed.name or _layout_name(printed.rules, printed.schedule)
        given = replace(printed, name=name)
    if not isinstance(given, Layout):
        rules = tuple(_rules(given, place))
        given = Layout(_layout_name(rules), rules, None, place.span)
    layouts = {**declarations.layouts, **{n.name.text: n for n in given.syntax()}}
    schedules = {**declarations.schedules, **{n.name.text: n for n in given.tables()}}
    return replace(declarations, layouts=layouts, schedules=schedules), given.name


_WHOLE = re.compile(r"^\s*(layout\b|\{)|\bwith\b")


def is_whole(text: str) -> bool:
    """Whether it is a layout as it is printed, with braces or a schedule, not rules alone."""
    return bool(_WHOLE.search(text))


def is_written_out(text: str) -> bool:
    """Whether it is a layout that is written out, and not a name."""
    return ":" in text or "->" in text or is_whole(text)


def _whole(text: str, span: Span) -> Layout:
    """A layout as it is printed, read by the parser of the language; its place is the call.

    Its name is "" where none is written.
    """
    from meshdsl.syntax.parse import parse_layout

    node, problems = parse_layout(Source("layout", text))
    if node is None:
        first = replace(problems[0], span=span, related=(), fixes=())
        raise DiagnosticError(replace(first, message=f"{first.message} in the layout `{text}`"))
    if node.base is not None:
        help = "pass the layout that it extends: `md.layout(…, extends=other)`"
        fail("MD0818", "a layout that is written out extends no other", span, help=help)
    rules, settings = with_span(node.rules, span), with_span(node.settings, span)
    entries: tuple[Entry, ...] = (*rules, *settings)
    used = None if node.schedule is None else Schedule(with_span(node.schedule, span), None)
    return Layout(node.name.text, entries, None, span, used)


def _layout_name(rules: tuple[Entry, ...], schedule: Schedule | None = None) -> str:
    used = f" with {scheduled(schedule.call)}" if schedule else ""
    return (", ".join(map(rule, rules)) or "none") + used


def _rules(given: Any, place: ArgumentPlace) -> Iterator[Entry]:
    """The rules in any of the forms that `layout` accepts."""
    if given is None:
        return
    if isinstance(given, Mapping):
        for key, axes in given.items():
            yield _of_pair(key, axes, place.entry(str(key)))
    elif isinstance(given, str) and "->" not in given and "=" not in given:
        yield from _of_mesh_tensorflow(given, place.span)
    elif isinstance(given, str):
        yield from _of_text(given, place.span)
    elif isinstance(given, Iterable):
        for text in given:
            yield from _rules(text, place)
    else:
        _no_rule(given, place.span)


def _of_pair(key: Any, axes: Any, span: Span) -> ast.RuleDecl:
    """The rule of a pair: `"batch": "rows"`, `"params: model": ("x", "y")`, `seq: None`."""
    selector, _, dim = str(key).rpartition(":")
    if axes is not None and not isinstance(axes, Iterable):
        _no_rule({key: axes}, span)
    names = (axes,) if isinstance(axes, str) else tuple(axes or ())
    parts = [p.strip() for p in selector.split(".")] if selector else []
    if not isinstance(key, str | Dim) or not all(isinstance(n, str) for n in names):
        _no_rule({key: axes}, span)
    for part in (*parts, dim.strip(), *(n for n in names if sub_axis(n) is None)):
        check_name("dim, tensor or axis", part, span)
    to = tuple(ast.Name(n, span) for n in names if n != "none")
    chosen = tuple(ast.Name(p, span) for p in parts)
    return ast.RuleDecl(chosen, ast.Name(dim.strip(), span), to, False, span)


def _of_mesh_tensorflow(text: str, span: Span) -> Iterator[ast.RuleDecl]:
    """The rules of `batch:rows,hidden:cols`; a dim named twice is split over both, outer first."""
    axes_of: dict[str, tuple[str, ...]] = {}
    for part in filter(None, (p.strip() for p in text.replace(";", ",").split(","))):
        dim, colon, axis = (s.strip() for s in part.partition(":"))
        if not colon or not dim or not axis:
            _no_rule(part, span)
        axes_of[dim] = (*axes_of.get(dim, ()), axis)
    for dim, axes in axes_of.items():
        yield _of_pair(dim, axes, span)


def _of_text(text: str, span: Span) -> Iterator[Entry]:
    """Rules and settings of the language, read by its parser; their span is that of the call."""
    from meshdsl.syntax.parse import parse

    tree, problems = parse(Source("layout", f"layout written {{\n{text}\n}}\n"))
    if problems:
        first = replace(problems[0], span=span, related=(), fixes=())
        raise DiagnosticError(replace(first, message=f"{first.message} in the rule `{text}`"))
    for node in tree.declarations:
        if isinstance(node, ast.LayoutDecl):
            yield from with_span(node.rules, span)
            yield from with_span(node.settings, span)


def _no_rule(given: Any, span: Span) -> None:
    help = 'write `{"batch": "rows"}`, `"batch:rows,hidden:cols"` or `"params: model -> data"`'
    fail("MD0818", f"{kind_of(given)} is no rule of a layout", span, help=help)


# --- sbp -----------------------------------------------------------------------------------------


def with_sbp(declarations: Declarations, given: Any, span: Span) -> tuple[Declarations, str | None]:
    """The declarations with an `sbp` block: a name, or `{"x": "S(0), B", "w at y": ("B", "P")}`."""
    from meshdsl.syntax.parse import parse

    if given is None or isinstance(given, str):
        return declarations, given
    if not isinstance(given, Mapping):
        help = 'write `sbp={"x": "S(0), B", "w": "B, S(1)"}`'
        fail("MD0818", f"{kind_of(given)} is no `sbp` block", span, help=help)
    entries = (f"{n}: ({c if isinstance(c, str) else ', '.join(c)})" for n, c in given.items())
    text = "sbp written {\n  " + "\n  ".join(entries) + "\n}\n"
    tree, problems = parse(Source("sbp", text))
    if problems:
        raise DiagnosticError(*problems)
    (node,) = (n for n in tree.declarations if isinstance(n, ast.Sbp))
    return replace(declarations, sbps={**declarations.sbps, "written": node}), "written"
