"""Schedules that a file declares, `schedule mine(stages=2, micro=4) { 0: F0 … }`: their tables.

A row is as in `table`, behind the number of its device. The head says of how many stages and
micro-batches the table is, and by which rule its passes read parameters where it updates them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from itertools import islice

from meshdsl.diagnostics import (
    Diagnostic,
    DiagnosticError,
    Diagnostics,
    Edit,
    Fix,
    Related,
    Span,
    advice,
    did_you_mean,
    fail,
    spelled_right,
)
from meshdsl.schedule.registry import schedules
from meshdsl.schedule.table import (
    WEIGHTS,
    Action,
    Row,
    ScheduleTable,
    Weights,
    parse_action,
    row_text,
)
from meshdsl.schedule.verification import ROW, Place, Unexecutable, Verified, Way, verify
from meshdsl.syntax import ast
from meshdsl.syntax.edits import without_line

HEAD = ("stages", "micro", "weights")


@lru_cache(maxsize=64)
def table_of(node: ast.ScheduleDecl) -> Verified:
    """The verified table of a declaration. Raises MD0520 to MD0526, MD0533 and MD0536.

    Each error is at the action or the row that it is about, at the name where it is about none.
    """
    name = node.name
    if name.text in schedules():
        gone = Edit(without_line(node.span), "")
        fixes = (Fix("remove the declaration: `with` finds that one", (gone,), safe=False),)
        help = advice(fixes, "or choose another name")
        message = f"`{name.text}` is a schedule already"
        fail("MD0143", message, name.span, help=help, fixes=fixes)
    problems = Diagnostics()
    stages, micro = (problems.of(partial(_count, node, name)) for name in HEAD[:2])
    weights = problems.of(partial(_weights, node))
    _check_names(node, problems)
    rows = _rows(node, problems)
    problems.raise_errors()
    assert stages is not None
    assert micro is not None
    assert weights is not None
    table = ScheduleTable(
        stages, micro, tuple(row for row, _ in rows.values()), weights, node.name.text
    )
    spans: dict[Place, Span] = {(device, ROW): row.span for device, (_, row) in rows.items()}
    for device, (_, row) in rows.items():
        spans |= {(device, at): action.span for at, action in enumerate(row.actions)}
    try:
        return verify(table, spans.get)
    except DiagnosticError as error:
        ways = error.ways if isinstance(error, Unexecutable) else ()
        written = {device: row for device, (_, row) in rows.items()}
        mended = tuple(_executable(ways, table, written))
        placed = (
            replace(d, span=d.span or node.name.span, fixes=mended, help=advice(mended) or d.help)
            for d in error.diagnostics
        )
        raise DiagnosticError(*placed) from None


MOST_TRIED = 100
"""The most tables that are verified to find one that can be executed."""


def _executable(
    ways: Iterable[Way], table: ScheduleTable, written: Mapping[int, ast.ScheduleRow]
) -> Iterator[Fix]:
    """The fixes of a table, of each kind the first after which it can be executed."""
    offered = set[str]()
    for title, changed in islice(ways, MOST_TRIED):
        rows = tuple(changed.get(d, row) for d, row in enumerate(table.rows))
        spans = [written[device].span for device in changed]
        if title in offered or any("\n" in span.text for span in spans):
            continue  # comments of lines are kept
        try:
            verify(replace(table, rows=rows))
        except DiagnosticError:
            continue
        offered.add(title)
        texts = (f"{device}: {row_text(device, row)}" for device, row in changed.items())
        yield Fix(title, tuple(map(Edit, spans, texts)), safe=False)


# --- the head ------------------------------------------------------------------------------------


def _check_names(node: ast.ScheduleDecl, diagnostics: Diagnostics) -> None:
    """Report options of the head that there are not."""
    for option in node.options:
        name, options = option.name, list(HEAD)
        if name.text not in options:
            help = did_you_mean(name.text, options) or "there are stages, micro and weights"
            message = f"a schedule has no option `{name.text}`"
            fixes = spelled_right(name.span, name.text, options)
            diagnostics.add(Diagnostic("MD0533", message, name.span, help=help, fixes=fixes))


def _count(node: ast.ScheduleDecl, name: str) -> int:
    """The number of stages or of micro-batches."""
    option = next((o for o in node.options if o.name.text == name), None)
    said = {"stages": "stages", "micro": "micro-batches"}[name]
    if option is None:
        message = f"schedule `{node.name.text}` does not say of how many {said} it is"
        help = f"write `schedule {node.name.text}(stages=2, micro=4)`"
        fail("MD0533", message, node.name.span, help=help)
    match option.value:
        case ast.Number(value=int() as number) if number > 0:
            return number
    help = f"write `{name}=4`"
    fail("MD0533", f"`{name}` is a whole number of 1 or more", option.value.span, help=help)


def _weights(node: ast.ScheduleDecl) -> Weights:
    """The rule by which passes read parameters that are updated on the way."""
    option = next((o for o in node.options if o.name.text == "weights"), None)
    if option is None:
        return "latest"
    written = option.value.name.text if isinstance(option.value, ast.Ref) else ""
    for weights in WEIGHTS:
        if written == weights:
            return weights
    help = did_you_mean(written, list(WEIGHTS)) or f"there are {', '.join(WEIGHTS)}"
    message = "`weights` says which version of the parameters passes read"
    fail("MD0533", message, option.value.span, help=help)


# --- the rows ------------------------------------------------------------------------------------


NUMBERED = "rows are numbered from 0, one for each device"


def _numbered(row: ast.ScheduleRow, number: int) -> tuple[Fix, ...]:
    """The fix that gives a row a number that no row has."""
    return (Fix.write(row.device.span, str(number), safe=False),)


def _rows(
    node: ast.ScheduleDecl, diagnostics: Diagnostics
) -> Mapping[int, tuple[Row, ast.ScheduleRow]]:
    """The rows by device, in the order of devices; what is wrong with them goes to `diagnostics`.

    One for each device, in any order.
    """
    by_device: dict[int, tuple[Row, ast.ScheduleRow]] = {}
    numbers = {row.device.value for row in node.rows}
    free = (number for number in range(len(node.rows)) if number not in numbers)
    for row in node.rows:
        device = row.device.value
        if device in by_device:
            message, where = f"two rows for device {device}", by_device[int(device)][1].device.span
            related = (Related(where, "the other row"),)
            fixes = _numbered(row, next(free))
            help = advice(fixes, NUMBERED)
            diagnostics.add(
                Diagnostic("MD0536", message, row.device.span, "error", related, help, fixes)
            )
        elif not isinstance(device, int) or device >= len(node.rows):
            message = f"there is no device {device} in a schedule with {len(node.rows)} rows"
            fixes = _numbered(row, next(free))
            help = advice(fixes, NUMBERED)
            diagnostics.add(Diagnostic("MD0536", message, row.device.span, help=help, fixes=fixes))
        else:
            actions = [diagnostics.of(partial(_action, a, device)) for a in row.actions]
            by_device[device] = tuple(a for a in actions if a is not None), row
    return dict(sorted(by_device.items()))


def _action(node: ast.ScheduleAction, device: int) -> Action:
    """One action. Raises MD0520."""
    stage = "" if node.stage is None else f"@{node.stage.value}"
    return parse_action(f"{node.text.text}{stage}", device, node.span)
