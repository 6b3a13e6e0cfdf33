"""Schedules that a file declares, `schedule mine(stages=2, micro=4) { 0: F0 … }`: their tables.

A row is as in `table`, behind the number of its device. The head says of how many stages and
micro-batches the table is, and by which rule its passes read parameters where it updates them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache, partial

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
from meshdsl.schedule.table import WEIGHTS, Action, Row, ScheduleTable, Weights, parse_action
from meshdsl.schedule.verification import ROW, Place, Verified, verify
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
        placed = (replace(d, span=d.span or node.name.span) for d in error.diagnostics)
        raise DiagnosticError(*placed) from None


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


def _rows(
    node: ast.ScheduleDecl, diagnostics: Diagnostics
) -> Mapping[int, tuple[Row, ast.ScheduleRow]]:
    """The rows by device, in the order of devices; what is wrong with them goes to `diagnostics`.

    One for each device, in any order.
    """
    by_device: dict[int, tuple[Row, ast.ScheduleRow]] = {}
    for row in node.rows:
        device = row.device.value
        if device in by_device:
            message, where = f"two rows for device {device}", by_device[int(device)][1].device.span
            related = (Related(where, "the other row"),)
            help = "number the rows from 0, one for each device"
            diagnostics.add(Diagnostic("MD0536", message, row.device.span, "error", related, help))
        elif not isinstance(device, int) or device >= len(node.rows):
            message = f"there is no device {device} in a schedule with {len(node.rows)} rows"
            help = "number the rows from 0, one for each device"
            diagnostics.add(Diagnostic("MD0536", message, row.device.span, help=help))
        else:
            actions = [diagnostics.of(partial(_action, a, device)) for a in row.actions]
            by_device[device] = tuple(a for a in actions if a is not None), row
    return dict(sorted(by_device.items()))


def _action(node: ast.ScheduleAction, device: int) -> Action:
    """One action. Raises MD0520."""
    stage = "" if node.stage is None else f"@{node.stage.value}"
    return parse_action(f"{node.text.text}{stage}", device, node.span)
