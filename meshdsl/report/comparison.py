"""`compare`: one program in several columns, statement by statement.

`compare` gives the facts as JSON, and every view is made of them; `comparison` is the document for
people. A row is a source line with tensors or reshards: the named tensors and the reshards of all
columns side by side; a cell is None where a column has none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from meshdsl.carets import to_json
from meshdsl.columns import Column, Wish
from meshdsl.device import ir as device
from meshdsl.device.traffic import Done, busiest
from meshdsl.diagnostics import Source
from meshdsl.named.ir import walk as named_walk
from meshdsl.pipeline import Compilation
from meshdsl.placed import ir as placed
from meshdsl.placed.layout import resolve_layout
from meshdsl.placed.placements import WHOLE, Mesh
from meshdsl.report import document as doc
from meshdsl.report import schema
from meshdsl.report.explanation import explain

Place = tuple[str, int]
Key = tuple[str, int, str, int]
"""A tensor or a reshard of the program: file, line, name, and its number among those."""

VERSION = 1
NOT_RUN: schema.RunFacts = {"executed": [], "seed": None, "engine": None, "runs": [], "between": []}
"""The runs where nothing was executed."""
UNNAMED = "a subexpression"
TIMES: dict[str, Literal["compute", "waiting", "seconds"]] = {
    "computing": "compute",
    "waiting": "waiting",
    "time in all": "seconds",
}
"""Rows of predicted times, where a cluster is named, and their keys."""
MOST_NAME = 14
"""The longest name that shares a line with its cells."""


def compare(columns: Sequence[Column], source: Source) -> schema.TableFacts:
    """The comparison. Each entry of `columns` is that of `explain`, and more (docs/compare.md).

    `same` is true where placements, routes and bytes of all columns agree.
    """
    entries = [column_as_json(c) for c in columns]
    statement_rows = rows(entries, source)
    everywhere = all(row["same"] for row in statement_rows) and all(c.works for c in columns)
    first = next(c.made for c in columns if c.made)
    return {
        "version": VERSION,
        "program": first.named.name,
        "file": source.name,
        "same": everywhere and _bytes_agree(entries),
        "columns": entries,
        "rows": statement_rows,
    }


def _bytes_agree(entries: Sequence[schema.ColumnFacts]) -> bool:
    sent = [_sums_of(e["totals"]) for e in entries if "totals" in e]
    return all(each == sent[0] for each in sent)


def _sums_of(totals: schema.TotalsFacts) -> tuple[object, ...]:
    each = (totals["wire_bytes"], totals["cluster_wire_bytes"])
    return (*each, totals["by_axis"], totals["by_kind"])


# --- a column --------------------------------------------------------------------------------


def column_as_json(column: Column) -> schema.ColumnFacts:
    """The report of a column, or its diagnostics, under its letter and title."""
    about: schema.ColumnHead = {
        "letter": column.letter,
        "title": column.title,
        "kind": column.wish.kind,
        "positional": column.wish.positional or column.wish.kind == "sbp",
        "same_as": column.same_as,
    }
    if column.made is None:
        broken: schema.BrokenColumn = {
            "version": VERSION,
            "layout": column.wish.name,
            "reduce": column.wish.reduce,
            **about,
            "diagnostics": [to_json(d) for d in column.diagnostics],
        }
        return broken
    device = column.made.device
    report = explain(device, column.diagnostics, column.made.timing, column.made.identifiers)
    for entry, tensor in zip(report["tensors"], device.placed.tensors, strict=True):
        entry["named"] = tensor.placement.show(tensor.value.type, device.mesh)
        entry["sbp"] = positional(entry)
    routes = [_route(moves, device.mesh) for moves in _chains(busiest(device).done)]
    annotations = count_annotations(column.wish, column.made)
    compiled: schema.CompiledColumn = {
        **report,
        **about,
        "annotations": annotations,
        "routes": routes,
    }
    return compiled


def count_annotations(wish: Wish, made: Compilation) -> schema.AnnotationFacts:
    """The number of annotations: `rules` and `pins` by name, `signatures` by position.

    Of a layout, `signatures` counts those that a positional system needs: one for every input and
    parameter that is not whole, and one for every value that is resharded to another split than its
    operator gives it; the backward pass and the update follow from those of the forward pass. Of an
    `sbp` block it counts the entries.
    """
    declarations, program = made.declarations, made.placed
    if wish.kind == "sbp":
        assert wish.name is not None, "an `sbp` block has a name"
        entries = declarations.sbps[wish.name].entries
        return {"rules": 0, "pins": 0, "signatures": len(entries)}
    layout = resolve_layout(declarations, wish.name, program.mesh)
    named = program.named
    values = (*named.inputs, *(p.value for p in named.params))
    results = (v for op in named_walk(named.body) for v in op.outs)
    # Values of the backward pass share the pins of their tensors.
    pins = {v.pins for v in (*values, *results) if v.pins}
    return {"rules": len(layout.rules), "pins": len(pins), "signatures": _signatures(program)}


def _signatures(program: placed.PlacedProgram) -> int:
    stored = [*program.inputs, *(p.tensor for p in program.params)]
    settled = set(program.tensors)
    moved = [
        n
        for n, _ in placed.walk(program.body)
        if isinstance(n, placed.Reshard) and n.phase == "forward"
    ]
    asked = {n.target for n in moved if n.target in settled or n.source.value.role == "param"}
    reductions = {n.target for n in moved if all(s.kind == "all_reduce" for s in n.route.steps)}
    return sum(t.placement != WHOLE for t in stored) + len(asked - reductions)


def positional(tensor: schema.TensorFacts) -> dict[str, str]:
    """The placement by positions, per mesh axis: `S(0)`, `B`, `P`, `P(max)`.

    A position is that of a dim as the program declares the tensor. A dim that several axes split in
    another order than the mesh's gets its rank: `S(0)/2` is the second cut of dim 0.
    """
    axes = list(tensor["placement"])
    return {axis: _component(tensor, axis, axes) for axis in axes}


def _component(tensor: schema.TensorFacts, axis: str, mesh: Sequence[str]) -> str:
    for dim, order in tensor["order"].items():
        if axis in order:
            in_order = list(order) == sorted(order, key=mesh.index)
            rank = "" if in_order else f"/{order.index(axis) + 1}"
            dims = tensor["declared"] if dim in tensor["declared"] else tensor["dims"]
            return f"S({dims.index(dim)}){rank}"
    return tensor["placement"][axis]


# --- routes ----------------------------------------------------------------------------------


Leg = tuple[device.Move, Done]
"""A step of a reshard, and what it sends in all."""


def _chains(sent: Mapping[device.Collective, Done]) -> list[list[Leg]]:
    """The steps of every reshard of a device, local ones too.

    Steps of one reshard may be apart, and those of several in one bucket.
    """
    chains: list[list[Leg]] = []
    ends: dict[device.Var, list[Leg]] = {}
    for node, done in sent.items():
        for move, traffic in _shared(node, done):
            chain = ends.get(move.source, [])
            if not chain or not _continues(chain[-1][0], move):
                chain = []
                chains.append(chain)
            chain.append((move, traffic))
            ends[move.target] = chain
    return chains


def _shared(node: device.Collective, done: Done) -> Iterator[Leg]:
    """The moves of a collective, of a bucket each with its share of what that sends, rounded."""
    if isinstance(node, device.Move):
        yield node, done
        return
    apart = sum(m.wire for m in node.moves)
    upto = sent = 0
    for move in node.moves:
        upto += move.wire
        share = node.wire * upto // max(apart, 1) - sent
        sent += share
        yield replace(move, wire=share), Done(done.count, share * done.count)


def _continues(before: device.Move, node: device.Move) -> bool:
    one = (before.span, before.why, before.phase) == (node.span, node.why, node.phase)
    return one and node.source is before.target


def _route(legs: Sequence[Leg], mesh: Mesh) -> schema.RouteFacts:
    moves = [move for move, _ in legs]
    first, last = moves[0], moves[-1]
    value = last.target.value
    return {
        "tensor": value.name or last.target.name,
        "named": value.name is not None,
        "file": last.span.file,
        "line": last.span.line,
        "phase": last.phase,
        "count": legs[0][1].count,
        "dims": list(value.type.names),
        "shape": list(value.type.shape),
        "from": first.source.placement.show(value.type, mesh),
        "to": last.target.placement.show(value.type, mesh),
        "steps": [_step(m, mesh) for m in moves],
        "wire_bytes": sum(done.bytes for _, done in legs),
        "why": last.why,
    }


def _step(move: device.Move, mesh: Mesh) -> schema.StepFacts:
    step = move.step
    return {
        "kind": step.kind,
        "op": step.op,
        "axes": list(mesh.written(step.axes)),
        "dim": step.dim,
        "to_dim": step.to_dim,
        "before": _placement(move.source, mesh),
        "after": _placement(move.target, mesh),
        "payload_bytes": move.payload,
        "wire_bytes": move.wire,
    }


def _placement(var: device.Var, mesh: Mesh) -> schema.PlacementFacts:
    """The text of a placement, and the data for a picture of it."""
    p = var.placement.written(mesh)
    return {
        "named": p.show(var.value.type),
        "order": {dim: list(axes) for dim, axes in p.splits},
        "partial": list(p.partial),
        "op": p.op,
        "local_shape": list(var.local.shape),
    }


# --- rows ------------------------------------------------------------------------------------


def rows(entries: Sequence[schema.ColumnFacts], source: Source) -> list[schema.RowFacts]:
    """Rows of all columns, those of the file first and in the order of its lines."""
    tensors = [dict(_tensors(e, source)) for e in entries]
    routes = [dict(_keyed_routes(e)) for e in entries]
    places = sorted(
        {key[:2] for keys in (*map(list, tensors), *map(list, routes)) for key in keys},
        key=lambda place: (place[0] != source.name, place),
    )
    works = ["totals" in e for e in entries]
    return [_row(place, tensors, routes, works, source) for place in places]


def _tensors(entry: schema.ColumnFacts, source: Source) -> Iterator[tuple[Key, schema.TensorFacts]]:
    """The named tensors of the file; of those that a loop makes, the carried ones."""
    seen: Counter[tuple[str, int, str]] = Counter()
    for tensor in entry["tensors"] if "tensors" in entry else ():
        loop, name = tensor["loop"], tensor["name"]
        if name and tensor["file"] == source.name and (loop is None or loop["as"] == "carried"):
            yield _key(tensor["file"], (loop or tensor)["line"], name, seen), tensor


def _keyed_routes(entry: schema.ColumnFacts) -> Iterator[tuple[Key, schema.RouteFacts]]:
    seen: Counter[tuple[str, int, str]] = Counter()
    for route in entry["routes"] if "routes" in entry else ():
        name = route["tensor"] if route["named"] else UNNAMED
        yield _key(route["file"], route["line"], name, seen), route


def _key(file: str, line: int, name: str, seen: Counter[tuple[str, int, str]]) -> Key:
    seen[file, line, name] += 1
    return (file, line, name, seen[file, line, name])


def _row(
    place: Place,
    tensors: Sequence[Mapping[Key, schema.TensorFacts]],
    routes: Sequence[Mapping[Key, schema.RouteFacts]],
    works: Sequence[bool],
    source: Source,
) -> schema.RowFacts:
    held = [_cells(k, tensors, works, _held) for k in _keys(tensors, place)]
    sent = [_cells(k, routes, works, _sent) for k in _keys(routes, place)]
    here = [[c for k, c in by_key.items() if k[:2] == place] for by_key in routes]
    sums = zip(works, here, strict=True)
    return {
        "file": place[0],
        "line": place[1],
        "text": source.excerpt(place[1]) if place[0] == source.name else "",
        "same": all(line["same"] for line in (*held, *sent)),
        "tensors": held,
        "routes": sent,
        "wire_bytes": [sum(r["wire_bytes"] for r in rs) if ok else None for ok, rs in sums],
    }


def _keys(columns: Iterable[Mapping[Key, object]], place: Place) -> list[Key]:
    return list(dict.fromkeys(k for found in columns for k in found if k[:2] == place))


def _cells(
    key: Key,
    columns: Sequence[Mapping[Key, schema.Cell]],
    works: Sequence[bool],
    compared: Callable[[schema.Cell | None], object],
) -> schema.Cells[schema.Cell]:
    """One tensor or reshard in all columns, which differ in what is `compared` of it."""
    cells = [c.get(key) for c in columns]
    differs = _differing([compared(c) for c in cells], works)
    return {"tensor": key[2], "same": not any(differs), "differs": differs, "cells": cells}


def _differing(facts: Sequence[object], works: Sequence[bool]) -> list[bool]:
    """Whether each is other than the first; columns that did not compile are ignored."""
    first = facts[works.index(True)]
    return [ok and each != first for each, ok in zip(facts, works, strict=True)]


def _held(tensor: schema.TensorFacts | None) -> object:
    """The facts of a tensor to compare: splits, partial axes, and the local shape."""
    if tensor is None:
        return None
    partial = {a: c for a, c in tensor["placement"].items() if c.startswith("P")}
    return tensor["order"], partial, tensor["local_shape"]


def _sent(r: schema.RouteFacts | None) -> object:
    """The facts of a reshard to compare: steps, bytes, and the number of executions."""
    if r is None:
        return None
    return r["from"], r["to"], r["steps"], r["count"], r["wire_bytes"], r["phase"]


# --- for people ------------------------------------------------------------------------------


def comparison(compared: schema.ComparisonFacts, source: Source) -> doc.Document:
    """The comparison as a document, with measurements (`run`)."""
    return (
        doc.line(sentence(compared), "strong"),
        *verdict(compared),
        doc.Gap(),
        *headings(compared),
        doc.Gap(),
        table(compared, source),
        doc.Gap(),
        *measured(compared["run"]),
    )


def sentence(compared: schema.TableFacts) -> str:
    """The sentence `mlp in 3 columns: 1 of 6 statements differs.`."""
    columns, statement_rows = compared["columns"], compared["rows"]
    head = f"{compared['program']} in {doc.counted(len(columns), 'column')}"
    broken = sum("totals" not in c for c in columns)
    failed = f" {doc.counted(broken, 'column')} could not be compiled." if broken else ""
    if len(columns) - broken == 1:
        return f"{head}.{failed}"
    unlike = sum(not row["same"] for row in statement_rows)
    if not unlike:
        return f"{head}: placements, routes and bytes are the same in all.{failed}"
    verb = "differs" if unlike == 1 else "differ"
    return f"{head}: {unlike} of {doc.counted(len(statement_rows), 'statement')} {verb}.{failed}"


def verdict(compared: schema.TableFacts) -> Iterator[doc.Paragraph]:
    """What each other program sends, holds and takes compared with the first, in a sentence."""
    works = [c for c in compared["columns"] if "totals" in c and not c["same_as"]]
    for column in works[1:]:
        of_both = zip(_predicted(works[0]), _predicted(column), strict=True)
        changes = [
            f"{verb} {said(abs(other - one))} {'more' if other > one else 'less'}"
            for (verb, said, one), (_, _, other) in of_both
            if one != other
        ]
        if changes:
            *before, last = changes
            told = f"{', '.join(before)} and {last}" if before else last
            yield doc.line(f"Per device {column['letter']} {told} than {works[0]['letter']}.")


def _predicted(column: schema.CompiledColumn) -> list[tuple[str, Callable[[Any], str], float]]:
    """What a program sends and holds, and how long it takes where that is predicted."""
    amounts: list[tuple[str, Callable[[Any], str], float]] = [
        ("sends", doc.human, column["totals"]["wire_bytes"]),
        ("holds", doc.human, column["memory"]["peak"]),
    ]
    if "time" in column:
        amounts.append(("takes", doc.duration, column["time"]["seconds"]))
    return amounts


def headings(compared: schema.TableFacts) -> Iterator[doc.Item]:
    """A line for each column; for one that did not compile, the reason."""
    for column in compared["columns"]:
        head = (doc.Piece(f"  {column['letter']}  ", "strong"),)
        yield doc.Item(head, (doc.Piece(column["title"]), *_about(column)))


def _about(column: schema.ColumnFacts) -> doc.Text:
    """The text `, on rows:2, cols:2 (4 devices)`, and other properties of a column."""
    if "totals" not in column:
        errors = [d for d in column["diagnostics"] if d["severity"] == "error"]
        why = "; ".join(f"{d['code']} {d['message']}" for d in errors)
        return (doc.Piece(", not compiled", "strong", extra=True), doc.Piece(f": {why}"))
    axes = doc.mesh_text(column["mesh"])
    text = f", on {axes or 'one device'} ({doc.counted(column['devices'], 'device')})"
    text += "; not proven least" if column.get("proven") is False else ""
    text += f"; the program of {column['same_as']}" if column["same_as"] else ""
    return (doc.Piece(text),)


def table(compared: schema.TableFacts, source: Source, totals_first: bool = False) -> doc.Table:
    """Tensors and reshards of every source line, and below or above them the totals."""
    statement_rows, columns = compared["rows"], compared["columns"]
    names = [
        entry["tensor"] for row in statement_rows for entry in (*row["tensors"], *row["routes"])
    ]
    longest = max((len(name) for name in names), default=4) + 3
    gutter = len(str(max((row["line"] for row in statement_rows), default=1)))
    sections = [_section(n, row, compared, gutter, source) for n, row in enumerate(statement_rows)]
    letters = tuple(c["letter"] for c in columns)
    label = min(max(longest, 12), MOST_NAME + 3)
    sums = doc.Section(None, tuple(_sums(compared)), apart=not totals_first, title="per device")
    sections = [sums, *sections] if totals_first else [*sections, sums]
    return doc.Table(tuple(sections), letters, "tensor", label)


def _section(
    number: int, row: schema.RowFacts, compared: schema.TableFacts, gutter: int, source: Source
) -> doc.Section:
    here = row["file"] == source.name
    where = "" if here else f"{row['file']} "
    head = doc.SourceLine(f"{where}{row['line']:>{gutter}}", row["text"] if here else None)
    columns = compared["columns"]
    held = (_tensor_row(e, (number, at), columns) for at, e in enumerate(row["tensors"]))
    sent = (_route_row(e, (number, at)) for at, e in enumerate(row["routes"]))
    return doc.Section(head, (*held, *sent), data=(("row", number),))


NOTHING = (doc.Piece("-", "muted"),)
"""The cell of a column that has no such tensor or reshard."""


def _tensor_row(
    entry: schema.Cells[schema.TensorFacts],
    at: tuple[int, int],
    columns: Sequence[schema.ColumnFacts],
) -> doc.TableRow:
    label = (doc.Piece("  ", "arrow"), doc.Piece(entry["tensor"], "code"))
    cells = (
        doc.TableCell(_tensor_text(cell, column) if cell else NOTHING, differs, "")
        for cell, column, differs in zip(entry["cells"], columns, entry["differs"], strict=True)
    )
    return doc.TableRow(label, tuple(cells), "tensor", _data("tensors", *at))


def _route_row(entry: schema.Cells[schema.RouteFacts], at: tuple[int, int]) -> doc.TableRow:
    label = (doc.Piece("=> ", "arrow"), doc.Piece(entry["tensor"], "code"))
    cells = (
        doc.TableCell(_route_text(cell) if cell else NOTHING, differs, cell["why"] if cell else "")
        for cell, differs in zip(entry["cells"], entry["differs"], strict=True)
    )
    return doc.TableRow(label, tuple(cells), "route", _data("routes", *at))


def _data(kind: str, row: int, entry: int) -> tuple[tuple[str, str | int], ...]:
    """What the script of a page finds a row's facts by."""
    return (("kind", kind), ("row", row), ("entry", entry))


def _tensor_text(tensor: schema.TensorFacts, column: schema.ColumnFacts) -> doc.Text:
    """The placement by name, or in a positional column by position, one entry per mesh axis."""
    if column["positional"]:
        places = f"({', '.join(tensor['sbp'].values())})"
        return (doc.Piece(places, "code"), doc.Piece(tensor["named"], extra=True))
    axes = ", ".join(f"{axis} {component}" for axis, component in tensor["sbp"].items())
    return (doc.Piece(tensor["named"], "code"), doc.Piece(axes, extra=True))


def _route_text(route: schema.RouteFacts) -> doc.Text:
    """`slice over rows, all_gather over cols: 64 KiB`; in a loop `768 KiB × 4 iterations`."""
    steps = ", ".join(f"{s['kind']} over {'+'.join(s['axes'])}" for s in route["steps"])
    count = route["count"]
    times = f" × {count} iterations" if count > 1 else ""
    phase = "" if route["phase"] == "forward" else f" [{route['phase']}]"
    way = " → ".join([route["from"], *(s["after"]["named"] for s in route["steps"])])
    amount = f"{doc.human(route['wire_bytes'] // count)}{times}".replace(" ", doc.NO_BREAK)
    return (doc.Piece(f"{steps}: {amount}{phase}", "sent"), doc.Piece(way, extra=True))


# --- in all ----------------------------------------------------------------------------------


def _sums(compared: schema.TableFacts) -> Iterator[doc.TableRow]:
    for label, texts, differs in totals(compared):
        cells = (
            doc.TableCell((doc.Piece(doc.UNIT.sub(doc.NO_BREAK, text)),), mark)
            for text, mark in zip(texts, differs, strict=True)
        )
        yield doc.TableRow((doc.Piece(label),), tuple(cells), "total", plain=True)


def totals(compared: schema.TableFacts) -> Iterator[tuple[str, list[str], list[bool]]]:
    """Annotations, bytes sent and memory: a label, a text per column, and whether that differs.

    Annotations are not compared: their units differ.
    """
    works = ["totals" in c for c in compared["columns"]]
    for label, texts in _amounts(compared["columns"]):
        first = texts[works.index(True)]
        counts = label != "annotations"
        differs = [counts and ok and t != first for t, ok in zip(texts, works, strict=True)]
        yield label, texts, differs


def _amounts(columns: Sequence[schema.ColumnFacts]) -> Iterator[tuple[str, list[str]]]:
    axes = dict.fromkeys(a for c in columns if "totals" in c for a in c["totals"]["by_axis"])
    yield "annotations", [_written(c) if "totals" in c else "-" for c in columns]
    for axis in axes:
        yield f"sent, {axis}", _each(columns, partial(_over, axis))
    yield "sent, all", _each(columns, lambda c: doc.exact(c["totals"]["wire_bytes"]))
    yield "collectives", _each(columns, lambda c: f"{c['totals']['collectives']:,}")
    yield "memory held", _each(columns, lambda c: doc.exact(c["memory"]["peak"]))
    if any("time" in c for c in columns):
        for label, key in TIMES.items():
            yield label, _each(columns, partial(_time, key))


def _each(
    columns: Sequence[schema.ColumnFacts], text: Callable[[schema.CompiledColumn], str]
) -> list[str]:
    """A text for each column that compiled."""
    return [text(c) if "totals" in c else "-" for c in columns]


def _over(axis: str, column: schema.CompiledColumn) -> str:
    return doc.exact(column["totals"]["by_axis"].get(axis, 0))


def _time(key: Literal["compute", "waiting", "seconds"], column: schema.CompiledColumn) -> str:
    return doc.duration(column["time"][key]) if "time" in column else "-"


def _written(column: schema.CompiledColumn) -> str:
    """The number of annotations: `2 rules`, or `5 signatures` in a positional column."""
    about = column["annotations"]
    if column["positional"]:
        return doc.counted(about["signatures"], "signature")
    pins = f", {doc.counted(about['pins'], 'tensor')} with @" if about["pins"] else ""
    return doc.counted(about["rules"], "rule") + pins


# --- measurements ----------------------------------------------------------------------------


def measured(run: schema.RunFacts) -> Iterator[doc.Block]:
    """Sentences on the runs; only values that were compared are called equal."""
    return (doc.Paragraph((doc.Piece(text),), hang=2) for text in _measured(run))


def _measured(run: schema.RunFacts) -> Iterator[str]:
    if not run["executed"]:
        yield "Nothing was executed, so the values were not compared."
    else:
        *head, last = run["executed"]
        who = f"{', '.join(head)} and {last}" if head else last
        yield (
            f"Measured: {who} {'were' if head else 'was'} executed on the same made-up values "
            f"(seed {run['seed']}), every device in one process."
        )
    for entry in run["runs"]:
        yield f"  {_ran(entry)}"
    for pair in run["between"]:
        yield f"  {' and '.join(pair['columns'])}: {_verdict(pair)}."


def _ran(entry: schema.RanFacts) -> str:
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


def _verdict(found: schema.DistanceFacts) -> str:
    """The distance between two results, in words."""
    which = f"`{found['output']}`{'' if found['role'] == 'output' else ' after the step'}"
    if found["relative"] is None:
        return f"NOT equal, {which} has other shapes, NaN or infinities"
    if found["max_error"] == 0:
        return "equal, bit for bit"
    far = f"{found['relative']:.1e} of {found['measure']} ({which})"
    return f"equal up to rounding, at most {far}" if found["ok"] else f"NOT equal, by {far}"
