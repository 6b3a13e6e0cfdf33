"""`meshdsl schedule`: a pipeline schedule over time, without a program."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshdsl.cli import common, complete
from meshdsl.cli.options import AsData, Force, chosen, flag, opt, option, refuse_unknown
from meshdsl.diagnostics import fail

if TYPE_CHECKING:
    from meshdsl.report.document import Document
    from meshdsl.schedule.times import TimedSchedule, Times
    from meshdsl.schedule.verification import Verified


OUTPUTS = ("svg", "csv", "torch_csv")
"""Options of files that are written."""

SLICING = ("unit", "slice_times")
"""Options that go with `--tokens` alone."""

COUNTS = ("chunks", "batch", "forward", "waves", "active")
"""Options that a schedule counts by."""


@option
class TableOptions:
    """Options of the table."""

    stages: int | None = opt(
        "--stages", "N", "Devices of the pipeline, with a stage each, or --chunks.", min=1
    )
    micro: int | None = opt("--micro", "N", "Micro-batches of a step.", min=1)
    chunks: int | None = opt(
        "--chunks", "N", "Stages of a device: interleaved, breadth_first (2).", min=1
    )
    batch: int | None = opt(
        "--batch", "N", "Micro-batches to an update: two_bw (as many as stages).", min=1
    )
    forward: int | None = opt(
        "--forward", "N", "Forward passes in a row, 1 or 2: chimera (1).", min=1
    )
    waves: int | None = opt(
        "--waves", "N", "Times that stages go down the devices and up: hanayo (1).", min=1
    )
    active: int | None = opt(
        "--active", "N", "Most micro-batches in flight: ampnet (as many as stages).", min=1
    )
    weights: str | None = opt(
        "--weights", "W", "Of a FILE with updates: latest, stashed, buffered, corrected (latest)."
    )


@option
class Draw(TableOptions, Force, AsData):
    """Options of `schedule`."""

    list: bool = flag("--list", "List all schedules: options, laws, source.")
    times: str | None = opt(
        "--times", "F=1,…", "F, I, W, U, send; `F=1:2:1` by stage (F=1,I=1,W=1,U=0,send=0)."
    )
    tokens: int | None = opt(
        "--tokens", "N", "Cut sequences of N tokens in the best slices: terapipe.", min=1
    )
    unit: int | None = opt("--unit", "N", "Slices are multiples of N tokens (1).", min=1)
    slice_times: str | None = opt(
        "--slice-times",
        "slice=1,…",
        "Of a slice, each token, each before it, each pair (slice=1,token=1,before=0,pair=0).",
    )
    late: bool = flag("--late", "B sends after its W, not after its I.")
    svg: Path | None = opt("--svg", "F.svg", "Draw it.")
    csv: Path | None = opt("--csv", "F.csv", "Write the table: a line for each device.")
    torch_csv: Path | None = opt(
        "--torch-csv", "F.csv", "The same as torch.distributed.pipelining reads it."
    )


def command(
    given: Draw,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME|FILE.csv",
            help="one_f_one_b, gpipe, …, or a table.",
            autocompletion=complete.schedules,
            show_default=False,
        ),
    ] = None,
) -> None:
    """Draw a pipeline schedule: what is idle, in flight, sent, and how stale parameters are."""
    with common.reporting(given.json):
        if given.list:
            _list(name, given)
            return
        if name is None:
            help = "`meshdsl schedule one_f_one_b --stages 4 --micro 8`, or `--list` for the names"
            fail("MD0604", "no schedule is named", help=help)
        from meshdsl.report.schedule_charts import described
        from meshdsl.schedule.registry import schedules
        from meshdsl.schedule.times import parse_times, timed

        outputs = [path for path in (getattr(given, o) for o in OUTPUTS) if path is not None]
        for path in outputs:
            common.check_output(path, given.force, Path(name))
        if given.tokens is not None:
            _slices(name, given.tokens, given)
            _tell(outputs, given)
            return
        for field, text in chosen(given).items():
            if field in SLICING:
                help = f"add `--tokens`, the length of a sequence, or leave out `{text}`"
                fail("MD0532", f"`{text}` is of slices of a sequence", help=help)
        verified = _table(name, given, None)
        times = parse_times(given.times or "F=1", verified.schedule.stages, not given.late)
        if (record := schedules().get(name)) and record.by_times:
            verified = _table(name, given, times)
        drawn = timed(verified, times)
        _write(drawn, given)
        if given.json:
            common.print_json(described(drawn))
            return
        _show(drawn)
        _tell(outputs, given)


def _tell(outputs: list[Path], given: Draw) -> None:
    """Say which files have been written, where people read it."""
    for path in () if given.json else outputs:
        common.say(f"wrote {path}")


def _slices(name: str, tokens: int, given: Draw) -> None:
    """Print the best slices of a sequence, which are the micro-batches of a schedule."""
    from meshdsl.report.document import Gap, Listing
    from meshdsl.report.schedule_charts import chart
    from meshdsl.report.slicing_table import described, shown
    from meshdsl.schedule.registry import generate
    from meshdsl.schedule.slicing import best_slices, even_slicings, parse_slice_times
    from meshdsl.schedule.times import timed
    from meshdsl.schedule.verification import verify

    for field, text in chosen(given).items():
        if field not in ("tokens", "stages", "micro", "json", "force", *OUTPUTS, *SLICING):
            help = f"leave `{text}` out, or `--tokens`"
            fail("MD0532", f"`{text}` means nothing beside `--tokens`", help=help)
    verified = _table(name, given, None)
    schedule = verified.schedule
    if not verified.reverses or schedule.stages > schedule.devices:
        message = f"micro-batches of `{name}` are no slices of a sequence: it does not take the "
        message += "backward passes of a stage from the last to the first"
        fail("MD0532", message, help="take `terapipe`")
    times = parse_slice_times(given.slice_times or "slice=1")
    unit = 1 if given.unit is None else given.unit
    about = (tokens, schedule.stages, schedule.micro, times.of, unit)
    best = best_slices(*about)
    facts = described(schedule.name, times, best, [*even_slicings(*about)])
    micro = schedule.micro * len(best.sizes)
    drawn = timed(verify(generate(name, schedule.stages, micro)), best.passes)
    _write(drawn, given)
    if given.json:
        common.print_json(facts)
        return
    _print(lambda width: (*shown(facts), Gap(), Listing(chart(drawn, width))))


def _list(name: str | None, given: Draw) -> None:
    """Print every schedule that is known by name; no other option goes with that."""
    from meshdsl.report.schedule_charts import list_shown, listed

    others = [text for field, text in chosen(given).items() if field not in ("list", "json")]
    for other in [*others, *([] if name is None else [name])]:
        message = f"`--list` lists all schedules: `{other}` means nothing beside it"
        fail("MD0532", message, help=f"leave out `{other}`, or `--list`")
    if given.json:
        common.print_json(listed())
        return
    _print(lambda width: list_shown(listed()))


def _table(name: str, given: Draw, times: Times | None) -> Verified:
    """The schedule of a file, or the one of a name, in the order that the times make."""
    from meshdsl.schedule.csv_files import read
    from meshdsl.schedule.registry import generate, lookup
    from meshdsl.schedule.table import WEIGHTS
    from meshdsl.schedule.verification import verify
    from meshdsl.syntax.parse import read_source

    is_file = name.endswith(".csv") or name == "-" or "/" in name
    options = {field: getattr(given, field) for field in ("stages", "micro", *COUNTS)}
    if is_file:
        for field, value in options.items():
            if value is not None:
                help = "the table says what it is of: leave the option out"
                fail("MD0532", f"`--{field}` goes with the name of a schedule", help=help)
        weights = given.weights or "latest"
        refuse_unknown("weights", weights, WEIGHTS, "there is no such rule")
        verified = read(read_source(name), next(w for w in WEIGHTS if w == weights))
        if given.weights is not None and not verified.schedule.updates:
            help = "leave the option out, or write where stages update: `U0`"
            fail("MD0532", "`--weights` goes with a table that has updates", help=help)
        return verified
    lookup(name)
    if given.weights is not None:
        help = f"`{name}` has its own: leave the option out"
        fail("MD0532", "`--weights` goes with the table of a file", help=help)
    missing = [f"`--{field}`" for field in ("stages", "micro") if options[field] is None]
    if missing:
        help = f"`meshdsl schedule {name} --stages 4 --micro 8`"
        fail("MD0532", f"the size of `{name}` is not said: {' and '.join(missing)}", help=help)
    stages, micro = options.pop("stages"), options.pop("micro")
    return verify(generate(name, stages, micro, options, times=times))


def _write(made: TimedSchedule, given: Draw) -> None:
    """Write the files that are asked for."""
    from meshdsl.report.schedule_charts import schedule_picture
    from meshdsl.schedule.csv_files import written, written_for_torch

    schedule = made.verified.schedule
    if given.torch_csv is not None:
        common.write_whole(given.torch_csv, written_for_torch(schedule))
    if given.csv is not None:
        common.write_whole(given.csv, written(schedule))
    if given.svg is not None:
        common.write_whole(given.svg, schedule_picture(made))


def _show(made: TimedSchedule) -> None:
    from meshdsl.report.schedule_charts import shown

    _print(lambda width: shown(made, width))


def _print(document: Callable[[int], Document]) -> None:
    """Print a document for the width of the terminal."""
    from rich.console import Console

    from meshdsl.report.terminal import print_document

    console = Console(highlight=False)
    print_document(document(console.width), console)
