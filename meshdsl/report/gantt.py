"""A simulated step as a picture: the streams of a device over time, and below them its memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

from meshdsl.records import dataclass
from meshdsl.report.document import duration, human
from meshdsl.report.html import Markup, join, tag
from meshdsl.report.palette import EDGE, INK, MEMORY, SOFT, WORK, Work
from meshdsl.report.pictures import card, centred, legend, width_of, words
from meshdsl.simulate.timeline import COMPUTE, PER_SECOND, Event, Timeline

WIDTH, ROW, LANE = 640.0, 24.0, 32.0
"""Pixels: the whole time, the height of a stream's work, and from one stream to the next."""

BELOW = 70.0
"""The height of the picture of memory."""

FOLD = 44.0
"""The width of iterations that are left out, however long they take."""

LEAST = 0.8
"""Work narrower than this is drawn together with what is beside it."""

SMALL: Mapping[str, Any] = {"fill": SOFT, "font_size": 11}


@dataclass(slots=True)
class _Bar:
    """Work on one stream, in pixels."""

    kind: Work
    start: float
    end: float
    label: str


def gantt_picture(timeline: Timeline) -> Markup:
    """The streams one below the other, then the memory; the time runs to the right."""
    at = _scale(timeline)
    titles = [s if s == COMPUTE else f"axis {s}" for s in timeline.streams]
    sizes = [human(timeline.peak[0]), "0 B"]
    left, top = max(map(width_of, [*titles, *sizes])) + 10, 26.0
    lanes = len(titles) * LANE
    parts = [_legend(timeline)]
    for number, (stream, title) in enumerate(zip(timeline.streams, titles, strict=True)):
        y = top + number * LANE
        parts.append(words(0, y + 16, title))
        parts += [_drawn(bar, left, y) for bar in _bars(timeline, stream, at)]
    below = top + lanes + 6
    parts.append(tag("g", _memory(timeline, at), transform=f"translate({left:g} {below:g})"))
    parts += [words(0, below + y, t, **SMALL) for y, t in zip((9, BELOW), sizes, strict=True)]
    took = duration(timeline.seconds)
    parts.append(words(left, below + BELOW + 15, "0 s", **SMALL))
    parts.append(words(left + WIDTH - width_of(took, 11), below + BELOW + 15, took, **SMALL))
    return card(left + WIDTH + 4, below + BELOW + 18, *parts)


def _scale(timeline: Timeline) -> Callable[[int], float]:
    """From a time to pixels. Iterations that are left out take little room, if there are few."""
    folds = sorted((f.start, f.end) for f in timeline.folded)
    folds = folds if len(folds) * FOLD < WIDTH / 2 else []
    skipped = sum(end - start for start, end in folds)
    unit = (WIDTH - FOLD * len(folds)) / max(1, timeline.ticks - skipped)

    def at(time: int) -> float:
        pixels = time * unit
        for start, end in folds:
            inside = min(max(time - start, 0), end - start)
            pixels += inside * (FOLD / max(1, end - start) - unit)
        return pixels

    return at


def _bars(timeline: Timeline, stream: str, at: Callable[[int], float]) -> Iterator[_Bar]:
    """The work of a stream, narrow pieces of one kind drawn as one."""
    bars = [
        _Bar(_kind(e), at(e.start), at(e.end), _name(e))
        for e in timeline.events
        if stream in e.streams
    ]
    if stream == COMPUTE:
        more: Work = "more iterations"
        bars += [_Bar(more, at(f.start), at(f.end), f"+{f.trips:,}") for f in timeline.folded]
    last: _Bar | None = None
    for bar in sorted(bars, key=lambda b: b.start):
        narrow = last is not None and min(bar.end - bar.start, last.end - last.start) < LEAST
        if last is not None and narrow and bar.kind == last.kind and bar.start - last.end < LEAST:
            last.end, last.label = bar.end, ""
            continue
        if last is not None:
            yield last
        last = bar
    if last is not None:
        yield last


def _kind(event: Event) -> Work:
    if event.kind == "wait":
        return "waiting"
    return cast("Work", event.node.phase) if COMPUTE in event.streams else "sending"


def _name(event: Event) -> str:
    node = event.node
    return node.name if COMPUTE in event.streams and hasattr(node, "name") else ""


def _drawn(bar: _Bar, left: float, y: float) -> Markup:
    width = max(bar.end - bar.start, 0.3)
    rect = tag(
        "rect",
        x=left + bar.start,
        y=y,
        width=width,
        height=ROW,
        fill=WORK[bar.kind],
        stroke=INK if width > 3 else None,
        stroke_width=0.4,
    )
    if not bar.label or width_of(bar.label, 10) + 4 > width:
        return rect
    middle = left + bar.start + width / 2
    return join(rect, centred(middle, y + ROW / 2 - 0.5, bar.label, font_size=10))


def _memory(timeline: Timeline, at: Callable[[int], float]) -> Markup:
    """The bytes held over time, as steps, and a mark where they are most."""
    most, when = timeline.peak
    up = BELOW / max(1, most)
    corners = [(at(time), BELOW - size * up) for time, size in _steps(timeline)]
    drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in _thinned(corners))
    filled = f"M0 {BELOW} L{drawn} L{WIDTH:.1f} {BELOW} Z"
    x = at(round(when * PER_SECOND))
    return join(
        tag("path", d=filled, fill=MEMORY["activations"], stroke=INK, stroke_width=0.6),
        tag("rect", x=0, y=0, width=WIDTH, height=BELOW, fill="none", stroke=EDGE),
        tag("circle", cx=x, cy=0, r=3, fill=INK),
    )


def _steps(timeline: Timeline) -> Iterator[tuple[int, int]]:
    """The corners of the memory: each sample holds until the next."""
    for (time, size), (until, _) in itertools.pairwise([*timeline.memory, (timeline.ticks, 0)]):
        yield time, size
        yield until, size


def _thinned(corners: Iterable[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """The corners; of those in one pixel the highest and the lowest, and the last."""
    for _, group in itertools.groupby(corners, lambda corner: int(corner[0])):
        near = list(group)
        if len(near) > 4:
            heights = [y for _, y in near]
            ends = ((near[0][0], y) for y in (min(heights), max(heights)))
            near = [near[0], *ends, near[-1]]
        yield from near


def _legend(timeline: Timeline) -> Markup:
    """The kinds of work that there are, with their fills."""
    there = {_kind(e) for e in timeline.events}
    if timeline.folded:
        there.add("more iterations")
    return legend({kind: fill for kind, fill in WORK.items() if kind in there})[0]


def gantt_text(timeline: Timeline) -> str:
    """The same in words."""
    busy = {COMPUTE: timeline.compute, **timeline.sending}
    parts = (f"{stream} {duration(seconds)}" for stream, seconds in busy.items())
    return f"over {duration(timeline.seconds)}: {', '.join(parts)}"
