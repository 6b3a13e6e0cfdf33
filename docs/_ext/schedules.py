"""Pipeline schedules: an entry for every one that is known by name, and pictures."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from docs._ext.markdown import code
from meshdsl.report.document import Picture
from meshdsl.report.html import html
from meshdsl.report.schedule_charts import in_words
from meshdsl.report.schedule_picture import schedule_picture
from meshdsl.schedule.laws import CONDITIONS
from meshdsl.schedule.registry import Record, generate, schedules
from meshdsl.schedule.times import timed
from meshdsl.schedule.verification import verify

DRAWN = ("4", "8")
"""The devices and micro-batches of the pictures."""


def reference() -> str:
    """Every schedule: what it is, what it costs, what it takes, and where it comes from."""
    return "\n\n".join(map(entry, schedules().values()))


def entry(record: Record) -> str:
    """One schedule, in the words of its docstring."""
    text = " ".join(inspect.cleandoc(record.make.__doc__ or "").split())
    options = "".join(f" Option: {code(f'--{name}')}." for name in record.options)
    laws = "".join(f" {law}" for law in _laws(record))
    drawn = picture(record.name, *DRAWN)
    return (
        f"### {code(record.name)}\n\n{text}{laws}{options}\n\n{drawn}\n\nSource: {record.source}."
    )


def _laws(record: Record) -> Iterator[str]:
    """What is published of idle time and of what is in flight."""
    for law in record.idle:
        published = f", published as {code(law.published)}" if law.published else ""
        yield f"Idle {CONDITIONS[law.passes]}: {code(str(law))}{published}."
    if record.in_flight is not None:
        yield f"In flight: {code(str(record.in_flight))}."


def picture(name: str, stages: str, micro: str) -> str:
    """A schedule over time."""
    made = timed(verify(generate(name, int(stages), int(micro))))
    drawn = html((Picture(lambda: schedule_picture(made), in_words(made)),))
    return f'<div class="made">\n{drawn}\n</div>'
