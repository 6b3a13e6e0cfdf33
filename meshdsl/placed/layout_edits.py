"""Fixes of the text of a layout: the stage in a rule, and its schedule."""

from __future__ import annotations

import re

from meshdsl.diagnostics import Edit, Fix, Span
from meshdsl.syntax.edits import inserted

_NUMBER = re.compile(r"\d+")


def on_stage(rule: Span, axis: str, stage: int) -> tuple[Fix, ...]:
    """The fix that writes another stage in `h: pipe = 2`."""
    places = list(_NUMBER.finditer(rule.text))
    if not places or places[-1].end() != len(rule.text):
        return ()
    span = Span(rule.source, rule.start + places[-1].start(), rule.end)
    return (Fix(f"write `{axis} = {stage}`", (Edit(span, str(stage)),), safe=False),)


def cut_into(use: Span, count: int) -> tuple[Fix, ...]:
    """The fix that writes another number of micro-batches in `one_f_one_b[batch](4)`."""
    place = re.search(r"\(\s*(\d+)", use.text)
    if place is None:
        return ()
    text = f"{use.text[: place.start(1)]}{count}{use.text[place.end(1) :]}"
    return (Fix.write(use, text, safe=False),)


def by_schedule(use: Span, name: str) -> tuple[Fix, ...]:
    """The fix that names another schedule, with the same dims and micro-batches."""
    place = re.match(r"\w+", use.text)
    if place is None:
        return ()
    span = Span(use.source, use.start, use.start + place.end())
    return (Fix.write(span, name, safe=False),)


def ended(rule: Span, schedule: str) -> tuple[Fix, ...]:
    """The fix that ends the layout of a rule with a schedule, where it has none."""
    text, end = rule.source.text, rule.source.text.find("}", rule.end)
    if end < 0 or "{" in text[rule.end : end]:
        return ()
    return (inserted(end + 1, f" with {schedule}", rule, f"add `with {schedule}`"),)
