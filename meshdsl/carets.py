"""Diagnostics for a reader: the sentence, the place with carets, the way out; or as JSON.

Nothing that comes from a file is taken for markup or reaches the terminal as a control character.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypedDict

from meshdsl.diagnostics import Diagnostic, Fix, Related, Span
from meshdsl.records import dataclass

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_STYLES = {"error": "bold red", "warning": "bold yellow", "note": "bold cyan"}
_GUTTER = "bold blue"
_TAB = "    "
_LEAST_WIDTH = 20
_CUT = "…"
_ENDLESS = re.compile(r"(\S{160})\S{80,}(\S{80})")


@dataclass(frozen=True, slots=True)
class _Mark:
    """A mark at a span: the sign under it, the words behind that, the style."""

    span: Span
    sign: str
    label: str
    style: str


def render(diagnostic: Diagnostic, console_width: int = 100, command: str | None = None) -> Text:
    """The diagnostic as lines of text, each ended; source lines are cut to the width.

    Lines of the message after the first (a table, the end of a log) are indented. `command` is the
    whole command after the first fix.

    ::

        error[MD0301]: dim `heads` of size 6 does not divide over mesh axis `tp` of size 4
          --> lm.mdsl:7:3
          |
        7 |   heads -> tp
          |   ^^^^^^^^^^^
        help: sizes that divide: 4 or 8
    """
    from rich.text import Text

    style = _STYLES[diagnostic.severity]
    text = Text()
    text.append(f"{diagnostic.severity}[{diagnostic.code}]", style)
    sentence, *details = diagnostic.message.split("\n")
    text.append(f": {_brief(sentence)}\n", "bold")
    for line in details:
        text.append(f"{'' if line.startswith('  ') else '  '}{_brief(line)}\n")
    marks = _marks(diagnostic)
    gutter = max((len(str(mark.span.line)) for mark in marks), default=1)
    for place, group in _by_file(marks):
        _file(text, place, group, gutter, console_width)
    if diagnostic.help is not None:
        text.append("help", "bold green")
        text.append(f": {_brief(diagnostic.help)}\n")
    if command is not None:
        text.append("try", "bold green")
        text.append(f": {safe(command)}\n")
    return text


def print_diagnostics(
    diagnostics: Iterable[Diagnostic],
    console: Console,
    corrected: Callable[[Diagnostic], str | None] = lambda diagnostic: None,
) -> None:
    """Print diagnostics to a console; `corrected` is the whole command after the first fix."""
    for diagnostic in diagnostics:
        text = render(diagnostic, console.width, corrected(diagnostic))
        console.print(text, soft_wrap=True, highlight=False)


def _marks(diagnostic: Diagnostic) -> list[_Mark]:
    """The places to show, the main one first."""
    if diagnostic.span is None:
        return []
    main = _Mark(diagnostic.span, "^", "", _STYLES[diagnostic.severity])
    return [main, *(_second(related) for related in diagnostic.related)]


def _second(related: Related) -> _Mark:
    return _Mark(related.span, "-", _brief(related.message), _GUTTER)


def _by_file(marks: list[_Mark]) -> list[tuple[_Mark, list[_Mark]]]:
    """Marks grouped by their file, in order, each group with its first mark."""
    groups: dict[int, list[_Mark]] = {}
    for mark in marks:
        groups.setdefault(id(mark.span.source), []).append(mark)
    return [(group[0], group) for group in groups.values()]


def _file(text: Text, place: _Mark, marks: list[_Mark], gutter: int, width: int) -> None:
    """Show the marked lines of one file."""
    span = place.span
    text.append(f"{' ' * gutter} --> ", _GUTTER)
    text.append(f"{safe(span.file)}:{span.line}:{span.column}\n")
    text.append(f"{' ' * gutter} |\n", _GUTTER)
    lines = sorted({mark.span.line for mark in marks})
    for number, following in zip(lines, [*lines[1:], None], strict=True):
        here = sorted((m for m in marks if m.span.line == number), key=lambda m: m.sign != "^")
        _source_line(text, number, here, gutter, width)
        if following is not None and following > number + 1:
            text.append(f"{'.' * min(gutter, 3):>{gutter}} |\n", _GUTTER)


def _source_line(text: Text, number: int, marks: list[_Mark], gutter: int, width: int) -> None:
    """One source line, and below it a line for each mark."""
    room = max(width - gutter - 4, _LEAST_WIDTH)
    line = _ShownLine.near(marks[0], number, room)
    cells = line.cells
    start, stop = _window(line, *line.columns(marks[0]), room)
    left = _CUT if start or line.before else ""
    right = _CUT if stop < len(cells) or line.after else ""
    text.append(f"{number:>{gutter}} | ", _GUTTER)
    text.append(f"{left}{''.join(cells[start:stop])}{right}\n")
    for mark in marks:
        first, last = line.columns(mark)
        under = cells[max(first, start) : min(last, stop)]
        indent = len(left) + _width(cells[start : max(first, start)])
        # What is out of view is under the sign for what was cut.
        if right and first >= stop:
            under, indent = [_CUT], len(left) + _width(cells[start:stop])
        elif left and last <= start:
            under, indent = [_CUT], 0
        _underline(text, mark, indent, under, gutter)


def _underline(text: Text, mark: _Mark, indent: int, under: list[str], gutter: int) -> None:
    label = f" {mark.label}" if mark.label else ""
    text.append(f"{' ' * gutter} | ", _GUTTER)
    text.append(f"{' ' * indent}{mark.sign * max(_width(under), 1)}{label}\n", mark.style)


@dataclass(frozen=True, slots=True)
class _ShownLine:
    """The text shown for every character of a line, as far from a mark as there may be room for.

    `offset` is that of the first of these characters; `before` and `after` count those left out.
    """

    cells: list[str]
    offset: int
    before: int
    after: int

    @classmethod
    def near(cls, mark: _Mark, number: int, room: int) -> _ShownLine:
        """The part of line `number` around the mark that could be shown in `room` columns."""
        start, end = mark.span.source.bounds(number)
        first = max(start, min(mark.span.start, end) - room)
        last = min(end, max(mark.span.start, start) + room)
        cells = cells_of(mark.span.source.text[first:last])
        return cls(cells, first, first - start, end - last)

    def columns(self, mark: _Mark) -> tuple[int, int]:
        """The first marked cell of the line, and the end of the marked ones."""
        first = min(max(mark.span.start - self.offset, 0), len(self.cells))
        last = min(max(mark.span.end - self.offset, 0), len(self.cells))
        return first, max(last, first + 1)


def _window(line: _ShownLine, first: int, last: int, room: int) -> tuple[int, int]:
    """The range of cells to show of a line that may be wider than `room`, with the mark in view."""
    cells, more = line.cells, line.after
    if not line.before and not more and _width(cells) <= room:
        return 0, len(cells)
    room -= 2 * len(_CUT)
    start = stop = min(first, len(cells))
    while _width(cells[start:stop]) < room and stop < min(last, len(cells)):
        stop += 1
    behind = min(room // 4, len(cells) - stop + more)
    while start > 0 and _width(cells[start - 1 : stop]) <= room - behind:
        start -= 1
    while stop < len(cells) and _width(cells[start : stop + 1]) <= room:
        stop += 1
    return start, stop


def cut(text: str, room: int) -> str:
    """One line of a file as a terminal of `room` columns shows it."""
    cells = cells_of(text[: room + 1])
    if len(text) <= room and _width(cells) <= room:
        return "".join(cells)
    while cells and _width(cells) > room - 1:
        cells.pop()
    return "".join(cells) + _CUT


# --- characters ------------------------------------------------------------------------------


def cells_of(line: str) -> list[str]:
    """The text shown for every character of a line."""
    return [_TAB if char == "\t" else _shown(char) for char in line]


def safe(text: str) -> str:
    """A text with its control characters escaped; line ends too."""
    return text if text.isprintable() else "".join(map(_shown, text))


def _brief(text: str) -> str:
    """A sentence for a reader: like `safe`, but overlong words are cut in the middle."""
    return safe(_ENDLESS.sub(rf"\1{_CUT}\2", text))


def _shown(char: str) -> str:
    """A character, or its escape where it could steer a terminal or turn the line around."""
    if char.isprintable() or unicodedata.category(char) == "Zs":
        return char
    code = ord(char)
    if code > 0xFFFF:
        return f"\\U{code:08x}"
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def _width(cells: list[str]) -> int:
    """Terminal columns that the characters take."""
    text = "".join(cells)
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


# --- JSON ------------------------------------------------------------------------------------


class PositionFacts(TypedDict):
    """A place in a text; lines and columns count from 1."""

    line: int
    column: int


class RangeFacts(TypedDict):
    """A part of a text; the end is exclusive."""

    start: PositionFacts
    end: PositionFacts


class RelatedFacts(TypedDict):
    """Another place that a diagnostic speaks of."""

    message: str
    file: str
    span: RangeFacts


class EditFacts(RangeFacts):
    """A text in the place of a part of a file."""

    file: str
    text: str


class OptionFacts(TypedDict):
    """An option given with a `value` (true: one that takes none; null: left out).

    `old` is the value that is replaced, of an option that may be given several times; where
    `option` is empty, the argument that is.
    """

    option: str
    value: str | bool | None
    old: str | None


class FixFacts(TypedDict):
    """A way out that can be carried out: edits of a file, or of the arguments of the command.

    The `file` of an edit is the name of an option, such as `--mesh`, where its value is edited.
    """

    title: str
    safe: bool
    edits: list[EditFacts]
    options: list[OptionFacts]


class DiagnosticFacts(TypedDict):
    """A diagnostic as the JSON that users read."""

    code: str
    severity: str
    message: str
    file: str | None
    span: RangeFacts | None
    related: list[RelatedFacts]
    help: str | None
    fixes: list[FixFacts]


def to_json(diagnostic: Diagnostic) -> DiagnosticFacts:
    """A diagnostic as plain data; lines and columns count from 1, ends are exclusive."""
    span = diagnostic.span
    return {
        "code": diagnostic.code,
        "severity": diagnostic.severity,
        "message": diagnostic.message,
        "file": None if span is None else span.file,
        "span": None if span is None else _range(span),
        "related": [
            {"message": r.message, "file": r.span.file, "span": _range(r.span)}
            for r in diagnostic.related
        ],
        "help": diagnostic.help,
        "fixes": [fix_facts(fix) for fix in diagnostic.fixes],
    }


def fix_facts(fix: Fix) -> FixFacts:
    """A fix as plain data."""
    edits: list[EditFacts] = [
        {"file": e.span.file, **_range(e.span), "text": e.text} for e in fix.edits
    ]
    options: list[OptionFacts] = [
        {"option": e.option, "value": e.value, "old": e.old} for e in fix.options
    ]
    return {"title": fix.title, "safe": fix.safe, "edits": edits, "options": options}


def _range(span: Span) -> RangeFacts:
    start, end = span.source.position(span.start), span.source.position(span.end)
    return {
        "start": {"line": start[0], "column": start[1]},
        "end": {"line": end[0], "column": end[1]},
    }
