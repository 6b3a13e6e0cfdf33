"""Pipeline schedules in Python: `scheduled` is that of a layout, `schedule` draws one over time."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast, overload

from meshdsl.api.argument_types import kind_of
from meshdsl.api.dims import Dim, check_name
from meshdsl.api.errors import told
from meshdsl.api.sizes import Size, number_of
from meshdsl.api.source_location import Site, here, with_span
from meshdsl.diagnostics import Diagnostic, DiagnosticError, Source, Span, fail
from meshdsl.syntax import ast, printer
from meshdsl.syntax.tokens import is_name

if TYPE_CHECKING:
    from meshdsl.api.timelines import ScheduleTimeline, SlicedTimeline
    from meshdsl.schedule.requested import ScheduleCounts, ScheduleRequest, TableReader

Times = str | Mapping[str, Any]
"""`"F=1,send=0.5"`, or `{"F": 1, "send": 0.5}`; a list has a time for each stage."""


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
    `slices` alike, `recompute="stage"`, `backward="split"`, `reduce="last"` or `"each"`.

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
    { layers -> pipe } with gpipe[batch](4)

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


# fmt: off
@overload
def schedule(which: str | os.PathLike[str] | Iterable[str] | Schedule, /, *,
             stages: int | None = None, micro: int | Size | None = None, chunks: int | None = None,
             batch: int | None = None, forward: int | None = None, waves: int | None = None,
             active: int | None = None, weights: str | None = None, times: Times | None = None,
             late: bool = False, tokens: None = None) -> ScheduleTimeline: ...
@overload
def schedule(which: str | os.PathLike[str] | Iterable[str] | Schedule, /, *,
             stages: int | None = None, micro: int | Size | None = None, tokens: int,
             unit: int | None = None, slice_times: Times | None = None) -> SlicedTimeline: ...
# fmt: on
@told
def schedule(
    which: str | os.PathLike[str] | Iterable[str] | Schedule,
    /,
    *,
    stages: int | None = None,
    micro: int | Size | None = None,
    chunks: int | None = None,
    batch: int | None = None,
    forward: int | None = None,
    waves: int | None = None,
    active: int | None = None,
    weights: str | None = None,
    times: Times | None = None,
    late: bool = False,
    tokens: int | None = None,
    unit: int | None = None,
    slice_times: Times | None = None,
) -> ScheduleTimeline | SlicedTimeline:
    """A pipeline schedule over time, without a program: `md.schedule("gpipe", stages=4, micro=8)`.

    It prints as `meshdsl schedule` does and draws itself in a notebook. `which` is the name of a
    schedule, the `.csv` file of a table, a table as rows of actions, or what `md.scheduled` gives.
    Options are those of the command (docs/pipelines.md): `times={"F": 1, "send": 0.5}` or the text
    of `--times`, in any unit of time; a list has a time for each stage. With `tokens`, it is the
    table of the best slices of a sequence.

    >>> import meshdsl as md
    >>> found = md.schedule(["F0 F1 B0 B1", "F0 B0 F1 B1"], times={"F": [1, 2]})
    >>> found.makespan, found.bubble
    (Fraction(10, 1), Fraction(3, 10))
    >>> print(found.beside(gpipe=md.schedule("gpipe", stages=2, micro=2, times={"F": [1, 2]})))
    found: 2 stages on 2 devices, 2 micro-batches.
    time      0           4           8
    device 0  F0 F1       B0---       B1---
    device 1     F0--- B0--- F1--- B1---
    <BLANKLINE>
    gpipe: 2 stages on 2 devices, 2 micro-batches.
    time      0           4           8
    device 0  F0 F1             B0--- B1---
    device 1     F0--- F1--- B0--- B1---
    <BLANKLINE>
    schedule  takes  idle  in flight, by device
    found     10     30 %  2 1
    gpipe     10     30 %  2 2

    Raises:
        ProgramError: there is no such schedule (MD0528), it cannot be made for these numbers
            (MD0529), an option is missing or means nothing here (MD0532), a time is none (MD0530),
            a table cannot be executed (MD0520 to MD0527), a value is of the wrong kind (MD0533).
    """
    from meshdsl.api.timelines import ScheduleTimeline, SlicedTimeline
    from meshdsl.schedule.requested import ScheduleRequest, drawn, sliced

    site = here()
    counts = {"stages": stages, "micro": micro, "chunks": chunks, "batch": batch, "waves": waves}
    counts |= {"forward": forward, "active": active, "tokens": tokens, "unit": unit}
    numbers = {
        name: int(_number(value, name, site.argument(name)).value)
        for name, value in counts.items()
        if value is not None
    }
    request = ScheduleRequest(
        times=_text(times, "times", site),
        slice_times=_text(slice_times, "slice_times", site),
        weights=_text(weights, "weights", site),
        late=late,
        spelling=_in_python(),
        **numbers,
    )
    try:
        table, request = _which(which, request, site)
        if request.tokens is not None:
            return SlicedTimeline(sliced(table, request.tokens, request))
        return ScheduleTimeline(drawn(table, request))
    except DiagnosticError as error:
        raise DiagnosticError(*(_at(d, site) for d in error.diagnostics)) from None


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


# --- over time -----------------------------------------------------------------------------------


def _in_python() -> Any:
    """How diagnostics write an option and a call."""
    from meshdsl.schedule.requested import OptionSpelling

    class Keywords(OptionSpelling):
        def option(self, name: str, value: str = "") -> str:
            return f'{name}="{value}"' if value else f"{name}="

        def call(self, schedule: str) -> str:
            return f'md.schedule("{schedule}", stages=4, micro=8)'

    return Keywords()


def _which(
    which: Any, request: ScheduleRequest, site: Site
) -> tuple[str | TableReader, ScheduleRequest]:
    """The name of a schedule or the reader of a table, and the request with what it adds."""
    from meshdsl.schedule.csv_files import read
    from meshdsl.schedule.declared import table_of
    from meshdsl.schedule.registry import schedules
    from meshdsl.schedule.requested import COUNTS, of_declaration
    from meshdsl.syntax.parse import read_source

    if isinstance(which, os.PathLike) or (
        isinstance(which, str) and (which.endswith(".csv") or "/" in which)
    ):
        path = os.fspath(which)
        return lambda weights: read(read_source(path), weights), request
    if isinstance(which, str):
        return which, request
    span = site.argument("which", 0)
    if isinstance(which, Schedule) and which.table is None:
        call = which.call
        arguments = {"micro": call.args[0]} if call.args else {}
        arguments |= {each.name.text: each.value for each in call.keywords}
        for sizes in ("layers", "slices"):
            if sizes in arguments:
                help = (
                    f"leave `{sizes}` out of `md.scheduled`; `times=` may have one for each stage"
                )
                message = f"`{sizes}` is of a program, and a schedule alone has equal parts"
                fail("MD0532", message, span, help=help)
        counts = {
            name: value.value
            for name, value in arguments.items()
            if name in ("micro", *COUNTS)
            and isinstance(value, ast.Number)
            and getattr(request, name) is None
        }
        return call.function.text, replace(request, **cast("ScheduleCounts", counts))
    if isinstance(which, Schedule) and (declared := which.table) is not None:
        return of_declaration(declared, request), request
    if not isinstance(which, Iterable):
        help = 'write a name, `md.schedule("gpipe", stages=4, micro=8)`, or the rows of a table'
        fail("MD0533", f"{kind_of(which)} is no schedule", span, help=help)
    rows = [*which]
    known_name = isinstance(site.names, str) and is_name(site.names)
    name = site.names if known_name and site.names not in schedules() else "table"
    return lambda weights: table_of(_table(str(name), rows, weights, span)), request


def _text(given: Any, name: str, site: Site) -> str | None:
    """An option as the command line takes it; times by part are written as `F=1:2,send=0.5`."""
    if given is None or isinstance(given, str):
        return given
    if isinstance(given, Mapping) and name != "weights":
        each = ((part, t if isinstance(t, list | tuple) else (t,)) for part, t in given.items())
        return ",".join(f"{part}={':'.join(map(str, times))}" for part, times in each)
    help = f"write `{name}={_USUAL[name]}`"
    fail("MD0533", f"`{name}` is not {kind_of(given)}", site.argument(name), help=help)


_USUAL = {
    "times": '{"F": 1, "send": 0.5}',
    "slice_times": '{"slice": 1, "token": 1}',
    "weights": '"stashed"',
}
_OPTIONS = {"--times": "times", "--slice-times": "slice_times"}
"""The texts in which times are looked for, and the arguments that they are of."""


def _at(found: Diagnostic, site: Site) -> Diagnostic:
    """The diagnostic at the argument that it is about; one in a file stays there."""
    if found.span is None:
        return replace(found, span=site.argument("which", 0))
    option = _OPTIONS.get(found.span.file)
    return found if option is None else replace(found, span=site.argument(option))


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
    """The value of an option: a number, a word, or numbers, as the layers of each stage."""
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
