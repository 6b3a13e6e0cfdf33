"""A pipeline schedule as JSON and as a document, and a chart of it as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction

from meshdsl.report.document import (
    Block,
    Document,
    Gap,
    Grid,
    Listing,
    Piece,
    Text,
    counted,
    line,
)
from meshdsl.report.palette import Pass
from meshdsl.report.schedule_schema import (
    ActionTimes,
    DeviceRow,
    KnownSchedules,
    LawFacts,
    ScheduleFacts,
    VersionFacts,
)
from meshdsl.schedule.laws import CONDITIONS
from meshdsl.schedule.registry import laws_of_idle, schedules
from meshdsl.schedule.table import Kind, ScheduleTable, row_text
from meshdsl.schedule.times import Slot, TimedSchedule
from meshdsl.schedule.verification import Verified

VERSION = 1

DOES: dict[Kind, Pass] = {
    "F": "forward",
    "B": "backward",
    "I": "backward",
    "W": "weights",
    "U": "update",
}
MOST_LINES = 150
"""Lines of a chart of text that are printed."""


# --- facts ---------------------------------------------------------------------------------------


def described(timed: TimedSchedule) -> ScheduleFacts:
    """The facts of a schedule in time. Times are exact fractions, as text."""
    verified = timed.verified
    schedule = verified.schedule
    return {
        "version": VERSION,
        "schedule": schedule.name or None,
        "stages": schedule.stages,
        "micro_batches": schedule.micro,
        "weights": schedule.weights if schedule.updates else None,
        "times": _times(timed),
        "makespan": str(timed.makespan),
        "bubble": str(timed.bubble),
        "laws": list(_laws(schedule)),
        "sends": verified.sends,
        "in_order": verified.in_order,
        "devices": list(_devices(timed)),
        "lines": [
            {
                "from": each.source,
                "to": each.target,
                "kind": each.kind,
                "messages": len(each.messages),
                "buffers": each.buffers,
            }
            for each in verified.lines
        ],
        "versions": [
            {
                "stage": each.stage,
                "forward": list(each.forward),
                "backward": list(each.backward),
                "staleness": list(each.staleness),
                "copies": each.copies,
            }
            for each in verified.versions
        ],
    }


def _laws(table: ScheduleTable) -> Iterator[LawFacts]:
    for law, share in laws_of_idle(table):
        yield {
            "formula": law.text,
            "condition": CONDITIONS[law.passes],
            "published": law.published or None,
            "derived": law.derived,
            "share": str(share),
        }


def _times(timed: TimedSchedule) -> ActionTimes:
    times = timed.times
    return {
        "F": [*map(str, times.forward)],
        "I": [*map(str, times.inputs)],
        "W": [*map(str, times.weights)],
        "U": [*map(str, times.update)],
        "send": [*map(str, times.send)],
        "early": times.early,
    }


def _devices(timed: TimedSchedule) -> Iterator[DeviceRow]:
    verified = timed.verified
    for device, row in enumerate(verified.schedule.rows):
        yield {
            "row": row_text(device, row),
            "stages": list(verified.held[device]),
            "in_flight": verified.peaks[device],
            "in_flight_by_stage": {str(s): n for s, n in verified.stage_peaks[device].items()},
            "busy": str(timed.busy[device]),
            "idle": str(timed.idle[device]),
            "waiting": str(timed.waiting[device]),
        }


def listed() -> KnownSchedules:
    """Every schedule that is known by name, with its laws."""
    return {
        "version": VERSION,
        "schedules": [
            {
                "name": record.name,
                "meaning": record.meaning,
                "options": dict(record.options),
                "idle": [
                    {
                        "formula": law.text,
                        "where": law.where or None,
                        "condition": CONDITIONS[law.passes],
                        "published": law.published or None,
                        "derived": law.derived,
                    }
                    for law in record.idle
                ],
                "in_flight": None if record.in_flight is None else str(record.in_flight),
                "asynchronous": record.asynchronous,
                "source": record.source,
            }
            for record in schedules().values()
        ],
    }


# --- for people ----------------------------------------------------------------------------------


def list_shown(facts: KnownSchedules) -> Document:
    """A line for each schedule: its options, and what it does."""
    rows = tuple(
        (
            each["name"],
            # A default of 0 is as many as there are devices.
            ", ".join(f"{name}={value or 'D'}" for name, value in each["options"].items()),
            each["meaning"],
        )
        for each in facts["schedules"]
    )
    return (
        Grid("", ("schedule", "options", "what it does"), rows),
        Gap(),
        line("D: as many as devices."),
        line("`meshdsl schedule NAME --stages 4 --micro 8` shows one, with its formula."),
        line("`meshdsl schedule --list --json` has all formulas and sources."),
    )


def shown(timed: TimedSchedule, chart: Block) -> Document:
    """The schedule: its rows over time, what is idle, in flight, sent, and how stale."""
    facts = described(timed)
    return (
        line(sentence(facts), "strong"),
        Gap(),
        chart,
        Gap(),
        *(line(text) for text in _sentences(timed, facts)),
        Gap(),
        *_tables(facts),
    )


def sentence(facts: ScheduleFacts) -> str:
    """`gpipe: 4 stages on 4 devices, 8 micro-batches.`."""
    devices = counted(len(facts["devices"]), "device")
    micro = counted(facts["micro_batches"], "micro-batch")
    stages = counted(facts["stages"], "stage")
    return f"{facts['schedule'] or 'schedule'}: {stages} on {devices}, {micro}."


def _sentences(timed: TimedSchedule, facts: ScheduleFacts) -> Iterator[str]:
    share = f"{100 * float(timed.bubble):.3g} %"
    idle = f"{facts['bubble']} of the devices' time is idle ({share})" if timed.bubble else ""
    took = f"A step takes {facts['makespan']} ({_said(facts['times'])})"
    yield f"{took}."
    yield f"{idle or 'No device is ever idle'}."
    for law in facts["laws"]:
        yield _compared(law, facts["bubble"])
    if facts["weights"] is None and timed.bubble and not any(timed.waiting):
        yield (
            "No device waits between its first action and its last one; all of it is waiting for"
            " the others at the ends of a step."
        )
    lines = counted(len(facts["lines"]), "channel")
    unordered = [each for each in facts["lines"] if each["buffers"] > 1]
    order = "" if unordered or not facts["lines"] else ", received in the order they are sent in"
    yield f"{counted(facts['sends'], 'message')} on {lines}{order}."
    for each in unordered:
        where = f"From device {each['from']} to device {each['to']} ({each['kind']})"
        yield f"{where}, {each['buffers']} messages are kept at once: they are not read in order."
    if not facts["in_order"]:
        yield "Gradients are added up in another order than on one device, so they round otherwise."


def _compared(law: LawFacts, bubble: str) -> str:
    """The share of idle time by a law beside the one of the given times."""
    formula = law["formula"] if law["formula"] == law["share"] else f"{law['formula']} ="
    share = "" if law["formula"] == law["share"] else f" {law['share']}"
    here = "the same" if bubble == law["share"] else bubble
    published = f" Published as {law['published']}." if law["published"] else ""
    title = "Law of this table" if law["derived"] else "Textbook"
    return f"{title}: {formula}{share} {law['condition']}; here {here}.{published}"


def _said(times: ActionTimes) -> str:
    each = {"F": times["F"], "I": times["I"], "W": times["W"], "U": times["U"]}
    each["send"] = times["send"]
    said = [f"{n}={':'.join(t)}" for n, t in each.items() if n != "U" or t != ["0"]]
    return ", ".join(said) + ("" if times["early"] else ", B sends after W")


def _tables(facts: ScheduleFacts) -> Iterator[Block]:
    head = ("device", "stages", "in flight", "busy", "idle", "waiting")
    yield Grid("", head, tuple(_row(n, each) for n, each in enumerate(facts["devices"])))
    if facts["versions"]:
        rows = tuple(
            (str(v["stage"]), str(max(v["staleness"])), str(v["copies"]), _behind(v))
            for v in facts["versions"]
        )
        title = f"versions of parameters ({facts['weights']})"
        last = "forward and backward pass read"
        yield Gap()
        yield Grid(title, ("stage", "updates behind", "copies", last), rows)


def _row(number: int, device: DeviceRow) -> tuple[str, ...]:
    stages = ", ".join(map(str, device["stages"]))
    flying = str(device["in_flight"])
    return (str(number), stages, flying, device["busy"], device["idle"], device["waiting"])


def _behind(versions: VersionFacts) -> str:
    """Whether a micro-batch's two passes read one version."""
    pairs = zip(versions["forward"], versions["backward"], strict=True)
    apart = max(backward - forward for forward, backward in pairs)
    return "the same version" if not apart else f"versions up to {apart} apart"


# --- a chart of text -----------------------------------------------------------------------------


def chart(timed: TimedSchedule, width: int, instead: str = "`--svg FILE`") -> Listing:
    """A line for each device: each action as wide as it is long, cut to the width of a screen.

    `instead` is named where it would have too many lines.
    """
    slots = [(slot, _label(timed.verified, n, slot)) for n, row in enumerate(timed.rows)
             for slot in row if slot.end > slot.start]  # fmt: skip
    scale = max(
        (Fraction(len(label) + 1) / (slot.end - slot.start) for slot, label in slots),
        default=Fraction(1),
    )
    left = len(f"device {len(timed.rows) - 1}  ")
    cell = max(int(min((s.end - s.start for s, _ in slots), default=1) * scale), 1)
    panel = max(width - left, 2 * cell) // cell * cell
    total = int(timed.makespan * scale)
    panels = -(-total // panel)
    if panels * (len(timed.rows) + 2) > MOST_LINES:
        return Listing.of(f"The chart is too large for a screen: {instead} draws it.")
    drawn = [("time", [Piece(_ruler(timed.makespan, scale, cell))])]
    drawn += [(f"device {n}", _drawn(timed, n, scale)) for n in range(len(timed.rows))]
    lines: list[Text] = []
    for start in range(0, max(total, 1), panel):
        lines += [()] if lines else []
        for title, row in drawn:
            shown = _columns(row, start, start + panel)
            lines.append((Piece(f"{title:<{left}}" if shown else title), *shown))
    return Listing((*lines, *_legend_text(timed.verified)))


def _drawn(timed: TimedSchedule, device: int, scale: Fraction) -> list[Piece]:
    """The row of a device: a label and as many dashes as its action takes."""
    row, ends = [], 0
    for slot in timed.rows[device]:
        start, end = int(slot.start * scale), int(slot.end * scale)
        if end > start:
            row.append(Piece(" " * (start - ends)))
            label = _label(timed.verified, device, slot)
            row.append(Piece(f"{label:-<{end - start - 1}}", DOES[slot.action.kind]))
            ends = start + len(row[-1].text)
    return row


def _columns(row: Sequence[Piece], start: int, end: int) -> Text:
    """The characters `start` to `end` of a row, without spaces at the end."""
    shown, at = [], 0
    for piece in row:
        text = piece.text[max(start - at, 0) : max(end - at, 0)]
        at += len(piece.text)
        if text:
            shown.append(replace(piece, text=text))
    while shown and shown[-1].text.isspace():
        shown.pop()
    return (*shown[:-1], replace(shown[-1], text=shown[-1].text.rstrip())) if shown else ()


def _label(found: Verified, device: int, slot: Slot) -> str:
    """`F3`; on the second of two stages `f3`, on one of more `F3@4`."""
    action, held = slot.action, found.held[device]
    if len(held) > 2:
        return action.text(device)
    label = f"{action.kind}{action.micro}"
    return label.lower() if action.stage != held[0] and len(held) == 2 else label


def _legend_text(found: Verified) -> tuple[Text, ...]:
    if not any(len(held) == 2 for held in found.held):
        return ()
    return ((), (Piece("Small letters: on the second stage of a device."),))


def _ruler(makespan: Fraction, scale: Fraction, cell: int) -> str:
    """Times above the columns where they begin."""
    step = -(-10 // cell) * cell
    text = ""
    for column in range(0, int(makespan * scale), step):
        label = str(Fraction(column) / scale)
        text = f"{text:<{column}}{label if len(label) < step else ''}"
    return text


def in_words(timed: TimedSchedule) -> str:
    """The picture in words."""
    return f"{sentence(described(timed))} Over {timed.makespan}, {timed.bubble} idle."
