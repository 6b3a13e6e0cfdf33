"""The report of `explain` for people: what each source line holds, what it sends, and why.

`report_lines` makes lines of styled parts from the JSON of `report/explain.py`, without a terminal;
`print_report` puts them on one. Nothing that comes from a file is taken for markup or reaches the
terminal as a control character.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from meshdsl.diagnostics import Source
from meshdsl.render import _safe, cut
from meshdsl.report.figures import counted, exact, human, scaled, wrapped

if TYPE_CHECKING:
    from rich.console import Console

Report = dict[str, Any]
Line = tuple[tuple[str, str], ...]
"""One line of the screen: parts of text, each with its style."""

LEAST_WIDTH = 60
NUMBER, SOURCE, NAME, RULE, SENT, LABEL = "blue", "bold", "cyan", "dim", "bold yellow", "dim"
LOOP_WORDS = {"carried": "carried through {trips} trips", "kept": "kept from {trips} trips"}
"""What is said of a tensor that a loop carries, or keeps for the backward pass."""
IN_ASCII = str.maketrans({"→": "->", "×": "x", "…": "...", "–": "-"})


def print_report(report: Report, source: Source, console: Console | None = None) -> None:
    """Print a report; `source` is the text of the file it is about."""
    from rich.console import Console
    from rich.text import Text

    console = console or Console(highlight=False)
    ascii_only = console.options.ascii_only
    for line in report_lines(report, source, console.width):
        parts = [(in_ascii(text) if ascii_only else text, style) for text, style in line]
        console.print(Text.assemble(*parts), soft_wrap=True, highlight=False)


def in_ascii(text: str) -> str:
    """`text` for a terminal that knows only ASCII."""
    return text.translate(IN_ASCII).encode("ascii", "backslashreplace").decode("ascii")


def report_lines(report: Report, source: Source, width: int = 100) -> Iterator[Line]:
    """The whole report. Lines are at most `width` columns wide where words allow it."""
    for line in _lines(report, source, max(width, LEAST_WIDTH)):
        yield tuple((_safe(text), style) for text, style in line)


def _lines(report: Report, source: Source, width: int) -> Iterator[Line]:
    yield from summary(report, width)
    sends = True
    for file, number in places(report, source):
        block = list(_block(report, source, (file, number), width))
        before, sends = sends, any(c["line"] == number for c in report["collectives"])
        if before or sends:
            yield ()
        yield source_line(report, source, file, number, width)
        yield from block
    yield ()
    yield from totals(report, width)


# --- the first lines -------------------------------------------------------------------------


def summary(report: Report, width: int) -> Iterator[Line]:
    """One sentence on the whole program, then what is worth knowing before the details."""
    yield from ((line,) for line in wrapped(sentence(report), width, style=SOURCE))
    most = largest(report)
    if most:
        yield from ((line,) for line in wrapped(most, width))
    if report["plan"] and report["collectives"]:
        yield from ((line,) for line in wrapped(planned(report["plan"]), width))
    for axis, size in report["mesh"].items():
        if size > 1 and not _used(report, axis):
            text = f"Axis {axis} splits nothing: its {size} devices all do the same work."
            yield from ((line,) for line in wrapped(text, width))


def sentence(report: Report) -> str:
    """`mlp under layout hybrid on mesh rows:2, cols:2 (4 devices): 2 collectives send …`."""
    where = f"{report['program']} under layout {report['layout']} on {_mesh(report)}"
    count, sent = report["totals"]["collectives"], report["totals"]["wire_bytes"]
    if not count:
        return f"{where}: nothing is sent."
    verb = "sends" if count == 1 else "send"
    return f"{where}: {counted(count, 'collective')} {verb} {human(sent)} per device."


def planned(plan: Report) -> str:
    """What a plan minimises, and how far that was searched."""
    message = plan["message_bytes"]
    cost = f"bytes + {human(message)} for each collective" if message else "bytes"
    known = "No plan costs less" if plan["least"] else "Not proven to cost least"
    return f"{known} ({cost}; searched: {plan['searched']})."


def _mesh(report: Report) -> str:
    axes = ", ".join(f"{axis}:{size}" for axis, size in report["mesh"].items())
    devices = counted(report["devices"], "device")
    return f"mesh {axes} ({devices})" if axes else devices


def largest(report: Report) -> str:
    """The collective that sends the most, when there are several."""
    found = report["collectives"]
    if len(found) < 2:
        return ""
    most = max(found, key=lambda c: c["wire_bytes"])
    share = 100 * most["wire_bytes"] / max(sum(c["wire_bytes"] for c in found), 1)
    times = "" if most["count"] == 1 else f", {most['count']} times"
    whose = _bucket(most) or most["tensor"]
    what = f"{most['kind']} of {whose} over {_axes(most)}, line {most['line']}{times}"
    return f"The largest ({share:.0f}%): {what}."


def _used(report: Report, axis: str) -> bool:
    return any(t["placement"].get(axis, "B") != "B" for t in report["tensors"])


# --- a source line ---------------------------------------------------------------------------


def places(report: Report, source: Source) -> list[tuple[str, int]]:
    """The source lines that hold or send something: those of the file in order, then others."""
    found = {(t["file"], _line_of(t)) for t in report["tensors"] if _shown(t, source)}
    found |= {(c["file"], c["line"]) for c in report["collectives"]}
    return sorted(found, key=lambda place: (place[0] != source.name, place))


def _shown(tensor: Report, source: Source) -> bool:
    """Named tensors of the file, but not what a loop makes of them again on each trip."""
    loop = tensor.get("loop") or {"as": "carried"}
    return bool(tensor["name"]) and tensor["file"] == source.name and loop["as"] in LOOP_WORDS


def _line_of(tensor: Report) -> int:
    """A tensor that is carried or kept belongs to the line of its `repeat`."""
    line: int = (tensor.get("loop") or tensor)["line"]
    return line


def source_line(report: Report, source: Source, file: str, number: int, width: int) -> Line:
    """The text of a line with its number, cut to the width."""
    gutter = _gutter(report)
    if file != source.name:
        return ((f"{file} {number:>{gutter}} |", NUMBER),)
    text = cut(source.excerpt(number), width - gutter - 3)
    return ((f"{number:>{gutter}} | ", NUMBER), (text.rstrip(), SOURCE))


def _gutter(report: Report) -> int:
    lines = [e["line"] for e in (*report["tensors"], *report["collectives"])]
    return len(str(max(lines, default=1)))


def _block(report: Report, source: Source, place: tuple[str, int], width: int) -> Iterator[Line]:
    """What stands below a source line."""
    indent = _gutter(report) + 3
    tensors = [t for t in report["tensors"] if _shown(t, source)]
    here = [t for t in tensors if (t["file"], _line_of(t)) == place]
    names = max((len(t["name"]) for t in here), default=0)
    for tensor in here:
        yield from tensor_lines(tensor, indent, names, width)
    named = {t["name"] for t in report["tensors"]}
    for c in report["collectives"]:
        if (c["file"], c["line"]) == place:
            yield from collective_lines(c, c["tensor"] in named, indent, width)


def tensor_lines(tensor: Report, indent: int, names: int, width: int) -> Iterator[Line]:
    """`h  f32[batch@rows 64→32, hidden@cols 2048→1024]  line 8: batch -> rows, hidden -> cols`."""
    head = " " * indent + f"{tensor['name']:{names}}  "
    first, *rest = wrapped(type_text(tensor), width - len(head))
    note, short = _note(tensor), _note(tensor, short=True)
    room = width - len(head) - len((rest or [first])[-1][0]) - 3
    note = note if len(note) <= room or len(short) > room else short
    beside = bool(note) and len(note) <= room
    pad = " " * len(head)
    lines: list[Line] = [((head, NAME), first), *(((pad, ""), part) for part in rest)]
    if beside:
        lines[-1] = (*lines[-1], (f"   {note}", RULE))
    yield from lines
    if note and not beside:
        yield from (((pad, ""), part) for part in wrapped(note, width - len(pad), RULE))


def type_text(tensor: Report) -> str:
    """Global sizes, arrows to the local ones where a dim is split, and what is partial."""
    sizes = zip(tensor["dims"], tensor["shape"], tensor["local_shape"], strict=True)
    dims = [_dim(d, n, local, tensor["order"].get(d, [])) for d, n, local in sizes]
    partial = {a: c for a, c in tensor["placement"].items() if c.startswith("P")}
    kind = next(iter(partial.values()), "")[2:-1] or "sum"
    tail = f", a partial {kind} over {', '.join(partial)}" if partial else ""
    return f"{tensor['dtype']}[{', '.join(dims)}]{tail}"


def _dim(name: str, size: int, local: int, axes: list[str]) -> str:
    if not axes:
        return f"{name} {size}"
    over = axes[0] if len(axes) == 1 else f"({', '.join(axes)})"
    return f"{name}@{over} {size}→{local}"


def _note(tensor: Report, short: bool = False) -> str:
    """Which rules split it, by the place they stand at; and whether a loop carries or keeps it.

    `short` leaves out rules that say no more than the dims do: those without a selector.
    """
    loop = tensor.get("loop")
    notes = [LOOP_WORDS[loop["as"]].format(trips=loop["trips"])] if loop else []
    by_place: dict[str, list[str]] = {}
    for dim in (d for d in tensor["dims"] if d in tensor["order"]):
        rule = tensor["rules"].get(dim, {"rule": dim})
        by_place.setdefault(_place(rule, tensor["file"]), []).append(rule["rule"])
    plain = len(by_place) == 1 and not any(":" in r for rs in by_place.values() for r in rs)
    for place, rules in by_place.items():
        notes.append(place if short and plain else f"{place}: {', '.join(rules)}")
    return "; ".join(notes)


def _place(rule: Report, file: str) -> str:
    if "line" not in rule:
        return "by its operator"
    where: str = rule["file"]
    return f"line {rule['line']}" if where == file else where


# --- a collective ----------------------------------------------------------------------------


def collective_lines(c: Report, named: bool, indent: int, width: int) -> Iterator[Line]:
    """What is sent, the formula, the change of placement, why, and what would remove it."""
    pad = " " * indent
    whose = c["tensor"] if named else f"a subexpression (`{c['tensor']}` when compiled)"
    whose = _bucket(c) or whose
    phase = "" if c["phase"] == "forward" else f" [{c['phase']}]"
    op = f" {c['op']}" if c["op"] else ""
    head = f"=> {c['kind']}{op} of {whose} over {_axes(c)}{phase}: {_sent(c)}"
    for number, (text, _) in enumerate(wrapped(head, width - indent, hang=3)):
        yield ((pad, ""), (text, SENT if number == 0 else ""))
    details = [("bytes", f"{c['formula']} = {c['wire_bytes'] // c['count']:,} B {_inputs(c)}")]
    details += _parts(c) if c["parts"] else [("from", c["from"]), ("to", c["to"])]
    for label, key in (("why", "why"), ("remove it", "remedy")):
        details += [(label, text) for text in _said(c, key)]
    for label, text in details:
        yield from _labelled(label, text, indent + 3, width)


def _bucket(c: Report) -> str:
    """`3 tensors in a bucket`; empty for a collective on one tensor."""
    return f"{counted(len(c['parts']), 'tensor')} in a bucket" if c["parts"] else ""


def _parts(c: Report) -> list[tuple[str, str]]:
    """What of a bucket is which tensor."""
    return [
        (
            "holds",
            f"{p['tensor']} (line {p['line']}), {p['payload_bytes']:,} B: {p['from']} → {p['to']}",
        )
        for p in c["parts"]
    ]


def _said(c: Report, key: str) -> list[str]:
    """A reason or a way out; of a bucket each one with the tensors that it is about."""
    whose: dict[str, list[str]] = {}
    for part in c["parts"]:
        whose.setdefault(part[key], []).append(part["tensor"])
    if len(whose) < 2:
        return [c[key]]
    return [f"{', '.join(names)}: {text}" for text, names in whose.items()]


def _sent(c: Report) -> str:
    """`64 KiB (65,536 B) sent per device`; in a loop per trip, and in all."""
    meanwhile = " while it computes" if c["overlapped"] else ""
    if c["count"] == 1:
        return f"{exact(c['wire_bytes'])} sent per device{meanwhile}"
    each = human(c["wire_bytes"] // c["count"])
    whole = f"{exact(c['wire_bytes'])} sent per device{meanwhile}"
    return f"{each} a trip × {c['count']} trips = {whole}"


def _inputs(c: Report) -> str:
    return f"(n = {c['group_size']:,} devices, b = {c['payload_bytes']:,} B on each)"


def _axes(c: Report) -> str:
    return "+".join(c["axes"])


def _labelled(label: str, text: str, indent: int, width: int) -> Iterator[Line]:
    first, *rest = wrapped(text, width - indent - 11)
    yield ((" " * indent + f"{label + ':':11}", LABEL), first)
    yield from (((" " * (indent + 11), ""), part) for part in rest)


# --- the last lines --------------------------------------------------------------------------


def totals(report: Report, width: int) -> Iterator[Line]:
    """What is sent, computed and held in all."""
    yield from _sent_in_all(report, width)
    flops, devices = report["totals"]["flops_per_device"], report["devices"]
    whole = "" if devices == 1 else f"; {scaled(flops * devices)} on all {devices:,} devices"
    yield ()
    yield from _headed("Computed per device:", f"{scaled(flops, precise=True)}{whole}", width)
    yield ()
    yield from _memory(report["memory"], width)
    if report["warnings"]:
        yield ()
        yield from _warnings(report["warnings"], width)


def _sent_in_all(report: Report, width: int) -> Iterator[Line]:
    total = report["totals"]
    if total["collectives"]:
        sent, cluster = exact(total["wire_bytes"]), exact(total["cluster_wire_bytes"])
        times = counted(total["collectives"], "collective")
        text = f"{sent} in {times}; {cluster} by all {report['devices']:,} devices"
    else:
        why = "each works on its own" if report["devices"] > 1 else "there is only one"
        text = f"nothing, {why}."
    yield from _headed("Sent per device:", text, width)
    phases = total["by_phase"]
    tables = {"by axis": total["by_axis"], "by kind": total["by_kind"]}
    if len(phases) > 1 or "output" in phases:
        tables["by phase"] = phases
    yield from _table([(k, n, v) for k, t in tables.items() for n, v in t.items()], 9)


def _headed(head: str, text: str, width: int) -> Iterator[Line]:
    """`Head: text`, further lines below the text."""
    first, *rest = wrapped(text, width - len(head) - 1)
    yield ((f"{head} ", SOURCE), first)
    yield from (((" " * (len(head) + 1), ""), part) for part in rest)


def _table(rows: list[tuple[str, str, int]], indent: int = 0) -> Iterator[Line]:
    """Rows of (what, name, bytes); `what`, `indent` wide, is shown where it changes."""
    names = max((len(name) for _, name, _ in rows), default=0)
    before = ""
    for what, name, value in rows:
        head = what if what != before else ""
        before = what
        yield ((f"  {head:{indent}}", LABEL), (f"{name:{names}}  ", NAME), (exact(value), ""))


def _memory(memory: Report, width: int) -> Iterator[Line]:
    yield from _headed("Held per device:", f"{exact(memory['peak'])} at the worst moment", width)
    kinds = {"params": "parameters", "grads": "gradients", "state": "state", "inputs": "inputs"}
    rows = [("", word, memory[key]) for key, word in kinds.items() if memory.get(key)]
    where = f"activations, line {memory['peak_line']}"
    yield from _table([*rows, ("", where, memory["activations"])])


def _warnings(warnings: list[Report], width: int) -> Iterator[Line]:
    yield ((counted(len(warnings), "warning").capitalize() + ":", "bold"),)
    for warning in warnings:
        line = f"line {warning['line']}: " if warning["line"] else ""
        text = f"{warning['code']} {line}{warning['message']}"
        yield from ((("  ", ""), part) for part in wrapped(text, width - 2, hang=2))
