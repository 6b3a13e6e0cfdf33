"""Pipeline schedules written in Python, as a layout of a file names or a file declares them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from meshdsl.api.dims import Dim, check_name, kind_of
from meshdsl.api.errors import told
from meshdsl.api.sizes import Size, number_of
from meshdsl.api.source_location import here, with_span
from meshdsl.diagnostics import DiagnosticError, Source, Span, fail
from meshdsl.syntax import ast, printer
from meshdsl.syntax.tokens import is_name


@dataclass(frozen=True, slots=True)
class Schedule:
    """The schedule of a layout: `md.layout(layers="pipe", schedule=…)`.

    `call` is what stands behind `with`, `table` the declaration of one written out.
    """

    call: ast.CallExpr
    table: ast.ScheduleDecl | None

    def __repr__(self) -> str:
        used = printer.scheduled(self.call)
        return used if self.table is None else f"{printer.schedule(self.table)}\n{used}"


@told
def scheduled(
    which: str | Iterable[str], /, *dims: Dim | str, micro: int | Size | None = None, **options: Any
) -> Schedule:
    """The schedule of a pipeline: `md.scheduled("one_f_one_b", batch, micro=8)`.

    The dims are cut into so many micro-batches; without dims, those are taken that `accumulate` of
    the optimizer counts. Options are those of the schedule, `layers="3 5"` or `[3, 5]`,
    `recompute="stage"`, `backward="split"`, `reduce="last"` or `"each"`.

    A table of your own has a row of actions for each device, and the name of the variable;
    `weights` says what passes read where it has updates:

    >>> import meshdsl as md
    >>> batch = md.dim("batch", 8)
    >>> mine = md.scheduled(["F0 F1 B0 B1", "F0 B0 F1 B1"], batch)
    >>> mine
    schedule mine(stages=2, micro=2) {
      0: F0 F1 B0 B1
      1: F0 B0 F1 B1
    }
    mine[batch]
    >>> md.layout(layers="pipe", schedule=md.scheduled("gpipe", batch, micro=4))
    layout layers -> pipe with gpipe[batch](4) { layers -> pipe } with gpipe[batch](4)

    Raises:
        ProgramError: there is no such schedule (MD0528), or what a row or an option is, it cannot
            be (MD0520, MD0533). What the dims and the mesh decide is told by `compile`.
    """
    from meshdsl.schedule.registry import lookup

    site = here()
    span = site.span
    if isinstance(which, str):
        lookup(which, site.argument("which", 0))
        return Schedule(_call(which, dims, micro, options, span), None)
    name = site.names if isinstance(site.names, str) and is_name(site.names) else "table"
    weights = options.pop("weights", "latest")
    table = _table(name, which, weights, span)
    return Schedule(_call(name, dims, micro, options, span), table)


def of_text(text: str, span: Span) -> Schedule:
    """A schedule as the language writes it, `one_f_one_b[batch](8)`; its place is the call."""
    from meshdsl.syntax.parse import parse_scheduled

    call, problems = parse_scheduled(Source("schedule", text))
    if call is None:
        first = replace(problems[0], span=span, related=(), fixes=())
        raise DiagnosticError(replace(first, message=f"{first.message} in the schedule `{text}`"))
    return Schedule(with_span(call, span), None)


def given(found: Any, span: Span) -> Schedule | None:
    """The schedule of a layout in any form. Raises MD0533 for what is none."""
    if found is None or isinstance(found, Schedule):
        return found
    if isinstance(found, str):
        return of_text(found, span)
    help = (
        'write `schedule="one_f_one_b[batch](8)"`, or `md.scheduled("one_f_one_b", batch, micro=8)`'
    )
    fail("MD0533", f"{kind_of(found)} is no schedule", span, help=help)


# --- as the language writes it -------------------------------------------------------------------


def _call(
    name: str, dims: Iterable[Any], micro: Any, options: Mapping[str, Any], span: Span
) -> ast.CallExpr:
    items = tuple(ast.DimItem(ast.Name(_dim(dim, span), span), span) for dim in dims)
    number = () if micro is None else (_number(micro, "micro", span),)
    keywords = tuple(
        ast.Keyword(ast.Name(key, span), _value(value, key, span), span)
        for key, value in options.items()
    )
    return ast.CallExpr(ast.Name(name, span), items or None, number, keywords, None, span)


def _dim(dim: Any, span: Span) -> str:
    if not isinstance(dim, Dim | str):
        help = 'write `md.scheduled("gpipe", batch, micro=8)`'
        fail("MD0533", f"a schedule cuts dims, not {kind_of(dim)}", span, help=help)
    check_name("dim", str(dim), span)
    return str(dim)


def _number(found: Any, name: str, span: Span) -> ast.Number:
    number = number_of(found)
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        help = f"write `{name}=8`"
        fail("MD0533", f"`{name}` is a whole number of 1 or more, not {found!r}", span, help=help)
    return ast.Number(int(number), span)


def _value(found: Any, name: str, span: Span) -> ast.Expr:
    """The value of an option: a number, a word, or the layers of each stage."""
    if isinstance(found, str) and is_name(found):
        return ast.Ref(ast.Name(found, span), span)
    if isinstance(found, str):
        return ast.String(found, span)
    if isinstance(found, list | tuple):
        return ast.String(" ".join(str(_number(n, name, span).value) for n in found), span)
    return _number(found, name, span)


def _table(name: str, rows: Iterable[Any], weights: Any, span: Span) -> ast.ScheduleDecl:
    """The declaration of a table, of as many stages and micro-batches as its rows have.

    Raises MD0520 for words that are no actions.
    """
    from meshdsl.schedule.table import of_rows, parse_action

    written: list[tuple[str, ...]] = []
    for row in rows:
        if not isinstance(row, str):
            help = 'write a text for each device: `["F0 F1 B0 B1", "F0 B0 F1 B1"]`'
            fail("MD0533", f"a row of a schedule is a text, not {kind_of(row)}", span, help=help)
        written.append(tuple(row.split()))
    parsed = of_rows(
        [tuple(parse_action(w, device, span) for w in row) for device, row in enumerate(written)]
    )
    numbers = {"stages": max(parsed.stages, 1), "micro": max(parsed.micro, 1)}
    head = [_keyword(key, ast.Number(n, span), span) for key, n in numbers.items()]
    if weights != "latest":
        head.append(_keyword("weights", _value(weights, "weights", span), span))
    table_rows = [
        ast.ScheduleRow(ast.Number(device, span), tuple(_action(w, span) for w in row), span)
        for device, row in enumerate(written)
    ]
    return ast.ScheduleDecl(ast.Name(name, span), tuple(head), tuple(table_rows), span)


def _keyword(name: str, value: ast.Expr, span: Span) -> ast.Keyword:
    return ast.Keyword(ast.Name(name, span), value, span)


def _action(word: str, span: Span) -> ast.ScheduleAction:
    text, at, stage = word.partition("@")
    number = ast.Number(int(stage), span) if at else None
    return ast.ScheduleAction(ast.Name(text, span), number, span)
