"""Parts of `explain`'s report: the largest collectives, one source line, one tensor.

A `Focus` says what to show, `focused` is the document. A short report is shown whole; of a long
one, unless asked otherwise, what sends the most and the memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

from meshdsl.diagnostics import Source, fail
from meshdsl.option_edits import give, known_values, refuse
from meshdsl.records import dataclass
from meshdsl.report.document import (
    Block,
    Document,
    Gap,
    Table,
    counted,
    human,
    line,
)
from meshdsl.report.explanation_document import (
    away,
    compressed,
    explanation,
    frozen,
    held,
    listed,
    listing,
    place_of,
    planned,
    section,
    sentence,
    summary,
)
from meshdsl.report.pipeline_facts import by_stage

if TYPE_CHECKING:
    from meshdsl.report.schema import CollectiveFacts, ReportFacts, TensorFacts

TOP = 5
"""The collectives of a long report that are shown; a short one has no more."""

SHORT = 24
"""The tensors of a short report, those in buckets counted."""

NEAR = 2
"""The lines before and after an empty one that are named."""


@dataclass(frozen=True, slots=True)
class Focus:
    """The part of a report to show: all of it, the `top` largest collectives, a line, a tensor.

    `line` is one of the first source. `tensor` is a name, or the last part of one. Together they
    show what is on that line and of that tensor, and with `top` the largest collectives of it.
    """

    whole: bool = False
    top: int | None = None
    line: int | None = None
    tensor: str | None = None


def focused(
    report: ReportFacts, sources: Mapping[str, Source], focus: Focus, rest: str
) -> Document:
    """The document of a part; `rest` is the sentence on how to see the rest.

    Raises:
        DiagnosticError: the first source has no such line, or no such tensor is there (MD0607);
            none are the largest (MD0601).
    """
    if focus.top is not None and focus.top < 1:
        message = f"`--top {focus.top}`: the number of collectives is 1 or more"
        refuse("MD0601", message, give("--top", "1"))
    if focus.line is not None or focus.tensor is not None:
        return (line(sentence(report), "strong"), *_asked(report, sources, focus))
    short = focus.top is None and _is_short(report, sources)
    if focus.whole or short:
        return explanation(report, sources)
    return tuple(_excerpt(report, sources, focus.top or TOP, rest))


def _is_short(report: ReportFacts, sources: Mapping[str, Source]) -> bool:
    tensors = len(listed(report, sources)) + sum(len(c["parts"]) for c in report["collectives"])
    return len(report["collectives"]) <= TOP and tensors <= SHORT


# --- the largest collectives -----------------------------------------------------------------


def _excerpt(
    report: ReportFacts, sources: Mapping[str, Source], top: int, rest: str
) -> Iterator[Block]:
    """The summary, the lines of the collectives that send the most, and the memory."""
    yield from summary(report, largest=False)
    most, others = _largest(report["collectives"], top)
    by_place: dict[tuple[str, int], list[CollectiveFacts]] = {}
    for c in most:
        by_place.setdefault(place_of(c), []).append(c)
    sections = (
        section(report, sources, place, (), collectives, brief=True)
        for place, collectives in by_place.items()
    )
    yield Table(tuple(sections))
    yield Gap()
    yield from _left_out(others)
    yield from planned(report, brief=True)
    yield from compressed(report)
    yield Gap()
    yield from held(report)
    yield from frozen(report)
    yield from away(report)
    yield from by_stage(report)
    yield Gap()
    yield line(rest, "muted")


def _largest(
    collectives: Iterable[CollectiveFacts], top: int | None
) -> tuple[list[CollectiveFacts], list[CollectiveFacts]]:
    """The `top` collectives that send the most, in order, and the others."""
    found = sorted(collectives, key=lambda c: -c["wire_bytes"])
    return found[:top], found[top:] if top is not None else []


def _left_out(others: Sequence[CollectiveFacts]) -> Iterator[Block]:
    if others:
        sent = human(sum(c["wire_bytes"] for c in others))
        runs = counted(sum(c["count"] for c in others), "collective")
        ones = (
            f"entry ({runs}) sends"
            if len(others) == 1
            else f"{len(others):,} entries ({runs}) send"
        )
        yield line(f"The other {ones} {sent} per device.")


# --- a line, a tensor ------------------------------------------------------------------------


def _asked(report: ReportFacts, sources: Mapping[str, Source], focus: Focus) -> Iterator[Block]:
    """What there is on a line and of a tensor."""
    first = next(iter(sources.values()))
    tensors, collectives = listed(report, sources), list(report["collectives"])
    if focus.tensor is not None:
        names = _names(report, sources, focus.tensor)
        tensors = [t for t in tensors if t["name"] in names]
        collectives = [c for c in collectives if names & _moved(c)]
    here = (tensors, collectives)
    if focus.line is not None:
        _check_line(first, focus.line)
        place = (first.name, focus.line)
        here = (
            [t for t in tensors if place_of(t) == place],
            [c for c in collectives if place_of(c) == place],
        )
    most, others = _largest(here[1], focus.top)
    if focus.line is not None and not (here[0] or most):
        yield from _elsewhere(report, sources, focus, (tensors, collectives))
        return
    yield listing(report, sources, here[0], most)
    if others:
        yield Gap()
    yield from _left_out(others)


def _check_line(source: Source, number: int) -> None:
    last = len(source.text.removesuffix("\n").split("\n"))
    if not 1 <= number <= last:
        fix = give("--line", str(min(max(number, 1), last)))
        message = f"{source.name} has no line {number}: it has lines 1 to {last}"
        refuse("MD0607", message, fix)


def _elsewhere(
    report: ReportFacts,
    sources: Mapping[str, Source],
    focus: Focus,
    known: tuple[list[TensorFacts], list[CollectiveFacts]],
) -> Iterator[Block]:
    """On a line that makes and sends nothing: what its rules split, or the lines near it."""
    first = next(iter(sources.values()))
    assert focus.line is not None
    rules = [t for t in known[0] if _ruled(t, first.name, focus.line)]
    if rules:
        yield Table((section(report, sources, (first.name, focus.line), rules, ()),))
        return
    places = (*map(place_of, known[0]), *map(place_of, known[1]))
    lines = sorted({n for file, n in places if file == first.name})
    near = [n for n in lines if n < focus.line][-NEAR:] + [n for n in lines if n > focus.line][
        :NEAR
    ]
    whose = f" of `{focus.tensor}`" if focus.tensor is not None else ""
    yield Gap()
    yield Table((section(report, sources, (first.name, focus.line), (), (), apart=False),))
    nearest = f" The nearest where there is: {', '.join(map(str, near))}." if near else ""
    yield line(f"Nothing{whose} is made, split or sent on this line.{nearest}")


def _ruled(tensor: TensorFacts, file: str, number: int) -> bool:
    """Whether a rule on this line splits the tensor."""
    rules = tensor["rules"].values()
    return any((rule["file"], rule["line"]) == (file, number) for rule in rules)


def _moved(c: CollectiveFacts) -> set[str]:
    """The names of the tensors that a collective moves."""
    return {part["tensor"] for part in c["parts"]} | {c["tensor"]}


def _names(report: ReportFacts, sources: Mapping[str, Source], wanted: str) -> set[str]:
    """The tensors of this name; else those whose name ends in it, as `attention.q` in `q`."""
    labels = dict.fromkeys(t["name"] for t in listed(report, sources) if t["name"])
    alone = (c for c in report["collectives"] if not c["parts"])
    labels |= dict.fromkeys(c["tensor"] for c in alone)
    labels |= dict.fromkeys(p["tensor"] for c in report["collectives"] for p in c["parts"])
    matching = {wanted} & set(labels) or {n for n in labels if n.rpartition(".")[2] == wanted}
    return matching or _unknown(wanted, list(labels), report["program"])


def _unknown(wanted: str, known: list[str], program: str) -> NoReturn:
    fixes, help = known_values("--tensor", wanted, known, few=0)
    if not fixes:
        help = f"there are {', '.join(known[:10])}{', …' if len(known) > 10 else ''}"
    fail("MD0607", f"`{program}` has no tensor `{wanted}`", help=help, fixes=fixes)
