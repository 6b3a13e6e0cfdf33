"""One program in several columns, statement by statement, as JSON. Every view is drawn from this.

A row is a source line that holds or sends something. In it the named tensors and the reshards of
all columns stand beside each other; a cell is None where a column has none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from meshdsl.backends.torch.text import taken_names
from meshdsl.device import ir as device
from meshdsl.device.from_placed import lower
from meshdsl.diagnostics import Diagnostic, Source
from meshdsl.named.ir import walk as named_walk
from meshdsl.pipeline import Compilation
from meshdsl.placed import ir as placed
from meshdsl.placed.layout import resolve_layout
from meshdsl.placed.sbp import WHOLE
from meshdsl.report.columns import Column, Wish
from meshdsl.report.explain import explain

Json = dict[str, Any]
Place = tuple[str, int]
Key = tuple[str, int, str, int]
"""A tensor or a reshard of the program: file, line, name, and which one of these."""

VERSION = 1
UNNAMED = "a subexpression"


def compare(columns: Sequence[Column], source: Source) -> Json:
    """The comparison. Each entry of `columns` is what `explain` says, and more (docs/compare.md).

    `same` is true where placements, routes and bytes of all columns agree.
    """
    entries = [column_as_json(c) for c in columns]
    table = rows(entries, source)
    everywhere = all(row["same"] for row in table) and all(c.works for c in columns)
    first = next(c.made for c in columns if c.made)
    return {
        "version": VERSION,
        "program": first.named.name,
        "file": source.name,
        "same": everywhere and _bytes_agree(entries),
        "columns": entries,
        "rows": table,
    }


def _bytes_agree(entries: Sequence[Json]) -> bool:
    first = entries[0]["totals"]
    sent = ("wire_bytes", "cluster_wire_bytes", "by_axis", "by_kind")
    return all(e["totals"][key] == first[key] for e in entries for key in sent)


# --- a column --------------------------------------------------------------------------------


def column_as_json(column: Column) -> Json:
    """What `explain` says of a column, or what is wrong with it, under its letter and title."""
    about = {
        "letter": column.letter,
        "title": column.title,
        "kind": column.wish.kind,
        "positional": column.wish.positional or column.wish.kind == "sbp",
        "same_as": column.same_as,
    }
    if column.made is None:
        asked = {"version": VERSION, "layout": column.wish.name, "reduce": column.wish.reduce}
        return {**asked, **about, "diagnostics": [_diagnostic(d) for d in column.diagnostics]}
    report = explain(column.made.device, column.diagnostics)
    for tensor in report["tensors"]:
        tensor["named"] = named_text(tensor)
        tensor["sbp"] = positional(tensor)
    plain = lower(column.made.placed, taken_names())
    routes = [_route(moves, n) for moves, n in _chains(plain)]
    annotations = count_annotations(column.wish, column.made)
    return {**report, **about, "annotations": annotations, "routes": routes}


def _diagnostic(diagnostic: Diagnostic) -> Json:
    from meshdsl.render import to_json

    return to_json(diagnostic)


def count_annotations(wish: Wish, made: Compilation) -> Json:
    """How much is written: `rules` and `pins` by name, `signatures` by position.

    Of a layout, `signatures` counts what a positional system would need: one for every input and
    parameter that is not whole, and one for every value that is brought to another split than its
    operator gives it; the backward pass and the update follow from those of the forward pass. Of an
    `sbp` block it counts what is written.
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
    # What a backward pass makes of a tensor has its pins as well.
    pins = {v.pins for v in (*values, *results) if v.pins}
    return {"rules": len(layout.rules), "pins": len(pins), "signatures": _signatures(program)}


def _signatures(program: placed.Program) -> int:
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


def named_text(tensor: Json) -> str:
    """`[batch@rows, hidden@(x, y)] partial sum over z`, from the JSON of a tensor."""
    dims = ", ".join(_dim(d, tensor["order"].get(d, ())) for d in tensor["dims"])
    partial = {a: c for a, c in tensor["placement"].items() if c.startswith("P")}
    kind = next(iter(partial.values()), "")[2:-1] or "sum"
    return f"[{dims}]" + (f" partial {kind} over {', '.join(partial)}" if partial else "")


def _dim(name: str, axes: Sequence[str]) -> str:
    if not axes:
        return name
    return f"{name}@{axes[0]}" if len(axes) == 1 else f"{name}@({', '.join(axes)})"


def positional(tensor: Json) -> Json:
    """The same by positions, per mesh axis: `S(0)`, `B`, `P`, `P(max)`.

    A position is that of a dim as the program declares the tensor. A dim that several axes split in
    another order than the mesh's gets its rank: `S(0)/2` is the second cut of dim 0.
    """
    axes = list(tensor["placement"])
    return {axis: _component(tensor, axis, axes) for axis in axes}


def _component(tensor: Json, axis: str, mesh: Sequence[str]) -> str:
    for dim, order in tensor["order"].items():
        if axis in order:
            in_order = list(order) == sorted(order, key=mesh.index)
            rank = "" if in_order else f"/{order.index(axis) + 1}"
            dims = tensor["declared" if dim in tensor["declared"] else "dims"]
            return f"S({dims.index(dim)}){rank}"
    found: str = tensor["placement"][axis]
    return found


# --- routes ----------------------------------------------------------------------------------


def _chains(program: device.Program) -> list[tuple[list[device.Move], int]]:
    """The steps of every reshard, those too that stay on the device, and how often they run.

    Steps of one reshard may stand apart, and those of several in one bucket.
    """
    chains: list[tuple[list[device.Move], int]] = []
    ends: dict[device.Var, list[device.Move]] = {}
    for node, count in device.walk(program.body):
        for move in () if isinstance(node, device.Compute) else node.moves:
            chain = ends.get(move.source, [])
            if not chain or not _continues(chain[-1], move):
                chain = []
                chains.append((chain, count))
            chain.append(move)
            ends[move.target] = chain
    return chains


def _continues(before: device.Move, node: device.Move) -> bool:
    one = (before.span, before.why, before.phase) == (node.span, node.why, node.phase)
    return one and node.source is before.target


def _route(moves: Sequence[device.Move], count: int) -> Json:
    first, last = moves[0], moves[-1]
    value = last.target.value
    return {
        "tensor": value.name or last.target.name,
        "named": value.name is not None,
        "file": last.span.file,
        "line": last.span.line,
        "phase": last.phase,
        "count": count,
        "dims": list(value.type.names),
        "shape": list(value.type.shape),
        "from": first.source.placement.show(value.type),
        "to": last.target.placement.show(value.type),
        "steps": [_step(m) for m in moves],
        "wire_bytes": sum(m.wire for m in moves) * count,
        "why": last.why,
    }


def _step(move: device.Move) -> Json:
    step = move.step
    return {
        "kind": step.kind,
        "op": step.op,
        "axes": list(step.axes),
        "dim": step.dim,
        "to_dim": step.to_dim,
        "before": _placement(move.source),
        "after": _placement(move.target),
        "payload_bytes": move.payload,
        "wire_bytes": move.wire,
    }


def _placement(var: device.Var) -> Json:
    """The text of a placement, and what a picture of it needs."""
    p = var.placement
    return {
        "named": p.show(var.value.type),
        "order": {dim: list(axes) for dim, axes in p.splits},
        "partial": list(p.partial),
        "op": p.op,
        "local_shape": list(var.local.shape),
    }


# --- rows ------------------------------------------------------------------------------------


def rows(entries: Sequence[Json], source: Source) -> list[Json]:
    """Rows of all columns, those of the file first and in the order of its lines."""
    tensors = [dict(_tensors(e, source)) for e in entries]
    routes = [dict(_keyed_routes(e)) for e in entries]
    places = sorted(
        {key[:2] for found in (*tensors, *routes) for key in found},
        key=lambda place: (place[0] != source.name, place),
    )
    works = ["totals" in e for e in entries]
    return [_row(place, tensors, routes, works, source) for place in places]


def _tensors(entry: Json, source: Source) -> Iterator[tuple[Key, Json]]:
    """The named tensors of the file; of what a loop makes again on each trip, what it carries."""
    seen: Counter[tuple[str, int, str]] = Counter()
    for tensor in entry.get("tensors", ()):
        loop = tensor["loop"] or {"as": "carried", "line": tensor["line"]}
        if tensor["name"] and tensor["file"] == source.name and loop["as"] == "carried":
            yield _key(tensor["file"], loop["line"], tensor["name"], seen), tensor


def _keyed_routes(entry: Json) -> Iterator[tuple[Key, Json]]:
    seen: Counter[tuple[str, int, str]] = Counter()
    for route in entry.get("routes", ()):
        name = route["tensor"] if route["named"] else UNNAMED
        yield _key(route["file"], route["line"], name, seen), route


def _key(file: str, line: int, name: str, seen: Counter[tuple[str, int, str]]) -> Key:
    seen[file, line, name] += 1
    return (file, line, name, seen[file, line, name])


def _row(
    place: Place,
    tensors: Sequence[Mapping[Key, Json]],
    routes: Sequence[Mapping[Key, Json]],
    works: Sequence[bool],
    source: Source,
) -> Json:
    held = [_line(k, [t.get(k) for t in tensors], works, _held) for k in _keys(tensors, place)]
    sent = [_line(k, [r.get(k) for r in routes], works, _sent) for k in _keys(routes, place)]
    here = [[c for k, c in found.items() if k[:2] == place] for found in routes]
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


def _keys(columns: Iterable[Mapping[Key, Json]], place: Place) -> list[Key]:
    return list(dict.fromkeys(k for found in columns for k in found if k[:2] == place))


def _line(key: Key, cells: list[Json | None], works: Sequence[bool], fact: Any) -> Json:
    """One tensor or reshard in all columns; columns that did not compile are left aside."""
    first = fact(cells[works.index(True)])
    differs = [ok and fact(c) != first for c, ok in zip(cells, works, strict=True)]
    return {"tensor": key[2], "same": not any(differs), "differs": differs, "cells": cells}


def _held(tensor: Json | None) -> Any:
    """What must agree of a tensor: where it is split, what is partial, and the local shape."""
    if tensor is None:
        return None
    partial = {a: c for a, c in tensor["placement"].items() if c.startswith("P")}
    return tensor["order"], partial, tensor["local_shape"]


def _sent(route: Json | None) -> Any:
    """What must agree of a reshard: its steps, its bytes, and how often it runs."""
    if route is None:
        return None
    return [route[key] for key in ("from", "to", "steps", "count", "wire_bytes", "phase")]
