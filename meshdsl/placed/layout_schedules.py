"""The schedule of a layout: what stands behind `with`, from a name to a `ScheduleUse`.

`[ ]` holds the dims that are cut into micro-batches, `( )` into how many, and options. Of how many
devices the table is follows from a mesh: `lint` looks at that, and at the sizes of the dims.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from meshdsl.diagnostics import (
    DiagnosticError,
    Diagnostics,
    Edit,
    Fix,
    Poisoned,
    Source,
    advice,
    all_of,
    did_you_mean,
    fail,
    spelled_right,
)
from meshdsl.named.declarations import Declarations, declared_integer, unknown
from meshdsl.schedule.declared import table_of
from meshdsl.schedule.registry import called, meant, schedules
from meshdsl.schedule.use import Option, ScheduleUse
from meshdsl.schedule.verification import Verified
from meshdsl.syntax import ast
from meshdsl.syntax.call_edits import written_anew
from meshdsl.syntax.parse import parse_scheduled

MOST = 1 << 18
"""The largest number of micro-batches, and of whatever else an option counts."""


def used(call: ast.CallExpr, declarations: Declarations) -> ScheduleUse:
    """The schedule that a layout names. Raises all that is wrong with it by itself.

    That is MD0528 for its name, MD0101 for its dims, MD0533 for its options, MD0535 where it does
    not say what is cut or into how many, and what is wrong with a table that the file declares.
    """
    name = call.function
    table = _table(name, declarations)
    if call.out is not None:
        help = f"write `{name.text}[batch](8)`"
        fail("MD0533", "a schedule has no result: `->` means nothing here", call.span, help=help)
    readers = {} if table is not None else schedules()[name.text].options
    problems = Diagnostics()
    dims = problems.of(partial(_dims, call, declarations))
    micro = problems.of(partial(_micro, call, declarations, table))
    options = problems.of(partial(_options, call, readers))
    problems.raise_errors()
    if dims is None or options is None:
        raise Poisoned
    return ScheduleUse(name.text, dims, micro, call.span, options, table)


def used_of_text(text: str, declarations: Declarations) -> ScheduleUse:
    """The schedule of `--schedule`: as `used`, and what is wrong with the text."""
    source = Source("--schedule", text)
    call, problems = parse_scheduled(source)
    if call is None:
        raise DiagnosticError(*problems[:1])
    return used(call, declarations)


def _table(name: ast.Name, declarations: Declarations) -> Verified | None:
    """The declared table of this name; None for one of the schedules that are made for any size."""
    if name.text in declarations.schedules:
        return table_of(declarations.schedules[name.text])
    names = [*declarations.schedules, *schedules()]
    if name.text in schedules():
        return None
    more = f"there are {', '.join(names)}; or declare `schedule {name.text}(stages=2, …) {{ … }}`"
    wrong = unknown("MD0528", "schedule", name, names, more)
    if others := called(name.text):
        fixes = (Fix(f"write `{n}`", (Edit(name.span, n),), safe=len(others) == 1) for n in others)
        wrong = replace(wrong, help=meant(name.text), fixes=tuple(fixes))
    raise DiagnosticError(wrong)


def _dims(call: ast.CallExpr, declarations: Declarations) -> tuple[str, ...]:
    """The dims that are cut."""
    cut_dims: list[str] = []
    for item in call.items or ():
        if not isinstance(item, ast.DimItem) or item.dim.text == "...":
            help = f"name the dims that are cut: `{call.function.text}[batch](8)`"
            fail("MD0533", "`[ ]` of a schedule holds names of dims alone", item.span, help=help)
        if item.dim.text not in declarations.dims:
            wrong = unknown("MD0101", "dim", item.dim, list(declarations.dims))
            raise DiagnosticError(wrong)
        if item.dim.text in cut_dims:
            help = "name each dim once"
            fail("MD0533", f"`{item.dim.text}` is cut twice", item.span, help=help)
        cut_dims.append(item.dim.text)
    return tuple(cut_dims)


NUMBER = "write the number in parentheses"


def _micro(call: ast.CallExpr, declarations: Declarations, table: Verified | None) -> int | None:
    """The number of micro-batches that dims are cut into; None where none are."""
    name, dims = call.function.text, call.items
    dim = next((i.dim.text for i in dims or () if isinstance(i, ast.DimItem)), "batch")
    options = "".join(f", {k.name.text}={k.value.span.text}" for k in call.keywords)
    if len(call.args) > 1:
        help = f"write the number of micro-batches alone: `{name}[{dim}](8)`"
        message = f"`{name}` takes one number without a name, not {len(call.args)}"
        fail("MD0533", message, call.args[1].span, help=help)
    if call.args and not dims:
        number = call.args[0]
        text = f"{name}[{dim}]({number.span.text}{options})"
        fixes = written_anew(call.span, text) if dim in declarations.dims else ()
        why = "without a number too, those are taken that `accumulate` counts"
        told = advice(fixes, why) if fixes else f"name it: `{text}`; {why}"
        message = "which dim is cut into micro-batches is not said"
        fail("MD0535", message, number.span, help=told, fixes=fixes)
    if call.args:
        return declared_integer(call.args[0], declarations, MOST)
    if not dims:
        return None
    if table is not None:
        return table.schedule.micro
    sizes = (k.value.span.text for k in call.keywords if k.name.text == "slices")
    count = next((len(text.split()) for text in sizes), 8)
    message = f"into how many micro-batches `{dim}` is cut is not said"
    cut = ", ".join(item.span.text for item in dims)
    fixes = written_anew(call.span, f"{name}[{cut}]({count}{options})")
    fail("MD0535", message, call.span, help=NUMBER if not fixes else None, fixes=fixes)


# --- options -------------------------------------------------------------------------------------


def _options(call: ast.CallExpr, own: Mapping[str, int]) -> dict[str, Option]:
    """The options by name; `own` are those that the schedule counts by."""
    readers = {**dict.fromkeys(own, _count), **_COMMON}
    steps = [partial(_option, call, keyword, readers) for keyword in call.keywords]
    return dict(all_of(steps))


Reader = Callable[[ast.Expr], Option | None]


def _option(
    call: ast.CallExpr, keyword: ast.Keyword, readers: Mapping[str, Reader]
) -> tuple[str, Option]:
    """One option. Raises MD0533 for one that there is not, or with a value of another kind."""
    name, options = keyword.name, list(readers)
    if name.text not in readers:
        others = [n for n, r in schedules().items() if name.text in r.options]
        verb = "takes" if len(others) == 1 else "take"
        beside = f"; {', '.join(f'`{n}`' for n in others)} {verb} it" if others else ""
        help = did_you_mean(name.text, options) or f"there are {', '.join(options)}{beside}"
        message = f"schedule `{call.function.text}` has no option `{name.text}`"
        fixes = spelled_right(name.span, name.text, options)
        fail("MD0533", message, name.span, help=help, fixes=fixes)
    value = readers[name.text](keyword.value)
    if value is None:
        help = f"write {_FORMS.get(name.text, f'a number from 1: `{name.text}=2`')}"
        message = f"the option `{name.text}` has no such value"
        fail("MD0533", message, keyword.value.span, help=help)
    return name.text, value


def _count(node: ast.Expr) -> int | None:
    match node:
        case ast.Number(value=int() as number) if 1 <= number <= MOST:
            return number
    return None


_NUMBERS = re.compile(r"\s*\d{1,9}(\s+\d{1,9})*\s*", re.ASCII)


def _numbers(node: ast.Expr) -> tuple[int, ...] | None:
    """How many layers each stage has, or how large each slice is, from `"3 5"`."""
    if not isinstance(node, ast.String) or not _NUMBERS.fullmatch(node.value):
        return None
    return tuple(map(int, node.value.split()))


def _word(*known: str) -> Reader:
    def read(node: ast.Expr) -> str | None:
        text = node.name.text if isinstance(node, ast.Ref) else None
        return text if text in known else None

    return read


VALUES = {
    "layers": (),
    "slices": (),
    "recompute": ("stage",),
    "backward": ("split",),
    "reduce": ("last", "each"),
}
"""The options of every schedule, with the words that they may be."""

_COMMON: Mapping[str, Reader] = {
    name: _word(*words) if words else _numbers for name, words in VALUES.items()
}

_FORMS = {
    "layers": 'the layers of each stage: `layers="3 5"`',
    "slices": 'the size of each micro-batch: `slices="3 2 2 1"`',
    "recompute": "`recompute=stage`",
    "backward": "`backward=split`",
    "reduce": "`reduce=last` or `reduce=each`",
}
