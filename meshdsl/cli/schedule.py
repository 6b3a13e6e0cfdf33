"""`meshdsl schedule`: a pipeline schedule over time, without a program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshdsl.cli import common, complete
from meshdsl.cli.options import AsData, Force, chosen, flag, opt, option
from meshdsl.diagnostics import Fix, OptionEdit
from meshdsl.option_edits import give, leave_out, refuse
from meshdsl.output_files import write_whole

if TYPE_CHECKING:
    from meshdsl.report.document import Document
    from meshdsl.report.schedule_schema import KnownSchedules
    from meshdsl.schedule.requested import ScheduleRequest, TableReader
    from meshdsl.schedule.times import TimedSchedule


OUTPUTS = ("svg", "csv", "torch_csv")
"""Options of files that are written."""


@option
class TableOptions:
    """Options of the table."""

    heading = "Schedule options"

    stages: int | None = opt(
        "--stages", "N", "The number of devices. Each has one stage, or --chunks.", min=1
    )
    micro: int | None = opt("--micro", "N", "The number of micro-batches.", min=1)
    chunks: int | None = opt(
        "--chunks", "N", "Stages per device: interleaved, breadth_first. [default: 2]", min=1
    )
    batch: int | None = opt(
        "--batch", "N", "Micro-batches per update: two_bw. [default: --stages]", min=1
    )
    forward: int | None = opt(
        "--forward", "N", "Forward passes in a row, 1 or 2: chimera. [default: 1]", min=1
    )
    waves: int | None = opt(
        "--waves", "N", "Waves of stages down and up the devices: hanayo. [default: 1]", min=1
    )
    active: int | None = opt(
        "--active", "N", "Most micro-batches in flight: ampnet. [default: --stages]", min=1
    )
    weights: str | None = opt(
        "--weights",
        "W",
        "For a table with updates, the version that backward passes read: latest, stashed, "
        "buffered or corrected. [default: latest]",
    )


@option
class Draw(TableOptions, Force, AsData):
    """Options of `schedule`."""

    list: bool = flag("--list", "List all schedules; with --json also formulas and sources.")
    times: str | None = opt(
        "--times",
        "F=1,…",
        "Times of F, I, W, U and send; `F=1:2:1` by stage. [default: F=1,I=1,W=1,U=0,send=0]",
    )
    tokens: int | None = opt(
        "--tokens", "N", "Find the best slices of a sequence of N tokens: terapipe.", min=1
    )
    unit: int | None = opt("--unit", "N", "Slices are multiples of N tokens. [default: 1]", min=1)
    slice_times: str | None = opt(
        "--slice-times",
        "slice=1,…",
        "Times per slice, token, earlier token and pair. "
        "[default: slice=1,token=1,before=0,pair=0]",
    )
    late: bool = flag("--late", "Send after W instead of after I.")
    svg: Path | None = opt("--svg", "F.svg", "Write a picture.")
    csv: Path | None = opt("--csv", "F.csv", "Write the table, a row per device.")
    torch_csv: Path | None = opt(
        "--torch-csv", "F.csv", "Write the table for torch.distributed.pipelining."
    )


def command(
    given: Draw,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME|FILE.csv",
            help="A schedule (one_f_one_b, gpipe, …) or a table of your own.",
            autocompletion=complete.schedules,
            show_default=False,
        ),
    ] = None,
) -> None:
    """Show a pipeline schedule: idle time, messages, staleness."""
    with common.reporting(given.json):
        if given.list:
            _list(name, given)
            return
        _draw(named(name), given)


def named(name: str | None) -> str:
    """The name that is given. Raises MD0604 without one."""
    if name is None:
        other = "name one: `meshdsl schedule one_f_one_b --stages 4 --micro 8`"
        refuse("MD0604", "no schedule is named", give("--list", safe=False), other)
    return name


def _draw(name: str, given: Draw) -> None:
    """Print a schedule, or the slices of a sequence, and write the files that are asked for."""
    from meshdsl.schedule.requested import drawn

    outputs = [path for path in (getattr(given, o) for o in OUTPUTS) if path is not None]
    for path in outputs:
        common.check_output(path, given.force, Path(name))
    if given.tokens is not None:
        _slices(name, given.tokens, given)
        _tell(outputs, given)
        return
    timed_schedule = drawn(which(name), request_of(given))
    _write(timed_schedule, given)
    if given.json:
        from meshdsl.report.schedule_charts import described

        common.print_json(described(timed_schedule))
        return
    _show(timed_schedule)
    _tell(outputs, given)


def _tell(outputs: list[Path], given: Draw) -> None:
    """Say which files have been written, where people read it."""
    for path in () if given.json else outputs:
        common.say(f"wrote {path}")


def which(name: str) -> str | TableReader:
    """The name of a schedule, or what reads the table of a file."""
    from meshdsl.schedule.csv_files import read
    from meshdsl.syntax.parse import read_source

    if name.endswith(".csv") or name == "-" or "/" in name:
        return lambda weights: read(read_source(name), weights)
    return name


def request_of(given: Draw) -> ScheduleRequest:
    """What the options ask for."""
    from meshdsl.schedule.requested import ScheduleRequest

    names = (f.name for f in fields(ScheduleRequest) if hasattr(given, f.name))
    return ScheduleRequest(**{name: getattr(given, name) for name in names})


def _slices(name: str, tokens: int, given: Draw) -> None:
    """Print the best slices of a sequence, which are the micro-batches of a schedule."""
    from meshdsl.report.document import Gap
    from meshdsl.report.schedule_charts import chart
    from meshdsl.report.slicing_table import described, shown
    from meshdsl.schedule.requested import sliced

    slicings = sliced(which(name), tokens, request_of(given))
    facts = described(slicings.schedule, slicings.times, slicings.best, slicings.even)
    _write(slicings.drawn, given)
    if given.json:
        common.print_json(facts)
        return
    _print(lambda width: (*shown(facts), Gap(), chart(slicings.drawn, width)))


def _list(name: str | None, given: Draw) -> None:
    """Print every schedule that is known by name."""
    document, facts = listing(name, given)
    if given.json:
        common.print_json(facts)
        return
    _print(lambda width: document)


def listing(name: str | None, given: Draw) -> tuple[Document, KnownSchedules]:
    """Every schedule that is known by name; no other option goes with that."""
    from meshdsl.report.schedule_charts import list_shown, listed

    others = [text for field, text in chosen(given).items() if field not in ("list", "json")]
    for other in [*others, *([] if name is None else [name])]:
        message = f"`--list` lists all schedules: `{other}` means nothing beside it"
        fixes = [leave_out("--list", safe=False)]
        if other != name:
            fixes.insert(0, leave_out(other, safe=False))
        elif other is not None:
            edit = OptionEdit("", None, other)
            fixes.insert(0, Fix(f"leave out `{other}`", safe=False, options=(edit,)))
        refuse("MD0532", message, fixes)
    facts = listed()
    return list_shown(facts), facts


def _write(made: TimedSchedule, given: Draw) -> None:
    """Write the files that are asked for."""
    from meshdsl.report.schedule_picture import schedule_picture
    from meshdsl.schedule.csv_files import written, written_for_torch

    schedule = made.verified.schedule
    if given.torch_csv is not None:
        write_whole(given.torch_csv, written_for_torch(schedule))
    if given.csv is not None:
        write_whole(given.csv, written(schedule))
    if given.svg is not None:
        write_whole(given.svg, schedule_picture(made))


def _show(made: TimedSchedule) -> None:
    from meshdsl.report.schedule_charts import chart, shown

    _print(lambda width: shown(made, chart(made, width)))


def _print(document: Callable[[int], Document]) -> None:
    """Print a document for the width of the terminal."""
    from rich.console import Console

    from meshdsl.report.terminal import print_document

    console = Console(highlight=False)
    print_document(document(console.width), console)
