"""What `explain` says, as HTML: every source line with what it holds and what it sends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from meshdsl.diagnostics import Source
from meshdsl.notebook import tensor
from meshdsl.notebook.held import Holding
from meshdsl.notebook.html import (
    CELL,
    CODE,
    PAGE,
    SENT,
    TABLE,
    folded,
    plain_row,
    small,
    split_dims,
)
from meshdsl.notebook.svg import Markup, image, join, tag
from meshdsl.report import figures, terminal

Json = dict[str, Any]
Place = tuple[str, int]


def page(report: Json, sources: Mapping[str, Source]) -> Markup:
    """The whole report. Of tensors those are shown that are made in one of `sources`."""
    first = next(iter(sources), "")
    found = {(t["file"], terminal._line_of(t)) for t in _tensors(report, sources)}
    found |= {(c["file"], c["line"]) for c in report["collectives"]}
    places = sorted(found, key=lambda place: (place[0] != first, place))
    rows = [row for place in places for row in _place(report, sources, place)]
    table = tag("table", tag("tbody", *rows), style=TABLE)
    return tag("div", *_head(report), table, totals(report), style=PAGE)


def _head(report: Json) -> Iterator[Markup]:
    yield tag("p", tag("b", terminal.sentence(report)), " ", terminal.largest(report))
    for axis, size in report["mesh"].items():
        if size > 1 and not terminal._used(report, axis):
            text = f"Axis {axis} splits nothing: its {size} devices all do the same work."
            yield tag("p", text)


def _tensors(report: Json, sources: Mapping[str, Source]) -> list[Json]:
    """Named tensors of the sources, but not what a loop makes of them again on each trip."""
    return [
        t
        for t in report["tensors"]
        if t["file"] in sources and terminal._shown(t, sources[t["file"]])
    ]


def _place(report: Json, sources: Mapping[str, Source], place: Place) -> Iterator[Markup]:
    """The rows of one source line."""
    yield _source_line(sources, place)
    for t in _tensors(report, sources):
        if (t["file"], terminal._line_of(t)) == place:
            yield tensor_row(t, report["mesh"])
    named = {t["name"] for t in report["tensors"]}
    for c in report["collectives"]:
        if (c["file"], c["line"]) == place:
            yield collective_row(c, c["tensor"] in named)


def _source_line(sources: Mapping[str, Source], place: Place) -> Markup:
    file, number = place
    source = sources.get(file)
    where = str(number) if file == next(iter(sources), "") else f"{file} {number}"
    text = "" if source is None else source.excerpt(number).rstrip()
    code = tag("td", tag("b", tag("code", text, style=CODE)), colspan=3, style=CELL)
    return plain_row(tag("td", small(where), style=CELL), code)


def tensor_row(found: Json, mesh: Mapping[str, int]) -> Markup:
    """A tensor: its name, a small picture, its dims, and the rules that split them."""
    held = Holding.of(found, mesh)
    told = found["loop"] is None or found["loop"]["as"] in terminal.LOOP_WORDS
    note = terminal._note(found if told else {**found, "loop": None})
    described = f"{held.name}: {terminal.type_text(found)}"
    cells = (
        tag("td", image(tensor.thumbnail(held), described), style=CELL),
        tag("td", tag("code", held.name, style=CODE), style=CELL),
        tag("td", split_dims(found, mesh), " ", small(note.replace("->", "→")), style=CELL),
    )
    return plain_row(tag("td", style=CELL), *cells)


def collective_row(found: Json, named: bool) -> Markup:
    """What is sent, and folded behind it why, and what would remove it."""
    whose = found["tensor"] if named else "a subexpression"
    op = f" {found['op']}" if found["op"] else ""
    phase = "" if found["phase"] == "forward" else f" [{found['phase']}]"
    head = f"⇒ {found['kind']}{op} of {whose} over {'+'.join(found['axes'])}{phase}"
    sent = terminal._sent(found)
    each = f"{found['formula']} = {found['wire_bytes'] // found['count']:,} B"
    details = (
        ("bytes", f"{each} {terminal._inputs(found)}"),
        ("from", found["from"]),
        ("to", found["to"]),
        ("why", found["why"]),
        ("remove it", found["remedy"]),
    )
    content = folded(join(tag("b", head), f": {sent}"), details)
    return plain_row(tag("td", style=CELL), tag("td", content, colspan=3, style=SENT))


def totals(report: Json) -> Markup:
    """What is sent, computed and held in all, per device."""
    found, devices = report["totals"], report["devices"]
    sent = "nothing"
    if found["collectives"]:
        times = figures.counted(found["collectives"], "collective")
        sent = f"{figures.exact(found['wire_bytes'])} in {times}"
    whole = f"; {figures.scaled(found['flops_per_device'] * devices)} on all {devices:,} devices"
    computed = figures.scaled(found["flops_per_device"], precise=True) + whole * (devices > 1)
    memory = report["memory"]
    held = f"{figures.exact(memory['peak'])} at the worst moment, line {memory['peak_line']}"
    rows = [("sent", sent), *(("", t) for t in _shares(found))]
    rows += [("computed", computed), ("held", held)]
    lines = (
        plain_row(tag("td", tag("b", name), style=CELL), tag("td", text, style=CELL))
        for name, text in rows
    )
    head = plain_row(tag("td", small("per device"), colspan=2, style=CELL))
    return tag("table", tag("tbody", head, *lines), style=TABLE)


def _shares(found: Json) -> Iterator[str]:
    """Bytes by axis and by kind, where there are several."""
    for key in ("by_axis", "by_kind", "by_phase"):
        if len(found[key]) > 1:
            yield ", ".join(f"{name} {figures.human(n)}" for name, n in found[key].items())
