"""Schedules as CSV: a line for each device, a cell for each action, an empty one where it waits.

There are two forms. Ours has the actions of `table`: `F0,F1@4,B0`. That of torch puts the stage
first, `0F0,4F1,0B0`, for `torch.distributed.pipelining`, whose schedules read and write it; what it
says of messages and of parameters that are gathered is derived, and skipped here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NoReturn

from meshdsl.diagnostics import Source, Span, fail
from meshdsl.option_edits import leave_out, refuse
from meshdsl.schedule.table import Action, Row, ScheduleTable, Weights, of_rows, parse_action
from meshdsl.schedule.verification import ROW, Place, Verified, verify

_TORCH = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})", re.ASCII)
_PAIR = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_SKIPPED = re.compile(
    r"\d{1,9}(UNSHARD|RESHARD|REDUCE_GRAD|(SEND|RECV)_[FB]\d{1,9})", re.ASCII
)  # fmt: skip
_FORM_OF_TORCH = re.compile(r"[\d(]")

Cells = list[tuple[str, Span]]


def read(source: Source, weights: Weights = "latest") -> Verified:
    """The schedule of a CSV file in either form, verified. Raises MD0520 to MD0526."""
    lines = list(_lines(source))
    filled = (text for line in lines for text, _ in line if text)
    torch = bool(_FORM_OF_TORCH.match(next(filled, "")))
    rows: list[Row] = []
    spans: dict[Place, Span] = {}
    for device, line in enumerate(lines):
        row: list[Action] = []
        spans[device, ROW] = line[0][1].to(line[-1][1])
        for text, span in line:
            for action in _actions(text, device, span, torch):
                spans[device, len(row)] = span
                row.append(action)
        rows.append(tuple(row))
    return verify(of_rows(rows, weights), spans.get)


def _lines(source: Source) -> Iterator[Cells]:
    """The cells of each line with their places; empty lines at the end are none."""
    number = len(source.starts)
    while number and not source.line(number).strip(" \t,"):
        number -= 1
    for line in range(1, number + 1):
        start, end = source.bounds(line)
        yield list(_cells(source, start, source.text[start:end]))


def _cells(source: Source, start: int, text: str) -> Iterator[tuple[str, Span]]:
    """The cells of one line. No action has a comma in it; quotes around one mean nothing."""
    for cell in text.split(","):
        bare = cell.strip().strip('"').strip()
        at = start + (cell.find(bare) if bare else 0)
        yield bare, Span(source, at, at + len(bare))
        start += len(cell) + 1


def _actions(text: str, device: int, span: Span, torch: bool) -> Iterator[Action]:
    """The actions of a cell: none, one, or the pair that torch overlaps."""
    if not text:
        return
    if not torch:
        yield parse_action(text, device, span)
        return
    pair = _PAIR.fullmatch(text)
    for part in pair[1].split(";") if pair else [text]:
        match = _TORCH.fullmatch(part.strip())
        if match is not None:
            stage, kind, micro = match.groups()
            yield parse_action(f"{kind}{micro}@{stage}", device, span)
        elif not _SKIPPED.fullmatch(part.strip()):
            _refuse(text, span)


def _refuse(text: str, span: Span) -> NoReturn:
    help = "in the form of torch, which this file begins with, an action is as `1F0`"
    fail("MD0520", f"`{text}` is no action of a schedule", span, help=help)


def written(schedule: ScheduleTable) -> str:
    """The table as CSV in our form."""
    return _csv((a.text(device) for a in row) for device, row in enumerate(schedule.rows))


def written_for_torch(schedule: ScheduleTable) -> str:
    """The table as CSV in the form of torch.

    Raises MD0531 for updates on the way and for stages on several devices, which it does not have.
    """
    held = [{action.stage for action in row} for row in schedule.rows]
    twice = sum(map(len, held)) > schedule.stages
    if schedule.updates or twice:
        what = "updates parameters during a step" if schedule.updates else "has replicas of stages"
        name = f"`{schedule.name}`" if schedule.name else "this schedule"
        fix = leave_out("--torch-csv", safe=False)
        other = "write `--csv FILE`: that form has it"
        refuse("MD0531", f"{name} {what}: torch has no form for that", fix, other)
    return _csv((f"{a.stage}{a.kind}{a.micro}" for a in row) for row in schedule.rows)


def _csv(rows: Iterable[Iterable[str]]) -> str:
    return "".join(",".join(row) + "\n" for row in rows)
