"""The comparison for people, on a terminal: columns beside each other, differences marked `≠`.

Lines of styled parts are made from the JSON of `report/compare.py` and put on the screen by
`print_comparison`. Where the columns are too many for the width they stand below each other.
Nothing that comes from a file is taken for markup or reaches the terminal as a control character.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from meshdsl.diagnostics import Source
from meshdsl.render import _safe
from meshdsl.report.figures import UNIT, counted, exact, human, wrapped
from meshdsl.report.terminal import (
    LEAST_WIDTH,
    NAME,
    SENT,
    SOURCE,
    Line,
    in_ascii,
    source_line,
)

if TYPE_CHECKING:
    from rich.console import Console

Json = dict[str, Any]
Cell = tuple[str, str]
"""What stands in one column: text and style."""

DIFFERS = "bold yellow"
GAP = 2
LEAST_CELL = 20
MOST_NAME = 14


def print_comparison(compared: Json, source: Source, console: Console | None = None) -> None:
    """Print a comparison; `source` is the text of the file it is about."""
    from rich.console import Console
    from rich.text import Text

    console = console or Console(highlight=False)
    ascii_only = console.options.ascii_only
    for line in comparison_lines(compared, source, console.width):
        parts = [(_ascii(text) if ascii_only else text, style) for text, style in line]
        console.print(Text.assemble(*parts), soft_wrap=True, highlight=False)


def _ascii(text: str) -> str:
    return in_ascii(text.replace("≠", "!"))


def comparison_lines(compared: Json, source: Source, width: int = 100) -> Iterator[Line]:
    """The whole comparison. Lines are at most `width` columns wide where words allow it."""
    for line in _lines(compared, source, max(width, LEAST_WIDTH)):
        yield tuple((_safe(text), style) for text, style in line)


def _lines(compared: Json, source: Source, width: int) -> Iterator[Line]:
    yield from ((part,) for part in wrapped(sentence(compared), width, SOURCE))
    yield ()
    for column in compared["columns"]:
        yield from _about(column, width)
    grid = Grid(compared, width)
    yield ()
    if not grid.stacked:
        letters = [(c["letter"], SOURCE) for c in compared["columns"]]
        yield from grid.line("", "", letters)
    for row in compared["rows"]:
        yield source_line(_lined(compared), source, row["file"], row["line"], width)
        yield from _row(row, compared, grid)
    yield ()
    yield from _totals(compared, grid)
    yield ()
    for text in measured(compared):
        yield from ((part,) for part in wrapped(text, width, hang=2))


def sentence(compared: Json) -> str:
    """`mlp in 3 columns: 1 of 6 statements differs.`."""
    columns, table = compared["columns"], compared["rows"]
    head = f"{compared['program']} in {counted(len(columns), 'column')}"
    broken = sum("totals" not in c for c in columns)
    failed = f" {counted(broken, 'column')} could not be compiled." if broken else ""
    if len(columns) - broken == 1:
        return f"{head}.{failed}"
    unlike = sum(not row["same"] for row in table)
    if not unlike:
        return f"{head}: placements, routes and bytes are the same in all.{failed}"
    verb = "differs" if unlike == 1 else "differ"
    return f"{head}: {unlike} of {counted(len(table), 'statement')} {verb}.{failed}"


def _about(column: Json, width: int) -> Iterator[Line]:
    """What a column is; of one that did not compile, why."""
    head = f"  {column['letter']}  "
    text = column["title"]
    if "totals" in column:
        text += where(column)
    else:
        text += f": {problems(column)}"
    pad = " " * len(head)
    for number, (part, _) in enumerate(wrapped(text, width - len(head))):
        yield ((pad if number else head, SOURCE), (part, ""))


def where(column: Json) -> str:
    """`, on rows:2, cols:2 (4 devices)`, and what else there is to know of a column."""
    axes = ", ".join(f"{axis}:{size}" for axis, size in column["mesh"].items())
    text = f", on {axes or 'one device'} ({counted(column['devices'], 'device')})"
    text += "; not proven least" if column.get("proven") is False else ""
    return text + (f"; the program of {column['same_as']}" if column["same_as"] else "")


def problems(column: Json) -> str:
    """Why a column did not compile."""
    errors = [d for d in column["diagnostics"] if d["severity"] == "error"]
    return "; ".join(f"{d['code']} {d['message']}" for d in errors)


def _lined(compared: Json) -> Json:
    """What `source_line` needs to know: how wide line numbers are."""
    return {"tensors": compared["rows"], "collectives": []}


# --- the grid --------------------------------------------------------------------------------


class Grid:
    """Where columns stand: beside each other, or, `stacked`, below each other."""

    def __init__(self, compared: Json, width: int) -> None:
        names = [line["tensor"] for row in compared["rows"] for line in _entries(row)]
        longest = max((len(n) for n in names), default=4) + 3
        self.letters = [c["letter"] for c in compared["columns"]]
        self.width = width
        self.label = min(max(longest, 12), MOST_NAME + 3)
        room = width - self.label - 2
        self.cell = room // len(self.letters) - GAP
        self.stacked = self.cell < LEAST_CELL

    def line(self, mark: str, label: str, cells: Sequence[Cell]) -> Iterator[Line]:
        """One line of the table, on as many lines of the screen as its longest cell needs."""
        if self.stacked:
            yield from self._stacked(mark, label, cells)
            return
        name, columns = _cut(label, self.label), [_cut(text, self.cell) for text, _ in cells]
        for number in range(max(len(name), *(len(c) for c in columns))):
            sign = mark if number == 0 else ""
            head = ((f"{sign:2}", DIFFERS), (f"{_at(name, number):{self.label}}", NAME))
            parts = [
                (f"{'':{GAP}}{_at(lines, number):{self.cell}}", style)
                for lines, (_, style) in zip(columns, cells, strict=True)
            ]
            yield _trimmed((*head, *parts))

    def _stacked(self, mark: str, label: str, cells: Sequence[Cell]) -> Iterator[Line]:
        for part in _cut(label, self.width - 2):
            yield ((f"{mark:2}", DIFFERS), (part, NAME))
            mark = ""
        for letter, (text, style) in zip(self.letters, cells, strict=True):
            for number, part in enumerate(_cut(text, self.width - 7)):
                yield ((f"    {'' if number else letter:3}", ""), (part, style))


def _cut(text: str, width: int) -> list[str]:
    """`text` in lines of at most `width`; words that are longer are broken, numbers keep units."""
    lines = textwrap.wrap(UNIT.sub("\u00a0", text), width, break_on_hyphens=False)
    return [line.replace("\u00a0", " ") for line in lines] or [""]


def _at(lines: Sequence[str], number: int) -> str:
    return lines[number] if number < len(lines) else ""


def _trimmed(line: Line) -> Line:
    """A line without spaces at its end."""
    found = list(line)
    while found and not found[-1][0].strip():
        found.pop()
    if found:
        found[-1] = (found[-1][0].rstrip(), found[-1][1])
    return tuple(found)


# --- rows ------------------------------------------------------------------------------------


def _entries(row: Json) -> Iterator[Json]:
    yield from row["tensors"]
    yield from row["routes"]


def _row(row: Json, compared: Json, grid: Grid) -> Iterator[Line]:
    columns = compared["columns"]
    for entry in row["tensors"]:
        cells = [_tensor_text(t, c) for t, c in zip(entry["cells"], columns, strict=True)]
        yield from _entry(entry, f"  {entry['tensor']}", cells, "", grid)
    for entry in row["routes"]:
        cells = [route_text(r) if r else "-" for r in entry["cells"]]
        yield from _entry(entry, f"=> {entry['tensor']}", cells, SENT, grid)


def _entry(entry: Json, label: str, cells: list[str], style: str, grid: Grid) -> Iterator[Line]:
    marked = [
        (f"≠ {text}", DIFFERS) if differs else (text, style if text != "-" else "dim")
        for text, differs in zip(cells, entry["differs"], strict=True)
    ]
    yield from grid.line("" if entry["same"] else "≠", label, marked)


def _tensor_text(tensor: Json | None, column: Json) -> str:
    """By name, or in a positional column by position, one entry per mesh axis."""
    if tensor is None:
        return "-"
    if column["positional"]:
        return f"({', '.join(tensor['sbp'].values())})"
    named: str = tensor["named"]
    return named


def route_text(route: Json) -> str:
    """`slice over rows, all_gather over cols: 64 KiB`; in a loop `768 KiB × 4 trips`."""
    steps = ", ".join(f"{s['kind']} over {'+'.join(s['axes'])}" for s in route["steps"])
    count = route["count"]
    times = f" × {count} trips" if count > 1 else ""
    phase = "" if route["phase"] == "forward" else f" [{route['phase']}]"
    return f"{steps}: {human(route['wire_bytes'] // count)}{times}{phase}"


# --- totals ----------------------------------------------------------------------------------


def _totals(compared: Json, grid: Grid) -> Iterator[Line]:
    for label, texts, differs in totals(compared):
        cells = [(t, DIFFERS if mark else "") for t, mark in zip(texts, differs, strict=True)]
        yield from grid.line("≠" if any(differs) else "", label, cells)


def totals(compared: Json) -> Iterator[tuple[str, list[str], list[bool]]]:
    """What is written, sent and held: a label, a text per column, and whether that differs.

    What is written is not compared: it is not counted in one unit.
    """
    works = ["totals" in c for c in compared["columns"]]
    for label, texts in _sums(compared["columns"]):
        first = texts[works.index(True)]
        counts = label != "written"
        differs = [counts and ok and t != first for t, ok in zip(texts, works, strict=True)]
        yield label, texts, differs


def _sums(columns: Sequence[Json]) -> Iterator[tuple[str, list[str]]]:
    axes = dict.fromkeys(a for c in columns for a in c.get("totals", {}).get("by_axis", ()))
    yield "written", [written(c) if "totals" in c else "-" for c in columns]
    for axis in axes:
        yield f"sent, {axis}", [_number(c, "totals", "by_axis", axis) for c in columns]
    yield "sent in all", [_number(c, "totals", "wire_bytes") for c in columns]
    counts = [c["totals"]["collectives"] if "totals" in c else "-" for c in columns]
    yield "collectives", [f"{n:,}" if isinstance(n, int) else n for n in counts]
    yield "memory", [_number(c, "memory", "peak") for c in columns]


def _number(column: Json, *keys: str) -> str:
    if "totals" not in column:
        return "-"
    found: Any = column
    for key in keys:
        found = found.get(key, 0)
    return exact(found)


def written(column: Json) -> str:
    """What the user had to write: `2 rules`, or `5 signatures` in a positional column."""
    about = column["annotations"]
    if column["positional"]:
        return counted(about["signatures"], "signature")
    pins = f", {counted(about['pins'], 'tensor')} with @" if about["pins"] else ""
    return counted(about["rules"], "rule") + pins


# --- what was measured -----------------------------------------------------------------------


def measured(compared: Json) -> Iterator[str]:
    """Sentences on what was executed; nothing is called equal that was not."""
    run = compared["run"]
    if not run["executed"]:
        yield "Nothing was executed: no word on whether the values are equal."
    else:
        who = _listed(run["executed"])
        were = "was" if len(run["executed"]) == 1 else "were"
        yield (
            f"Measured: {who} {were} executed on the same made-up values (seed {run['seed']}), "
            "every device in one process."
        )
    for entry in run["runs"]:
        yield f"  {_ran(entry)}"
    for pair in run["between"]:
        yield f"  {' and '.join(pair['columns'])}: {_verdict(pair)}."


def _listed(letters: Sequence[str]) -> str:
    *head, last = letters
    return f"{', '.join(head)} and {last}" if head else last


def _ran(entry: Json) -> str:
    match entry["status"]:
        case "ran":
            text = f"{_verdict(entry['reference'])}, against the float64 reference."
        case "same":
            text = f"the program of {entry['same_as']}, not executed again."
        case "broken":
            text = "not executed: it did not compile."
        case _:
            why = "; ".join(f"{d['code']} {d['message']}" for d in entry["diagnostics"])
            text = f"{'not executed' if entry['status'] == 'refused' else 'failed'}: {why}"
    return f"{entry['column']}: {text}"


def _verdict(found: Json) -> str:
    """How far two results are apart, in words that hold."""
    which = f"`{found['output']}`{'' if found['role'] == 'output' else ' after the step'}"
    if found["relative"] is None:
        return f"NOT equal, {which} has other shapes, NaN or infinities"
    if found["max_error"] == 0:
        return "equal, bit for bit"
    far = f"{found['relative']:.1e} of {found['measure']} ({which})"
    return f"equal up to rounding, at most {far}" if found["ok"] else f"NOT equal, by {far}"
