"""A pipeline schedule as a picture: devices over time, idle time, phases, and what is in flight."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from fractions import Fraction

from meshdsl.report.gantt import LANE, ROW, SMALL
from meshdsl.report.html import Markup, join, tag
from meshdsl.report.palette import BLANK, EDGE, IDLE, INK, PHASES, SOFT, WORK
from meshdsl.report.pictures import card, centred, legend, width_of, words
from meshdsl.report.schedule_charts import DOES
from meshdsl.schedule.table import Kind
from meshdsl.schedule.times import Slot, TimedSchedule

MEANINGS: dict[Kind, str] = {
    "F": "forward",
    "B": "backward",
    "I": "gradient of the input",
    "W": "gradients of parameters",
    "U": "update",
}

STRIP = 4.0
"""The height in pixels of the line of phases below a device."""

CURVE, MOST_CURVES = 56.0, 8
"""The height in pixels of the curves of what is in flight, and how many devices have one."""

DASHES = ("", "6 3", "2 2", "8 2 2 2")
NARROWEST, WIDEST = 640.0, 2400.0
"""The width in pixels of a chart, as it needs."""

STEPS = (1, 2, 5)
TICKS = 12
"""The most ticks of the axis of time, which are 1, 2 or 5 times a power of ten apart."""


def unit_of(timed: TimedSchedule) -> float:
    """The pixels of a unit of time with which the numbers of micro-batches have room."""
    drawn = [slot for slots in timed.rows for slot in slots if slot.end > slot.start]
    shortest = float(min((s.end - s.start for s in drawn), default=Fraction(1)))
    makespan = float(timed.makespan) or 1.0
    label = max((width_of(str(s.action.micro), 10) for s in drawn), default=0.0)
    return min(max(NARROWEST, makespan / shortest * (label + 6)), WIDEST) / makespan


def schedule_picture(
    timed: TimedSchedule, row: str = "device", ends: str = "", unit: float | None = None
) -> Markup:
    """The rows of the devices one below the other; the time runs to the right, to `ends`.

    Later stages of a device are drawn lighter. `row` is what a row is called. A unit of time has
    `unit` pixels, else as many as the schedule alone needs.
    """
    unit = unit or unit_of(timed)
    width = (float(timed.makespan) or 1.0) * unit
    titles = [f"{row} {n}" for n in range(len(timed.rows))]
    peak = f"{max(timed.verified.peaks, default=0)} in flight"
    left, top = max(map(width_of, [*titles, peak])) + 10, 26.0
    legend, right = _legend(timed)
    below = top + len(titles) * LANE
    times = _times(timed, ends)
    parts = [legend, _lines(times, left, unit, top, below)]
    for number, (slots, title) in enumerate(zip(timed.rows, titles, strict=True)):
        y = top + number * LANE
        parts.append(words(0, y + 16, title))
        parts.append(
            tag("path", d=_across(left, y + ROW / 2, width), stroke=IDLE, stroke_width=ROW)
        )
        held = timed.verified.held[number]
        parts += [
            _slot(slot, left, y, unit, held.index(slot.action.stage) / len(held))
            for slot in slots
            if slot.end > slot.start
        ]
        parts += _phases(slots, left, y + ROW + 1 + STRIP / 2, unit)
    parts += _ticks(times, left, unit, below + 9)
    curves = below + 24
    parts.append(tag("g", *_curves(timed, unit), transform=f"translate({left:g} {curves:g})"))
    parts.append(words(0, curves + 10, peak, **SMALL))
    parts.append(words(0, curves + CURVE, "0", **SMALL))
    return card(max(left + width + 4, right), curves + CURVE + 4, *parts)


# --- devices -------------------------------------------------------------------------------------


def _across(left: float, y: float, width: float) -> str:
    return f"M{left:.1f} {y:.1f}h{width:.1f}"


def _slot(slot: Slot, left: float, y: float, unit: float, later: float) -> Markup:
    """An action with the number of its micro-batch, if that has room."""
    x, width = left + float(slot.start) * unit, float(slot.end - slot.start) * unit
    place = {"x": x, "y": y, "width": width, "height": ROW}
    # Below a lighter action there is blank ground, not idle time.
    under = tag("path", d=_across(x, y + ROW / 2, width), stroke=BLANK, stroke_width=ROW)
    rect = tag(
        "rect",
        **place,
        fill=WORK[DOES[slot.action.kind]],
        fill_opacity=None if not later else f"{1 - 0.8 * later:.2f}",
        stroke=INK if width > 3 else None,
        stroke_width=0.4,
    )
    rect = join(under, rect) if later else rect
    label = str(slot.action.micro)
    if width_of(label, 10) + 4 > width:
        return rect
    return join(rect, centred(x + width / 2, y + ROW / 2 - 0.5, label, font_size=10))


def phases(slots: tuple[Slot, ...]) -> Iterator[tuple[str, Fraction, Fraction]]:
    """The phases of a device with their beginnings and ends; none without backward passes."""
    forward = [slot for slot in slots if slot.action.kind == "F"]
    backward = [slot for slot in slots if slot.action.kind in "BI"]
    if not forward or not backward:
        return
    first, last = Fraction(backward[0].start), Fraction(max(s.end for s in forward))
    at = (Fraction(slots[0].start), first, max(first, last), Fraction(slots[-1].end))
    for name, (start, end) in zip(PHASES, itertools.pairwise(at), strict=True):
        if end > start:
            yield name, start, end


def _phases(slots: tuple[Slot, ...], left: float, y: float, unit: float) -> Iterator[Markup]:
    """A thin line below a device, in the colour of each phase."""
    for name, start, end in phases(slots):
        line = _across(left + float(start) * unit, y, float(end - start) * unit)
        yield tag("path", d=line, stroke=PHASES[name], stroke_width=STRIP)


# --- time ----------------------------------------------------------------------------------------


def _times(timed: TimedSchedule, ends: str) -> list[tuple[Fraction, str]]:
    """Times with a label: round ones if times are numbers, and the end."""
    last = (timed.makespan, ends or str(timed.makespan))
    if ends or not timed.makespan:
        return [(Fraction(0), "0"), last]
    steps = (Fraction(n) * Fraction(10) ** power for power in range(-9, 30) for n in STEPS)
    step = next(step for step in steps if timed.makespan / step <= TICKS)
    count = int(timed.makespan / step)
    # The last one leaves room for the label of the end.
    return [(n * step, f"{float(n * step):g}") for n in range(count)] + [last]


def _lines(
    times: list[tuple[Fraction, str]], left: float, unit: float, top: float, below: float
) -> Markup:
    """A line down at each time."""
    drawn = (f"M{left + float(time) * unit:.1f} {top - 4:.1f}V{below:.1f}" for time, _ in times)
    return tag("path", d="".join(drawn), stroke=EDGE, stroke_width=0.8)


def _ticks(
    times: list[tuple[Fraction, str]], left: float, unit: float, y: float
) -> Iterator[Markup]:
    """The labels of the times: the first to the right of its line, the last to the left."""
    for number, (time, label) in enumerate(times):
        x = left + float(time) * unit
        if number == len(times) - 1:
            yield words(x - width_of(label, 11), y, label, **SMALL)
        elif number:
            yield words(x, y, label, text_anchor="middle", **SMALL)
        else:
            yield words(x, y, label, **SMALL)


# --- what is in flight ---------------------------------------------------------------------------


def in_flight(slots: tuple[Slot, ...]) -> list[tuple[Fraction, int]]:
    """How many micro-batches are in flight on a device from each time on.

    One is from the beginning of its forward pass to the end of its backward pass; without
    backward passes, to the end of its forward pass.
    """
    forward_only = all(slot.action.kind == "F" for slot in slots)
    changes = [(Fraction(s.start), 1) for s in slots if s.action.kind == "F"]
    ending = "F" if forward_only else "BW"
    changes += [(Fraction(s.end), -1) for s in slots if s.action.kind in ending]
    curve: list[tuple[Fraction, int]] = [(Fraction(0), 0)]
    for time, group in itertools.groupby(sorted(changes), key=lambda change: change[0]):
        curve.append((time, curve[-1][1] + sum(step for _, step in group)))
    return curve


def _curves(timed: TimedSchedule, unit: float) -> Iterator[Markup]:
    """A curve for each device, with its number where it is highest first.

    Of many devices only the first and the last have one.
    """
    numbers = range(len(timed.rows))
    chosen = numbers if len(numbers) <= MOST_CURVES else (numbers[0], numbers[-1])
    most = max(1, *timed.verified.peaks)
    height = CURVE / most
    width = float(timed.makespan) * unit
    yield tag(
        "path", d=f"M0 0H{width:.1f}M0 {CURVE:.1f}H{width:.1f}", stroke=EDGE, stroke_width=0.8
    )
    for place, number in enumerate(chosen):
        steps = in_flight(timed.rows[number])
        path = f"M0 {CURVE:.1f}" + "".join(
            f"H{float(time) * unit:.1f}V{CURVE - count * height:.1f}" for time, count in steps
        )
        yield tag(
            "path",
            d=f"{path}H{width:.1f}",
            fill="none",
            stroke=SOFT if place else INK,
            stroke_width=1.4,
            stroke_dasharray=DASHES[place % len(DASHES)] or None,
        )
        peak = timed.verified.peaks[number]
        first = next(time for time, count in steps if count == peak)
        yield words(float(first) * unit + 2, CURVE - peak * height + 9, str(number), **SMALL)


# --- the legend ----------------------------------------------------------------------------------


def _legend(timed: TimedSchedule) -> tuple[Markup, float]:
    """What there is with its colours, and where the legend ends."""
    there = {action.kind for row in timed.verified.schedule.rows for action in row}
    named = {name for slots in timed.rows for name, _, _ in phases(slots)}
    kinds = {MEANINGS[kind]: WORK[DOES[kind]] for kind in DOES if kind in there}
    lines = {name: fill for name, fill in PHASES.items() if name in named}
    return legend({**kinds, "idle": IDLE, **lines}, dict.fromkeys(lines, STRIP))
