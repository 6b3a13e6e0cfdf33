"""`check --fix`: the fixes of diagnostics carried out, until there is nothing more to fix."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Callable, Iterable

from meshdsl.diagnostics import Diagnostic, Diagnostics, Edit, Fix, Source
from meshdsl.records import dataclass
from meshdsl.syntax.edits import apply

MAX_ROUNDS = 10
"""How often a text is checked and fixed: what is fixed may show more."""

_LINE = re.compile(r"([^\r\n]*)(\r\n|\r|\n|$)")

Check = Callable[[Source], Diagnostics]
"""All diagnostics of a text."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """A text after its fixes: those that were carried out, each with its diagnostic, and the rest.

    `left` are the diagnostics of `text`.
    """

    text: str
    done: tuple[tuple[Diagnostic, Fix], ...]
    left: Diagnostics


def fixed(source: Source, check: Check) -> Fixed:
    """The text with the first safe fix of each diagnostic carried out, round after round.

    What is returned never has more errors than `source`: rounds that end with more are dropped.
    """
    best = now = Fixed(source.text, (), check(source))
    seen = {source.text}
    for _ in range(MAX_ROUNDS):
        now = _round(now, source.name, check)
        if now.text in seen:
            break
        seen.add(now.text)
        if len(now.left.errors) <= len(best.left.errors):
            best = now
    return best


def _round(before: Fixed, name: str, check: Check) -> Fixed:
    """One round of fixes; one alone where all at once make more errors and that one does not."""
    chosen = _chosen(before.left, before.text)
    every = _after(before, chosen, name, check)
    if len(chosen) < 2 or len(every.left.errors) <= len(before.left.errors):
        return every
    alone = (_after(before, [one], name, check) for one in chosen)
    good = (result for result in alone if len(result.left.errors) <= len(before.left.errors))
    return next(good, every)


def _after(before: Fixed, chosen: list[tuple[Diagnostic, Fix]], name: str, check: Check) -> Fixed:
    """The text with these fixes carried out, checked again."""
    text = apply(before.text, _edits(chosen))
    return Fixed(text, (*before.done, *chosen), check(Source(name, text)))


def _chosen(diagnostics: Iterable[Diagnostic], text: str) -> list[tuple[Diagnostic, Fix]]:
    """The first safe fix of each diagnostic, less those that touch what another one edits."""
    chosen: list[tuple[Diagnostic, Fix]] = []
    for diagnostic in diagnostics:
        fix = next(iter(diagnostic.fixes), None)
        if fix is None or not fix.safe or not fix.is_of(text):
            continue
        taken = _edits(chosen)
        new = [edit for edit in fix.edits if edit not in taken]
        if not any(_touch(one, other) for one in new for other in taken):
            chosen.append((diagnostic, fix))
    return chosen


def _edits(chosen: Iterable[tuple[Diagnostic, Fix]]) -> list[Edit]:
    """The edits of fixes; one that several make is made once."""
    return list(dict.fromkeys(edit for _, fix in chosen for edit in fix.edits))


def _touch(one: Edit, other: Edit) -> bool:
    return one.span.start <= other.span.end and other.span.start <= one.span.end


# --- files -----------------------------------------------------------------------------------


def with_line_ends_of(raw: str, text: str) -> str:
    """`text`, whose lines end in a newline, with the line ends and the byte order mark of `raw`.

    Lines of `raw` that are still there keep theirs; others end as most of `raw` do.
    """
    mark = "\ufeff" if raw.startswith("\ufeff") else ""
    old = _LINE.findall(raw.removeprefix(mark))
    usual = Counter(end for _, end in old if end).most_common(1)
    ends = dict.fromkeys(range(text.count("\n")), usual[0][0] if usual else "\n")
    lines = text.split("\n")
    matcher = difflib.SequenceMatcher(None, [line for line, _ in old], lines, autojunk=False)
    for block in matcher.get_matching_blocks():
        for step in range(block.size):
            end = old[block.a + step][1]
            if end and block.b + step in ends:
                ends[block.b + step] = end
    return mark + "".join(line + ends.get(number, "") for number, line in enumerate(lines))
